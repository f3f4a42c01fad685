"""Long work in blocks, kept beside the output until that is written, so that no stop loses them.

    OUT.partial     a line of JSON: the work that it is of, its precision; then for each block that
                    is done the number of its bytes (8, little-endian), its arrays as .npz

The same work resumes after these blocks. One that a kill cut short is computed again.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from zipfile import BadZipFile

import numpy as np

from bertsmith.base import VERSION
from bertsmith.base.files import locked_file, named_errors
from bertsmith.checkpoints.stored import weight_files

if TYPE_CHECKING:
    from bertsmith.inference.predictor import Predictor

SUFFIX = ".partial"
BLOCK_TOKENS = 32_768  # four batches: seconds of work, which is what a stop may cost
BLOCK_CHARACTERS = 4 * BLOCK_TOKENS

Arrays = tuple[np.ndarray, ...]


class KeptBlocks:
    """The blocks of some work in an open file; `sizes` are the rows of each block."""

    def __init__(self, file: BinaryIO, request: str, sizes: Sequence[int], unit: str) -> None:
        self._file, self._sizes, self._unit = file, sizes, unit
        self._found: list[Arrays] = []
        self._head: dict[str, Any] = {"bertsmith": VERSION, "request": request}
        file.seek(0)
        if (head := file.readline()).startswith(json.dumps(self._head)[:-1].encode()):
            with suppress(json.JSONDecodeError):  # cut short
                self._head = json.loads(head)
                self._read()
        elif head:
            message = "of another input, model or flags: what it keeps is dropped"
            print(f"{file.name}: {message}", file=sys.stderr)

    def set_precision(
        self, models: Sequence[Predictor], measure: Callable[[Predictor], object]
    ) -> None:
        """Set the models' precisions: as in the blocks that are done, else by `measure`."""
        if self._found:
            for model, precision in zip(models, self._head["precisions"], strict=True):
                model.use_precision(precision)
            return
        for model in models:
            measure(model)
        self._head["precisions"] = [model.processor.precision for model in models]
        self._file.truncate(0)
        self._file.write(json.dumps(self._head).encode() + b"\n")

    @property
    def rows(self) -> int:
        """The number of rows that are done."""
        return sum(self._sizes[: len(self._found)])

    def __str__(self) -> str:
        return f"{self.rows:,} of {sum(self._sizes):,} {self._unit} are kept in {self._file.name}"

    def arrays(self, compute: Callable[[int], Arrays]) -> list[Arrays]:
        """The arrays of every block; compute(number) gives those that are not there yet.

        Errors: OSError from the disk.
        """
        for number in range(len(self._found), len(self._sizes)):
            arrays = compute(number)
            box = io.BytesIO()
            np.savez(box, *arrays)
            with named_errors(Path(self._file.name)):
                self._file.write(box.tell().to_bytes(8, "little") + box.getvalue())
                self._file.flush()
            self._found.append(arrays)
        return self._found

    def _read(self) -> None:
        end = self._file.tell()  # of the blocks that are complete
        while len(length := self._file.read(8)) == 8:
            data = self._file.read(size := int.from_bytes(length, "little"))
            if len(data) < size:
                break
            try:
                with np.load(io.BytesIO(data)) as box:
                    self._found.append(tuple(box.values()))
            except (ValueError, BadZipFile):  # damaged: computed again, and what follows
                break
            end = self._file.tell()
        self._file.truncate(end)


@contextmanager
def kept_blocks(out: Path, request: str, sizes: Sequence[int], unit: str) -> Iterator[KeptBlocks]:
    """Keep what is done of a `request_digest` until the block is left without an error.

    Errors: ValueError where another process is at this work; KeyboardInterrupt that says what is
    kept; OSError from the disk.
    """
    path = out.resolve()
    path = path.with_name(path.name + SUFFIX)
    with suppress(ValueError):  # "." has no name
        given = out.with_name(out.name + SUFFIX)
        path = given if given.resolve() == path else path  # messages show it as it was given
    path.parent.mkdir(parents=True, exist_ok=True)
    in_use = (
        f"{path}: another process is at this work: wait until it has ended, or name another output"
    )
    with locked_file(path, "work", in_use), path.open("a+b") as file:
        kept = KeptBlocks(file, request, sizes, unit)
        if kept.rows:
            print(f"{kept}: going on behind them", file=sys.stderr)
        try:
            yield kept
            path.unlink(missing_ok=True)
        except KeyboardInterrupt as stop:
            if not kept.rows:
                raise
            raise KeyboardInterrupt(f"{kept}: the same command goes on") from stop
        finally:
            if not kept.rows:
                path.unlink(missing_ok=True)


def request_digest(models: Iterable[Path], content: Iterable[bytes], *settings: object) -> str:
    """A digest of all that decides the numbers: the files of models, their input, settings.

    Of the weights it takes path, size and time, which are quick to tell.
    """
    known = hashlib.sha256()
    for file in (file for folder in models for file in weight_files(folder)):
        stat = file.stat()
        known.update(f"{file.resolve()} {stat.st_size} {stat.st_mtime_ns}\0".encode())
    for part in content:
        known.update(str(len(part)).encode() + b"\0")
        known.update(part)
    known.update(repr(settings).encode("utf-8", "backslashreplace"))
    return known.hexdigest()


def sorted_blocks(sizes: Sequence[int] | np.ndarray, budget: int) -> list[np.ndarray]:
    """The numbers of items, the largest first, in blocks of about `budget` together.

    >>> sorted_blocks([3, 9, 4, 4], 8)
    [array([1, 2]), array([3, 0])]
    """
    order = np.argsort(-np.asarray(sizes), kind="stable")
    numbers = (np.cumsum(np.asarray(sizes)[order]) - 1) // budget
    return np.split(order, np.flatnonzero(np.diff(numbers)) + 1)
