"""A run directory: settings, checkpoints, result, and the newest model as a Hugging Face folder.

    RUN/run.json result.json                    what was asked for, what came out
    RUN/config.json model.safetensors vocab.txt tokenizer.json tokenizer_config.json
    RUN/checkpoints/step-00001234/              a model folder with, besides,
        optimizer.safetensors state.json        all that training needs to go on

A checkpoint appears whole or not at all: it is written under another name, synced and renamed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from bertsmith import __version__
from bertsmith.checkpoints.folder import save_model
from bertsmith.checkpoints.model_config import CONFIG_FILE
from bertsmith.checkpoints.tensors import read_tensor_file, write_tensors
from bertsmith.files import TEMPORARY_PREFIX, atomic_file, atomic_folder, read_json, write_json
from bertsmith.text.wordpiece import Tokenizer

FORMAT = 1
SETTINGS_FILE = "run.json"
RESULT_FILE = "result.json"
OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "state.json"


class RunFolder:
    """Reads and writes a run directory; `path` need not exist before the first write."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"

    def exists(self) -> bool:
        """Whether a run was started here, or a model of other origin would be written over."""
        files = (self.path / SETTINGS_FILE, self.path / CONFIG_FILE)
        return any(file.exists() for file in files) or self.latest() is not None

    def write_settings(self, settings: Mapping[str, Any]) -> None:
        """Write run.json: `settings` (kind, command, ...), format, version, commit and time."""
        created = datetime.now(UTC).isoformat(timespec="seconds")
        head = {"format": FORMAT, "bertsmith": __version__, "created": created}
        commit = source_commit(Path(__file__).parents[3])
        write_json(self.path / SETTINGS_FILE, head | {"commit": commit} | dict(settings))

    def settings(self) -> dict[str, Any]:
        """What run.json holds. Errors: ValueError when it is absent, damaged or too new."""
        settings = self._read(SETTINGS_FILE, "so not a run directory")
        if settings.get("format") != FORMAT:
            raise ValueError(
                f"{self.path / SETTINGS_FILE}: format {settings.get('format')!r}, but this "
                f"bertsmith ({__version__}) reads format {FORMAT}: use the one that wrote it"
            )
        return settings

    def kind(self) -> str | None:
        """What run.json says the run is, "pretrain" or "finetune"; None without one."""
        return self.settings()["kind"] if (self.path / SETTINGS_FILE).exists() else None

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Write result.json."""
        write_json(self.path / RESULT_FILE, dict(result))

    def forget_result(self) -> None:
        """Remove result.json: the run goes on."""
        (self.path / RESULT_FILE).unlink(missing_ok=True)

    def result(self) -> dict[str, Any]:
        """What result.json holds. Errors: ValueError when it is absent or damaged."""
        return self._read(RESULT_FILE, "so the run has not ended: go on with --resume")

    def save_checkpoint(
        self,
        step: int,
        model: nn.Module,
        tokenizer: Tokenizer,
        optimizer_tensors: Mapping[str, Tensor],
        state: Mapping[str, Any],
        keep: int = 2,
        label_names: Sequence[str] | None = None,
        extra_config: dict[str, Any] | None = None,
        leave_out: Collection[str] = (),
    ) -> Path:
        """Write a checkpoint, make it the run's own model, delete all but the newest `keep`.

        A kill at any instant leaves the checkpoints of before (but for one of the same step, which
        is replaced), or those and this one. The model part goes through `save_model`.
        Errors: OSError from the disk.
        """
        assert keep >= 1 and 0 <= step < 10**8, (keep, step)
        self._remove_leftovers()
        path = self.checkpoints / f"step-{step:08d}"
        with atomic_folder(path) as temporary:
            save_model(
                model,
                tokenizer,
                temporary,
                label_names=label_names,
                extra_config=extra_config,
                leave_out=leave_out,
            )
            model_files = sorted(file.name for file in temporary.iterdir())
            write_tensors(temporary / OPTIMIZER_FILE, optimizer_tensors)
            write_json(temporary / STATE_FILE, {"step": step, **state})
        for name in model_files:
            _link(path / name, self.path / name)
        for old in self.saved()[:-keep]:
            shutil.rmtree(old)
        return path

    def saved(self) -> list[Path]:
        """The whole checkpoints, oldest first."""
        if not self.checkpoints.is_dir():
            return []
        found = self.checkpoints.iterdir()
        return sorted(path for path in found if re.fullmatch(r"step-\d{8}", path.name))

    def latest(self) -> Path | None:
        """The newest whole checkpoint; None before the first."""
        return (self.saved() or [None])[-1]

    def load_training_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """(optimizer tensors, state with "step") of the newest checkpoint.

        Errors: ValueError without a checkpoint, or when a file of it is damaged.
        """
        path = self.latest()
        if path is None:
            raise ValueError(f"{self.path}: no checkpoint to go on from")
        return read_tensor_file(path / OPTIMIZER_FILE), read_json(path / STATE_FILE)

    def _read(self, name: str, meaning: str) -> dict[str, Any]:
        path = self.path / name
        if not path.exists():
            raise ValueError(f"{self.path}: no {name}, {meaning}")
        content = read_json(path)
        if not isinstance(content, dict):
            raise ValueError(f"{path}: not a JSON object")
        return content

    def _remove_leftovers(self) -> None:
        """What killed writers left behind; only the writer of a run does this, never a reader."""
        for folder in (self.path, self.checkpoints):
            for leftover in folder.glob(f"{TEMPORARY_PREFIX}*"):
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()


def _link(source: Path, target: Path) -> None:
    """Put a file at a second place, atomically and without its bytes where the disk can do so."""
    with atomic_file(target) as temporary:
        try:
            os.link(source, temporary)
        except OSError:  # a file system without hard links
            shutil.copyfile(source, temporary)


def source_commit(checkout: Path) -> str | None:
    """The commit of the code, with "-dirty" behind it where files were changed since.

    None where the folder is no checkout (an installed package) or there is no git.
    """
    if not (checkout / ".git").exists():  # also not one of a folder above, such as the user's own
        return None
    command = ["git", "--no-optional-locks", "-C", str(checkout), "describe", "--always"]
    command += ["--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None
