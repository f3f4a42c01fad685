"""Tensors on disk: safetensors files, checked before they are read, and the one table of names.

A row of `HUGGING_FACE` names a module, whose tensors are `.weight` and `.bias` on both sides; `{n}`
is the number of a layer. The other direction and the split of the fused matrix follow from it.
"""

from __future__ import annotations

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

HUGGING_FACE = {  # ours: theirs; several of theirs are concatenated along the rows of ours
    "encoder.embeddings.token": ["bert.embeddings.word_embeddings"],
    "encoder.embeddings.position": ["bert.embeddings.position_embeddings"],
    "encoder.embeddings.segment": ["bert.embeddings.token_type_embeddings"],
    "encoder.embeddings.norm": ["bert.embeddings.LayerNorm"],
    "encoder.layers.{n}.qkv": [
        "bert.encoder.layer.{n}.attention.self.query",
        "bert.encoder.layer.{n}.attention.self.key",
        "bert.encoder.layer.{n}.attention.self.value",
    ],
    "encoder.layers.{n}.attention_output": ["bert.encoder.layer.{n}.attention.output.dense"],
    "encoder.layers.{n}.attention_norm": ["bert.encoder.layer.{n}.attention.output.LayerNorm"],
    "encoder.layers.{n}.intermediate": ["bert.encoder.layer.{n}.intermediate.dense"],
    "encoder.layers.{n}.gate_up": [  # of a gated model, in place of intermediate; a name of ours
        "bert.encoder.layer.{n}.intermediate.gate",
        "bert.encoder.layer.{n}.intermediate.up",
    ],
    "encoder.layers.{n}.output": ["bert.encoder.layer.{n}.output.dense"],
    "encoder.layers.{n}.output_norm": ["bert.encoder.layer.{n}.output.LayerNorm"],
    "encoder.final_norm": ["bert.encoder.final_norm"],  # of a pre_norm model; a name of ours
    "pooler.dense": ["bert.pooler.dense"],
    "mlm.dense": ["cls.predictions.transform.dense"],
    "mlm.norm": ["cls.predictions.transform.LayerNorm"],
    "mlm": ["cls.predictions"],  # the bias of the output, whose matrix is the token embedding
    "nsp": ["cls.seq_relationship"],
    **{  # of a BiLSTM over a frozen encoder; names of ours
        name: [name]
        for way in ("forwards", "backwards")
        for name in (f"reader.{way}.{{n}}.inputs", f"reader.{way}.{{n}}.state")
    },
    "classifier": ["classifier"],
    "span": ["qa_outputs"],
}
OURS = {theirs: ours for ours, row in HUGGING_FACE.items() for theirs in row}

TIED_MATRIX = "cls.predictions.decoder.weight"  # some folders store the token embedding twice
# no weights of their own
REDUNDANT = {TIED_MATRIX, "cls.predictions.decoder.bias", "bert.embeddings.position_ids"}
WEIGHTS = "model.safetensors"
SHARD_INDEX = "model.safetensors.index.json"


def hugging_face_names(name: str) -> list[str]:
    """The stored tensors that make up ours.

    >>> [name.rpartition("self.")[2] for name in hugging_face_names("encoder.layers.0.qkv.weight")]
    ['query.weight', 'key.weight', 'value.weight']
    """
    template, number, kind = _parts(name)
    return [f"{theirs.replace('{n}', number)}.{kind}" for theirs in HUGGING_FACE[template]]


def canonical(name: str) -> str:
    """A stored name as transformers spells it today in a model with a head.

    A bare encoder is stored without "bert."; files converted from TensorFlow have gamma and beta.

    >>> canonical("embeddings.LayerNorm.gamma")
    'bert.embeddings.LayerNorm.weight'
    """
    if name.startswith(("embeddings.", "encoder.", "pooler.")):
        name = f"bert.{name}"
    name = re.sub(r"\.LayerNorm\.gamma$", ".LayerNorm.weight", name)
    return re.sub(r"\.LayerNorm\.beta$", ".LayerNorm.bias", name)


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
        template, number, kind = _parts(name)
        if template not in OURS:
            continue
        ours = f"{OURS[template].replace('{n}', number)}.{kind}"
        names = hugging_face_names(ours)
        if name == names[0] and all(part in theirs for part in names):
            parts = [theirs[part] for part in names]
            renamed[ours] = torch.cat(parts) if len(parts) > 1 else parts[0]
    return renamed


def _parts(name: str) -> tuple[str, str, str]:
    """ "encoder.layers.3.qkv.bias" -> ("encoder.layers.{n}.qkv", "3", "bias")."""
    module, _, kind = name.rpartition(".")
    number = re.search(r"(?<=\.)\d+(?=\.)", module)
    return re.sub(r"(?<=\.)\d+(?=\.)", "{n}", module), number[0] if number else "", kind


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file, known by the file's header alone."""

    file: Path
    name: str
    shape: tuple[int, ...]


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
    """A file's tensors by its header. Errors: ValueError for a damaged file; FileNotFoundError."""
    with _opened(file) as tensors:
        return [
            StoredTensor(file, name, tuple(tensors.get_slice(name).get_shape()))
            for name in tensors.keys()  # noqa: SIM118 (not a dict)
        ]


def read_tensors(stored: Iterable[StoredTensor]) -> Iterator[Tensor]:
    """The tensors themselves, mapped from the file.

    Copy them before computing with them: a map starts at any byte, and sums may depend on that.
    """
    for tensor in stored:
        with _opened(tensor.file) as tensors:
            yield tensors.get_tensor(tensor.name)


def read_tensor_file(file: Path) -> dict[str, Tensor]:
    """All tensors of a file, in memory of their own. Errors: as `stored_tensors`."""
    with _opened(file) as tensors:
        return {name: tensors.get_tensor(name).clone() for name in tensors.keys()}  # noqa: SIM118


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files with a folder's weights. Errors: ValueError if there are none."""
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    index = folder / SHARD_INDEX
    if index.exists():
        weight_map = read_json_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"{index}: no weight_map with the names of the files")
        names = sorted({str(name) for name in weight_map.values()})
        for name in names:
            if Path(name).name != name:
                raise ValueError(f"{index}: '{name}' is not the name of a file beside it")
            if not (folder / name).exists():
                raise ValueError(f"{folder / name}: missing, though {SHARD_INDEX} names it")
        return [folder / name for name in names]
    hint = "convert it with transformers (from_pretrained, then save_pretrained)"
    if pickled := sorted(folder.glob("*.bin")):
        raise ValueError(
            f"{pickled[0]}: a pickled file can run any program and is never opened: {hint}"
        )
    raise ValueError(
        f"{folder}: no {WEIGHTS}, so not a folder with a model (or not downloaded whole, or the hub"
        f" has only pickled weights of it, which are never opened: {hint})"
    )


@contextmanager
def _opened(file: Path) -> Iterator[safe_open]:
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except SafetensorError as error:
        damaged = f"{file}: truncated or damaged ({error}): copy or download it again"
        raise ValueError(damaged) from error
