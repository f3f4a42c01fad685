"""A small store of made-up English that a small model can learn, built once for all tests here."""

import random
from pathlib import Path

import pytest
import torch

from bertsmith.corpus.build.build import build_store
from bertsmith.corpus.build.settings import BuildSettings
from bertsmith.text.readers.documents import Document
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.text.vocabulary.train import train_vocabulary
from bertsmith.training.pretraining.settings import PretrainSettings

ANIMALS = ("cat", "dog", "cow", "owl", "fox")
PLACES = ("barn", "house", "field", "tree", "river")


def sentences(count: int, seed: int) -> list[str]:
    """Sentences in which a word tells its neighbours: each animal lives in one place."""
    draw = random.Random(seed)
    texts = []
    for _ in range(count):
        k = draw.randrange(len(ANIMALS))
        texts.append(f"The old {ANIMALS[k]} sleeps near the {PLACES[k]} in summer.")
    return texts


@pytest.fixture(autouse=True)
def one_thread():
    """Tests run side by side: more threads than cores would slow each other down."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def store_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    documents = [Document("made", n, [" ".join(sentences(12, n))]) for n in range(60)]
    tokenizer = Tokenizer(train_vocabulary(documents, 70))
    folder = tmp_path_factory.mktemp("store")
    build_store([], tokenizer, folder, BuildSettings(held_out=0.2), documents=documents)
    return folder


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
