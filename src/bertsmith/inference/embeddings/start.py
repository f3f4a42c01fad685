"""A model that has vectors of texts already, as the start of `bertsmith embed train`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from bertsmith.checkpoints.config_json import read_config
from bertsmith.checkpoints.reading import load_tokenizer
from bertsmith.inference.embeddings.pooling import (
    PROMPTS_FILE,
    SimilarityTraining,
    similarity_training,
)
from bertsmith.training.finetuning.contrastive import Kept
from bertsmith.training.finetuning.settings import ContrastiveSettings


def as_the_start(
    start: Path, settings: ContrastiveSettings, given: Collection[str]
) -> tuple[ContrastiveSettings, SimilarityTraining | None, Kept]:
    """The settings, with the start's own pooling and length where none are given; the way to its
    vectors with these, and what stays of it. Nothing of a start without such vectors.

    Errors: ValueError for vectors that cannot be trained here.
    """
    trained = similarity_training(start)
    if trained is None:
        return settings, None, Kept()
    _check_trainable(trained, load_tokenizer(start).normalization.lowercase)
    theirs = {
        "pool": trained.pool or "mean",
        "max_length": trained.max_length or read_config(start).max_positions,
    }
    theirs = {name: value for name, value in theirs.items() if name not in given}
    if theirs.get("pool", "mean") not in ("mean", "cls"):
        raise ValueError(
            f"{start}: its vectors are pooled by {trained.pool}, which is not trained here: name"
            " `pool`"
        )
    settings = replace(settings, **theirs)
    way = replace(trained, pool=settings.pool, max_length=settings.max_length)
    of_default = (name for name, text in trained.prompts.items() if text == trained.prompt)
    name = next(of_default) if trained.prompt else None
    return settings, way, Kept(trained.prompts, name, trained.normalize)


def _check_trainable(trained: SimilarityTraining, tokenizer_lowercases: bool) -> None:
    """Refuse vectors with parts that `bertsmith embed train` would lose. Errors: ValueError."""
    layers = [*trained.unread, *(layer.folder.name for layer in trained.dense)]
    parts = {
        f"layers after the pooling ({', '.join(layers)})": bool(layers),
        "texts lower-cased": trained.lowercase and not tokenizer_lowercases,
        f"their first {trained.dimensions} numbers alone": trained.dimensions is not None,
        "prompts left out of the pooling": bool(trained.prompts) and not trained.pools_prompt,
    }
    if lost := [part for part, is_there in parts.items() if is_there]:
        raise ValueError(
            f"{trained.folder}: its vectors have {', '.join(lost)}, which are not trained here: use"
            " sentence-transformers, or start from a copy of the folder without modules.json and"
            f" {PROMPTS_FILE}"
        )
