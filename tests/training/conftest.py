"""A small store of made-up English that a small model can learn, built once for all tests here."""

from pathlib import Path

import pytest
import torch

from bertsmith.training.pretraining.settings import PretrainSettings

from ..tiny import animal_sentences, write_store


@pytest.fixture(autouse=True)
def one_thread():
    """Tests run side by side: more threads than cores would slow each other down."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def store_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    documents = [[" ".join(animal_sentences(12, n))] for n in range(60)]
    return write_store(tmp_path_factory.mktemp("store"), documents)


@pytest.fixture
def recipe() -> dict:
    """Settings of a run of a second or two; dropout is on, since it must resume exactly too."""
    return {
        "size": "2x64",
        "max_length": 48,
        "batch_size": 16,
        "steps": 24,
        "learning_rate": 3e-3,
        "dropout": 0.1,
        "attention_dropout": 0.1,
        "precision": "float32",
        "threads": 1,
        "checkpoint_every": 8,
        "log_every": 4,
        "num_evals": 2,
        "eval_rows": 16,
    }


@pytest.fixture
def settings(recipe: dict) -> PretrainSettings:
    return PretrainSettings(**recipe)
