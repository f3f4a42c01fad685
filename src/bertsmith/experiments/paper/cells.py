"""Cells: pieces of work that are done once, each in a folder named after what it is made of.

A cell's key is a hash of its settings, of the files that it reads, of the keys of the cells that it
builds on and of the version of bertsmith. So tables share what they have in common, a changed
setting is another cell, and whatever is there stays good.

    CELLS/finetune-mlm-sst2-1-0f3a9c51d2e4/     the run
        cell.json                               last: the cell is done; digests of what it came to

Any number of processes may work on one folder: each takes a cell that no other holds.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from bertsmith.base import VERSION
from bertsmith.base.files import locked_folder, read_json_object, write_json
from bertsmith.base.terminal import duration
from bertsmith.checkpoints.run_folder import RESULT_FILE
from bertsmith.text.readers.tables import digest, known_digest

CELL_FILE, LOCK_FILE = "cell.json", "cell.lock"
WAIT = 2.0  # seconds between two looks at cells that other processes hold


class Held(ValueError):
    """Another process works on the cell."""


@dataclass(frozen=True, eq=False)
class Cell:
    """A piece of work."""

    kind: str
    label: str
    """For people; of nothing but what is in the key."""
    made_of: Mapping[str, Any]
    """Plain values that decide the result."""
    make: Callable[[Path], None]
    """Fills the folder; called again after it was stopped, it goes on there."""
    inputs: tuple[Cell, ...] = ()
    flops: float = 0.0
    """About as many operations; for the time that is left."""
    kept: tuple[str, ...] = (RESULT_FILE,)
    """Files that must stay as they were written."""
    budget: float = 0.0
    """Seconds that it takes on any machine, besides its FLOPs."""

    @cached_property
    def key(self) -> str:
        parts = {
            "kind": self.kind,
            "version": VERSION,
            "made_of": self.made_of,
            "inputs": [cell.key for cell in self.inputs],
        }
        text = json.dumps(parts, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.label}-{self.key}".replace("/", "-").replace(" ", "-")

    def folder(self, root: Path) -> Path:
        return root / self.name

    def seconds(self, root: Path) -> float | None:
        """The time that it took; None: it is not done.

        Errors: ValueError where its results are not those that were written.
        """
        folder = self.folder(root)
        if not (folder / CELL_FILE).exists():
            return None
        done = read_json_object(folder / CELL_FILE)
        for name, written in done["files"].items():
            if not (folder / name).exists() or known_digest(folder / name) != written:
                raise ValueError(
                    f"{folder / name} is not as it was written: remove {folder}, and this cell is "
                    "computed again"
                )
        return done["seconds"]

    def compute(self, root: Path) -> None:
        """Do the work, unless it is done. A failure that leaves no file leaves no folder.

        Errors: Held where another process does it; those of the work.
        """
        folder = self.folder(root)
        with ExitStack() as until_end:
            try:
                until_end.enter_context(locked_folder(folder, LOCK_FILE))
            except ValueError as error:
                raise Held(self.name) from error
            if self.seconds(root) is None:
                self._compute(folder)

    def _compute(self, folder: Path) -> None:
        started = time.monotonic()
        self.make(folder)
        seconds = round(time.monotonic() - started, 1)
        files = {name: digest(folder / name) for name in self.kept}
        facts = {"made_of": self.made_of, "inputs": [cell.name for cell in self.inputs]}
        write_json(folder / CELL_FILE, {"seconds": seconds, "files": files, **facts})


def needed(cells: Iterable[Cell]) -> list[Cell]:
    """The cells and all that they build on, each once, behind its inputs."""
    found: dict[str, Cell] = {}

    def add(cell: Cell) -> None:
        for one in cell.inputs:
            add(one)
        found.setdefault(cell.key, cell)

    for cell in cells:
        add(cell)
    return list(found.values())


def compute(cells: Sequence[Cell], root: Path) -> Iterator[None]:
    """Compute all that are needed and not done, by whichever process.

    Yields at the start, after each that is done and at the end: the caller may write pages.

    Errors: ValueError for a finished cell whose files were changed; the first of the work, when all
    cells that do not build on it are done.
    """
    left = [cell for cell in needed(cells) if cell.seconds(root) is None]
    failed: dict[str, Exception] = {}
    total, done = len(left), 0
    yield
    while left:
        before = len(left)
        for cell in list(left):
            lacking = [one for one in cell.inputs if one.seconds(root) is None]
            if lost := [failed[one.key] for one in lacking if one.key in failed]:
                print(f"{cell.name}: left out, for it builds on what failed", file=sys.stderr)
                failed[cell.key] = lost[0]
                left.remove(cell)
                continue
            if lacking:
                continue  # another process makes it
            try:
                cell.compute(root)
            except Held:
                continue
            except Exception as error:  # of whatever kind: hours of others do not wait for it
                print(f"{cell.name} failed: {type(error).__name__}: {error}", file=sys.stderr)
                traceback.clear_frames(error.__traceback__)  # they hold the model
                failed[cell.key] = error
                left.remove(cell)
                continue
            left.remove(cell)
            done += 1
            took = duration(cell.seconds(root) or 0.0)
            print(f"{done} of {total}: {cell.name}: {took}", file=sys.stderr)
            yield
        if len(left) == before:
            time.sleep(WAIT)
    yield  # what failed here may have been made elsewhere since
    for cell in needed(cells):
        if cell.key in failed and cell.seconds(root) is None:  # no other process could do it
            raise failed[cell.key]


def time_left(cells: Sequence[Cell], root: Path, flops_per_second: float) -> dict[str, Any]:
    """Cells, FLOPs and seconds that are left, by kind.

    The speed of a kind is that of its finished cells, or `flops_per_second` where there are none.
    """
    found: dict[str, Any] = {}
    for cell in needed(cells):
        counts = ("done", "left", "flops", "budget", "done_flops", "done_seconds")
        kind = found.setdefault(cell.kind, dict.fromkeys(counts, 0))
        seconds = cell.seconds(root)
        if seconds is None:
            kind["left"] += 1
            kind["flops"] += cell.flops
            kind["budget"] += cell.budget
        else:
            kind["done"] += 1
            kind["done_flops"] += cell.flops
            kind["done_seconds"] += seconds
    for kind in found.values():
        done_flops, done_seconds = kind.pop("done_flops"), kind.pop("done_seconds")
        speed = done_flops / done_seconds if done_flops and done_seconds else flops_per_second
        kind["seconds"] = kind["flops"] / speed + kind.pop("budget")
    return found
