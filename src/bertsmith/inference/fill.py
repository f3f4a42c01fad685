"""Answers for the [MASK] of a text: each mask by itself, all together, or whole words.

The score of a word of pieces w1 ... wn in its text (Kauf and Ivanova 2023, arXiv 2305.10588, after
Salazar et al. 2020, arXiv 1910.14659): each piece is masked in turn, and with it the pieces of the
word after it,

    log p(w1 | text) + log p(w2 | text, w1) + ... + log p(wn | text, w1 ... wn-1)

where `text` is all that stands around the word. Were the pieces after it shown, "so [MASK]" with
"##uvenir" would be certain, and rare words of many pieces would win everywhere.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from bertsmith.inference.answers import FillCandidate
from bertsmith.inference.engines.runner import Runner
from bertsmith.tasks.features import Features
from bertsmith.tasks.vectors import log_softmax
from bertsmith.text.tokenizer.rows import concatenated_ranges
from bertsmith.text.tokenizer.tokenizer import as_texts

MASK = "[MASK]"
NEVER_ANSWERS = re.compile(r"\[(PAD|CLS|SEP|MASK|unused\d+)\]")
BEAM = 20  # fillings that the search goes on with, or as many as are asked for
MAX_COMBINATIONS = 64  # of the masks' numbers of pieces; each is a search of its own

Word = tuple[np.ndarray, int, int]
"""The ids of a row, int64 [S], and begin and end of a word's pieces among them."""


class MaskFiller:
    """Fills the masks of texts with the masked-LM head of a model.

    P is the number of masks in a row, V the size of the model's table of pieces.
    """

    def __init__(self, model: Runner) -> None:
        assert not model.config.causal
        self.model, self.tokenizer = model, model.tokenizer

    @functools.cached_property
    def answers(self) -> np.ndarray:
        """bool [V]: the pieces that are offered, not [PAD], [CLS], [SEP], [MASK] and [unused]."""
        offered = np.zeros(self.model.config.vocab_size, bool)
        for number, piece in enumerate(self.tokenizer.vocabulary.pieces):
            offered[number] = not NEVER_ANSWERS.fullmatch(piece)
        return offered

    def pieces(self, texts: Sequence[str], top: int = 5) -> list[list[list[FillCandidate]]]:
        """The `top` likeliest pieces at each [MASK] by itself: see `Predictor.fill`."""
        _check_top(top)
        names, top = self.tokenizer.vocabulary.pieces, min(top, int(self.answers.sum()))
        encoded = [self.row(text) for text in texts]
        found: list[list[list[FillCandidate]]] = [[] for _ in texts]
        rows, positions = [row for row, _ in encoded], [masks for _, masks in encoded]
        for number, scores_PV in self.log_probabilities(rows, positions):
            values_PK, ids_PK = best(np.where(self.answers, scores_PV, -np.inf), top)
            found[number] = [
                [FillCandidate(names[k], k, value) for k, value in zip(ids, values, strict=True)]
                for ids, values in zip(ids_PK.tolist(), np.exp(values_PK).tolist(), strict=True)
            ]
        return found

    def joint(self, text: str, top: int = 5) -> list[dict[str, Any]]:
        """The `top` likeliest ways to fill all masks together, best first: see `search`.

        Returns {"tokens": ["cat", "mat"], "log_probability": -2.1, "probability": 0.12} for each.

        Errors: as `pieces`.
        """
        _check_top(top)
        row, masks = self.row(text)
        names = self.tokenizer.vocabulary.pieces
        allowed_PV = np.tile(self.answers, (len(masks), 1))
        return [
            {
                "tokens": [names[piece] for piece in filling],
                "log_probability": score,
                "probability": float(np.exp(score)),
            }
            for filling, score in self.search(row, masks, allowed_PV, max(top, BEAM))[:top]
        ]

    def row(self, text: str, counts: Sequence[int] = ()) -> tuple[np.ndarray, np.ndarray]:
        """[CLS] text [SEP] with counts[k] masks (default: one) where the k-th [MASK] stands.

        Returns the ids, int64 [S], and where each [MASK] begins, int64 [P]. The tokenizer itself
        would split "[MASK]".

        Errors: ValueError for several texts, one without [MASK], or longer than the model's
        positions.
        """
        if not isinstance(text, str):
            raise ValueError(f"text is {type(text).__name__}: expected one text (str) with [MASK]")
        vocabulary, positions = self.tokenizer.vocabulary, self.model.config.max_positions
        parts = text.split(MASK)
        if len(parts) == 1:
            raise ValueError(f'no [MASK] in "{text:.60}": write it such as "The [MASK] sat."')
        encoded = self.tokenizer.encode_batch(parts)
        sizes = np.array(counts or [1] * (len(parts) - 1))
        ends = encoded.boundaries[1:-1]
        ids = np.insert(encoded.ids.astype(np.int64), ends.repeat(sizes), vocabulary.mask_id)
        row = np.concatenate([[vocabulary.cls_id], ids, [vocabulary.sep_id]])
        if len(row) > positions:
            raise ValueError(
                f'"{text:.60}" has {len(row)} tokens with [CLS] and [SEP], but the model knows '
                f"{positions} positions: shorten the text"
            )
        return row, 1 + ends + np.cumsum(sizes) - sizes

    def search(
        self, row: np.ndarray, positions: np.ndarray, allowed_PV: np.ndarray, width: int
    ) -> list[tuple[tuple[int, ...], float]]:
        """Beam search over the pieces at the masked `positions` [P] of a row.

        Returns (a piece a mask, log-probability), likeliest first. The mask whose best piece is
        likeliest is filled first, the others are looked at again with that piece in place, and so
        on. The log-probability is the sum of those of the pieces, each given those filled before
        it. A masked LM does not promise that another order gives the same sum; of the orders that
        were tried the best one counts.
        """
        beam: dict[tuple[int, ...], float] = {(OPEN,) * len(positions): 0.0}
        for _ in positions:
            states, found = list(beam), {}
            masks = [[k for k, piece in enumerate(state) if piece == OPEN] for state in states]
            rows = []
            for state in states:
                is_filled = np.array(state) != OPEN
                rows.append(row.copy())
                rows[-1][positions[is_filled]] = np.array(state)[is_filled]
            open_positions = [positions[places] for places in masks]
            for number, scores_OV in self.log_probabilities(rows, open_positions):
                state, places = states[number], masks[number]
                allowed_OV = np.where(allowed_PV[places], scores_OV, -np.inf)
                values_OK, pieces_OK = best(allowed_OV, width)
                surest = int(values_OK[:, 0].argmax())
                place, pieces = places[surest], pieces_OK[surest].tolist()
                for piece, value in zip(pieces, values_OK[surest].tolist(), strict=True):
                    if value > -np.inf:
                        filled = (*state[:place], piece, *state[place + 1 :])
                        total = beam[state] + value
                        found[filled] = max(found.get(filled, -np.inf), total)
            beam = dict(sorted(found.items(), key=lambda item: -item[1])[:width])
        return list(beam.items())

    def log_probabilities(
        self, rows: Sequence[np.ndarray], positions: Sequence[np.ndarray]
    ) -> Iterator[tuple[int, np.ndarray]]:
        """(k, log-probabilities float32 [P, V] at `positions[k]` of row k) for all rows.

        They come in any order, and are not kept.
        """
        if not rows:
            return
        features = row_features(self.model, rows)
        places = [own + begin for own, begin in zip(positions, features.boundaries, strict=False)]
        for number, logits_PV in self.model.piece_logits(features, np.concatenate(places)):
            yield number, log_softmax(logits_PV)


OPEN = -1  # in place of a piece: not filled yet


def best(scores_PV: np.ndarray, top: int) -> tuple[np.ndarray, np.ndarray]:
    """The `top` largest of each row, or all: (values, columns) [P, K], the largest first.

    >>> best(np.array([[0.1, 0.7, 0.2]]), 2)[1]
    array([[1, 2]])
    """
    top = min(top, scores_PV.shape[1])
    columns = np.argpartition(-scores_PV, top - 1, axis=1)[:, :top]
    values = np.take_along_axis(scores_PV, columns, axis=1)
    order = np.lexsort((columns, -values), axis=1)  # of equal ones the first piece
    return np.take_along_axis(values, order, axis=1), np.take_along_axis(columns, order, axis=1)


def _check_top(top: int) -> None:
    if top < 1:
        raise ValueError(f"`top={top}`: ask for at least 1 answer")


def fill_words(
    filler: MaskFiller, text: str, max_pieces: int, top: int = 5
) -> list[dict[str, Any]]:
    """The `top` best ways to put a whole word of 1 to `max_pieces` pieces at every [MASK].

    Returns {"words": ["souvenir"], "pieces": [["so", "##uvenir"]], "log_probability": -3.2,
    "score": -1.6} for each, best first by "score", the log-probability divided by the number of
    pieces: longer words have more factors below 1, and would else be found too rarely. Only words
    that the tokenizer itself would cut into these pieces are offered; there may be none. With
    several masks the score is the sum over the words, each scored with the others in place.

    Errors: ValueError as `MaskFiller.pieces`, and for more combinations of lengths than 64.
    """
    _check_top(top)
    if max_pieces < 1:
        raise ValueError(f"`max_pieces={max_pieces}`: allow at least 1 piece")
    masks = max(1, text.count(MASK))
    if (combinations := max_pieces**masks) > MAX_COMBINATIONS:
        raise ValueError(
            f"`max_pieces={max_pieces}`: {masks} masks of 1 to {max_pieces} pieces are "
            f"{combinations:,} combinations, at most {MAX_COMBINATIONS}: lower it, or write "
            "fewer [MASK]"
        )
    names = filler.tokenizer.vocabulary.pieces
    found: list[dict[str, Any]] = []
    places: list[Word] = []
    for counts in itertools.product(range(1, max_pieces + 1), repeat=masks):
        row, begins = filler.row(text, counts)
        for filling in _search(filler, row, begins, counts, max(top, BEAM)):
            filled = row.copy()
            for begin, pieces in zip(begins.tolist(), filling, strict=True):
                filled[begin : begin + len(pieces)] = pieces
                places.append((filled, begin, begin + len(pieces)))
            spelled = [_spelled(filler, pieces) for pieces in filling]
            found.append(
                {"words": spelled, "pieces": [[names[k] for k in pieces] for pieces in filling]}
            )
    if not found:
        return []
    scores = pseudo_log_likelihoods(filler.model, places).reshape(len(found), masks).sum(axis=1)
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
    candidates = as_texts(candidates, "candidates")
    if text.count(MASK) > 1:
        raise ValueError(f"{text.count(MASK)} [MASK] in the text: candidates are for one")
    if not candidates:
        raise ValueError("no candidates: name one at least")
    vocabulary = filler.tokenizer.vocabulary
    encoded = filler.tokenizer.encode_batch(candidates, offsets=False)
    seen: dict[tuple[int, ...], str] = {}
    words = []
    for number, candidate in enumerate(candidates):
        key = tuple(encoded[number].ids.tolist())
        names = [vocabulary.pieces[piece] for piece in key]
        if not key:
            raise ValueError(f"candidate {candidate!r}: no word in it")
        if vocabulary.unk_id in key:
            raise ValueError(
                f"candidate {candidate!r}: the model's vocabulary cannot spell it (its pieces: "
                f"{' '.join(names)}): leave it out"
            )
        if key in seen:
            raise ValueError(f"candidate {candidate!r}: the same pieces as {seen[key]!r}: drop one")
        seen[key] = candidate
        row, (begin,) = filler.row(text, [len(key)])
        row[begin : begin + len(key)] = key
        words.append((row, int(begin), int(begin) + len(key)))
    log_probabilities = pseudo_log_likelihoods(filler.model, words)
    scores = log_probabilities / np.diff(encoded.boundaries)
    odds = np.exp(scores - scores.max())
    answers = [
        {
            "candidate": candidate,
            "pieces": [vocabulary.pieces[piece] for piece in key],
            "log_probability": float(log_probabilities[number]),
            "score": float(scores[number]),
            "probability": float(odds[number] / odds.sum()),
        }
        for number, (key, candidate) in enumerate(seen.items())
    ]
    return sorted(answers, key=lambda answer: -answer["score"])


def _search(
    filler: MaskFiller, row: np.ndarray, begins: np.ndarray, counts: Sequence[int], width: int
) -> list[list[list[int]]]:
    """The likeliest words of counts[k] pieces at the k-th [MASK]: lists of the words' pieces."""
    vocabulary = filler.tokenizer.vocabulary
    rest = np.zeros_like(filler.answers)
    rest[: len(vocabulary)] = vocabulary.continuation
    starts = filler.answers & ~rest
    starts[vocabulary.unk_id] = False
    allowed_PV = np.stack([rest if place else starts for count in counts for place in range(count)])
    positions = concatenated_ranges(begins, np.array(counts))
    edges = list(itertools.accumulate(counts, initial=0))
    fillings = [
        [list(pieces[a:b]) for a, b in itertools.pairwise(edges)]
        for pieces, _ in filler.search(row, positions, allowed_PV, width)
    ]
    spelled = [_spelled(filler, word) for words in fillings for word in words]
    own = iter(filler.tokenizer.encode_batch(spelled, offsets=False))
    return [words for words in fillings if [next(own).ids.tolist() for _ in words] == words]


def _spelled(filler: MaskFiller, pieces: Sequence[int]) -> str:
    names = filler.tokenizer.vocabulary.pieces
    return "".join(names[piece].removeprefix("##") for piece in pieces)


def pseudo_log_likelihoods(model: Runner, words: Sequence[Word]) -> np.ndarray:
    """The score of each word, see above; rows that several words ask for are computed once."""
    mask_id = model.tokenizer.vocabulary.mask_id
    wanted: dict[tuple[bytes, int], list[tuple[int, int]]] = defaultdict(list)
    for number, (row, begin, end) in enumerate(words):
        masked = row.astype(np.int32)
        for position in range(end - 1, begin - 1, -1):
            masked[position] = mask_id
            wanted[masked.tobytes(), position].append((number, int(row[position])))
    rows, positions = zip(*wanted, strict=True)
    features = row_features(model, [np.frombuffer(row, np.int32) for row in rows])
    counts = np.array([len(asked) for asked in wanted.values()])
    asked = np.array([pair for pairs in wanted.values() for pair in pairs])
    places = features.boundaries[:-1] + positions
    found = model.piece_log_probabilities(features, places, asked[:, 1], counts)
    return np.bincount(asked[:, 0], found, minlength=len(words))


def row_features(model: Runner, rows: Sequence[np.ndarray]) -> Features:
    """Rows of ids, each as it is.

    Errors: ValueError for one longer than the model's positions.
    """
    boundaries = np.cumsum([0, *map(len, rows)])
    ids = np.concatenate(rows).astype(np.int32)
    positions = model.config.max_positions
    features = Features(ids, np.zeros_like(ids), boundaries, None, positions, 0)
    features.check_lengths(positions)
    return features
