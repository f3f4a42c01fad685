"""Tensors on disk, checked before they are read, and the one table of their names.

A row of `HUGGING_FACE` names a module, whose tensors are `.weight` and `.bias` on both sides; `{n}`
is the number of a layer. The other direction, the split of the fused matrix and the names in
Google's checkpoints (`google_name`) follow from it.
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
from bertsmith.checkpoints.tensorflow.bundle import INDEX, IS_SHARD, Bundle, write_bundle
from bertsmith.checkpoints.tensorflow.google import checkpoint_prefix, open_checkpoint

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

GOOGLE_HEADS = {  # theirs: Google's; the tensors are output_weights and output_bias
    "cls.predictions": "cls/predictions/",
    "cls.seq_relationship": "cls/seq_relationship/",
    "classifier": "",
    "qa_outputs": "cls/squad/",
}
KERNEL = "/kernel"  # a matrix [inputs, outputs] of Google's, the transpose of ours
SLOTS = {"/adam_m": "exp_avg", "/adam_v": "exp_avg_sq"}  # after a weight's name: of the optimizer
GLOBAL_STEP = "global_step"

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

    A bare encoder is stored without "bert."; files converted from TensorFlow have gamma and beta,
    and Google's checkpoints the names of `google_name`.

    >>> canonical("embeddings.LayerNorm.gamma"), canonical("bert/encoder/layer_3/output/dense/bias")
    ('bert.embeddings.LayerNorm.weight', 'bert.encoder.layer.3.output.dense.bias')
    """
    if (template := GOOGLE_LAYER.sub(r"layer_{n}/", name)) in FROM_GOOGLE:
        number = GOOGLE_LAYER.search(name)
        return FROM_GOOGLE[template].replace("{n}", number[1] if number else "")
    if name.startswith(("embeddings.", "encoder.", "pooler.")):
        name = f"bert.{name}"
    name = re.sub(r"\.LayerNorm\.gamma$", ".LayerNorm.weight", name)
    return re.sub(r"\.LayerNorm\.beta$", ".LayerNorm.bias", name)


def google_name(name: str) -> str:
    """A canonical name as google-research/bert spells it.

    >>> google_name("bert.encoder.layer.3.output.dense.weight")
    'bert/encoder/layer_3/output/dense/kernel'
    >>> google_name("bert.embeddings.word_embeddings.weight"), google_name("classifier.bias")
    ('bert/embeddings/word_embeddings', 'output_bias')
    """
    module, _, kind = name.rpartition(".")
    if module in GOOGLE_HEADS:
        return GOOGLE_HEADS[module] + {"weight": "output_weights", "bias": "output_bias"}[kind]
    path = module.replace(".layer.", ".layer_").replace(".", "/")
    if module.endswith("_embeddings"):
        return path
    own = {"weight": "gamma", "bias": "beta"} if module.endswith("LayerNorm") else {}
    return f"{path}/{own.get(kind) or {'weight': 'kernel', 'bias': 'bias'}[kind]}"


GOOGLE_LAYER = re.compile(r"layer_(\d{1,6})/")
FROM_GOOGLE = {  # with {n} for the number of a layer
    google_name(name): name
    for module in OURS
    if module.split(".")[0] in ("bert", "cls", "classifier", "qa_outputs")
    for name in (f"{module}.bias", f"{module}.weight")  # tables have no bias: weight is the last
}


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
    """The tensors themselves, mapped from the file, or read from a checkpoint of TensorFlow's.

    Copy them before computing with them: a map starts at any byte, and sums may depend on that.
    """
    for tensor in stored:
        if tensor.bundle:
            yield _from_bundle(tensor.bundle, tensor.name, tensor.name)
            continue
        with _opened(tensor.file) as tensors:
            yield tensors.get_tensor(tensor.name)


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
    """The files with a folder's weights, safetensors or a checkpoint of Google's.

    Errors: ValueError if there are none.
    """
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
    if prefix := checkpoint_prefix(folder):
        bundle = open_checkpoint(prefix)
        return [bundle.index, *bundle.shards()]
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
