"""A tiny model of random weights whose vocabulary is the words of some texts."""

from collections.abc import Iterable
from pathlib import Path

import torch

from bertsmith.checkpoints.model_folder import save_model
from bertsmith.cli.main import main
from bertsmith.model.config import config_for
from bertsmith.model.heads import PreTrainingModel
from bertsmith.model.initialization import initialize
from bertsmith.text.tokenizer.normalize import GOOGLE_UNCASED, words_of
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.text.tokenizer.wordpiece import SPECIAL, Vocabulary


def write_model(folder: Path, texts: Iterable[str], size: str = "1x64") -> Path:
    words = {word.characters for text in texts for word in words_of(text, GOOGLE_UNCASED)}
    tokenizer = Tokenizer(Vocabulary([*SPECIAL, *sorted(words)]))
    config = config_for(size, len(tokenizer.vocabulary), max_positions=64)
    model = initialize(PreTrainingModel(config), 0.05, torch.Generator().manual_seed(1))
    save_model(model, tokenizer, folder)
    return folder


def bertsmith(*words: object) -> None:
    """A command that must succeed."""
    assert main([str(word) for word in words]) == 0
