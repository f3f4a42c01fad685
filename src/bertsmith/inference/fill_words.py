"""Whole words behind a [MASK], of one piece or several, scored by pseudo-log-likelihood.

The score of a word of pieces w1 ... wn in its text (Kauf and Ivanova 2023, arXiv 2305.10588, after
Salazar et al. 2020, arXiv 1910.14659): each piece is masked in turn, and with it the pieces of the
word behind it,

    log p(w1 | text) + log p(w2 | text, w1) + ... + log p(wn | text, w1 ... wn-1)

where `text` is all that stands around the word. Were the pieces behind it shown, "so [MASK]" with
"##uvenir" would be certain, and rare words of many pieces would win everywhere.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bertsmith.inference.fill import BEAM, MASK, MaskFiller
from bertsmith.text.given_texts import texts_of
from bertsmith.text.sequences import concatenated_ranges

MAX_COMBINATIONS = 64  # of the masks' numbers of pieces; each is a search of its own


class Word(NamedTuple):
    """A word in a row: the ids of the whole row, int64 [S], and the word's pieces among them."""

    row: np.ndarray
    begin: int
    end: int


def pseudo_log_likelihoods(filler: MaskFiller, words: Sequence[Word]) -> list[float]:
    """The score of each word, see above; rows that several words ask for are computed once."""
    mask_id = filler.tokenizer.vocabulary.mask_id
    rows: dict[tuple[bytes, int], np.ndarray] = {}
    wanted = defaultdict(list)
    for number, (row, begin, end) in enumerate(words):
        for place in range(begin, end):
            masked = row.copy()
            masked[place:end] = mask_id
            key = masked.tobytes(), place
            rows[key] = masked
            wanted[key].append((number, int(row[place])))
    keys = list(rows)
    scores = np.zeros(len(words))
    places = [np.array([place]) for _, place in keys]
    for k, log_probabilities_1V in filler.log_probabilities([rows[key] for key in keys], places):
        numbers, pieces = zip(*wanted[keys[k]], strict=True)
        scores[list(numbers)] += log_probabilities_1V[0, list(pieces)].cpu().numpy()
    return scores.tolist()


def fill_words(
    filler: MaskFiller, text: str, max_pieces: int, top: int = 5
) -> list[dict[str, Any]]:
    """The `top` best ways to put a whole word of 1 to `max_pieces` pieces at every [MASK].

    Returns {"words": ["souvenir"], "pieces": [["so", "##uvenir"]], "log_probability": -3.2,
    "score": -1.6} for each, best first by "score", the log-probability divided by the number of
    pieces: longer words have more factors below 1, and would else be found too rarely. Only words
    that the tokenizer itself would cut into these pieces are offered. With several masks the score
    is the sum over the words, each scored with the others in place.

    Errors: ValueError as `MaskFiller.pieces`, and for more combinations of lengths than 64.
    """
    if max_pieces < 1 or top < 1:
        raise ValueError(f"words = {max_pieces}, top = {top}: both must be at least 1")
    masks = max(1, text.count(MASK))
    if (combinations := max_pieces**masks) > MAX_COMBINATIONS:
        raise ValueError(
            f"{text.count(MASK)} masks of 1 to {max_pieces} pieces: {combinations:,} combinations "
            f"to search, at most {MAX_COMBINATIONS}: lower --words, or write fewer [MASK]"
        )
    found: list[dict[str, Any]] = []
    words: list[Word] = []
    for counts in itertools.product(range(1, max_pieces + 1), repeat=masks):
        row, begins = filler.layout(text, counts)
        for pieces in _search(filler, row, begins, counts, max(top, BEAM)):
            filled = row.copy()
            for begin, own in zip(begins, pieces, strict=True):
                filled[begin : begin + len(own)] = own
                words.append(Word(filled, int(begin), int(begin) + len(own)))
            found.append(_named(filler, pieces))
    scores = np.array(pseudo_log_likelihoods(filler, words))
    scores = scores.reshape(len(found), masks).sum(axis=1)
    for filling, score in zip(found, scores.tolist(), strict=True):
        filling["log_probability"] = score
        filling["score"] = score / sum(map(len, filling["pieces"]))
    return sorted(found, key=lambda filling: -filling["score"])[:top]


def fill_candidates(
    filler: MaskFiller, text: str, candidates: Sequence[str]
) -> list[dict[str, Any]]:
    """Exactly these words or phrases at the [MASK] of a text, best first.

    Returns {"candidate": "souvenir", "pieces": ["so", "##uvenir"], "log_probability": -3.2,
    "score": -1.6, "probability": 0.7} for each: log-probability and score as in `fill_words`, the
    probabilities the softmax of the scores over the candidates.

    Errors: ValueError that names the candidate which is blank, has a part that the vocabulary
    cannot spell, or the same pieces as another; for a text with other than one [MASK].
    """
    candidates = texts_of(candidates, "candidates")
    if text.count(MASK) > 1:
        raise ValueError(f"{text.count(MASK)} [MASK] in the text: candidates are for one")
    if not candidates:
        raise ValueError("no candidates: name one at least")
    vocabulary = filler.tokenizer.vocabulary
    encoded = filler.tokenizer.encode_batch(candidates, offsets=False)
    seen: dict[tuple[int, ...], str] = {}
    words = []
    for number, candidate in enumerate(candidates):
        pieces = encoded[number].ids
        if not len(pieces):
            raise ValueError(f"candidate {candidate!r}: no word in it")
        if vocabulary.unk_id in pieces:
            raise ValueError(
                f"candidate {candidate!r}: the model's vocabulary cannot spell it (its pieces: "
                f"{' '.join(vocabulary.pieces[piece] for piece in pieces)}): leave it out"
            )
        key = tuple(pieces.tolist())
        if key in seen:
            raise ValueError(f"candidate {candidate!r}: the same pieces as {seen[key]!r}: drop one")
        seen[key] = candidate
        row, begins = filler.layout(text, [len(pieces)])
        begin, end = int(begins[0]), int(begins[0]) + len(pieces)
        row[begin:end] = pieces
        words.append(Word(row, begin, end))
    log_probabilities = np.array(pseudo_log_likelihoods(filler, words))
    scores = log_probabilities / np.diff(encoded.boundaries)
    odds = np.exp(scores - scores.max())
    answers = [
        {
            "candidate": candidate,
            "pieces": [vocabulary.pieces[piece] for piece in word.row[word.begin : word.end]],
            "log_probability": float(log_probabilities[number]),
            "score": float(scores[number]),
            "probability": float(odds[number] / odds.sum()),
        }
        for number, (candidate, word) in enumerate(zip(candidates, words, strict=True))
    ]
    return sorted(answers, key=lambda answer: -answer["score"])


def _search(
    filler: MaskFiller, row: np.ndarray, begins: np.ndarray, counts: Sequence[int], width: int
) -> list[list[list[int]]]:
    """The likeliest words of counts[k] pieces at the k-th [MASK]: lists of the words' pieces."""
    starts, inside = _starts_and_rest(filler)
    allowed_PV = torch.stack(
        [inside if place else starts for count in counts for place in range(count)]
    )
    positions = concatenated_ranges(begins, np.array(counts))
    edges = list(itertools.accumulate(counts, initial=0))
    fillings = [
        [list(filling.pieces[a:b]) for a, b in itertools.pairwise(edges)]
        for filling in filler.search(row, positions, allowed_PV, width)
    ]
    own = filler.tokenizer.encode_batch(
        [_spelled(filler, word) for words in fillings for word in words], offsets=False
    )
    kept = []
    for number, words in enumerate(fillings):
        first = number * len(counts)
        if all(own[first + k].ids.tolist() == word for k, word in enumerate(words)):
            kept.append(words)
    return kept


def _starts_and_rest(filler: MaskFiller) -> tuple[Tensor, Tensor]:
    """bool [V] and [V]: the pieces that begin a word, and those that go on with one."""
    vocabulary = filler.tokenizer.vocabulary
    rest = torch.zeros_like(filler.answers)
    rest[: len(vocabulary)] = torch.from_numpy(vocabulary.continuation.copy()).to(rest.device)
    starts = filler.answers & ~rest
    starts[vocabulary.unk_id] = False
    return starts, rest


def _spelled(filler: MaskFiller, pieces: Sequence[int]) -> str:
    names = filler.tokenizer.vocabulary.pieces
    return "".join(names[piece].removeprefix("##") for piece in pieces)


def _named(filler: MaskFiller, words: list[list[int]]) -> dict[str, Any]:
    names = filler.tokenizer.vocabulary.pieces
    return {
        "words": [_spelled(filler, pieces) for pieces in words],
        "pieces": [[names[piece] for piece in pieces] for pieces in words],
    }
