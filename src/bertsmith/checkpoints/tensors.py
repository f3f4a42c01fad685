"""Tensors on disk, checked before they are read, under our names and others' (`names.py`)."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from bertsmith.base.files import atomic_file, read_json_object
from bertsmith.checkpoints.names import (
    GLOBAL_STEP,
    KERNEL,
    OURS,
    SLOTS,
    canonical,
    google_name,
    hugging_face_names,
    name_parts,
)
from bertsmith.checkpoints.pickled import PICKLED, read_pickled
from bertsmith.checkpoints.tensorflow.bundle import INDEX, IS_SHARD, Bundle, write_bundle
from bertsmith.checkpoints.tensorflow.google import checkpoint_prefix, open_checkpoint

WEIGHTS = "model.safetensors"
WEIGHT_FILES = WEIGHTS, "pytorch_model.bin"  # in parts: beside an index of this name and suffix:
INDEX_SUFFIX = ".index.json"


def to_hugging_face(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our tensors under Hugging Face's names; the fused matrix becomes three views of its rows.

    >>> state = {"encoder.layers.0.qkv.bias": torch.arange(6)}
    >>> [part.tolist() for part in to_hugging_face(state).values()]
    [[0, 1], [2, 3], [4, 5]]
    """
    renamed = {}
    for name, tensor in state.items():
        names = hugging_face_names(name)
        renamed.update(zip(names, tensor.chunk(len(names)), strict=True))
    return renamed


def from_hugging_face(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `to_hugging_face`, for any spelling that `canonical` knows.

    Tensors of heads that we do not have are dropped, and so is one of ours that lacks a part.
    """
    theirs = {canonical(name): tensor for name, tensor in state.items()}
    renamed = {}
    for name in theirs:
        template, number, kind = name_parts(name)
        if template not in OURS:
            continue
        ours = f"{OURS[template].replace('{n}', number)}.{kind}"
        names = hugging_face_names(ours)
        if name == names[0] and all(part in theirs for part in names):
            parts = [theirs[part] for part in names]
            renamed[ours] = torch.cat(parts) if len(parts) > 1 else parts[0]
    return renamed


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file, known by the file's header alone."""

    file: Path
    name: str
    shape: tuple[int, ...]  # as ours, whatever the file's
    bundle: Bundle | None = None  # the checkpoint of TensorFlow's that it is in


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors to a safetensors file, atomically. Errors: OSError with the path."""
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with atomic_file(path) as temporary:
        try:
            save_file(on_cpu, temporary, metadata={"format": "pt"})  # transformers asks for it
        except SafetensorError as error:  # it hides the system's error number in a sentence
            number = re.search(r"os error (\d+)", str(error))
            if not number:
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
        # safetensors makes files for the owner alone: give it the readers that the folder has
        temporary.chmod(path.parent.stat().st_mode & 0o666)


def stored_tensors(file: Path) -> list[StoredTensor]:
    """A file's tensors by its header. Errors: ValueError for a damaged file; FileNotFoundError.

    Those of a checkpoint of Google's are in its index, without what belongs to its optimizer.
    """
    if file.suffix == PICKLED:
        tensors = read_pickled(file)
        return [StoredTensor(file, name, tuple(tensors[name].shape)) for name in tensors]
    if file.name.endswith(INDEX):
        bundle = open_checkpoint(file.with_name(file.name.removesuffix(INDEX)))
        return [
            StoredTensor(file, name, _turned(name, bundle.shape(name)), bundle)
            for name in bundle.names
            if name != GLOBAL_STEP and not name.endswith(tuple(SLOTS))
        ]
    if IS_SHARD.search(file.name):
        return []
    with _opened(file) as tensors:
        return [
            StoredTensor(file, name, tuple(tensors.get_slice(name).get_shape()))
            for name in tensors.keys()  # noqa: SIM118 (not a dict)
        ]


def _turned(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape[::-1] if name.endswith(KERNEL) else shape


def read_tensors(stored: Iterable[StoredTensor]) -> Iterator[Tensor]:
    """The tensors themselves, mapped from the file where it can be.

    Copy them before computing with them: a map starts at any byte, and sums may depend on that.
    """
    for file, wanted in itertools.groupby(stored, key=lambda tensor: tensor.file):
        if file.suffix == PICKLED:
            tensors = read_pickled(file)
            yield from (tensors[tensor.name] for tensor in wanted)
        elif file.name.endswith(INDEX):
            for tensor in wanted:
                assert tensor.bundle is not None
                yield _from_bundle(tensor.bundle, tensor.name, tensor.name)
        else:
            with _opened(file) as opened:
                yield from (opened.get_tensor(tensor.name) for tensor in wanted)


def _from_bundle(bundle: Bundle, name: str, weight: str) -> Tensor:
    """A tensor of a checkpoint, turned as the weight it is or belongs to."""
    values = bundle.read(name)
    if values.dtype.kind != "f":
        raise ValueError(f"{bundle.index}: '{name}' holds {values.dtype} numbers, not weights")
    return torch.from_numpy(values.T if weight.endswith(KERNEL) else values).contiguous()


def google_optimizer(folder: Path) -> tuple[dict[str, Tensor], int] | None:
    """Adam's state in a folder of Google's by our names ("exp_avg:encoder..."), and its step.

    None where there is none, as in the released models. Errors: as `stored_tensors`.
    """
    prefix = checkpoint_prefix(folder)
    bundle = open_checkpoint(prefix) if prefix else None
    if bundle is None or GLOBAL_STEP not in bundle.names:
        return None
    state = {}
    for ending, kind in SLOTS.items():
        weights = [n.removesuffix(ending) for n in bundle.names if n.endswith(ending)]
        theirs = {name: _from_bundle(bundle, name + ending, name) for name in weights}
        state |= {f"{kind}:{name}": value for name, value in from_hugging_face(theirs).items()}
    return (state, int(bundle.read(GLOBAL_STEP))) if state else None


def write_google_checkpoint(prefix: Path, weights: Mapping[str, Tensor]) -> None:
    """Write tensors by our names as a checkpoint that google-research/bert loads.

    Errors: OSError with the path.
    """
    tensors = {}
    for name, tensor in to_hugging_face(weights).items():
        values, google = tensor.detach().cpu().numpy(), google_name(name)
        tensors[google] = values.T if google.endswith(KERNEL) else values
    write_bundle(prefix, tensors)


def read_tensor_file(file: Path) -> dict[str, Tensor]:
    """All tensors of a file, in memory of their own. Errors: as `stored_tensors`."""
    with _opened(file) as tensors:
        return {name: tensors.get_tensor(name).clone() for name in tensors.keys()}  # noqa: SIM118


def weight_files(folder: Path) -> list[Path]:
    """The files with a folder's weights, safetensors before pickled ones and Google's.

    Errors: ValueError if there are none.
    """
    for name in WEIGHT_FILES:
        if (folder / name).exists():
            return [folder / name]
        if (index := folder / f"{name}{INDEX_SUFFIX}").exists():
            return _shards(index)
    if prefix := checkpoint_prefix(folder):
        bundle = open_checkpoint(prefix)
        return [bundle.index, *bundle.shards()]
    raise ValueError(
        f"{folder}: no {' or '.join(WEIGHT_FILES)}, so not a folder with a model (or not downloaded"
        " whole, or with weights of another framework)"
    )


def _shards(index: Path) -> list[Path]:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index}: no weight_map with the names of the files")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name:
            raise ValueError(f"{index}: '{name}' is not the name of a file beside it")
        if not index.with_name(name).exists():
            raise ValueError(f"{index.with_name(name)}: missing, though {index.name} names it")
    return [index.with_name(name) for name in names]


@contextmanager
def _opened(file: Path) -> Iterator[safe_open]:
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except SafetensorError as error:
        damaged = f"{file}: truncated or damaged ({error}): copy or download it again"
        raise ValueError(damaged) from error
