"""Train a model's vectors of texts on pairs that belong together.

Examples:
    bertsmith embed-train --model run --data pairs.csv --text query --text-pair answer --out pairs
    bertsmith embed-train --model run --data duplicates.tsv --text a --text-pair b --out pairs \\
        --dev STS-B/dev.tsv --dev-text sentence1 --dev-text-pair sentence2 --score score

Each first text must find its own second text among those of its group (multiple negatives ranking
loss); nothing but the pairs is labelled. --dev is a file of pairs with a similarity each (STS-B):
the Spearman correlation of the cosines with it is printed, before and after. OUT is a model folder
for `bertsmith embed`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from pathlib import Path

from bertsmith.cli.try_next import after_similarity_training
from bertsmith.finetuning.contrastive_settings import ContrastiveSettings


@dataclass(frozen=True, kw_only=True)
class EmbedTrain(ContrastiveSettings):
    model: str
    """A run, a Hugging Face folder or hub name."""
    data: Path
    """csv, tsv, jsonl or parquet file of pairs."""
    text: str
    """Column of the first text."""
    text_pair: str
    """Column of the second text."""
    out: Path
    """Run directory to write."""
    dev: Path | None = None
    """File of pairs with a similarity each."""
    dev_text: str | None = None
    """Its column of the first text. Default: that of --text."""
    dev_text_pair: str | None = None
    """Its column of the second text. Default: that of --text-pair."""
    score: str | None = None
    """Its column of the similarity. Default: score."""


def run_embed_train(settings: EmbedTrain) -> None:
    from bertsmith.checkpoints.open import open_model_folder
    from bertsmith.cli.outputs import check_folder
    from bertsmith.finetuning.contrastive_run import read_pairs, train_sentence_vectors

    if settings.dev is None:
        for name in ("dev_text", "dev_text_pair", "score"):
            if getattr(settings, name) is not None:
                raise ValueError(f"--{name.replace('_', '-')}: only with --dev")
    check_folder(settings.out)
    start = open_model_folder(settings.model)
    pairs = read_pairs(settings.data, settings.text, settings.text_pair)
    dev = None
    if settings.dev is not None:
        dev = read_pairs(
            settings.dev,
            settings.dev_text or settings.text,
            settings.dev_text_pair or settings.text_pair,
            settings.score or "score",
        )
    recipe = {field.name: getattr(settings, field.name) for field in fields(ContrastiveSettings)}
    result = train_sentence_vectors(
        start,
        pairs,
        dev,
        settings.out,
        ContrastiveSettings(**recipe),
        command=["bertsmith", *sys.argv[1:]],
    )
    for name, after in result["metrics"].items():
        print(f"{name} on dev: {after:.4f} (before: {result['metrics_before'][name]:.4f})")
    print(f"{settings.out}: trained on {len(pairs):,} pairs")
    print(after_similarity_training(settings.out))
