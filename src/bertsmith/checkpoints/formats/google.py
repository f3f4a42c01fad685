"""Folders of google-research/bert: `bert_config.json`, `vocab.txt` and a TensorFlow checkpoint.

Its names of tensors are in `checkpoints/names.py`, beside the others.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from bertsmith.base.files import read_json_object
from bertsmith.checkpoints.formats.tensorflow_bundle import INDEX, Bundle
from bertsmith.checkpoints.formats.tensorflow_table import MAGIC

GOOGLE_CONFIG = "bert_config.json"
PREFIX = "bert_model.ckpt"  # of the released models' files, and of those that we write
LATEST = "checkpoint"  # the text file in which TensorFlow keeps the newest prefix
LATEST_PATH = re.compile(r'^model_checkpoint_path:\s*"([^"]*)"', re.MULTILINE)
MOST_TEXT, MOST_CLASSES = 1 << 16, 10_000  # read of `checkpoint`; given names
OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
GELU = "gelu"  # an entry of ours beside hidden_act, for what Google's code has no name for
HEADS = [  # tensor that tells: class of the model
    ("output_weights", "BertForSequenceClassification"),
    ("cls/squad/output_weights", "BertForQuestionAnswering"),
    ("cls/seq_relationship/output_weights", "BertForPreTraining"),
    ("cls/predictions/output_bias", "BertForMaskedLM"),
]


def checkpoint_prefix(folder: Path) -> Path | None:
    """The checkpoint of a folder without its endings: what `checkpoint` names, or the only one.

    None where there is none. Errors: ValueError for a choice of several, and for V1 files.
    """
    indexes = sorted(folder.glob(f"*{INDEX}"))
    if (latest := folder / LATEST).is_file():
        with latest.open(encoding="utf-8", errors="replace") as text:
            named = LATEST_PATH.search(text.read(MOST_TEXT))
        if named is None:
            raise ValueError(f"{latest}: no model_checkpoint_path in it, which names a checkpoint")
        name = re.split(r"[/\\]", named[1])[-1]  # the folder it names may be another machine's
        if folder / f"{name}{INDEX}" in indexes:
            return folder / name
        if name:
            _check_version(folder / name)
        raise ValueError(f"{latest}: names '{name}', but {name}{INDEX} is not there: copy it too")
    if len(indexes) > 1:
        names = ", ".join(index.name.removesuffix(INDEX) for index in indexes[:5])
        raise ValueError(
            f"{folder}: several checkpoints ({names}): keep one of them there, or write the line "
            f"'model_checkpoint_path: \"NAME\"' into a file {LATEST}"
        )
    for file in sorted(folder.glob("*.ckpt*")):
        _check_version(file)
    return folder / indexes[0].name.removesuffix(INDEX) if indexes else None


def _check_version(file: Path) -> None:
    """Refuse a checkpoint of the first format, which is one sorted table."""
    if not file.is_file() or file.name.endswith(INDEX):
        return
    with file.open("rb") as opened:
        opened.seek(max(0, file.stat().st_size - len(MAGIC)))
        if opened.read() == MAGIC:
            raise ValueError(
                f"{file}: a V1 checkpoint of TensorFlow, which bertsmith does not read: write it "
                "anew with `tf.compat.v1.train.Saver`, whose default is V2"
            )


def open_checkpoint(prefix: Path) -> Bundle:
    """A checkpoint of named variables. Errors: as `Bundle`, and ValueError for TF2's objects."""
    bundle = Bundle(prefix)
    if OBJECT_GRAPH in bundle.names:
        raise ValueError(
            f"{bundle.index}: a TF2 checkpoint of objects (`tf.train.Checkpoint`), whose tensors "
            "have no names of variables: bertsmith reads those of google-research/bert"
        )
    return bundle


def google_config(folder: Path) -> dict[str, Any]:
    """`bert_config.json` as the entries of a config.json; the class is told by the tensors.

    "gelu", the default too, is the tanh approximation there (modeling.py, `gelu`, `BertConfig`).
    Without a checkpoint the folder is one of pytorch-pretrained-bert (2018), whose gelu is exact.
    """
    stored = read_json_object(folder / GOOGLE_CONFIG)
    prefix = checkpoint_prefix(folder)
    if prefix is None:
        return stored
    bundle = open_checkpoint(prefix)
    names = bundle.names
    told = (architecture for name, architecture in HEADS if name in names)
    entries: dict[str, Any] = {"architectures": [next(told, "BertModel")]}
    if "output_weights" in names:
        outputs = min((*bundle.shape("output_weights"), MOST_CLASSES)[0], MOST_CLASSES)
        entries["id2label"] = {str(k): f"LABEL_{k}" for k in range(outputs)}
    entries |= {name: value for name, value in stored.items() if name != GELU}
    if stored.get("hidden_act", "gelu") == "gelu" and stored.get(GELU) != "erf":
        entries["hidden_act"] = "gelu_new"
    return entries


def google_config_entries(entries: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `google_config`: Google's code ignores entries that it does not know."""
    is_exact = entries["hidden_act"] == "gelu"
    return entries | {"hidden_act": "gelu"} | ({GELU: "erf"} if is_exact else {})
