"""Where the figures of a run go besides log.jsonl: TensorBoard, Weights & Biases, MLflow.

All write into the run's folder and need no network:

    tensorboard   RUN/tensorboard/       tensorboard --logdir RUN
    wandb         RUN/wandb/             wandb sync RUN/wandb/offline-run-*
    mlflow        RUN/mlflow/mlflow.db   mlflow ui --backend-store-uri sqlite:///RUN/mlflow/mlflow.db

The tools' own variables WANDB_MODE and MLFLOW_TRACKING_URI, when set, send the figures elsewhere.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from bertsmith.files import named_errors


class LogWriter(Protocol):
    """One more place for the figures of a run.

    It is opened with the run's folder and the first step that will be written: 0 for a new run. In
    TensorBoard a resumed run takes the place of the steps it repeats; W&B and MLflow cannot drop
    steps, so there every process is a run of its own, named after its first step.
    """

    def __init__(self, run_dir: Path, first_step: int) -> None: ...

    def write(self, figures: Mapping[str, float], step: int) -> None:
        """Keep finite figures, named "train/loss" and so on; steps never fall."""
        ...

    def close(self) -> None: ...


class TensorBoardWriter:
    """Event files that TensorBoard reads."""

    def __init__(self, run_dir: Path, first_step: int) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self._path = run_dir / "tensorboard"
        # purge_step hides the later events of the files that an earlier process left behind.
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
    """Refuse, before anything is written, a writer that is unknown or not installed.

    Errors: ValueError that names the writer, and the command that installs its package.
    """
    for name in names:
        if name not in WRITERS:
            raise ValueError(f"log writer '{name}': known are {', '.join(WRITERS)}")
        if find_spec(name) is None:
            raise ValueError(
                f"log writer '{name}': its package is not installed "
                f"(pip install 'bertsmith[{EXTRAS[name]}]')"
            )


def open_writers(names: Sequence[str] | None, run_dir: Path, first_step: int) -> list[LogWriter]:
    """The writers of these names; None: TensorBoard, or a notice where it is not installed.

    Errors: ValueError as `check_writers`; OSError from the disk.
    """
    if names is None:
        names = ["tensorboard"] if find_spec("tensorboard") else []
        if not names:
            _notice()
    check_writers(names)
    return [WRITERS[name](run_dir, first_step) for name in dict.fromkeys(names)]


@functools.cache  # a process with several runs (seeds) says it once
def _notice() -> None:
    print(
        "no TensorBoard events are written (to have them: pip install 'bertsmith[train]')",
        file=sys.stderr,
    )


def _run_name(run_dir: Path, first_step: int) -> str:
    name = run_dir.resolve().name
    return f"{name} from step {first_step}" if first_step else name
