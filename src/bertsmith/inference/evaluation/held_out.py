"""Held-out texts: the nats of a whole masked word, comparable between models of any vocabulary.

Words are those that BERT's own tokenizer parts (blanks, punctuation, ideographs), whatever the
model's does. Rows are 64 of them, within a paragraph's document; 15% are masked, all pieces of a
word together, drawn by the text and a seed. So all models predict the same words from the same
words, and the sum over a word's pieces does not depend on how many there are. A left-to-right model
predicts the same words from those before them.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bertsmith.base.files import nearby
from bertsmith.base.settings import checked
from bertsmith.base.terminal import Progress
from bertsmith.inference.engines.runner import LANGUAGE_MODEL, Runner
from bertsmith.inference.evaluation.minimal_pairs import check_language_model
from bertsmith.inference.fill import row_features
from bertsmith.inference.model_task import read_run
from bertsmith.inference.predictor import Predictor, opened
from bertsmith.tasks.tagging.features import encode_words
from bertsmith.text.readers.files import read_text
from bertsmith.text.readers.tables import file_suffix
from bertsmith.text.tokenizer.normalize import GOOGLE_CASED, split_words
from bertsmith.text.tokenizer.rows import concatenated_ranges

ROW_WORDS, SHARE, SEED = 64, 0.15, 0
ROWS_AT_ONCE = 512
DOCUMENT_END = re.compile(r"\n\s*\n")


@checked()
def evaluate_held_out(
    model: str | Path | Predictor, held_out: str | Path | Sequence[str | Path]
) -> dict[str, Any]:
    """Measure a language model on texts it has not seen, as `bertsmith evaluate --held-out` does.

        found = bertsmith.evaluate_held_out("runs/books", ["novel.txt", "textbook.txt"])
        found["texts"]["novel.txt"]["nats_per_word"]
        bertsmith.evaluate_held_out("runs/books", "stores/books")["metrics"]["mlm_loss"]

    `model` is a run, a Hugging Face folder, a hub name, or what `load` gave. Of texts the result is
    {"texts": {path: {"nats_per_word", "standard_error", "words", "unknown", "sha256"}}, "seed"}.
    "words" were predicted; "unknown" of them, besides, the vocabulary cannot spell: their [UNK]
    would be guessed too easily. The sha256 is of the unpacked text. Of a token store it is
    {"metrics": {name: number}, "examples"} of its held-out part, as at the end of pre-training.

    Errors: ValueError for a model that predicts no words, a missing file, a table, a text without a
    word to predict, a store of another vocabulary, or one that is not given alone.
    """
    model = opened(model)
    paths = [*map(Path, [held_out] if isinstance(held_out, str | Path) else held_out)]
    if stores := [path for path in paths if (path / "manifest.json").exists()]:
        if len(paths) > 1:
            raise ValueError(f"{stores[0]}: a token store is measured alone")
        return _evaluate_store(model, stores[0])
    check_language_model(model)
    found = {}
    for path in paths:
        if not path.is_file():
            raise ValueError(f"{path}: no such file{nearby(path)}")
        if file_suffix(path) not in (None, ".txt"):
            raise ValueError(f"{path}: a table is no running text: write its texts to a .txt")
        text = read_text(path)
        digest = hashlib.sha256(text.encode())
        rows, is_masked = masked_words(text, [SEED, *digest.digest()])
        with Progress(f"held-out {path.name}", len(rows), "rows") as progress:
            nats, unknown, word = [], 0, 0
            for begin in range(0, len(rows), ROWS_AT_ONCE):
                part = rows[begin : begin + ROWS_AT_ONCE]
                size = sum(map(len, part))
                own, lost = word_nats(model, part, is_masked[word : word + size])
                nats.append(own)
                unknown, word = unknown + lost, word + size
                progress.update(len(part))
        values = np.concatenate([np.empty(0), *nats])
        if not len(values):
            raise ValueError(f"{path}: no word to predict: give a text of some hundred words")
        found[str(path)] = {
            "nats_per_word": float(values.mean()),
            "standard_error": float(values.std() / math.sqrt(len(values))),
            "words": len(values),
            "unknown": unknown,
            "sha256": digest.hexdigest(),
        }
    return {"texts": found, "seed": SEED}


def _evaluate_store(model: Predictor, store: Path) -> dict[str, Any]:
    from bertsmith.training.pretraining.task import evaluate_store  # imports torch

    if (engine := model.asked.engine) not in ("auto", "pytorch"):
        raise ValueError(f"`engine={engine!r}`: PyTorch measures on a token store: leave it out")
    loaded = model.pytorch(LANGUAGE_MODEL)
    # a released model, without run.json, has learned from the paper's pairs
    stored = read_run(model.folder).get("settings", {"nsp_sampling": "paper"})
    metrics, rows = evaluate_store(
        store, loaded.model, model.tokenizer, model.folder, stored, model.processor.of_torch()
    )
    if any(name.startswith(("nsp.", "pooler.")) for name in loaded.missing):  # never trained
        metrics = {name: value for name, value in metrics.items() if not name.startswith("nsp_")}
    return {"metrics": metrics, "examples": rows}


def masked_words(text: str, key: Sequence[int]) -> tuple[list[list[str]], np.ndarray]:
    """The rows of a text, each of up to 64 words, and which words are masked, bool [W].

    The first word of a row never is: a left-to-right model has nothing to tell it from.
    """
    rows = [
        words[begin : begin + ROW_WORDS]
        for document in DOCUMENT_END.split(text)
        if (words := [word.characters for word in split_words(document, GOOGLE_CASED)])
        for begin in range(0, len(words), ROW_WORDS)
    ]
    sizes = np.array([len(row) for row in rows], np.int64)
    is_masked = np.random.default_rng(key).random(int(sizes.sum())) < SHARE
    is_masked[np.cumsum(sizes) - sizes] = False
    return rows, is_masked


def word_nats(
    model: Runner, rows: Sequence[Sequence[str]], is_masked: np.ndarray
) -> tuple[np.ndarray, int]:
    """The nats of each masked word, float64 [N], without those that have [UNK], whose number
    follows, and those of which the model does not tell every piece."""
    vocabulary, is_bare = model.tokenizer.vocabulary, model.config.family == "gpt"
    room = model.config.max_positions - 2
    pieces, _ = encode_words(model.tokenizer, [word for row in rows for word in row], room)
    edges, ids = pieces.boundaries, pieces.ids.astype(np.int64)
    spans = np.array([*_spans(edges, [len(row) for row in rows], room)])  # [R, 2], of pieces
    word_of = np.repeat(np.arange(len(is_masked)), np.diff(edges))
    shown = ids.copy()
    if not model.config.causal:
        shown[is_masked[word_of]] = vocabulary.mask_id
    border = [] if is_bare else [vocabulary.cls_id], [] if is_bare else [vocabulary.sep_id]
    features = row_features(
        model, [np.concatenate([border[0], shown[a:b], border[1]]) for a, b in spans.tolist()]
    )
    # the place of each piece in the rows; a left-to-right model tells it one place before
    sizes = spans[:, 1] - spans[:, 0]
    places = concatenated_ranges(features.boundaries[:-1] + len(border[0]), sizes)
    firsts = np.repeat(features.boundaries[:-1], sizes)
    is_asked = is_masked[word_of]
    if model.config.causal:
        places = places - 1
        is_asked = is_asked & (places >= firsts)
    asked = np.flatnonzero(is_asked)
    ones = np.ones_like(asked)
    found = model.piece_log_probabilities(features, places[asked], ids[asked], ones)
    nats = np.bincount(word_of[asked], -found, minlength=len(is_masked))
    has_unknown = np.bincount(word_of, ids == vocabulary.unk_id, minlength=len(is_masked)) > 0
    # a GPT does not tell the first piece of a row
    is_whole = np.bincount(word_of[asked], minlength=len(is_masked)) == np.diff(edges)
    return nats[is_masked & is_whole & ~has_unknown], int((is_masked & has_unknown).sum())


def _spans(edges: np.ndarray, sizes: Sequence[int], room: int) -> Iterator[tuple[int, int]]:
    """The pieces, from and to, of each row of `sizes` words; one that is too long is divided."""
    word = 0
    for size in sizes:
        end = word + size
        while word < end:
            last = int(np.searchsorted(edges, edges[word] + room, side="right")) - 1
            last = min(last, end)
            yield int(edges[word]), int(edges[last])
            word = last


def describe(result: dict[str, Any]) -> Iterator[str]:
    """A line a text."""
    for name, found in result["texts"].items():
        lost = f", {found['unknown']:,} unknown" if found["unknown"] else ""
        yield (
            f"{name}: {found['nats_per_word']:.3f} nats a word ± {found['standard_error']:.3f} "
            f"of {found['words']:,}{lost}; sha256 {found['sha256'][:12]}"
        )
