"""Bulk work on files of any size: a window of the input after the other, each kept when it is done.

    OUT.partial     a line of JSON: the model and flags that the work is of, its engines; then for
                    each part that is done a line of JSON (`Part`) and the bytes that were made

The same work reads its input again and passes over what is there, as long as the input is the same;
a part that a kill cut short is made again. So an input may be packed, a pipe, or mended behind what
is done. The output is written of the parts at the end: whole, or not at all.

On a Ray cluster other processes make the parts. This one reads the input and keeps them, in order.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
import platform
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, NamedTuple

import numpy as np

from bertsmith.base import VERSION
from bertsmith.base.cluster import cluster, map_in_order
from bertsmith.base.files import fault_point, locked_file, named_errors
from bertsmith.base.terminal import OnBatch, Progress
from bertsmith.inference.engines.choice import request_digest
from bertsmith.inference.engines.exported import model_files
from bertsmith.tasks.answer_files import read_rows
from bertsmith.text.readers.tables import count_rows, digest
from bertsmith.training.finetuning.task_types.texts import TextType

if TYPE_CHECKING:
    from bertsmith.inference.predictor import Predictor
    from bertsmith.tasks.answer_tables import AnswerTable
    from bertsmith.tasks.features import Features
    from bertsmith.training.finetuning.task_types.base import ModelTask

SUFFIX = ".partial"
# Enough to sort and to measure engines by, and little enough to be lost by a stop.
WINDOW_CHARACTERS, WINDOW_ROWS = 1 << 20, 8192
BLOCK_TOKENS = 32_768  # of rows that are held as a whole

Made = tuple[bytes, dict[str, int]]
"""What was made of a window, and counts that are summed up at the end."""
Make = Callable[[Sequence["Predictor"], Any, Callable[[float], None]], Made]
"""(models, a window or block, a function that is given the number of rows done) -> its part."""
Label = tuple[str, int]
"""The digest of a window or block, and the number of its rows."""
Backend = Literal["local", "ray"]


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

    def __init__(self, file: BinaryIO, request: str, unit: str, backend: Backend) -> None:
        self._file, self._unit, self._backend, self.done = file, unit, backend, 0
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
        return sum(part.rows for part in self._parts)

    def __str__(self) -> str:
        return f"{self.rows:,} {self._unit} are kept in {self._file.name}"

    def add(
        self,
        items: Iterable[tuple[Label, Any]],
        models: Sequence[Predictor],
        make: Make,
        progress: Progress,
    ) -> None:
        """Go on by these windows or blocks; `make` is called for those that are not there.

        Errors: those of the items and of `make`; OSError from the disk or the cluster.
        """
        missing = ((label, item) for label, item in items if not self._has(label[0]))
        if self._backend == "ray":
            there = functools.partial(_make_there, [SharedModel.of(one) for one in models], make)
            found = map_in_order(there, missing, "CPU" if models[0].processor.is_cpu else "GPU")
        else:
            found = ((label, make(models, item, progress.update)) for label, item in missing)
        for label, (data, counts) in found:
            self._append(label, data, counts)
            progress.update(done=self.rows)

    def _has(self, digest: str) -> bool:
        """Pass over the next part, if it is there; else drop what is there of another input."""
        if self.done == len(self._parts):
            return False
        if self._parts[self.done].digest == digest:
            self.done += 1
            return True
        known = sum(part.rows for part in self._parts[: self.done])
        message = f"another input behind {known:,} {self._unit}: what it keeps of that is dropped"
        print(f"{self._file.name}: {message}", file=sys.stderr)
        self._file.truncate(self._end())
        del self._parts[self.done :]
        return False

    def _append(self, label: Label, data: bytes, counts: dict[str, int]) -> None:
        part = Part(*label, len(data), counts, 0)
        part = part._replace(crc32=part.checksum(data))
        with named_errors(Path(self._file.name)):
            self._file.write(json.dumps(part[:-1]).encode() + b"\n")
            fault_point("part")
            self._file.write(data)
            self._file.flush()
            os.fsync(self._file.fileno())
        self._parts.append(part._replace(offset=self._file.seek(0, os.SEEK_END) - len(data)))
        self.done += 1

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
def kept_parts(
    out: Path, request: str, unit: str, backend: Backend = "local"
) -> Iterator[KeptParts]:
    """Keep what is done of a `request_digest` until the block is left without an error.

    Errors: ValueError where another process is at this work; KeyboardInterrupt that says what is
    kept; OSError from the disk; those of `cluster`, before anything is written.
    """
    path = out.resolve()
    path = path.with_name(path.name + SUFFIX)
    with suppress(ValueError):  # "." has no name
        given = out.with_name(out.name + SUFFIX)
        path = given if given.resolve() == path else path  # messages show it as it was given
    in_use = (
        f"{path}: another process is at this work: wait until it has ended, or name another output"
    )
    with ExitStack() as stack:
        if backend == "ray":
            stack.enter_context(cluster())
        path.parent.mkdir(parents=True, exist_ok=True)
        stack.enter_context(locked_file(path, "work", in_use))
        kept = KeptParts(stack.enter_context(path.open("a+b")), request, unit, backend)
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


class SharedModel(NamedTuple):
    """A model that processes on a cluster open themselves, in a folder that all machines reach."""

    folder: Path
    device: str
    precision: str
    engine: str
    digest: str

    @classmethod
    def of(cls, model: Predictor) -> SharedModel:
        device = "cpu" if model.processor.is_cpu else "cuda"  # a process sees its own GPU alone
        own = model.processor
        return cls(model.folder.resolve(), device, own.precision, own.engine, content_digest(model))


@functools.cache  # a model a process
def _opened(shared: SharedModel) -> Predictor:
    from bertsmith.inference.predictor import load

    try:
        model = load(
            shared.folder, device=shared.device, precision=shared.precision, engine=shared.engine
        )
        found = content_digest(model)
    except (ValueError, OSError) as error:
        raise OSError(f"{platform.node()}: {error} (all machines must reach the folder)") from error
    if found != shared.digest:
        raise OSError(
            f"{platform.node()}: {shared.folder}: another model than where the work began"
        )
    return model


def _make_there(shared: Sequence[SharedModel], make: Make, item: Any) -> Made:
    return make([_opened(model) for model in shared], item, lambda number: None)


def content_digest(model: Predictor) -> str:
    """A digest of a model's files, config and vocabulary; it reads all bytes of them."""
    files = [digest(file) for part in model_files(model.folder) for file in part]
    known = model.config, model.tokenizer.fingerprint, files
    return hashlib.sha256(repr(known).encode()).hexdigest()


def models_digest(models: Sequence[Predictor], *settings: object) -> str:
    """The `request_digest` of the models, and of device, precision and engine asked for."""
    machines = [replace(model.asked, threads=0) for model in models]
    return request_digest([model.folder for model in models], machines, *settings)


def answer_rows(
    models: Sequence[Predictor],
    model_task: ModelTask,
    source: str,
    out: Path,
    backend: Backend = "local",
) -> Counter[str]:
    """Write the rows of a file of texts or pairs with their answers; the mean outputs decide.

    Returns the sums of `Features.counts` and `Examples.counts`, and the number of "rows".

    Errors: ValueError as `read_rows` and `AnswerTable`, with what is done kept.
    """
    task_type = models[0].task_type
    assert isinstance(task_type, TextType)
    request = models_digest(models, models[0].tokenizer.fingerprint, model_task, out.suffix)
    with kept_parts(out, request, "rows", backend) as kept:
        numbered = windows(read_rows(source, model_task.task))
        first = next(numbered)
        data = task_type.examples(source, first.lines, first.rows, model_task)
        table = task_type.answer_table(data, out, model_task)

        def set_engine(model: Predictor) -> None:
            model.resolve_for(task_type.featurize(model.tokenizer, data, model_task))

        kept.set_engines(models, set_engine)

        def checked() -> Iterator[tuple[Label, Window]]:
            for window in chain([first], numbered):
                table.check(window.rows, window.lines)
                yield (window.digest, len(window.rows)), window

        total = None if source == "-" else count_rows(Path(source))
        with Progress("predict", total, "rows", start=kept.rows) as progress:
            make = functools.partial(_answer_window, source, model_task, table)
            kept.add(checked(), models, make, progress)
            progress.total = progress.done
        table.write(kept.of(slice(None)))
        return kept.counts()


def _answer_window(
    source: str,
    model_task: ModelTask,
    table: AnswerTable,
    models: Sequence[Predictor],
    window: Window,
    on_rows: Callable[[float], None],
) -> Made:
    task_type = models[0].task_type
    assert isinstance(task_type, TextType)
    data = task_type.examples(source, window.lines, window.rows, model_task)
    features = task_type.featurize(models[0].tokenizer, data, model_task)
    share = len(data) / (len(features) * len(models))  # of a row of the input
    outputs = mean_outputs(models, features, lambda count: on_rows(count * share))
    answers = task_type.answers(outputs, features, data, model_task)
    made = task_type.answer_part(table, answers, data, model_task)
    return made, features.counts() | data.counts()


def mean_outputs(models: Sequence[Predictor], features: Features, on_batch: OnBatch) -> np.ndarray:
    """The mean of the heads' outputs for rows, float32."""
    return np.mean([model.outputs(features, on_batch) for model in models], axis=0)


def answer_block(
    models: Sequence[Predictor], block: Features, on_rows: Callable[[float], None]
) -> Made:
    """The part that is the outputs for a block of rows."""
    outputs = mean_outputs(models, block, lambda count: on_rows(count / len(models)))
    return array_bytes(outputs), {}


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
