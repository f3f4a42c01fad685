"""A model folder in Hugging Face's layout <-> a model of ours.

config.json, model.safetensors and the tokenizer's files, as `from_pretrained` of transformers opens
and `save_pretrained` writes them, of BERT, DistilBERT, ELECTRA and GPT.
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
from bertsmith.base.files import read_json, read_optional_json, write_json
from bertsmith.checkpoints.config_json import (
    CLASS_PREFIX,
    CONFIG_FILE,
    KINDS,
    LENGTH_FILE,
    OTHER_CLASSES,
    OWN_PREFIX,
    SCORED_BY,
    TASK_HEADS,
    config_entries,
    model_kind,
    read_config,
    read_stored_config,
)
from bertsmith.checkpoints.formats.google import (
    GOOGLE_CONFIG,
    PREFIX,
    google_config_entries,
)
from bertsmith.checkpoints.names import REDUNDANT
from bertsmith.checkpoints.reading import (
    check_layers,
    check_shapes,
    check_tied,
    head_size,
    load_tokenizer,
    not_made_for,
)
from bertsmith.checkpoints.stored import (
    WEIGHTS,
    StoredTensor,
    folder_tensors,
    is_weight,
    no_weights,
    not_finite,
)
from bertsmith.checkpoints.tensors import (
    as_spelled,
    from_hugging_face,
    read_tensors,
    to_hugging_face,
    write_google_checkpoint,
    write_tensors,
)
from bertsmith.model.config import ModelConfig
from bertsmith.model.elmo import ElmoLM
from bertsmith.model.elmo_heads import (
    ElmoClassifier,
    ElmoOptionScorer,
    ElmoSpanPredictor,
    ElmoTagger,
)
from bertsmith.model.heads import (
    BareModel,
    FrozenTagger,
    OptionScorer,
    PreTrainingModel,
    ReplacedTokenDetector,
    SequenceClassifier,
    SpanPredictor,
    TaskModel,
    TokenClassifier,
)
from bertsmith.model.initialization import WithoutInitialization, initialize
from bertsmith.text.tokenizer.files import MODEL_MAX_LENGTH, TOKENIZER_CONFIG, added_tokens
from bertsmith.text.tokenizer.tokenizer import Tokenizer

TASK_CLASSES: dict[str, type[TaskModel]] = {
    kind.__name__: kind
    for kind in (SequenceClassifier, OptionScorer, TokenClassifier, FrozenTagger, SpanPredictor)
}
CLASSES: dict[str, type[nn.Module]] = {
    **TASK_CLASSES,
    **{
        kind.__name__: kind for kind in (PreTrainingModel, BareModel, ReplacedTokenDetector, ElmoLM)
    },
}
POSITIONS = "embeddings.position.weight"  # of one direction or the other
READER = "reader."  # tensors of a BiLSTM between encoder and head
Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class LoadedModel(Generic[Model]):
    """A model, with the tensors that its folder lacks or has too many."""

    model: Model
    missing: list[str]  # our names; these were initialized at random
    unused: list[str]  # the folder's names


def model_class(folder: Path) -> type[nn.Module]:
    """The class of the model in a folder; see `model_kind`."""
    return CLASSES[model_kind(folder)]


def class_names(kind: type[nn.Module]) -> list[str]:
    """The names in `CLASSES` of a class and of those that it is made of, its own first.

    A family's model has another class under the same name, a sharded one's is made of the model's
    own (training/ranks.py).
    """
    return [base.__name__ for base in kind.__mro__ if base in CLASSES.values()]


def family_class(kind: type[Model], config: ModelConfig, folder: Path) -> type[Model]:
    """The class that is `kind` in the family of a folder's model.

    Errors: ValueError where the family has none.
    """
    if config.family != "elmo":
        return kind
    for own in (ElmoClassifier, ElmoOptionScorer, ElmoTagger, ElmoSpanPredictor):
        if kind is own or CLASSES[class_names(own)[0]] is kind:
            return own  # type: ignore[return-value]
    raise ValueError(
        f"{folder}: an ELMo, which only feeds the heads of tasks: `bertsmith finetune` trains "
        "them, `predict` and `evaluate` read them; all else is for BERT"
    )


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
    kind = family_class(kind, config, folder)
    stored = usable = folder_tensors(folder)
    check_layers(folder, config, stored)
    arguments: list[Any] = [config]
    if issubclass(kind, TaskModel):
        name = class_names(kind)[0]
        outputs = head_size(folder, stored, name)
        if num_outputs is None and outputs is None:
            raise not_made_for(folder, name)
        if outputs is None or num_outputs not in (None, outputs) or not keep_head:
            lost = TASK_HEADS if outputs and keep_head else (*TASK_HEADS, READER)
            usable = {n: stored[n] for n in stored if not n.startswith(lost)}
        arguments.append(num_outputs or outputs)
    with torch.device("meta"), WithoutInitialization():  # shapes alone, no memory
        wanted = to_hugging_face(kind(*arguments).state_dict())
    shapes = {name: tuple(tensor.shape) for name, tensor in wanted.items()}
    check_shapes(folder, config, shapes, usable)
    if kind is PreTrainingModel:
        check_tied(stored)

    with WithoutInitialization():
        model = kind(*arguments)
    used = [name for name in wanted if name in usable]
    tensors = dict(zip(used, read_tensors(usable[name] for name in used), strict=True))
    _check_numbers(usable, tensors)
    state = from_hugging_face(tensors)
    missing = [name for name in model.state_dict() if name not in state]
    generator = generator or torch.Generator().manual_seed(0)
    for head in dict.fromkeys(name.split(".")[0] for name in missing):
        initialize(getattr(model, head), config.initializer_range, generator)
    model.load_state_dict(state, strict=False)  # copies: see read_tensors
    known = {*used, *REDUNDANT}
    return LoadedModel(model, missing, [stored[name].name for name in stored if name not in known])


def _check_numbers(stored: dict[str, StoredTensor], tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if not is_weight(tensor):
            raise no_weights(stored[name], tensor.dtype)
        # NaN is both the smallest and the largest number; this reads once and writes nothing
        if not torch.stack(tensor.aminmax()).isfinite().all():
            raise not_finite(stored[name])


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
    tables = [len(weights[name]) for name in weights if name.endswith(POSITIONS)]
    positions = tables[0] if tables else MODEL_MAX_LENGTH  # an ELMo has none
    has_types = any(name.endswith("embeddings.segment.weight") for name in weights)
    tokenizer.save(folder, positions, has_types)
    write_json(folder / CONFIG_FILE, entries)
    write_tensors(folder / WEIGHTS, as_spelled(stored, architecture))


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
    """The entries of the config.json of a model, whose class is one of `CLASSES`.

    label_names   a fine-tuned model's classes in the order of its outputs
    extra_config  goes under "bertsmith": transformers has no place for it
    problem_type  tells transformers what the classes are
    exclude       names of tensors that are not stored
    """
    config: ModelConfig = model.config  # type: ignore[assignment]
    architectures = {kind: name for name, kind in reversed(KINDS.items())}
    architecture = architectures[class_names(type(model))[0]]
    if architecture == "BertForPreTraining" and (
        "nsp.weight" in exclude or config.family != "bert"
    ):
        architecture = "BertLMHeadModel" if config.causal else "BertForMaskedLM"
    own = bool(beyond_transformers(config, type(model)))
    prefix = OWN_PREFIX if own else CLASS_PREFIX[config.family]
    architecture = re.sub("^Bert", prefix, architecture)
    architecture = OTHER_CLASSES.get(architecture, architecture)
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
    has_head = issubclass(kind, TaskModel)
    reader = ["a BiLSTM below its head"] * (config.bilstm and has_head)
    if config.family == "gpt":
        properties = {
            "the exact GELU": config.activation == "gelu",
            "another intermediate size": config.intermediate_size != 4 * config.hidden_size,
            # its classifier has no bias, and its other head scores options
            "its head": has_head and not issubclass(kind, OptionScorer),
        }
        return [name for name, is_so in properties.items() if is_so] + reader
    reads_last = config.causal and issubclass(kind, SequenceClassifier)
    if config.family == "elmo":
        return ["the layers of ELMo"]
    options = [name for name in ("pre_norm", "gated") if getattr(config, name)]
    options += ["two directions"] * (config.directions == 2)
    return options + reader + ["a class read at the last token"] * reads_last


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
    """Copy the files of sentence-transformers that say how a folder's vectors or scores are made.

    The length of its rows is put there, where its tokenizer alone has it.
    """
    for pattern in ("modules.json", "*sentence*.json", "[0-9]_*/**/*"):
        for file in filter(Path.is_file, source.glob(pattern)):
            place = target / file.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, place)
    # a tokenizer of ours knows the model's positions, theirs may say that rows are of fewer
    settings, tokenizer = target / LENGTH_FILE, source / TOKENIZER_CONFIG
    is_theirs = settings.exists() or any(name in read_stored_config(source) for name in SCORED_BY)
    if is_theirs and tokenizer.exists():
        most = read_config(source).max_positions
        length = min(read_json(tokenizer).get("model_max_length") or most, most)
        write_json(settings, {"max_seq_length": length} | read_optional_json(settings))
