"""Minimal pairs: does a model prefer the acceptable sentence of two? BLiMP and files of its shape.

BLiMP (Warstadt et al. 2020, TACL 8, 377-392) has 67 paradigms of 1,000 pairs. A masked LM scores a
sentence by its pseudo-log-likelihood (Salazar et al. 2020, arXiv 1910.14659): every piece is masked
once, and the log-probabilities of the right ones are added. "word" masks with a piece also those
behind it in its word, as Kauf and Ivanova (2023, arXiv 2305.10588): where a word has several pieces
they give each other away, and a wrong form of many pieces would win. A left-to-right model gives
its plain log-likelihood.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from bertsmith.base.files import nearby
from bertsmith.base.settings import Count, checked
from bertsmith.base.terminal import Progress
from bertsmith.inference.engines.runner import LANGUAGE_MODEL, Runner
from bertsmith.inference.fill import Word, pseudo_log_likelihoods, row_features
from bertsmith.inference.predictor import Predictor, opened
from bertsmith.tasks.examples import check_texts
from bertsmith.tasks.metrics import standard_error
from bertsmith.text.readers.tables import read_columns

COLUMNS = ("sentence_good", "sentence_bad", "UID", "field")
AT_ONCE = 256  # pairs, some 6,000 masked rows

Masked = Literal["word", "piece"]


@dataclass(frozen=True)
class MinimalPairs:
    """N pairs of sentences with the paradigm and the field of each."""

    good: list[str]
    bad: list[str]
    paradigms: list[str]
    fields: list[str]
    sha256: str
    """Of all pairs that were read."""


def read_minimal_pairs(path: Path, first: int | None = None) -> MinimalPairs:
    """Read a .jsonl in BLiMP's columns, packed or not, or a folder of such files.

    `first`: only so many pairs of each paradigm.

    Errors: ValueError that names file and line for what is not of this shape.
    """
    files = sorted(path.glob("*.jsonl*")) if path.is_dir() else [path]
    if not files or not path.exists():
        raise ValueError(f"{path}: no .jsonl of minimal pairs here{nearby(path)}")
    columns: dict[str, list[str]] = {name: [] for name in COLUMNS}
    for file in files:
        found, lines = read_columns(file, dict.fromkeys(COLUMNS, "minimal pairs"))
        for name in COLUMNS:
            columns[name] += check_texts(found[name], name, file, lines)
    digest = hashlib.sha256("\0".join(text for name in COLUMNS for text in columns[name]).encode())
    seen: Counter[str] = Counter()
    kept = []
    for number, paradigm in enumerate(columns["UID"]):
        seen[paradigm] += 1
        if first is None or seen[paradigm] <= first:
            kept.append(number)
    good, bad, paradigms, fields = ([columns[name][k] for k in kept] for name in COLUMNS)
    fields = [field.replace("/", "_") for field in fields]  # one of BLiMP's is written both ways
    return MinimalPairs(good, bad, paradigms, fields, digest.hexdigest())


@checked()
def evaluate_blimp(
    model: str | Path | Predictor,
    blimp: str | Path,
    *,
    first: int | None = None,
    masked: Masked = "word",
) -> dict[str, Any]:
    """Measure a language model on minimal pairs, as `bertsmith evaluate --blimp` does.

        bertsmith.evaluate_blimp("runs/books", "blimp.jsonl.xz", first=200)["accuracy"]

    `model` is a run, a Hugging Face folder, a hub name, or what `load` gave; `blimp` a .jsonl in
    BLiMP's columns or a folder of them, of which `first` takes so many pairs of each paradigm.

    The result has the share of pairs whose better sentence scores higher: {"accuracy",
    "standard_error", "pairs"} of all and, by name, in "fields" and "paradigms"; the errors are of
    the number of pairs alone. Equal scores count as wrong.

    Errors: ValueError for a model without a head that predicts pieces, a sentence longer than its
    positions, and what is not of BLiMP's shape, with file and line.
    """
    if first is not None and not Count.holds(first):
        raise ValueError(f"`first={first}`: {Count.words}")
    model, pairs = opened(model), read_minimal_pairs(Path(blimp), first)
    check_language_model(model)
    started, total = time.monotonic(), len(pairs.good)
    is_right, rows = np.empty(total, bool), 0
    with Progress("minimal pairs", total, "pairs") as progress:
        for begin in range(0, total, AT_ONCE):
            part = slice(begin, begin + AT_ONCE)
            sentences = [*pairs.good[part], *pairs.bad[part]]
            scores, computed = sentence_scores(model, sentences, masked)
            good, bad = np.split(scores, 2)
            is_right[part] = good > bad
            rows += computed
            progress.update(len(good))
    seconds = time.monotonic() - started
    paradigms, fields = np.array(pairs.paradigms), np.array(pairs.fields)
    return {
        **_share(is_right),
        "masked": "nothing" if model.config.causal else masked,
        "fields": {name: _share(is_right[fields == name]) for name in dict.fromkeys(pairs.fields)},
        "paradigms": {
            name: _share(is_right[paradigms == name]) for name in dict.fromkeys(pairs.paradigms)
        },
        "sha256": pairs.sha256,
        "rows": rows,
        "rows_per_second": round(rows / seconds, 1),
    }


def _share(is_right: np.ndarray) -> dict[str, Any]:
    accuracy, count = float(is_right.mean()), len(is_right)
    error = standard_error(accuracy, count)
    return {"accuracy": accuracy, "standard_error": error, "pairs": count}


def check_language_model(model: Runner) -> None:
    """Errors: ValueError for a model without a head that predicts pieces from one side or both."""
    if model.config.directions == 2 or model.config.is_frozen:
        raise ValueError(
            f"{model.folder}: two directions that do not see one another give a sentence no score: "
            "measure a masked LM, or a left-to-right one"
        )
    model.model(LANGUAGE_MODEL)


def sentence_scores(
    model: Runner, sentences: Sequence[str], masked: Masked
) -> tuple[np.ndarray, int]:
    """The (pseudo-)log-likelihood of each sentence in nats, float64 [N], and the rows it took."""
    encoded = model.tokenizer.encode_batch(sentences)
    vocabulary = model.tokenizer.vocabulary
    if model.config.causal:
        before = [] if model.config.family == "gpt" else [vocabulary.cls_id]
        rows = [
            np.concatenate([before, ids]) for ids in np.split(encoded.ids, encoded.boundaries[1:-1])
        ]
        features = row_features(model, rows)
        is_label = np.ones(len(features.ids), bool)
        is_label[features.boundaries[:-1]] = False  # nothing stands before a row's first token
        labels = np.flatnonzero(is_label)
        ones, asked = np.ones_like(labels), features.ids[labels].astype(np.int64)
        found = model.piece_log_probabilities(features, labels - 1, asked, ones)
        numbers = np.repeat(np.arange(len(rows)), np.diff(features.boundaries) - 1)
        return np.bincount(numbers, found, minlength=len(rows)), len(rows)
    words: list[Word] = []
    owners: list[int] = []
    for number in range(len(sentences)):
        own = encoded[number]
        row = np.concatenate([[vocabulary.cls_id], own.ids, [vocabulary.sep_id]])
        groups = np.arange(len(own.ids)) if masked == "piece" else np.asarray(own.word_ids)
        edges = 1 + np.flatnonzero(np.diff(groups, prepend=-1, append=-1))
        words += [(row, begin, end) for begin, end in pairwise(edges.tolist())]
        owners += [number] * (len(edges) - 1)
    scores = pseudo_log_likelihoods(model, words)
    return np.bincount(owners, scores, minlength=len(sentences)), len(encoded.ids)


def describe(result: dict[str, Any]) -> Iterator[str]:
    """Lines: every paradigm, every field, then all."""
    for found in (result["paradigms"], result["fields"], {"all": result}):
        for name, own in found.items():
            accuracy, error = 100 * own["accuracy"], 100 * own["standard_error"]
            yield f"{name:<58} {accuracy:5.1f}% ± {error:.1f}  {own['pairs']:>6,} pairs"
        yield ""
    yield f"{result['rows']:,} rows, {result['rows_per_second']:,.0f} a second"
