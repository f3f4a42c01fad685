"""Bulk work on files of any size: a window of the input after the other, each kept when it is done.

    OUT.partial     a line of JSON: the model and flags that the work is of, its engines; then for
                    each part that is done a line of JSON (`Part`) and the bytes that were made

The same work reads its input again and passes over what is there, as long as the input is the same;
a part that a kill cut short is made again. So an input may be packed, a pipe, or mended behind what
is done. The output is written of the parts at the end: whole, or not at all.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np

from bertsmith.base import VERSION
from bertsmith.base.files import atomic_file, fault_point, locked_file, named_errors
from bertsmith.base.terminal import Progress
from bertsmith.inference.engines.choice import request_digest
from bertsmith.tasks.answer_files import read_rows
from bertsmith.text.readers.tables import count_rows
from bertsmith.training.finetuning.task_types.texts import TextType

if TYPE_CHECKING:
    from bertsmith.inference.predictor import Predictor
    from bertsmith.tasks.examples import Examples
    from bertsmith.tasks.features import Features
    from bertsmith.training.finetuning.task_types.base import ModelTask

SUFFIX = ".partial"
# Enough to sort and to measure engines by, and little enough to be lost by a stop.
WINDOW_CHARACTERS, WINDOW_ROWS = 1 << 20, 8192
BLOCK_TOKENS = 32_768  # of rows that are held as a whole

Made = tuple[bytes, dict[str, int]]
"""What was made of a window, and counts that are summed up at the end."""


class Window(NamedTuple):
    """Consecutive rows of an input."""

    lines: list[int]
    rows: list[Any]
    digest: str


def windows(numbered: Iterable[tuple[int, Any]]) -> Iterator[Window]:
    """Part (line, row) into windows, which depend on nothing but the rows.

    >>> [window.lines for window in windows(enumerate(["a"] * 8194, start=1))][1]
    [8193, 8194]
    """
    lines, rows, size, digest = [], [], 0, hashlib.sha256()
    for line, row in numbered:
        lines.append(line)
        rows.append(row)
        text = repr(row)
        digest.update(text.encode("utf-8", "backslashreplace"))
        size += len(text)
        if size >= WINDOW_CHARACTERS or len(rows) == WINDOW_ROWS:
            yield Window(lines, rows, digest.hexdigest())
            lines, rows, size, digest = [], [], 0, hashlib.sha256()
    if rows:
        yield Window(lines, rows, digest.hexdigest())


class Part(NamedTuple):
    """A line of OUT.partial on the bytes behind it, which begin at `offset`."""

    digest: str
    rows: int
    size: int
    counts: dict[str, int]
    crc32: int
    offset: int = 0

    def checksum(self, data: bytes) -> int:
        """The CRC-32 of the part: its own line but for this, and the bytes."""
        return zlib.crc32(data, zlib.crc32(json.dumps(self[:4]).encode()))


class KeptParts:
    """The parts of some work in an open file; the first `done` of them are of this input."""

    def __init__(self, file: BinaryIO, request: str, unit: str) -> None:
        self._file, self._unit, self.done = file, unit, 0
        self._parts: list[Part] = []
        self._head: dict[str, Any] = {"bertsmith": VERSION, "request": request}
        file.seek(0)
        if (head := file.readline()).startswith(json.dumps(self._head)[:-1].encode()):
            with suppress(json.JSONDecodeError):  # cut short
                self._head = json.loads(head)
                self._read()
        elif head:
            message = "of another model or other flags: what it keeps is dropped"
            print(f"{file.name}: {message}", file=sys.stderr)

    def set_engines(
        self, models: Sequence[Predictor], measure: Callable[[Predictor], object]
    ) -> None:
        """Set the models' engines and precisions: as in the parts there, else by `measure`."""
        if self._parts:
            for model, (engine, precision) in zip(models, self._head["engines"], strict=True):
                model.use(engine, precision)
            return
        for model in models:
            measure(model)
        processors = [model.processor for model in models]
        self._head["engines"] = [[own.engine, own.precision] for own in processors]
        self._file.truncate(0)
        self._file.write(json.dumps(self._head).encode() + b"\n")

    @property
    def rows(self) -> int:
        """The number of rows that are kept."""
        return sum(part.rows for part in self._parts)

    def __str__(self) -> str:
        return f"{self.rows:,} {self._unit} are kept in {self._file.name}"

    def add(self, digest: str, rows: int, make: Callable[[], Made]) -> bool:
        """Go on to the next part; `make` is called where it is not there. True: it was called.

        Errors: OSError from the disk.
        """
        if self.done < len(self._parts):
            if self._parts[self.done].digest == digest:
                self.done += 1
                return False
            known = sum(part.rows for part in self._parts[: self.done])
            message = f"another input behind {known:,} {self._unit}: what it keeps of that is"
            print(f"{self._file.name}: {message} dropped", file=sys.stderr)
            self._file.truncate(self._end())
            del self._parts[self.done :]
        data, counts = make()
        part = Part(digest, rows, len(data), counts, 0)
        part = part._replace(crc32=part.checksum(data))
        with named_errors(Path(self._file.name)):
            self._file.write(json.dumps(part[:-1]).encode() + b"\n")
            fault_point("part")
            self._file.write(data)
            self._file.flush()
            os.fsync(self._file.fileno())
        self._parts.append(part._replace(offset=self._file.seek(0, os.SEEK_END) - len(data)))
        self.done += 1
        return True

    def of(self, parts: slice) -> Iterator[bytes]:
        """The bytes made of some of the parts that are done."""
        for part in self._parts[: self.done][parts]:
            self._file.seek(part.offset)
            yield self._file.read(part.size)

    def counts(self, parts: slice = slice(None)) -> Counter[str]:
        """The sums of the counts of parts that are done, and their "rows"."""
        total: Counter[str] = Counter()
        for part in self._parts[: self.done][parts]:
            total.update(part.counts | {"rows": part.rows})
        return total

    def _end(self) -> int:
        """The end of the parts that are done."""
        if self.done:
            part = self._parts[self.done - 1]
            return part.offset + part.size
        self._file.seek(0)
        return len(self._file.readline())

    def _read(self) -> None:
        end = self._file.tell()  # of the parts that are complete
        while line := self._file.readline():
            try:  # what is damaged is made again, and what follows
                part = Part(*json.loads(line), offset=end + len(line))
                data = self._file.read(part.size)
                if part.checksum(data) != part.crc32:
                    break
            except (ValueError, TypeError, OverflowError):
                break
            self._parts.append(part)
            end = self._file.tell()
        self._file.truncate(end)


@contextmanager
def kept_parts(out: Path, request: str, unit: str) -> Iterator[KeptParts]:
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
        kept = KeptParts(file, request, unit)
        if kept.rows:
            print(f"{kept}: going on behind them", file=sys.stderr)
        try:
            yield kept
            path.unlink(missing_ok=True)
        except KeyboardInterrupt as stop:
            if not kept.rows:
                raise
            raise KeyboardInterrupt(f"{kept}: the same command goes on") from stop
        except ValueError:
            if kept.rows:
                print(f"{kept}: the same command goes on behind them", file=sys.stderr)
            raise
        finally:
            if not kept.rows:
                path.unlink(missing_ok=True)


def answer_rows(
    models: Sequence[Predictor], model_task: ModelTask, source: str, out: Path, flags: object
) -> Counter[str]:
    """Write the rows of a file of texts or pairs with their answers; the mean outputs decide.

    Returns the sums of `Features.counts` and `Examples.counts`, and the number of "rows".

    Errors: ValueError as `read_rows` and `AnswerTable`, with what is done kept.
    """
    task_type, table = models[0].task_type, None
    assert isinstance(task_type, TextType)
    request = request_digest([model.folder for model in models], model_task, out.suffix, flags)

    def featurized(data: Examples) -> Features:
        names = model_task.label_names
        return task_type.featurize(models[0].tokenizer, data, model_task.encoding, names)

    with kept_parts(out, request, "rows") as kept:
        numbered = windows(read_rows(source, model_task.task))
        total = None if source == "-" else count_rows(Path(source))
        with Progress("predict", total, "rows", start=kept.rows) as progress:
            for lines, rows, digest in numbered:
                data = task_type.examples(source, lines, rows, model_task)
                if table is None:
                    table = task_type.answer_table(data, out, model_task)
                    kept.set_engines(
                        models, lambda model, data=data: model.resolve_for(featurized(data))
                    )
                table.check(rows, lines, source)

                def make(data: Examples = data, table=table) -> Made:
                    features = featurized(data)
                    share = len(data) / (len(features) * len(models))
                    outputs = mean_outputs(
                        models, features, lambda count: progress.update(count * share)
                    )
                    answers = task_type.answers(outputs, features, data, model_task)
                    made = task_type.answer_lines(table, answers, data, model_task)
                    return made, features.counts() | data.counts()

                done = progress.done + len(rows)
                if kept.add(digest, len(rows), make):
                    progress.update(done=done)
            progress.total = progress.done
        assert table is not None
        with atomic_file(out) as temporary, temporary.open("wb") as file:
            file.write(table.header())
            file.writelines(kept.of(slice(None)))
        return kept.counts()


def mean_outputs(
    models: Sequence[Predictor], features: Features, on_batch: Callable[[int], None]
) -> np.ndarray:
    """The mean of the heads' outputs for rows, float32."""
    return np.mean([model.outputs(features, on_batch) for model in models], axis=0)


def sorted_blocks(lengths: np.ndarray) -> list[np.ndarray]:
    """The numbers of rows, the longest first, in blocks of about BLOCK_TOKENS."""
    order = np.argsort(-lengths, kind="stable")
    numbers = (np.cumsum(lengths[order]) - 1) // BLOCK_TOKENS
    return np.split(order, np.flatnonzero(np.diff(numbers)) + 1)


def array_bytes(array: np.ndarray, *texts: str) -> bytes:
    """An array, and texts that belong to it, as a part has them."""
    box = io.BytesIO()
    np.save(box, array)
    return box.getvalue() + json.dumps(texts).encode()


def array_of(data: bytes) -> tuple[np.ndarray, list[str]]:
    """The inverse of `array_bytes`."""
    box = io.BytesIO(data)
    return np.load(box), json.loads(box.read())
