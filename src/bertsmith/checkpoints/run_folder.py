"""A run directory: settings, checkpoints, result, and the newest model as a Hugging Face folder.

    RUN/run.json result.json                    what was asked for, what came out
    RUN/run.lock                                empty; locked by the process that writes here
    RUN/config.json model.safetensors vocab.txt tokenizer.json tokenizer_config.json
    RUN/checkpoints/step-00001234/              a model folder with, besides,
        optimizer.safetensors state.json        all that training needs to resume
        manifest.json                           step, run identity, bytes and SHA-256 of every file

A checkpoint is written under another name, synced and renamed; it counts from the moment it has its
manifest, which is sealed by a checksum of its own (docs/reference/formats.md).
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from bertsmith.base import VERSION
from bertsmith.base.files import (
    atomic_file,
    fault_point,
    locked_file,
    read_json_object,
    read_sealed_json,
    remove_folder,
    remove_leftovers,
    write_json,
    write_sealed_json,
)
from bertsmith.checkpoints.config_json import CONFIG_FILE
from bertsmith.text.readers.files import without_password

if TYPE_CHECKING:
    from torch import nn

FORMAT = 2  # of run.json and manifest.json
SETTINGS_FILE = "run.json"
RESULT_FILE = "result.json"
OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "state.json"
LOCK_FILE = "run.lock"
MANIFEST_FILE = "manifest.json"
# what a run of any kind may write over, were it begun among the user's own files
WRITTEN = (
    *("seeds", RESULT_FILE, "log.jsonl", "vocab.txt", "tokenizer.json", "tokenizer_config.json"),
    "model.safetensors",
)
NOT_THE_MODEL = (OPTIMIZER_FILE, STATE_FILE, MANIFEST_FILE)


class CorruptCheckpoint(ValueError):
    """A checkpoint that nothing may be read from, and why."""


class Skipped(NamedTuple):
    """A checkpoint that a resume cannot use."""

    path: Path
    reason: str


def step_number(checkpoint: Path) -> int:
    """
    >>> step_number(Path("run/checkpoints/step-00000600"))
    600
    """
    return int(checkpoint.name.removeprefix("step-"))


def describe(
    kind: str,
    command: Sequence[str],
    settings: Mapping[str, Any],
    model: nn.Module | None = None,
    **facts: Any,
) -> dict[str, Any]:
    """The content of run.json: what all runs have, and further `facts`; see `write_settings`."""
    described = {"kind": kind, "command": list(command), "settings": dict(settings), **facts}
    if model is not None:
        described["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    return described


class RunFolder:
    """Reads and writes a run directory; `path` need not exist before the first write.

    `writes`: patterns of what a run of this kind writes over or removes besides `WRITTEN`.
    """

    def __init__(self, path: Path | str, writes: Sequence[str] = ()) -> None:
        self.path, self._writes = Path(path), (*WRITTEN, *writes)
        self.checkpoints = self.path / "checkpoints"

    def exists(self) -> bool:
        """True if a run was started here, or a model of other origin would be written over."""
        files = (self.path / SETTINGS_FILE, self.path / CONFIG_FILE)
        return any(file.exists() for file in files) or self.latest() is not None

    def check_free(self, kind: str) -> None:
        """Refuse, by ValueError, any file, model or run but an unfinished run of this kind."""
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"{self.path} is a file: name a folder that is not there yet")
        if self.kind() == kind and not (self.path / RESULT_FILE).exists():
            return
        if self.exists():
            is_finished = self.kind() and (self.path / RESULT_FILE).exists()
            held = "a finished run, ready to use" if is_finished else "a run already"
            raise ValueError(f"{self.path} holds {held}: name another `out`")
        self.check_unused()

    def check_unused(self) -> None:
        """Refuse, by ValueError, a folder without a run that holds what a run would write over."""
        for found in (path for pattern in self._writes for path in self.path.glob(pattern)):
            raise ValueError(
                f"{self.path} holds '{found.name}', which is of no run: name another `out`"
            )

    def is_begun(self, kind: str, settings: Mapping[str, Any], free: Collection[str] = ()) -> bool:
        """True if a run of this kind and these settings was begun here and may go on.

        `free`: names of settings that may differ.

        Errors: ValueError where it is another run: of another kind, or that names the setting.
        """
        if self.kind() != kind:
            self.check_free(kind)
            return False
        stored = self.settings()["settings"]
        for name, value in settings.items():
            if name not in free and stored.get(name) != value:
                raise ValueError(
                    f"{self.path} was made with {name} = {stored.get(name)}, not {value}: give"
                    " the same settings to go on with it, or name another `out`"
                )
        return True

    @contextmanager
    def locked(self, begun: bool = True) -> Iterator[None]:
        """Keep other processes from writing this run; the system unlocks it when this one ends.

        Where the file system has no locks a line on stderr says so, and nobody is kept out. With
        `begun` False the folder was seen without a run, and must still be.

        Errors: ValueError that names the folder another process writes; OSError from the disk.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with locked_file(self.path / LOCK_FILE, "run", self._in_use):  # which is never removed
            if not begun and self.kind() is not None:
                raise ValueError(
                    f"{self.path}: another process has begun a run here meanwhile: name another "
                    "`out`"
                )
            yield

    def check_unlocked(self) -> None:
        """Errors: ValueError where another process is in `locked`; nothing is written or kept."""
        try:
            file = (self.path / LOCK_FILE).open()
        except (FileNotFoundError, NotADirectoryError):
            return
        with file:
            try:  # a shared lock, which filelock does not have: the ranks of a run look at once
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ValueError(self._in_use) from error
            except OSError:
                return  # no locks on this file system: `locked` says so

    @property
    def _in_use(self) -> str:
        return (
            f"{self.path}: another process is training here right now: wait until it has ended, or "
            "name another `out`"
        )

    def write_settings(self, settings: Mapping[str, Any]) -> None:
        """Write run.json: `settings` of `describe`, format, version, time, commit; no password."""
        content = {
            "format": FORMAT,
            "bertsmith": VERSION,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": source_commit(Path(__file__).parents[3]),
            **settings,
            "command": [without_password(word) for word in settings.get("command", ())],
        }
        write_json(self.path / SETTINGS_FILE, content)

    def settings(self) -> dict[str, Any]:
        """Read run.json. Errors: ValueError when it is absent, damaged or too new."""
        settings = self._read(SETTINGS_FILE, "so not a run directory")
        if settings.get("format") != FORMAT:
            raise ValueError(
                f"{self.path / SETTINGS_FILE}: format {settings.get('format')!r}, but this "
                f"bertsmith ({VERSION}) reads format {FORMAT}: use the one that wrote it"
            )
        return settings

    def kind(self) -> str | None:
        """The run's kind, such as "pretrain"; None without a run.json."""
        return self.settings()["kind"] if (self.path / SETTINGS_FILE).exists() else None

    def write_result(self, result: Mapping[str, Any]) -> None:
        write_json(self.path / RESULT_FILE, dict(result))

    def forget_result(self) -> None:
        """Remove result.json: the run goes on."""
        (self.path / RESULT_FILE).unlink(missing_ok=True)

    def result(self) -> dict[str, Any]:
        """Read result.json. Errors: ValueError when it is absent or damaged."""
        return self._read(RESULT_FILE, "so the run has not ended")

    def saved(self) -> list[Path]:
        """The checkpoints with a manifest, oldest first; their bytes are not verified."""
        return [path for path in self._folders() if (path / MANIFEST_FILE).exists()]

    def latest(self) -> Path | None:
        """The newest checkpoint with a manifest; None before the first."""
        return (self.saved() or [None])[-1]

    def latest_valid(self) -> tuple[Path | None, list[Skipped]]:
        """The newest checkpoint that `verify_checkpoint` accepts, and the newer ones it refuses."""
        folders, skipped = self._folders(), []
        identity = self.settings().get("identity") if folders else None
        for path in reversed(folders):
            try:
                manifest = verify_checkpoint(path)
                if manifest["step"] != step_number(path):
                    raise CorruptCheckpoint(f"it holds step {manifest['step']}")
                if manifest["identity"] != identity:
                    raise CorruptCheckpoint(
                        "it is of another run, with other settings or another corpus"
                    )
            except CorruptCheckpoint as reason:
                skipped.append(Skipped(path, str(reason)))
            else:
                return path, skipped
        return None, skipped

    def return_to(self, checkpoint: Path, skipped: Sequence[Skipped]) -> None:
        """Make the model of `checkpoint` the run's own: a kill may have come before.

        What was skipped is renamed, so that `keep_checkpoints` does not count it; leftovers go.
        """
        self.clear_leftovers()
        for path, _ in skipped:
            if path.exists():
                aside = path.with_name(f"skipped-{path.name}")
                shutil.rmtree(aside, ignore_errors=True)
                os.replace(path, aside)
        self.publish(checkpoint)

    def publish(self, folder: Path) -> None:
        """Make the model of a folder, and all else of a finished one, the run's own."""
        for file in sorted(folder.iterdir()):
            if file.name not in NOT_THE_MODEL:
                with atomic_file(self.path / file.name) as temporary:
                    try:
                        os.link(file, temporary)
                    except OSError:  # a file system without hard links
                        shutil.copyfile(file, temporary)

    def _folders(self) -> list[Path]:
        return sorted(self.checkpoints.glob("step-" + 8 * "[0-9]"))

    def _read(self, name: str, meaning: str) -> dict[str, Any]:
        path = self.path / name
        if not path.exists():
            raise ValueError(f"{self.path}: no {name}, {meaning}")
        return read_json_object(path)

    def clear_leftovers(self) -> None:
        """Remove what a kill left half-written; only the writer of a run does this."""
        for folder in (self.path, self.checkpoints):
            remove_leftovers(folder)
        for half in set(self._folders()) - set(self.saved()):
            remove_folder(half)


def source_commit(checkout: Path) -> str | None:
    """The commit of the code, with "-dirty" where files were changed; None: no checkout, no git."""
    if not (checkout / ".git").exists():  # also not one of a folder above, such as the user's own
        return None
    command = ["git", "--no-optional-locks", "-C", str(checkout), "describe", "--always"]
    command += ["--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None
    except FileNotFoundError:
        return None


def write_manifest(folder: Path, facts: Mapping[str, Any]) -> None:
    """Record size and checksum of every file of the folder: from now on the checkpoint counts."""
    files = {}
    for file in sorted(folder.iterdir()):
        files[file.name] = {"bytes": file.stat().st_size, "sha256": _sha256(file)}
        fault_point("checkpoint-hashed")
    write_sealed_json(folder / MANIFEST_FILE, {"format": FORMAT, **facts, "files": files})


def verify_checkpoint(folder: Path) -> dict[str, Any]:
    """Verify all files of a folder; its manifest. Errors: CorruptCheckpoint names the file."""
    if not (folder / MANIFEST_FILE).exists():
        raise CorruptCheckpoint(f"half-written: no {MANIFEST_FILE}")
    with _reading(MANIFEST_FILE):
        try:
            manifest = read_sealed_json(folder / MANIFEST_FILE)
        except ValueError as error:
            raise CorruptCheckpoint(f"{MANIFEST_FILE} is truncated or damaged") from error
    if (found := manifest.get("format")) != FORMAT:
        raise CorruptCheckpoint(f"{MANIFEST_FILE} has format {found!r}, not {FORMAT}")
    for name, entry in manifest["files"].items():
        file = folder / name
        if not file.exists():
            raise CorruptCheckpoint(f"{name} is missing")
        size, expected = file.stat().st_size, entry["bytes"]
        if size != expected:
            damage = "truncated" if size < expected else "too long"
            raise CorruptCheckpoint(f"{name} is {damage}: {size:,} bytes, not {expected:,}")
        with _reading(name):
            found = _sha256(file)
        if found != entry["sha256"]:
            raise CorruptCheckpoint(f"{name} is damaged: its bytes are not those that were written")
    return manifest


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """Make a file of which the disk has lost a part a damaged one; other errors are no damage."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        raise CorruptCheckpoint(f"{name} cannot be read: {error.strerror}") from error


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
