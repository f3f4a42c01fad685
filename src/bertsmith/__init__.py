"""BERT whole, in Python: from raw text to a fine-tuned model.

The public names below are imported when first used, so that `import bertsmith` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from bertsmith.base import VERSION

if TYPE_CHECKING:
    from bertsmith.corpus.build import build_store
    from bertsmith.corpus.store import TokenStore
    from bertsmith.inference.feature_store import open_features
    from bertsmith.inference.predictor import load
    from bertsmith.model.encoder import Encoder, ModelConfig
    from bertsmith.model.scalar_mix import ScalarMix
    from bertsmith.text.encoded import Encoded
    from bertsmith.text.normalize import PRESETS, Normalization
    from bertsmith.text.vocabulary import Vocabulary
    from bertsmith.text.vocabulary_trainer import train_vocabulary
    from bertsmith.text.wordpiece import Tokenizer

__version__ = VERSION

__all__ = [
    "PRESETS",
    "Encoded",
    "Encoder",
    "ModelConfig",
    "Normalization",
    "ScalarMix",
    "TokenStore",
    "Tokenizer",
    "Vocabulary",
    "__version__",
    "build_store",
    "load",
    "open_features",
    "train_vocabulary",
]

_HOME = {
    "Encoded": "text.encoded",
    "Encoder": "model.encoder",
    "ModelConfig": "model.encoder",
    "Normalization": "text.normalize",
    "PRESETS": "text.normalize",
    "ScalarMix": "model.scalar_mix",
    "TokenStore": "corpus.store",
    "Tokenizer": "text.wordpiece",
    "Vocabulary": "text.vocabulary",
    "build_store": "corpus.build",
    "load": "inference.predictor",
    "open_features": "inference.feature_store",
    "train_vocabulary": "text.vocabulary_trainer",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'bertsmith' has no attribute '{name}'")
    return getattr(importlib.import_module(f"bertsmith.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
