"""The log of a run: one JSON object a line in log.jsonl, and the same figures for other tools.

    {"event": "train", "step": 40, "loss": 6.81, "rate": 0.0004, "tokens_per_second": 81000.0}
    {"event": "evaluate", "step": 200, "mlm_loss": 5.2, "mlm_accuracy": 0.21}
    {"event": "message", "text": "stopped by a signal at step 213; saved"}

Every line is flushed when it is written, so that a killed run has logged all it did but for at most
half a line. A resumed run first drops the lines behind its checkpoint: steps then rise without a
gap and without a repeat. It looks for them from the end, since a long run has a long log. Behind it
are also the held-out figures of the end, which a run takes after its last checkpoint, at the same
step; they alone hold "unigram_entropy".
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

from bertsmith.files import named_errors, read_json_lines, write_text
from bertsmith.training.log_writers import open_writers

TOKEN_LOSSES = ("mlm_loss", "ltr_loss")  # beside which the sum with the pairs' is left out
NOTES = {  # of a figure in the progress line, those first that a narrow terminal shows
    "mlm_loss": "MLM loss {:.3f}",
    "ltr_loss": "LTR loss {:.3f}",
    "loss": "loss {:.3f}",
    "tokens_per_second": "{:,.0f} tokens/s",
    "step": "step {:,}",
    "mlm_accuracy": "{:.0%} right",
    "ltr_accuracy": "{:.0%} right",
    "rate": "rate {:.1e}",
    "gradient_norm": "norm {:.2f}",
    "peak_share": "{:.0%} of peak",
    "padding_share": "{:.0%} padding",
    "phase": "phase {:.0f}",
}
TAIL = 1 << 16  # bytes of the log that a resume reads first: some hundred lines


class RunLog:
    """Appends to RUN/log.jsonl, and to what `writers` names (log_writers.py).

    `resume_step` is the step of the checkpoint that the run goes on from: later lines of an earlier
    log are dropped, and what is damaged among them; messages, which have no step, stay. None starts
    a new log. `writers` None: TensorBoard where it is installed.
    Errors: ValueError for a writer that is unknown or not installed; OSError from the disk.
    """

    def __init__(
        self,
        run_dir: Path,
        resume_step: int | None = None,
        writers: Sequence[str] | None = None,
    ) -> None:
        self._path = path = run_dir / "log.jsonl"
        if resume_step is not None and path.exists():
            with named_errors(path):
                _drop_behind(path, resume_step)
        else:
            write_text(path, "")
        self._file = path.open("a", encoding="utf-8", newline="")
        first_step = 0 if resume_step is None else resume_step + 1
        self._writers = open_writers(writers, run_dir, first_step)

    def train(self, step: int, **figures: Any) -> None:
        """Log what training did up to `step` (loss, rate, tokens per second, ...)."""
        self._write("train", step, figures)

    def evaluate(self, step: int, **figures: Any) -> None:
        """Log the figures on held-out data with the weights after `step`."""
        self._write("evaluate", step, figures)

    def message(self, text: str) -> None:
        """Log one sentence for people: a warning, a resume, why the run ended."""
        self._append({"event": "message", "text": text})

    def sync(self) -> None:
        """Have the lines so far on the disk, which a checkpoint counts on."""
        with named_errors(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the files; the log can be read at any time without it."""
        with named_errors(self._path):
            self._file.close()
        for writer in self._writers:
            writer.close()

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _write(self, event: str, step: int, figures: dict[str, Any]) -> None:
        self._append({"event": event, "step": step, **figures})
        numbers = {f"{event}/{name}": plain(value) for name, value in figures.items()}
        finite = {name: n for name, n in numbers.items() if isinstance(n, (int, float))}
        for writer in self._writers:
            writer.write(finite, step)

    def _append(self, event: dict[str, Any]) -> None:
        with named_errors(self._path):
            self._file.write(_line(event))
            self._file.flush()


class NoLog(RunLog):
    """The log of a rank that leaves all writing to rank 0."""

    def __init__(self) -> None:
        pass

    def sync(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _write(self, event: str, step: int, figures: dict[str, Any]) -> None:
        pass

    def _append(self, event: dict[str, Any]) -> None:
        pass


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a log.jsonl in their order.

    A half-written last line, which a kill leaves behind, is left out.
    Errors: FileNotFoundError; ValueError with file and line when an earlier line is damaged.
    """
    return read_json_lines(path)


def _drop_behind(path: Path, step: int) -> None:
    """Drop what is behind the last line that belongs to the steps up to `step`, but for messages.

    In place: a kill in between loses no more than these messages.
    """
    size, length = path.stat().st_size, TAIL
    with path.open("r+b") as file:
        while True:
            start = max(0, size - length)
            file.seek(start)
            lines = file.read().split(b"\n")[:-1]  # without half a line at the end
            events = [_event(line) for line in lines]  # nothing of half a line at the beginning
            last = max((n for n, event in enumerate(events) if _belongs(event, step)), default=-1)
            if last >= 0 or start == 0:
                break
            length *= 2
        behind = zip(lines[last + 1 :], events[last + 1 :], strict=True)
        messages = [line + b"\n" for line, event in behind if event.get("event") == "message"]
        file.seek(start + sum(len(line) + 1 for line in lines[: last + 1]))
        file.truncate()
        file.write(b"".join(messages))


def _event(line: bytes) -> dict[str, Any]:
    """The object of a line; an empty one for what is none."""
    try:
        event = json.loads(line)
    except ValueError:  # also what is not UTF-8
        return {}
    return event if isinstance(event, dict) else {}


def _belongs(event: dict[str, Any], step: int) -> bool:
    own = event.get("step", math.inf)
    return own < step or (own == step and "unigram_entropy" not in event)


def plain(value: Any) -> Any:
    """A figure as JSON can hold it; what is not a finite number becomes None (null).

    >>> plain({"loss": float("nan"), "rates": (0.5, 1)})
    {'loss': None, 'rates': [0.5, 1]}
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, Integral):
        return int(value)
    number = float(value)  # also NumPy's scalars and tensors of one element
    return number if math.isfinite(number) else None


def _line(event: dict[str, Any]) -> str:
    return json.dumps(plain(event), ensure_ascii=False, allow_nan=False) + "\n"


def progress_notes(step: int, figures: dict[str, float]) -> list[str]:
    """What the progress line says of the figures that there are.

    >>> progress_notes(1200, {"loss": 6.3, "mlm_loss": 5.6291, "mlm_accuracy": 0.123})
    ['MLM loss 5.629', 'step 1,200', '12% right']
    """
    known = {"step": step, **figures}
    if known.keys() & set(TOKEN_LOSSES):
        del known["loss"]
    return [words.format(known[name]) for name, words in NOTES.items() if name in known]
