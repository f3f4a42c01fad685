"""config.json of a model folder <-> the configuration of a model of ours.

A model that transformers' BERT cannot compute (`pre_norm`, `gated`, a class read at the last token)
is written so that transformers refuses it: most of its tensors would fit, and the answers would be
wrong without a word.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bertsmith.base.files import read_json_object
from bertsmith.base.settings import from_mapping
from bertsmith.checkpoints.formats.elmo import elmo_settings, options_path
from bertsmith.checkpoints.formats.google import GOOGLE_CONFIG, google_config
from bertsmith.checkpoints.formats.openai import SHAPES, openai_config
from bertsmith.checkpoints.stored import folder_tensors
from bertsmith.model.config import ElmoConfig, ModelConfig
from bertsmith.text.tokenizer.files import TOKENIZER_FILES

CONFIG_FILE = "config.json"
BERT_NAMES = {  # ours: as config.json calls it
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "max_positions": "max_position_embeddings",
    "type_vocab_size": "type_vocab_size",
    "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "activation": "hidden_act",
    "layer_norm_eps": "layer_norm_eps",
    "initializer_range": "initializer_range",
    "pad_id": "pad_token_id",
    "causal": "is_decoder",
}
MODEL_TYPES = {"gpt": "openai-gpt"}  # of transformers, where it is not our family's name
CONFIG_NAMES = {  # of each family
    "bert": BERT_NAMES,
    "electra": {
        **{ours: theirs for ours, theirs in BERT_NAMES.items() if ours != "causal"},
        "embedding_size": "embedding_size",
    },
    "distilbert": {
        "vocab_size": "vocab_size",
        "hidden_size": "dim",
        "num_layers": "n_layers",
        "num_heads": "n_heads",
        "intermediate_size": "hidden_dim",
        "max_positions": "max_position_embeddings",
        "dropout": "dropout",
        "attention_dropout": "attention_dropout",
        "activation": "activation",
        "initializer_range": "initializer_range",
        "pad_id": "pad_token_id",
    },
    "gpt": {
        "vocab_size": "vocab_size",
        "hidden_size": "n_embd",
        "num_layers": "n_layer",
        "num_heads": "n_head",
        "max_positions": "n_positions",
        "dropout": "resid_pdrop",
        "attention_dropout": "attn_pdrop",
        "activation": "afn",
        "layer_norm_eps": "layer_norm_epsilon",
        "initializer_range": "initializer_range",
        "pad_id": "pad_token_id",
    },
}
CLASS_PREFIX = {
    "bert": "Bert",
    "distilbert": "DistilBert",
    "electra": "Electra",
    "gpt": "OpenAIGPT",
}
DEFAULTS: dict[str, dict[str, Any]] = {  # of theirs, where ours are others
    "bert": {},
    "electra": {
        **{"embedding_size": 128, "hidden_size": 256, "num_heads": 4, "intermediate_size": 1024}
    },
    "distilbert": {"num_layers": 6, "type_vocab_size": 0},
    "gpt": {"type_vocab_size": 0, "causal": True, "layer_norm_eps": 1e-5},
}
ABSOLUTE = {"position_embedding_type": "absolute"}
RELATIVE = ABSOLUTE | {"is_decoder": False, "summary_use_proj": True}
ONLY = {  # what transformers can compute otherwise, and bertsmith in one way alone
    "bert": ABSOLUTE,
    "distilbert": RELATIVE,
    # the vector that the choice of options reads
    "electra": RELATIVE | {"summary_type": "first", "summary_activation": "gelu"},
    "gpt": RELATIVE | {"summary_type": "cls_index", "summary_activation": None},
}
ACTIVATIONS = {  # as config.json calls it: ours; of several names for one we write the first
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python": "gelu",
}
GPT_ACTIVATIONS = {"gelu": "gelu_tanh"}  # transformers' OpenAIGPT calls the approximation so
KINDS = {  # architecture: our class of model/heads.py
    "BertForPreTraining": "PreTrainingModel",
    "BertForMaskedLM": "PreTrainingModel",  # without pooler and next-sentence head
    "BertLMHeadModel": "PreTrainingModel",  # the same of a causal model
    "BertForSequenceClassification": "SequenceClassifier",
    "BertForMultipleChoice": "OptionScorer",
    "BertForTokenClassification": "TokenClassifier",
    "BertForFrozenTagging": "FrozenTagger",  # a name of ours
    "BertForQuestionAnswering": "SpanPredictor",
    "BertModel": "BareModel",
    "ElectraForPreTraining": "ReplacedTokenDetector",
    "OpenAIGPTForSequenceClassification": "BareModel",  # of texts without start and extract
    "OpenAIGPTDoubleHeadsModel": "OptionScorer",
    "BertForBidirectionalLM": "ElmoLM",  # a name of ours
}  # of the others there is one of each `CLASS_PREFIX`
TOLD_BY = {  # tensor: the kind of a model whose config.json names none, as some on the Hub
    "cls.predictions.bias": "PreTrainingModel",
    "discriminator_predictions.dense.weight": "ReplacedTokenDetector",
}
OTHER_CLASSES = {"OpenAIGPTForMultipleChoice": "OpenAIGPTDoubleHeadsModel"}  # by our rule: theirs
TASK_KINDS = (
    *("SequenceClassifier", "OptionScorer", "TokenClassifier", "FrozenTagger", "SpanPredictor"),
)
TASK_HEADS = ("classifier.", "qa_outputs.")  # tensors of the layer that a task's model adds
# entries of sentence-transformers 4 and 5, and before, on what makes a cross-encoder's scores
SCORED_BY = ("sentence_transformers", "sbert_ce_default_activation_function")
LENGTH_FILE = "sentence_bert_config.json"  # of theirs, also of a cross-encoder
OWN_PREFIX = "Bertsmith"  # in place of Bert, in the name of what transformers' BERT cannot compute
OWN_TYPE = "bertsmith"  # the model_type of what transformers' BERT cannot compute
OWN_SETTINGS = "model"  # where its config.json has them, under our names


def config_entries(config: ModelConfig, own: bool = False) -> dict[str, Any]:
    """The entries of config.json on a model's arithmetic; `own`: transformers must refuse them."""
    if own:
        # AutoModel refuses the model_type; BertModel only warns of it, but refuses the activation
        return {"model_type": OWN_TYPE, "hidden_act": OWN_TYPE, OWN_SETTINGS: asdict(config)}
    names = CONFIG_NAMES[config.family]
    entries = {theirs: getattr(config, ours) for ours, theirs in names.items()}
    if "embedding_size" in names:
        entries["embedding_size"] = config.table_size
    known = activations(config.family).items()
    entries[names["activation"]] = next(name for name, ours in known if ours == config.activation)
    if config.family == "gpt":
        entries["embd_pdrop"] = config.dropout
    model_type = MODEL_TYPES.get(config.family, config.family)
    return entries | {"model_type": model_type, "tie_word_embeddings": True}


def activations(family: str) -> dict[str, str]:
    """The names of activations in a config.json, each with ours."""
    if family == "gpt":
        return GPT_ACTIVATIONS
    # all heads of ELECTRA have the exact GELU, whatever the layers have
    exact = {theirs: ours for theirs, ours in ACTIVATIONS.items() if ours == "gelu"}
    return exact if family == "electra" else ACTIVATIONS


def config_path(folder: Path) -> Path:
    """config.json, Google's bert_config.json, OpenAI's list of shapes, or ELMo's options.json.

    Errors: ValueError for a folder with none.
    """
    for path in (folder / CONFIG_FILE, folder / GOOGLE_CONFIG, folder / SHAPES):
        if path.exists():
            return path
    if options := options_path(folder):
        return options
    if any(folder.glob("*.ckpt*")):
        raise ValueError(
            f"{folder}: no {GOOGLE_CONFIG}: copy it, and vocab.txt, from the folder of the model "
            "that this one was trained from"
        )
    names, hint = {path.name for path in folder.glob("*")}, ""
    if "manifest.json" in names:
        hint = ": a token store is for `bertsmith pretrain --corpus`"
    elif names and names.issubset(TOKENIZER_FILES):
        hint = ": a vocabulary is for `bertsmith corpus --vocab`"
    raise ValueError(f"{folder}: no {CONFIG_FILE}, so not a folder with a model{hint}")


def read_stored_config(folder: Path) -> dict[str, Any]:
    """config.json as it is, others' as if it were one. Errors: ValueError that names the file."""
    path = config_path(folder)
    if path.name == CONFIG_FILE:
        return read_json_object(path)
    if path.name == GOOGLE_CONFIG:
        return google_config(folder)
    if path.name == SHAPES:
        return openai_config(folder)
    return {"model_type": OWN_TYPE, OWN_SETTINGS: {"family": "elmo", **elmo_settings(path)}}


def read_config(folder: Path) -> ModelConfig:
    """The configuration of a folder's model. Errors: ValueError that names folder and value."""
    stored = read_stored_config(folder)
    path = config_path(folder)
    model_type = stored.get("model_type", "bert")
    families = {MODEL_TYPES.get(family, family): family for family in CONFIG_NAMES}
    if model_type not in [OWN_TYPE, *families]:  # any JSON value
        known = f"bertsmith opens only {', '.join(families)} and {OWN_TYPE}"
        raise ValueError(f"{path}: model_type '{model_type}': {known}")
    is_own = model_type == OWN_TYPE
    values = stored.get(OWN_SETTINGS) if is_own else _values(path, families[model_type], stored)
    if not isinstance(values, dict):
        raise ValueError(f"{path}: no '{OWN_SETTINGS}' with the settings of the model")
    try:
        kind = ElmoConfig if values.get("family") == "elmo" else ModelConfig
        return from_mapping(kind, values, path.name)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error


def _values(path: Path, family: str, stored: dict[str, Any]) -> dict[str, Any]:
    for name, only in ONLY[family].items():
        if (value := stored.get(name, only)) != only:
            raise ValueError(f"{path}: {name} '{value}': bertsmith has only '{only}'")
    names, known = CONFIG_NAMES[family], activations(family)
    activation = str(stored.get(names["activation"], "gelu"))
    if activation not in known:
        only = ", ".join(known)
        raise ValueError(f"{path}: {names['activation']} '{activation}': bertsmith has only {only}")
    values = DEFAULTS[family] | {"family": family}
    values |= {ours: stored[name] for ours, name in names.items() if name in stored}
    values["activation"] = known[activation]
    if family == "gpt" and isinstance(size := values.get("hidden_size", 768), int):
        values["intermediate_size"] = 4 * size
    if values.get("pad_id", 0) is None:
        del values["pad_id"]
    return values


def model_kind(folder: Path) -> str:
    """The name of the class of a folder's model; "BareModel" when its head is not one of ours.

    Tensors tell where no architecture does. Errors: as `architectures`.
    """
    names = architectures(folder)
    # not an ELMo's options.json
    if not names and config_path(folder).name in (CONFIG_FILE, GOOGLE_CONFIG):
        with suppress(ValueError):  # an exported model has no weights
            found = folder_tensors(folder)
            return next((kind for name, kind in TOLD_BY.items() if name in found), "BareModel")
    for name in names:
        as_bert = re.sub(rf"^({'|'.join((OWN_PREFIX, *CLASS_PREFIX.values()))})", "Bert", name)
        for known in (name, as_bert):
            if known in KINDS:
                return KINDS[known]
    return "BareModel"


def architectures(folder: Path) -> list[str]:
    """The classes of transformers that config.json names. Errors: ValueError for no names."""
    stored = read_stored_config(folder).get("architectures") or []
    names = [stored] if isinstance(stored, str) else stored
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        fault = f"architectures is {stored!r:.60}"
        raise ValueError(f'{config_path(folder)}: {fault}: it must be a list such as ["BertModel"]')
    return names


def label_names(folder: Path) -> list[str]:
    """The classes of a fine-tuned classifier in the order of its outputs; [] for other models."""
    labels = read_stored_config(folder).get("id2label") or {}
    if not isinstance(labels, dict) or sorted(labels) != sorted(map(str, range(len(labels)))):
        raise ValueError(f"{config_path(folder)}: id2label does not number the labels from 0")
    return [str(labels[str(k)]) for k in range(len(labels))]


def read_extra_config(folder: Path) -> dict[str, Any]:
    """The `extra_config` of `save_model`; {} in a folder of another program."""
    extra = read_stored_config(folder).get("bertsmith")
    return extra if isinstance(extra, dict) else {}
