"""A small model folder of our own, and the folder of a published model."""

import json

import pytest
import torch

from bertsmith.model.config import ModelConfig
from bertsmith.model.heads import PreTrainingModel, SequenceClassifier
from bertsmith.model.initialization import initialize

from ..tiny import piece_tokenizer, published_model, random_model


@pytest.fixture(scope="session")
def tokenizer():
    return piece_tokenizer("the cat sat ##s on mat .")


@pytest.fixture(scope="session")
def config(tokenizer):
    return ModelConfig(len(tokenizer.vocabulary), 16, 2, 2, 32, max_positions=24)


@pytest.fixture
def pretrained(config):
    return initialize(PreTrainingModel(config), 0.1, torch.Generator().manual_seed(1))


@pytest.fixture
def folder(tmp_path, config, tokenizer):
    """A pre-trained model as bertsmith writes it: that of `pretrained`."""
    return random_model(tmp_path / "model", tokenizer, config=config, std=0.1)


@pytest.fixture
def classifier_folder(tmp_path, config, tokenizer):
    folder, settings = tmp_path / "classifier", {"config": config, "std": 0.1, "seed": 2}
    settings["label_names"] = ["no", "maybe", "yes"]
    return random_model(folder, tokenizer, SequenceClassifier, 3, **settings)


@pytest.fixture(scope="session")
def change_config():
    """Changes entries of config.json, or of another JSON file of a folder."""

    def change(folder, changes, file="config.json"):
        stored = json.loads((folder / file).read_text()) | changes
        (folder / file).write_text(json.dumps(stored))
        return stored

    return change


@pytest.fixture(scope="session")
def published_folder():
    return published_model()
