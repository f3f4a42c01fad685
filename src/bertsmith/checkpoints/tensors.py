"""Tensors of PyTorch: to files and from them (`stored.py`), under our names and others'."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from bertsmith.base.files import atomic_file
from bertsmith.checkpoints.formats.elmo import HDF5
from bertsmith.checkpoints.formats.google import checkpoint_prefix, open_checkpoint
from bertsmith.checkpoints.formats.openai import SHAPES
from bertsmith.checkpoints.formats.tensorflow_bundle import INDEX, write_bundle
from bertsmith.checkpoints.names import (
    CONV1D,
    GLOBAL_STEP,
    KERNEL,
    OURS,
    SLOTS,
    canonical,
    google_name,
    hugging_face_names,
    name_parts,
    spelled,
)
from bertsmith.checkpoints.stored import PICKLED, StoredTensor, bundle_array, opened


def to_hugging_face(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our tensors under Hugging Face's names; the fused matrix becomes three views of its rows.

    >>> state = {"encoder.layers.0.qkv.bias": torch.arange(6)}
    >>> [part.tolist() for part in to_hugging_face(state).values()]
    [[0, 1], [2, 3], [4, 5]]
    """
    renamed = {}
    for name, tensor in state.items():
        names = hugging_face_names(name)
        parts = tensor.chunk(len(names)) if tensor.ndim else [tensor]
        renamed.update(zip(names, parts, strict=True))
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


def as_spelled(tensors: Mapping[str, Tensor], architecture: str) -> dict[str, Tensor]:
    """Canonical tensors under the names, and in the form, that transformers' class has.

    >>> tensors = {"bert.encoder.layer.0.output.dense.weight": torch.zeros(2, 8)}
    >>> [(name, *x.shape) for name, x in as_spelled(tensors, "OpenAIGPTModel").items()]
    [('transformer.h.0.mlp.c_proj.weight', 8, 2)]
    """
    found: dict[str, list[Tensor]] = {}
    for name, tensor in tensors.items():  # a GPT has one for queries, keys and values
        found.setdefault(spelled(name, architecture), []).append(tensor)
    joined = {n: parts[0] if len(parts) == 1 else torch.cat(parts) for n, parts in found.items()}
    return {n: x.T if CONV1D.search(n) and x.ndim == 2 else x for n, x in joined.items()}


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


def read_tensors(stored: Iterable[StoredTensor]) -> Iterator[Tensor]:
    """The tensors themselves, of the file's dtype, mapped from it where they can be.

    Copy them before computing with them: a map starts at any byte, and sums may depend on that.
    """
    for file, wanted in itertools.groupby(stored, key=lambda tensor: tensor.file):
        if file.suffix == PICKLED:
            yield from (tensor.own_part(tensor.source) for tensor in wanted)
        elif file.name == SHAPES or file.suffix == HDF5:
            yield from (torch.from_numpy(tensor.array()) for tensor in wanted)
        elif file.name.endswith(INDEX):
            for tensor in wanted:
                yield torch.from_numpy(bundle_array(tensor.source, tensor.name, tensor.name))
        else:
            with opened(file, "pt") as tensors:
                yield from (t.own_part(tensors.get_tensor(t.name)) for t in wanted)


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
        theirs = {
            name: torch.from_numpy(bundle_array(bundle, name + ending, name)) for name in weights
        }
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
    with opened(file, "pt") as tensors:
        return {name: tensors.get_tensor(name).clone() for name in tensors.keys()}  # noqa: SIM118
