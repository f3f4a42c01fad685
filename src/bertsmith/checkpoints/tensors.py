"""Tensors on disk: safetensors files, single or in shards, checked before they are read."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from bertsmith.files import atomic_file, read_json

WEIGHTS = "model.safetensors"
SHARD_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file, known by the file's header alone."""

    file: Path
    name: str
    shape: tuple[int, ...]


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors to a safetensors file, atomically.

    Errors: OSError with the path, for instance when the disk is full.
    """
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with atomic_file(path) as temporary:
        try:
            save_file(on_cpu, temporary, metadata={"format": "pt"})  # transformers asks for it
        except SafetensorError as error:  # it hides the system's error number in a sentence
            number = re.search(r"os error (\d+)", str(error))
            if not number:
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
        # safetensors makes files for the owner alone: give it the readers that the folder has.
        temporary.chmod(path.parent.stat().st_mode & 0o666)


def stored_tensors(file: Path) -> list[StoredTensor]:
    """What a safetensors file holds, from its header; its length is checked against the header.

    Errors: ValueError that names a truncated or otherwise damaged file; FileNotFoundError.
    """
    with _opened(file) as tensors:
        return [
            StoredTensor(file, name, tuple(tensors.get_slice(name).get_shape()))
            for name in tensors.keys()  # noqa: SIM118 (not a dict)
        ]


def read_tensors(stored: Iterable[StoredTensor]) -> Iterator[Tensor]:
    """The tensors themselves, in the order asked for, mapped from the file rather than read.

    Copy them before computing with them: a map starts at any byte, and sums may depend on that.
    """
    for tensor in stored:
        with _opened(tensor.file) as tensors:
            yield tensors.get_tensor(tensor.name)


def read_tensor_file(file: Path) -> dict[str, Tensor]:
    """All tensors of a file, in memory of their own. Errors: as `stored_tensors`."""
    stored = stored_tensors(file)
    tensors = zip(stored, read_tensors(stored), strict=True)
    return {place.name: tensor.clone() for place, tensor in tensors}


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files with a folder's weights.

    Errors: ValueError that names the folder and the remedy when it has none, or only pickled ones,
    which are never opened, since opening them can run any program.
    """
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    if (folder / SHARD_INDEX).exists():
        return _shards(folder)
    pickled = sorted(file.name for file in folder.glob("*.bin"))
    if pickled:
        raise ValueError(
            f"{folder / pickled[0]}: a pickled file can run any program and is never opened: "
            "convert it with transformers (from_pretrained, then save_pretrained)"
        )
    raise ValueError(
        f"{folder}: no {WEIGHTS}, so not a folder with a model (of a hub's model: the hub has none,"
        " or it was not fetched whole; pickled weights are never opened: convert them with"
        " transformers, from_pretrained, then save_pretrained)"
    )


def _shards(folder: Path) -> list[Path]:
    index = folder / SHARD_INDEX
    content = read_json(index)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index}: no weight_map with the names of the files")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name:
            raise ValueError(f"{index}: '{name}' is not the name of a file beside it")
        if not (folder / name).exists():
            raise ValueError(f"{folder / name}: missing, though {SHARD_INDEX} names it")
    return [folder / name for name in names]


@contextmanager
def _opened(file: Path) -> Iterator[safe_open]:
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except SafetensorError as error:
        raise ValueError(
            f"{file}: truncated or damaged ({error}): copy or download it again"
        ) from error
