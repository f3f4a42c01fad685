"""A tiny model of random weights whose vocabulary is the words of some texts."""

from collections.abc import Iterable
from pathlib import Path

import torch

from bertsmith.checkpoints.folder import save_model
from bertsmith.cli.main import main
from bertsmith.model.heads import PreTrainingModel
from bertsmith.model.initial_weights import initialize
from bertsmith.model.sizes import config_for
from bertsmith.text.normalize import GOOGLE_UNCASED, words_of
from bertsmith.text.vocabulary import SPECIAL, Vocabulary
from bertsmith.text.wordpiece import Tokenizer


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
