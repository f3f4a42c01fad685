"""BERT whole, in Python: from raw text to a fine-tuned model.

The public names below are imported when first used, so that `import bertsmith` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from bertsmith.base import VERSION

if TYPE_CHECKING:
    from bertsmith.corpus.build.build import build_store
    from bertsmith.corpus.build.settings import BuildSettings
    from bertsmith.corpus.store.store import TokenStore
    from bertsmith.inference.features import open_features
    from bertsmith.inference.predictor import load
    from bertsmith.model.config import ModelConfig
    from bertsmith.model.encoder import Encoder
    from bertsmith.model.lstm import ScalarMix
    from bertsmith.text.tokenizer.normalize import PRESETS, Normalization
    from bertsmith.text.tokenizer.rows import Encoded
    from bertsmith.text.tokenizer.tokenizer import Tokenizer
    from bertsmith.text.tokenizer.wordpiece import Vocabulary
    from bertsmith.text.vocabulary.train import train_vocabulary

__version__ = VERSION

__all__ = [
    "PRESETS",
    "BuildSettings",
    "Encoded",
    "Encoder",
    "ModelConfig",
    "Normalization",
    "ScalarMix",
    "TokenStore",
    "Tokenizer",
    "Vocabulary",
    "VocabularySettings",
    "__version__",
    "build_store",
    "load",
    "open_features",
    "train_vocabulary",
]

_HOME = {
    "BuildSettings": "corpus.build.settings",
    "Encoded": "text.tokenizer.rows",
    "Encoder": "model.encoder",
    "ModelConfig": "model.config",
    "Normalization": "text.tokenizer.normalize",
    "PRESETS": "text.tokenizer.normalize",
    "ScalarMix": "model.lstm",
    "TokenStore": "corpus.store.store",
    "Tokenizer": "text.tokenizer.tokenizer",
    "Vocabulary": "text.tokenizer.wordpiece",
    "VocabularySettings": "text.vocabulary.train",
    "build_store": "corpus.build.build",
    "load": "inference.predictor",
    "open_features": "inference.features",
    "train_vocabulary": "text.vocabulary.train",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'bertsmith' has no attribute '{name}'")
    return getattr(importlib.import_module(f"bertsmith.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
