"""Models of random weights that can do different things, and texts for them."""

import base64
import json

import numpy as np

from bertsmith.checkpoints.model_folder import BareModel
from bertsmith.model.config import ModelConfig
from bertsmith.model.heads import PreTrainingModel, SequenceClassifier

from ..tiny import piece_tokenizer, random_model, write

TOKENIZER = piece_tokenizer("the cat sat on a mat ann saw rome who left good bad film . , : ##s")
CONFIG = ModelConfig(len(TOKENIZER.vocabulary), 64, 2, 2, 128, 32)
MODELS = {  # folder: head, its outputs, labels, entries of config.json
    "film": (SequenceClassifier, [2], ("bad", "good"), {"kind": "classify"}),
    "topics": (SequenceClassifier, [3], ("a", "b", "c"), {"kind": "multilabel"}),
    "pairs": (SequenceClassifier, [1], None, {"kind": "regress", "text_pair": "second"}),
    "books": (PreTrainingModel, [], None, {}),
    "vectors": (BareModel, [], None, {}),
    "windows": (
        SequenceClassifier,
        [2],
        ("bad", "good"),
        {"kind": "classify", "max_length": 8, "long_texts": "windows", "doc_stride": 4},
    ),
}
TEXTS = ["the cats sat on a mat .", "ann left", "a good film"]
LONG = "the cat sat on a mat . " * 9  # 63 tokens, 65 in a row
PROMPTS = {"prompts": {"query": "who : ", "empty": ""}, "default_prompt_name": "empty"}


def write_models(folder):
    """All of them, each in its own folder; vectors have prompts."""
    for name, (head, outputs, labels, extra) in MODELS.items():
        about = {"label_names": labels, "extra_config": extra, "config": CONFIG}
        random_model(folder / name, TOKENIZER, head, *outputs, **about)
    write(folder / "vectors" / "config_sentence_transformers.json", json.dumps(PROMPTS))


def same(found, expected, within=1e-6):
    np.testing.assert_allclose(np.array(found, np.float32), expected, rtol=0, atol=within)


def floats(text):
    return np.frombuffer(base64.b64decode(text), "<f4")
