"""config.json of a model folder <-> the configuration of a model of ours.

A model that transformers' BERT cannot compute (`pre_norm`, `gated`, a class read at the last token)
is written so that transformers refuses it: most of its tensors would fit, and the answers would be
wrong without a word.
"""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bertsmith.base.files import read_json_object
from bertsmith.base.settings import from_mapping
from bertsmith.checkpoints.formats.elmo import elmo_settings, options_path
from bertsmith.checkpoints.formats.google import GOOGLE_CONFIG, google_config
from bertsmith.model.config import ElmoConfig, ModelConfig

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
CONFIG_NAMES = {  # of each model_type of transformers
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
}
CLASS_PREFIX = {"bert": "Bert", "distilbert": "DistilBert", "electra": "Electra"}
DEFAULTS: dict[str, dict[str, Any]] = {  # of theirs, where ours are others
    "bert": {},
    "electra": {
        **{"embedding_size": 128, "hidden_size": 256, "num_heads": 4, "intermediate_size": 1024}
    },
    "distilbert": {"num_layers": 6, "type_vocab_size": 0},
}
ONLY = {  # what transformers can compute otherwise, and bertsmith in one way alone
    "position_embedding_type": "absolute",
    "summary_type": "first",  # the vector that ELECTRA's choice of options reads
    "summary_activation": "gelu",
    "summary_use_proj": True,
}
ACTIVATIONS = {  # as config.json calls it: ours; of several names for one we write the first
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python": "gelu",
}
KINDS = {  # architecture: our class of model/heads.py, or lstm.py
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
    "BertForBidirectionalLM": "ElmoLM",  # a name of ours
}  # of the others there is one of each `CLASS_PREFIX`
TASK_KINDS = (
    *("SequenceClassifier", "OptionScorer", "TokenClassifier", "FrozenTagger", "SpanPredictor"),
)
TASK_HEADS = ("classifier.", "qa_outputs.")  # tensors of the layer that a task's model adds
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
    activation = next(name for name, ours in ACTIVATIONS.items() if ours == config.activation)
    entries[names["activation"]] = activation
    return entries | {"model_type": config.family, "tie_word_embeddings": True}


def config_path(folder: Path) -> Path:
    """config.json, Google's bert_config.json, or ELMo's options.json.

    Errors: ValueError for a folder with none.
    """
    for path in (folder / CONFIG_FILE, folder / GOOGLE_CONFIG):
        if path.exists():
            return path
    if options := options_path(folder):
        return options
    if any(folder.glob("*.ckpt*")):
        raise ValueError(
            f"{folder}: no {GOOGLE_CONFIG}: copy it, and vocab.txt, from the folder of the model "
            "that this one was trained from"
        )
    raise ValueError(f"{folder}: no {CONFIG_FILE}, so not a folder with a model")


def read_stored_config(folder: Path) -> dict[str, Any]:
    """config.json as it is, others' as if it were one. Errors: ValueError that names the file."""
    path = config_path(folder)
    if path.name == CONFIG_FILE:
        return read_json_object(path)
    if path.name == GOOGLE_CONFIG:
        return google_config(folder)
    return {"model_type": OWN_TYPE, OWN_SETTINGS: {"family": "elmo", **elmo_settings(path)}}


def read_config(folder: Path) -> ModelConfig:
    """The configuration of a folder's model. Errors: ValueError that names folder and value."""
    stored = read_stored_config(folder)
    path = config_path(folder)
    model_type = stored.get("model_type", "bert")
    if model_type != OWN_TYPE and model_type not in list(CONFIG_NAMES):  # any JSON value
        known = f"bertsmith opens only {', '.join(CONFIG_NAMES)} and {OWN_TYPE}"
        raise ValueError(f"{path}: model_type '{model_type}': {known}")
    is_own = model_type == OWN_TYPE
    values = stored.get(OWN_SETTINGS) if is_own else _values(path, model_type, stored)
    if not isinstance(values, dict):
        raise ValueError(f"{path}: no '{OWN_SETTINGS}' with the settings of the model")
    try:
        kind = ElmoConfig if values.get("family") == "elmo" else ModelConfig
        return from_mapping(kind, values, path.name)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error


def _values(path: Path, model_type: str, stored: dict[str, Any]) -> dict[str, Any]:
    for name, only in (ONLY if model_type == "bert" else ONLY | {"is_decoder": False}).items():
        if (value := stored.get(name, only)) != only:
            raise ValueError(f"{path}: {name} '{value}': bertsmith has only '{only}'")
    names = CONFIG_NAMES[model_type]
    activation = str(stored.get(names["activation"], "gelu"))
    # all heads of ELECTRA have the exact GELU, whatever the layers have
    known = [name for name in ACTIVATIONS if model_type != "electra" or ACTIVATIONS[name] == "gelu"]
    if activation not in known:
        only = ", ".join(known)
        raise ValueError(f"{path}: {names['activation']} '{activation}': bertsmith has only {only}")
    values = DEFAULTS[model_type] | {"family": model_type}
    values |= {ours: stored[name] for ours, name in names.items() if name in stored}
    values["activation"] = ACTIVATIONS[activation]
    if values.get("pad_id", 0) is None:
        del values["pad_id"]
    return values


def model_kind(folder: Path) -> str:
    """The name of the class of a folder's model; "BareModel" when its head is not one of ours."""
    stored = read_stored_config(folder).get("architectures")
    names = stored if isinstance(stored, list) else []
    for name in map(str, names):
        as_bert = re.sub(rf"^({'|'.join((OWN_PREFIX, *CLASS_PREFIX.values()))})", "Bert", name)
        for known in (name, as_bert):
            if known in KINDS:
                return KINDS[known]
    return "BareModel"


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
