"""The log of a run: one JSON object a line in log.jsonl, and the same figures for other tools.

    {"event": "train", "step": 40, "loss": 6.81, "learning_rate": 0.0004, ...}
    {"event": "evaluate", "step": 200, "mlm_loss": 5.2, "mlm_accuracy": 0.21}
    {"event": "message", "text": "stopped by a signal at step 213; saved"}

Every line is flushed, so that a killed run has logged all but at most half a line. A resumed run
drops the lines after its checkpoint, and the held-out figures of the end (the only ones with
"unigram_entropy"), which a run takes after its last checkpoint at the same step.

Other tools' files in the run's folder need no network, unless WANDB_MODE or MLFLOW_TRACKING_URI
send the figures elsewhere:

    tensorboard   RUN/tensorboard/       tensorboard --logdir RUN
    wandb         RUN/wandb/             wandb sync RUN/wandb/offline-run-*
    mlflow        RUN/mlflow/mlflow.db   mlflow ui --backend-store-uri sqlite:///RUN/mlflow/mlflow.db
"""

from __future__ import annotations

import functools
import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from importlib.util import find_spec
from numbers import Integral
from pathlib import Path
from typing import Any, Protocol

from bertsmith.base.files import json_object, named_errors, write_text
from bertsmith.text.readers.files import without_password

TOKEN_LOSSES = ("mlm_loss", "ltr_loss")  # with one of them the sum over all losses is not shown
NOTES = {  # words of the progress line, those first that a narrow terminal shows
    "mlm_loss": "MLM loss {:.3f}",
    "ltr_loss": "LTR loss {:.3f}",
    "rtl_loss": "RTL loss {:.3f}",
    "loss": "loss {:.3f}",
    "tokens_per_second": "{:,.0f} tokens/s",
    "step": "step {:,}",
    "mlm_accuracy": "{:.0%} right",
    "ltr_accuracy": "{:.0%} right",
    "learning_rate": "rate {:.1e}",
    "grad_norm": "norm {:.2f}",
    "mfu": "{:.0%} of peak",
    "padding_ratio": "{:.0%} padding",
    "phase": "phase {:.0f}",
}
TAIL = 1 << 16  # bytes of the log that a resume reads first: some hundred lines


class RunLog(AbstractContextManager["RunLog"]):
    """Appends to RUN/log.jsonl, and to the `loggers`, by name; None: TensorBoard, if installed.

    `resume_step` is the step of the checkpoint that the run resumes from: later lines are dropped,
    damaged ones too; messages, which have no step, stay. None starts a new log.

    Errors: ValueError for a writer that is unknown or not installed; OSError from the disk.
    """

    def __init__(
        self, run_dir: Path, resume_step: int | None = None, loggers: Sequence[str] | None = None
    ) -> None:
        self._path = path = run_dir / "log.jsonl"
        if resume_step is not None and path.exists():
            with named_errors(path):
                _drop_behind(path, resume_step)
        else:
            write_text(path, "")
        self._file = path.open("a", encoding="utf-8", newline="")
        first_step = 0 if resume_step is None else resume_step + 1
        self._writers = open_writers(loggers, run_dir, first_step)

    def train(self, step: int, **figures: Any) -> None:
        """Log the training figures of the steps up to `step` (loss, rate, ...)."""
        self._write("train", step, figures)

    def evaluate(self, step: int, **figures: Any) -> None:
        """Log the held-out figures of the weights after `step`."""
        self._write("evaluate", step, figures)

    def message(self, text: str) -> None:
        """Log a sentence for people: a warning, a resume, why the run ended; no URL's password."""
        self._append({"event": "message", "text": without_password(text)})

    def sync(self) -> None:
        """Flush the lines to the disk; a checkpoint counts on them."""
        with named_errors(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        with named_errors(self._path):
            self._file.close()
        for writer in self._writers:
            writer.close()

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
            self._file.write(json.dumps(plain(event), ensure_ascii=False, allow_nan=False) + "\n")
            self._file.flush()


class NoLog(RunLog):
    """The log of a rank that leaves all writing to rank 0."""

    def __init__(self) -> None:
        self._writers = []

    def sync(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _append(self, event: dict[str, Any]) -> None:
        pass


def _drop_behind(path: Path, step: int) -> None:
    """Drop the lines after the last of the steps up to `step`, but for messages.

    Read from the end, as a log may be long; in place, so that a kill loses messages only.
    """

    def belongs(event: dict[str, Any]) -> bool:
        own = event.get("step", math.inf)
        return own < step or (own == step and "unigram_entropy" not in event)

    size, length = path.stat().st_size, TAIL
    with path.open("r+b") as file:
        while True:
            start = max(0, size - length)
            file.seek(start)
            lines = file.read().split(b"\n")[:-1]  # without half a line at the end
            events = [json_object(line) or {} for line in lines]  # {} of half a line
            last = max((n for n, event in enumerate(events) if belongs(event)), default=-1)
            if last >= 0 or start == 0:
                break
            length *= 2
        behind = zip(lines[last + 1 :], events[last + 1 :], strict=True)
        messages = [line + b"\n" for line, event in behind if event.get("event") == "message"]
        file.seek(start + sum(len(line) + 1 for line in lines[: last + 1]))
        file.truncate()
        file.write(b"".join(messages))


def plain(value: Any) -> Any:
    """A figure for JSON; NaN and infinity become None (null).

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


def progress_notes(step: int, figures: dict[str, float]) -> list[str]:
    """Figures for the progress line.

    >>> progress_notes(1200, {"loss": 6.3, "mlm_loss": 5.6291, "mlm_accuracy": 0.123})
    ['MLM loss 5.629', 'step 1,200', '12% right']
    """
    known = {"step": step, **figures}
    if known.keys() & set(TOKEN_LOSSES):
        del known["loss"]
    return [words.format(known[name]) for name, words in NOTES.items() if name in known]


class LogWriter(Protocol):
    """Another tool that keeps a run's figures.

    `first_step` is 0 for a new run. On a resume TensorBoard replaces the steps that are repeated;
    W&B and MLflow cannot, so there each process is a run of its own, named after its first step.
    """

    def __init__(self, run_dir: Path, first_step: int) -> None: ...

    def write(self, figures: Mapping[str, float], step: int) -> None:
        """Keep finite figures, named "train/loss" and so on; steps never decrease."""

    def close(self) -> None: ...


class TensorBoardWriter:
    """Event files that TensorBoard reads."""

    def __init__(self, run_dir: Path, first_step: int) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self._path = run_dir / "tensorboard"
        # purge_step hides later events of an earlier process
        with named_errors(self._path):
            self._events = SummaryWriter(str(self._path), purge_step=first_step)

    def write(self, figures: Mapping[str, float], step: int) -> None:
        with named_errors(self._path):
            for name, value in figures.items():
                self._events.add_scalar(name, value, step)
            self._events.flush()

    def close(self) -> None:
        with named_errors(self._path):
            self._events.close()


class WandbWriter:
    """A run of Weights & Biases, project "bertsmith", offline unless WANDB_MODE says otherwise."""

    def __init__(self, run_dir: Path, first_step: int) -> None:
        import wandb  # type: ignore[import-not-found]

        quiet: dict[str, Any] = {"console": "off", "silent": True, "x_disable_stats": True}
        self._run = wandb.init(
            project="bertsmith",
            group=run_dir.resolve().name,
            name=_run_name(run_dir, first_step),
            dir=run_dir,
            mode=os.environ.get("WANDB_MODE", "offline"),
            reinit="create_new",  # a process may have several runs: seeds
            settings=wandb.Settings(disable_code=True, disable_git=True, **quiet),
        )

    def write(self, figures: Mapping[str, float], step: int) -> None:
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        self._run.finish()


class MlflowWriter:
    """A run of MLflow's experiment "bertsmith", in a SQLite file without MLFLOW_TRACKING_URI."""

    def __init__(self, run_dir: Path, first_step: int) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read when it is imported
        from mlflow import MlflowClient  # type: ignore[import-not-found]

        folder = run_dir.resolve() / "mlflow"
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if uri is None:
            with named_errors(folder):
                folder.mkdir(parents=True, exist_ok=True)
            uri = f"sqlite:///{folder / 'mlflow.db'}"
        self._client = MlflowClient(tracking_uri=uri)
        experiment = self._client.get_experiment_by_name("bertsmith")
        if experiment is None:
            number = self._client.create_experiment("bertsmith", folder.as_uri())
        else:
            number = experiment.experiment_id
        name = _run_name(run_dir, first_step)
        self._id = self._client.create_run(number, run_name=name).info.run_id

    def write(self, figures: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric  # type: ignore[import-not-found]

        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, step) for name, value in figures.items()]
        self._client.log_batch(self._id, metrics)

    def close(self) -> None:
        self._client.set_terminated(self._id)


WRITERS: dict[str, type[LogWriter]] = {
    "tensorboard": TensorBoardWriter,
    "wandb": WandbWriter,
    "mlflow": MlflowWriter,
}
EXTRAS = {"tensorboard": "train", "wandb": "wandb", "mlflow": "mlflow"}


def check_writers(names: Sequence[str]) -> None:
    """Errors: ValueError that names a writer that is unknown, or how to install its package."""
    for name in names:
        if name not in WRITERS:
            raise ValueError(f"log writer '{name}': known are {', '.join(WRITERS)}")
        if find_spec(name) is None:
            raise ValueError(
                f"log writer '{name}': its package is not installed "
                f"(pip install 'bertsmith[{EXTRAS[name]}]')"
            )


def open_writers(names: Sequence[str] | None, run_dir: Path, first_step: int) -> list[LogWriter]:
    """The writers by name; None: TensorBoard, or a notice where it is not installed."""
    if names is None:
        names = ["tensorboard"] if find_spec("tensorboard") else []
        if not names:
            _note_missing_tensorboard()
    check_writers(names)
    return [WRITERS[name](run_dir, first_step) for name in dict.fromkeys(names)]


@functools.cache  # a process with several runs (seeds) says it once
def _note_missing_tensorboard() -> None:
    print("no TensorBoard events are written: pip install 'bertsmith[train]'", file=sys.stderr)


def _run_name(run_dir: Path, first_step: int) -> str:
    name = run_dir.resolve().name
    return f"{name} from step {first_step}" if first_step else name
