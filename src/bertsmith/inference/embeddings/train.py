"""Sentence vectors trained from files to a run directory, on a model that may have vectors already.

`train_embeddings` is for Python, `run_pairs` is what `bertsmith embed train` calls.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bertsmith.base.settings import checked, from_mapping, group_values
from bertsmith.checkpoints.config_json import read_config
from bertsmith.checkpoints.hub import open_model_folder
from bertsmith.checkpoints.reading import load_tokenizer
from bertsmith.inference.embeddings.pooling import (
    PROMPTS_FILE,
    SimilarityTraining,
    similarity_training,
)
from bertsmith.training.finetuning.contrastive import Kept, read_pairs, train_sentence_vectors
from bertsmith.training.finetuning.settings import ContrastiveSettings, PairRequest


@checked(PairRequest)
def train_embeddings(
    *,
    data: str | Path,
    text: str,
    text_pair: str,
    model: str | Path,
    out: str | Path,
    **settings: Any,
) -> dict[str, Any]:
    """Train a model's vectors of texts on pairs that belong together, as `bertsmith embed train`.

        bertsmith.train_embeddings(data="faq.csv", text="question", text_pair="answer",
                                   model="run", out="pairs", epochs=2)
        bertsmith.load("pairs").embed("How do I send it back?")

    `data` is a csv, tsv, jsonl or parquet file, of which `text` and `text_pair` are columns;
    `model` a run, a Hugging Face folder or a hub name. `settings` are the fields of `PairRequest`,
    such as `dev="sts.tsv"`: `bertsmith embed train --help-all` explains them. Returns what is in
    result.json, such as the metrics on dev before and after.

    Errors: ValueError for anything that cannot be, before training where it can be known.
    """
    values = {"data": data, "text": text, "text_pair": text_pair, "model": str(model), "out": out}
    with_given = {**values, **settings, "given": tuple(settings)}
    return run_pairs(from_mapping(PairRequest, with_given, "train_embeddings()"))


def run_pairs(request: PairRequest, command: Sequence[str] = ()) -> dict[str, Any]:
    """Train sentence vectors as asked for; returns result.json. Errors: as `train_embeddings`."""
    start = open_model_folder(request.model)
    pairs = read_pairs(request.data, request.text, request.text_pair)
    dev = None
    if request.dev is not None:
        dev = read_pairs(request.dev, request.text, request.text_pair, request.score or "score")
    own, way, kept = as_the_start(start, group_values(request, ContrastiveSettings), request.given)
    if way:
        print(f"{start}: {way}", file=sys.stderr)
    return train_sentence_vectors(start, pairs, dev, request.out, own, command, kept)


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
