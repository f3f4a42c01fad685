"""A model folder in Hugging Face's layout <-> a model of ours.

config.json, model.safetensors and the tokenizer's files, as `from_pretrained` of transformers opens
and `save_pretrained` writes them, of BERT, DistilBERT and ELECTRA.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from bertsmith.base import VERSION
from bertsmith.base.files import read_json, write_json
from bertsmith.checkpoints.config_json import (
    CLASS_PREFIX,
    CONFIG_FILE,
    config_entries,
    config_path,
    read_config,
    read_stored_config,
)
from bertsmith.checkpoints.names import REDUNDANT, TIED_MATRIX, canonical, spelled
from bertsmith.checkpoints.tensorflow.google import (
    GOOGLE_CONFIG,
    PREFIX,
    google_config_entries,
)
from bertsmith.checkpoints.tensors import (
    WEIGHTS,
    StoredTensor,
    from_hugging_face,
    read_tensors,
    stored_tensors,
    to_hugging_face,
    weight_files,
    write_google_checkpoint,
    write_tensors,
)
from bertsmith.model.config import ModelConfig
from bertsmith.model.heads import (
    BareModel,
    OptionScorer,
    PreTrainingModel,
    ReplacedTokenDetector,
    SequenceClassifier,
    SpanPredictor,
    TaskModel,
    TokenClassifier,
)
from bertsmith.model.initialization import WithoutInitialization, initialize
from bertsmith.model.lstm import FrozenTagger
from bertsmith.text.tokenizer.files import added_tokens
from bertsmith.text.tokenizer.tokenizer import Tokenizer

ARCHITECTURES: dict[str, type[nn.Module]] = {
    "BertForPreTraining": PreTrainingModel,
    "BertForMaskedLM": PreTrainingModel,  # without pooler and next-sentence head
    "BertLMHeadModel": PreTrainingModel,  # the same of a causal model
    "BertForSequenceClassification": SequenceClassifier,
    "BertForMultipleChoice": OptionScorer,
    "BertForTokenClassification": TokenClassifier,
    "BertForFrozenTagging": FrozenTagger,  # a name of ours
    "BertForQuestionAnswering": SpanPredictor,
    "BertModel": BareModel,
    "ElectraForPreTraining": ReplacedTokenDetector,
}  # of the others there is one of each `CLASS_PREFIX`
LENGTH_FILE = "sentence_bert_config.json"  # of sentence-transformers
TASK_HEADS = ("classifier.", "qa_outputs.")  # tensors of the layer that a `TaskModel` adds
OWN_PREFIX = "Bertsmith"  # in place of Bert, in the name of what transformers' BERT cannot compute
ENCODER = ("bert.embeddings.", "bert.encoder.")

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class LoadedModel(Generic[Model]):
    """A model, with the tensors that its folder lacks or has too many."""

    model: Model
    missing: list[str]  # our names; these were initialized at random
    unused: list[str]  # the folder's names


def model_class(folder: Path) -> type[nn.Module]:
    """The class of the model in a folder; `BareModel` when its head is not one of ours."""
    stored = read_stored_config(folder).get("architectures")
    names = stored if isinstance(stored, list) else []
    for name in map(str, names):
        as_bert = re.sub(rf"^({'|'.join((OWN_PREFIX, *CLASS_PREFIX.values()))})", "Bert", name)
        for known in (name, as_bert):
            if known in ARCHITECTURES:
                return ARCHITECTURES[known]
    return BareModel


def folder_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Canonical name -> tensor of a folder. Errors: as `weight_files`."""
    files = weight_files(folder)
    return {canonical(tensor.name): tensor for file in files for tensor in stored_tensors(file)}


def load_model(
    folder: Path,
    kind: type[Model],
    *,
    num_outputs: int | None = None,
    keep_head: bool = True,
    generator: torch.Generator | None = None,
    **changes: Any,
) -> LoadedModel[Model]:
    """Open the model of a folder as `kind`, float32 on the CPU, in training mode.

    A head that the folder lacks is initialized with `generator` (None: a new one with seed 0) and
    listed as missing. So is a `TaskModel`'s of another kind, or with another number of outputs than
    `num_outputs` (None: as many as the folder's), or where `keep_head` is False. `changes` replace
    values of the configuration, such as dropout=0.0.

    Errors: ValueError that names the folder, file or tensor at fault, before memory is allocated.
    """
    config = replace(read_config(folder), **changes)
    stored = usable = folder_tensors(folder)
    _check_layers(folder, config, stored)
    arguments: list[Any] = [config]
    if issubclass(kind, TaskModel):
        # heads of different tasks have the same name, so the architecture must be the right one
        found, heads = model_class(folder), [n for n in stored if n.startswith(TASK_HEADS)]
        outputs = stored[heads[0]].shape[0] if heads and found is kind else None
        if num_outputs is None and outputs is None:
            asked = "fine-tuned classifier" if kind is SequenceClassifier else kind.__name__
            but = f" but a {found.__name__}" if issubclass(found, TaskModel) else ""
            raise ValueError(f"{folder}: not a {asked}{but}: fine-tune a model first")
        if outputs is None or num_outputs not in (None, outputs) or not keep_head:
            usable = {name: stored[name] for name in stored if name not in heads}
        arguments.append(num_outputs or outputs)
    with torch.device("meta"), WithoutInitialization():  # shapes alone, no memory
        wanted = to_hugging_face(kind(*arguments).state_dict())
    _check_tensors(folder, config, wanted, usable)
    if kind is PreTrainingModel:
        _check_tied(stored)

    with WithoutInitialization():
        model = kind(*arguments)
    used = [name for name in wanted if name in usable]
    tensors = dict(zip(used, read_tensors(usable[name] for name in used), strict=True))
    _check_finite(usable, tensors)
    state = from_hugging_face(tensors)
    missing = [name for name in model.state_dict() if name not in state]
    generator = generator or torch.Generator().manual_seed(0)
    for head in dict.fromkeys(name.split(".")[0] for name in missing):
        initialize(getattr(model, head), config.initializer_range, generator)
    model.load_state_dict(state, strict=False)  # copies: see read_tensors
    known = {*used, *REDUNDANT}
    return LoadedModel(model, missing, [stored[name].name for name in stored if name not in known])


def _check_layers(folder: Path, config: ModelConfig, stored: dict[str, StoredTensor]) -> None:
    # before a model is built even as shapes, since a damaged number of layers could be any
    matches = (re.match(r"bert\.encoder\.layer\.(\d+)\.", name) for name in stored)
    layers = {int(match[1]) for match in matches if match}
    if (len(layers), max(layers, default=-1)) != (config.num_layers, config.num_layers - 1):
        raise ValueError(
            f"{folder}: {config_path(folder).name} says {config.num_layers} layers, but the "
            f"weights hold {len(layers)}"
        )


def _check_tensors(
    folder: Path,
    config: ModelConfig,
    wanted: dict[str, Tensor],
    usable: dict[str, StoredTensor],
) -> None:
    for name, tensor in wanted.items():
        if name not in usable:
            if name.startswith(ENCODER):
                theirs = spelled(name, CLASS_PREFIX[config.family])
                raise ValueError(f"{folder}: the weights lack '{theirs}' of the encoder")
        elif (found := usable[name]).shape != tuple(tensor.shape):
            raise ValueError(
                f"{found.file}: '{found.name}' has shape {list(found.shape)}, but by "
                f"{config_path(folder).name} it should have {list(tensor.shape)}"
            )


def _check_finite(stored: dict[str, StoredTensor], tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        # NaN is both the smallest and the largest number; this reads once and writes nothing
        if not torch.stack(tensor.aminmax()).isfinite().all():
            raise ValueError(
                f"{stored[name].file}: '{stored[name].name}' holds NaN or infinity: take an earlier"
                " checkpoint, or copy or download the model again"
            )


def _check_tied(stored: dict[str, StoredTensor]) -> None:
    if TIED_MATRIX in stored:
        pair = [stored["bert.embeddings.word_embeddings.weight"], stored[TIED_MATRIX]]
        token, output = read_tensors(pair)
        if not torch.equal(token, output):
            raise ValueError(
                f"{pair[1].file}: '{pair[1].name}' differs from the token embedding, to "
                "which bertsmith ties it"
            )


def save_model(
    model: nn.Module,
    tokenizer: Tokenizer,
    folder: Path,
    *,
    exclude: Collection[str] = (),
    **about: Any,
) -> None:
    """Write a folder that transformers and `load_model` open, each file atomically, weights last.

    Tensors in `exclude` (our names) are not written; the rest is for `config_file`.
    """
    config: ModelConfig = model.config  # type: ignore[assignment]
    if len(tokenizer.vocabulary) > config.vocab_size:
        raise ValueError(
            f"a tokenizer of {len(tokenizer.vocabulary):,} pieces for a model of "
            f"{config.vocab_size:,}: use the tokenizer that the model was trained with"
        )
    exclude = {*exclude, *_placeless(model)}
    weights = {name: value for name, value in model.state_dict().items() if name not in exclude}
    write_model(folder, tokenizer, config_file(model, exclude=exclude, **about), weights)


def _placeless(model: nn.Module) -> list[str]:
    """Our names of tensors for which transformers has no place beside this head."""
    config: ModelConfig = model.config  # type: ignore[assignment]
    if config.family == "bert" or isinstance(model, TaskModel):
        return []
    return [name for name in model.state_dict() if name.startswith(("pooler.", "nsp."))]


def write_model(
    folder: Path, tokenizer: Tokenizer, entries: dict[str, Any], weights: Mapping[str, Tensor]
) -> None:
    """Write a model folder from the entries of its config.json and its tensors by our names."""
    architecture = entries["architectures"][0]
    stored = to_hugging_face(weights)
    folder.mkdir(parents=True, exist_ok=True)
    positions = len(weights["encoder.embeddings.position.weight"])
    has_types = "encoder.embeddings.segment.weight" in weights
    tokenizer.save(folder, positions, has_types)
    write_json(folder / CONFIG_FILE, entries)
    tensors = {spelled(name, architecture): tensor for name, tensor in stored.items()}
    write_tensors(folder / WEIGHTS, tensors)


def write_google_model(
    folder: Path, tokenizer: Tokenizer, entries: dict[str, Any], weights: Mapping[str, Tensor]
) -> None:
    """Write a folder that google-research/bert opens, from what `write_model` gets.

    Google's code has no name for the tokenizer's settings: its files stand beside `vocab.txt`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(folder, len(weights["encoder.embeddings.position.weight"]))
    write_json(folder / GOOGLE_CONFIG, google_config_entries(entries))
    write_google_checkpoint(folder / PREFIX, weights)


def config_file(
    model: nn.Module,
    *,
    label_names: Sequence[str] | None = None,
    extra_config: dict[str, Any] | None = None,
    problem_type: str | None = None,
    exclude: Collection[str] = (),
) -> dict[str, Any]:
    """The entries of the config.json of a model, which is one of `ARCHITECTURES`.

    label_names   a fine-tuned model's classes in the order of its outputs
    extra_config  goes under "bertsmith": transformers has no place for it
    problem_type  tells transformers what the classes are
    exclude       names of tensors that are not stored
    """
    config: ModelConfig = model.config  # type: ignore[assignment]
    kinds = {kind: name for name, kind in reversed(ARCHITECTURES.items())}
    # a sharded model's class is made of the model's own (training/ranks.py)
    architecture = next(kinds[kind] for kind in type(model).__mro__ if kind in kinds)
    if architecture == "BertForPreTraining" and (
        "nsp.weight" in exclude or config.family != "bert"
    ):
        architecture = "BertLMHeadModel" if config.causal else "BertForMaskedLM"
    own = bool(beyond_transformers(config, type(model)))
    prefix = OWN_PREFIX if own else CLASS_PREFIX[config.family]
    architecture = re.sub("^Bert", prefix, architecture)
    stored = config_entries(config, own) | {"architectures": [architecture]}
    if isinstance(model, TaskModel):
        labels = label_names or [f"LABEL_{k}" for k in range(model.num_outputs)]
        assert len(labels) == model.num_outputs, "one name for each output"
        stored["id2label"] = {str(k): label for k, label in enumerate(labels)}
        stored["label2id"] = {label: k for k, label in enumerate(labels)}
        stored["problem_type"] = problem_type
    stored["bertsmith"] = {"version": VERSION, **(extra_config or {})}
    return stored


def beyond_transformers(config: ModelConfig, kind: type[nn.Module]) -> list[str]:
    """The properties of a model of this kind that transformers' BERT lacks.

    >>> beyond_transformers(ModelConfig(100, causal=True, gated=True), SequenceClassifier)
    ['gated', 'a class read at the last token']
    """
    reads_last = config.causal and issubclass(kind, SequenceClassifier)
    options = [name for name in ("pre_norm", "gated") if getattr(config, name)]
    return options + ["a class read at the last token"] * reads_last


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model's folder. Errors: ValueError for more pieces than the model has."""
    tokenizer, rows = Tokenizer.from_pretrained(folder), read_config(folder).vocab_size
    if len(tokenizer.vocabulary) > rows:
        raise ValueError(
            f"{folder}: its vocabulary has {len(tokenizer.vocabulary):,} pieces, but its model "
            f"{rows:,}: take the model's own tokenizer: pieces were perhaps added to it alone"
        )
    return tokenizer


def whole_tokenizer(folder: Path) -> Tokenizer:
    """Load a tokenizer, but refuse (ValueError) added tokens, for which ours has no place."""
    tokenizer = load_tokenizer(folder)
    if lost := added_tokens(folder, tokenizer.vocabulary, tokenizer.normalization):
        raise ValueError(
            f"{folder}: tokens were added to its tokenizer ({', '.join(lost[:5])}), which would be"
            " lost: keep the folder as it is, or take them out of its tokenizer's files"
        )
    return tokenizer


def copy_similarity_training(source: Path, target: Path) -> None:
    """Copy the files of sentence-transformers that say how a folder's vectors are made."""
    for pattern in ("modules.json", "*sentence*.json", "[0-9]_*/**/*"):
        for file in filter(Path.is_file, source.glob(pattern)):
            place = target / file.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, place)
    # a tokenizer of ours knows the model's positions, theirs may say that vectors are of fewer
    settings, tokenizer = target / LENGTH_FILE, source / "tokenizer_config.json"
    if settings.exists() and tokenizer.exists():
        length = read_json(tokenizer).get("model_max_length")
        write_json(settings, {"max_seq_length": length} | read_json(settings))
