"""What a model's folder that is made of another one must keep of it."""

from __future__ import annotations

import shutil
from pathlib import Path

from bertsmith.checkpoints.folder import load_tokenizer
from bertsmith.files import read_json, write_json
from bertsmith.text.tokenizer_files import added_tokens
from bertsmith.text.wordpiece import Tokenizer

LENGTH_FILE = "sentence_bert_config.json"  # of sentence-transformers


def whole_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a folder of which another is to be made.

    Errors: ValueError as `load_tokenizer`, and for tokens that were added to it: ours has no place
    for them.
    """
    tokenizer = load_tokenizer(folder)
    if lost := added_tokens(folder, tokenizer.vocabulary, tokenizer.normalization):
        raise ValueError(
            f"{folder}: tokens were added to its tokenizer ({', '.join(lost[:5])}), which would be"
            " lost: keep the folder as it is, or take them out of its tokenizer's files"
        )
    return tokenizer


def copy_similarity_training(source: Path, target: Path) -> None:
    """Copy what a folder of sentence-transformers says of how its vectors are made."""
    for pattern in ("modules.json", "*sentence*.json", "[0-9]_*/**/*"):
        for file in filter(Path.is_file, source.glob(pattern)):
            place = target / file.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, place)
    # a tokenizer of ours knows the model's positions, theirs may say that vectors are of fewer
    settings, tokenizer = target / LENGTH_FILE, source / "tokenizer_config.json"
    if settings.exists() and tokenizer.exists():
        length = read_json(tokenizer).get("model_max_length")
        write_json(settings, {"max_seq_length": length} | read_json(settings))
