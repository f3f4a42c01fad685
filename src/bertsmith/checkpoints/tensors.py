"""Tensors on disk: safetensors files, checked before they are read, and the one table of names.

A row of `HUGGING_FACE` names a module, whose tensors are `.weight` and `.bias` on both sides; `{n}`
is the number of a layer. The other direction and the split of the fused matrix follow from it.
`OTHER_NAMES` has the modules that other models than BERT call otherwise; BERT's names are the
canonical ones, in which all else reads.
"""

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
from bertsmith.checkpoints.pickled import PICKLED, read_pickled

HUGGING_FACE = {  # ours: theirs; several of theirs are concatenated along the rows of ours
    "encoder.embeddings.token": ["bert.embeddings.word_embeddings"],
    "encoder.embeddings.position": ["bert.embeddings.position_embeddings"],
    "encoder.embeddings.segment": ["bert.embeddings.token_type_embeddings"],
    "encoder.embeddings.norm": ["bert.embeddings.LayerNorm"],
    "encoder.embeddings.project": ["bert.embeddings.project"],  # of an ELECTRA; a name of ours
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
    "rtd.dense": ["discriminator_predictions.dense"],  # of an ELECTRA
    "rtd.output": ["discriminator_predictions.dense_prediction"],
    **{  # of a BiLSTM over a frozen encoder; names of ours
        name: [name]
        for way in ("forwards", "backwards")
        for name in (f"reader.{way}.{{n}}.inputs", f"reader.{way}.{{n}}.state")
    },
    "classifier": ["classifier"],
    "span": ["qa_outputs"],
}
OURS = {theirs: ours for ours, row in HUGGING_FACE.items() for theirs in row}

_DISTIL, _BERT = "distilbert.transformer.layer.{n}.", "bert.encoder.layer.{n}."
OTHER_NAMES = {  # beginning of an architecture: BERT's: theirs; all else differs by its prefix
    "DistilBert": {
        f"{_BERT}attention.self.query": f"{_DISTIL}attention.q_lin",
        f"{_BERT}attention.self.key": f"{_DISTIL}attention.k_lin",
        f"{_BERT}attention.self.value": f"{_DISTIL}attention.v_lin",
        f"{_BERT}attention.output.dense": f"{_DISTIL}attention.out_lin",
        f"{_BERT}attention.output.LayerNorm": f"{_DISTIL}sa_layer_norm",
        f"{_BERT}intermediate.dense": f"{_DISTIL}ffn.lin1",
        f"{_BERT}output.dense": f"{_DISTIL}ffn.lin2",
        f"{_BERT}output.LayerNorm": f"{_DISTIL}output_layer_norm",
        "bert.pooler.dense": "pre_classifier",
        "cls.predictions.transform.dense": "vocab_transform",
        "cls.predictions.transform.LayerNorm": "vocab_layer_norm",
        "cls.predictions": "vocab_projector",
    },
    "Electra": {
        "bert.embeddings.project": "electra.embeddings_project",
        "cls.predictions.transform.dense": "generator_predictions.dense",
        "cls.predictions.transform.LayerNorm": "generator_predictions.LayerNorm",
        "cls.predictions": "generator_lm_head",
    },
    "ElectraForSequenceClassification": {
        "bert.pooler.dense": "classifier.dense",
        "classifier": "classifier.out_proj",
    },
    "ElectraForMultipleChoice": {"bert.pooler.dense": "sequence_summary.summary"},
}
BERTS = {theirs: name for rows in OTHER_NAMES.values() for name, theirs in rows.items()}
BARE = {  # first words of an encoder's names that is stored without a head, and what lacks there
    **dict.fromkeys(("embeddings", "encoder", "pooler"), "bert."),
    "transformer": "distilbert.",
    "embeddings_project": "electra.",
}

TIED_MATRIX = "cls.predictions.decoder.weight"  # some folders store the token embedding twice
# no weights of their own
REDUNDANT = {TIED_MATRIX, "cls.predictions.decoder.bias", "bert.embeddings.position_ids"}
WEIGHTS = "model.safetensors"
WEIGHT_FILES = WEIGHTS, "pytorch_model.bin"  # in parts: beside an index of this name and suffix:
INDEX_SUFFIX = ".index.json"


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
    DistilBERT's and ELECTRA's names become those of the same modules of BERT.

    >>> canonical("embeddings.LayerNorm.gamma")
    'bert.embeddings.LayerNorm.weight'
    >>> canonical("distilbert.transformer.layer.3.attention.q_lin.bias")
    'bert.encoder.layer.3.attention.self.query.bias'
    """
    name = BARE.get(name.partition(".")[0], "") + name
    name = re.sub(r"^(distilbert|electra)\.", "bert.", _renamed(name, BERTS))
    name = re.sub(r"^cls\.predictions\.weight$", TIED_MATRIX, name)
    name = re.sub(r"\.LayerNorm\.gamma$", ".LayerNorm.weight", name)
    return re.sub(r"\.LayerNorm\.beta$", ".LayerNorm.bias", name)


def spelled(name: str, architecture: str) -> str:
    """A canonical name as the class `architecture` of transformers has it.

    >>> spelled("bert.pooler.dense.bias", "ElectraForSequenceClassification")
    'classifier.dense.bias'
    """
    for beginning, rows in OTHER_NAMES.items():
        if architecture.startswith(beginning):
            name = _renamed(name, rows)
    family = re.match("Distil|Electra", architecture)
    prefix = {"Distil": "distilbert.", "Electra": "electra."}[family[0]] if family else "bert."
    return re.sub(r"^bert\.", prefix, name)


def _renamed(name: str, rows: Mapping[str, str]) -> str:
    module, number, kind = _parts(name)
    return f"{rows[module].replace('{n}', number)}.{kind}" if module in rows else name


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
    if file.suffix == PICKLED:
        tensors = read_pickled(file)
        return [StoredTensor(file, name, tuple(tensors[name].shape)) for name in tensors]
    with _opened(file) as tensors:
        return [
            StoredTensor(file, name, tuple(tensors.get_slice(name).get_shape()))
            for name in tensors.keys()  # noqa: SIM118 (not a dict)
        ]


def read_tensors(stored: Iterable[StoredTensor]) -> Iterator[Tensor]:
    """The tensors themselves, mapped from the file where it can be.

    Copy them before computing with them: a map starts at any byte, and sums may depend on that.
    """
    for file, wanted in itertools.groupby(stored, key=lambda tensor: tensor.file):
        if file.suffix == PICKLED:
            tensors = read_pickled(file)
            yield from (tensors[tensor.name] for tensor in wanted)
        else:
            with _opened(file) as opened:
                yield from (opened.get_tensor(tensor.name) for tensor in wanted)


def read_tensor_file(file: Path) -> dict[str, Tensor]:
    """All tensors of a file, in memory of their own. Errors: as `stored_tensors`."""
    with _opened(file) as tensors:
        return {name: tensors.get_tensor(name).clone() for name in tensors.keys()}  # noqa: SIM118


def weight_files(folder: Path) -> list[Path]:
    """The files with a folder's weights, safetensors before pickled ones. Errors: ValueError."""
    for name in WEIGHT_FILES:
        if (folder / name).exists():
            return [folder / name]
        if (index := folder / f"{name}{INDEX_SUFFIX}").exists():
            return _shards(index)
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
