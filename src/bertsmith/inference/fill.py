"""Answers for the [MASK] of a text: each mask by itself, all together, or whole words.

The score of a word of pieces w1 ... wn in its text (Kauf and Ivanova 2023, arXiv 2305.10588, after
Salazar et al. 2020, arXiv 1910.14659): each piece is masked in turn, and with it the pieces of the
word behind it,

    log p(w1 | text) + log p(w2 | text, w1) + ... + log p(wn | text, w1 ... wn-1)

where `text` is all that stands around the word. Were the pieces behind it shown, "so [MASK]" with
"##uvenir" would be certain, and rare words of many pieces would win everywhere.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bertsmith.model.heads import PreTrainingModel
from bertsmith.text.tokenizer.rows import concatenated_ranges, pad
from bertsmith.text.tokenizer.tokenizer import Tokenizer, texts_of
from bertsmith.training.engine import Engine
from bertsmith.training.replicas import computed, row_batches

MASK = "[MASK]"
NEVER_ANSWERS = re.compile(r"\[(PAD|CLS|SEP|MASK|unused\d+)\]")
BEAM = 20  # fillings that the search goes on with, or as many as are asked for
BATCH_TOKENS = 1024  # each masked position among them costs a row of the vocabulary's size
MAX_COMBINATIONS = 64  # of the masks' numbers of pieces; each is a search of its own


class MaskFiller:
    """Fills the masks of texts with the masked-LM head of a model.

    P is the number of masks in a row, V the size of the model's table of pieces.
    """

    def __init__(self, model: PreTrainingModel, tokenizer: Tokenizer, engine: Engine) -> None:
        assert not model.config.causal
        self.model, self.tokenizer, self.engine = model, tokenizer, engine

    def pieces(self, texts: str | Iterable[str], top: int = 5) -> list[Any]:
        """The `top` likeliest pieces at each [MASK] by itself: see `Predictor.fill`."""
        _check_top(top)
        laid = [self.layout(text) for text in texts_of(texts)]
        rows, begins = [row for row, _ in laid], [places for _, places in laid]
        answers: list[Any] = [None] * len(laid)
        for number, scores in self.log_probabilities(rows, begins):
            answers[number] = self._best(scores, top)
        return answers[0] if isinstance(texts, str) else answers

    def _best(self, scores_PV: Tensor, top: int) -> list[list[dict[str, Any]]]:
        scores_PV = scores_PV.masked_fill(~self.answers, -torch.inf)
        best = scores_PV.topk(min(top, int(self.answers.sum())))
        names = self.tokenizer.vocabulary.pieces
        return [
            [
                {"token": names[number], "id": number, "probability": probability}
                for number, probability in zip(numbers, values, strict=True)
            ]
            for numbers, values in zip(
                best.indices.tolist(), best.values.exp().tolist(), strict=True
            )
        ]

    def joint(self, text: str, top: int = 5) -> list[dict[str, Any]]:
        """The `top` likeliest ways to fill all masks together, best first: see `search`.

        Returns {"tokens": ["cat", "mat"], "log_probability": -2.1, "probability": 0.12} for each.

        Errors: as `pieces`.
        """
        _check_top(top)
        row, begins = self.layout(text)
        allowed_PV = self.answers.expand(len(begins), -1)
        names = self.tokenizer.vocabulary.pieces
        return [
            {
                "tokens": [names[piece] for piece in filling.pieces],
                "log_probability": filling.log_probability,
                "probability": float(np.exp(filling.log_probability)),
            }
            for filling in self.search(row, begins, allowed_PV, max(top, BEAM))[:top]
        ]

    def layout(self, text: str, counts: Sequence[int] = ()) -> tuple[np.ndarray, np.ndarray]:
        """[CLS] text [SEP] with counts[k] masks (default: one) where the k-th [MASK] stands.

        Returns the ids, int64 [S], and where each [MASK] begins, int64 [P]. The tokenizer itself
        would split "[MASK]".

        Errors: ValueError for several texts, one without [MASK], or longer than the model's
        positions.
        """
        if not isinstance(text, str):
            raise ValueError(f"text is {type(text).__name__}: expected one text (str) with [MASK]")
        vocabulary = self.tokenizer.vocabulary
        parts = text.split(MASK)
        if len(parts) == 1:
            raise ValueError(f'no [MASK] in "{text:.60}": write it such as "The [MASK] sat."')
        encoded = self.tokenizer.encode_batch(parts)
        sizes = np.array(counts or [1] * (len(parts) - 1))
        ends = encoded.boundaries[1:-1]
        ids = np.insert(encoded.ids.astype(np.int64), ends.repeat(sizes), vocabulary.mask_id)
        row = np.concatenate([[vocabulary.cls_id], ids, [vocabulary.sep_id]])
        if len(row) > self.model.config.max_positions:
            raise ValueError(
                f'"{text:.60}" has {len(row)} tokens with [CLS] and [SEP], but the model knows '
                f"{self.model.config.max_positions} positions: shorten the text"
            )
        return row, 1 + ends + np.cumsum(sizes) - sizes

    def search(
        self, row: np.ndarray, positions: np.ndarray, allowed_PV: Tensor, width: int
    ) -> list[Filling]:
        """Beam search over the pieces at the masked `positions` [P] of a row, likeliest first.

        The mask of which the model is surest is filled first, the others are looked at again with
        that piece in place, and so on. A filling's log-probability is the sum of those of its
        pieces, each given the pieces that were filled before it. A masked LM does not promise that
        another order gives the same sum; of the orders that were tried the best one counts.
        """
        beam: dict[tuple[int | None, ...], float] = {(None,) * len(positions): 0.0}
        for _ in positions:
            states, found = list(beam), {}
            still_open = [[k for k, piece in enumerate(s) if piece is None] for s in states]
            rows = [_filled(row, positions, state) for state in states]
            for number, scores_OV in self.log_probabilities(
                rows, [positions[places] for places in still_open]
            ):
                state, places = states[number], still_open[number]
                scores_OV = scores_OV.masked_fill(~allowed_PV[places], -torch.inf)
                best = scores_OV.topk(min(width, scores_OV.shape[1]))
                surest = int(best.values[:, 0].argmax())
                place = places[surest]
                for piece, value in zip(
                    best.indices[surest].tolist(), best.values[surest].tolist(), strict=True
                ):
                    if value > -np.inf:
                        filled = (*state[:place], piece, *state[place + 1 :])
                        total = beam[state] + value
                        found[filled] = max(found.get(filled, -np.inf), total)
            beam = dict(sorted(found.items(), key=lambda item: -item[1])[:width])
        return [
            Filling(tuple(piece for piece in state if piece is not None), score)
            for state, score in beam.items()
        ]

    def log_probabilities(
        self, rows: Sequence[np.ndarray], positions: Sequence[np.ndarray]
    ) -> Iterator[tuple[int, Tensor]]:
        """(k, log-probabilities float32 [P, V] at `positions[k]` of row k) for all rows.

        They come in the order of the rows' lengths; what is kept of them is for the caller to say.
        """
        if not rows:
            return
        pad_id, tensor = self.tokenizer.vocabulary.pad_id, self.engine.tensor
        lengths = np.array([len(row) for row in rows])
        boundaries = np.concatenate([[0], np.cumsum(lengths)])
        ids = np.concatenate(rows)

        def scores_of(chosen: np.ndarray) -> Tensor:
            width = int(lengths[chosen].max())
            input_ids = tensor(pad(ids, boundaries, chosen, width, pad_id))
            is_full = (lengths[chosen] == width).all()
            most = max(len(positions[k]) for k in chosen)
            wanted = np.zeros((len(chosen), most), np.int64)
            for place, k in enumerate(chosen):
                wanted[place, : len(positions[k])] = positions[k]
            logits = self.model(
                input_ids,
                torch.zeros_like(input_ids),
                None if is_full else tensor(lengths[chosen]),
                tensor(wanted),
            ).mlm_logits
            return logits.float().log_softmax(dim=-1).unflatten(0, wanted.shape)

        batches = row_batches(self.engine, lengths, BATCH_TOKENS)
        scores = computed(self.engine, scores_of, batches)
        for chosen, scores_BPV in zip(batches, scores, strict=True):
            for place, k in enumerate(chosen.tolist()):
                yield k, scores_BPV[place, : len(positions[k])]

    @functools.cached_property
    def answers(self) -> Tensor:
        """bool [V]: the pieces that are offered, not [PAD], [CLS], [SEP], [MASK] and [unused]."""
        offered = torch.zeros(self.model.config.vocab_size, dtype=torch.bool)
        for number, piece in enumerate(self.tokenizer.vocabulary.pieces):
            offered[number] = not NEVER_ANSWERS.fullmatch(piece)
        return offered.to(self.engine.device)


class Filling(NamedTuple):
    pieces: tuple[int, ...]  # one a mask, in the order of the text
    log_probability: float


def _filled(row: np.ndarray, positions: np.ndarray, state: Sequence[int | None]) -> np.ndarray:
    filled = row.copy()
    for position, piece in zip(positions, state, strict=True):
        if piece is not None:
            filled[position] = piece
    return filled


def _check_top(top: int) -> None:
    if top < 1:
        raise ValueError(f"top = {top}: ask for at least 1 answer")


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
    names = filler.tokenizer.vocabulary.pieces
    found: list[dict[str, Any]] = []
    words: list[Word] = []
    for counts in itertools.product(range(1, max_pieces + 1), repeat=masks):
        row, begins = filler.layout(text, counts)
        for pieces in _search(filler, row, begins, counts, max(top, BEAM)):
            filled = row.copy()
            for begin, own in zip(begins, pieces, strict=True):
                filled[begin : begin + len(own)] = own
                words.append(Word(filled, int(begin), int(begin) + len(own)))
            found.append(
                {
                    "words": [_spelled(filler, own) for own in pieces],
                    "pieces": [[names[piece] for piece in own] for own in pieces],
                }
            )
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
    vocabulary = filler.tokenizer.vocabulary
    rest = torch.zeros_like(filler.answers)
    rest[: len(vocabulary)] = torch.from_numpy(vocabulary.continuation.copy()).to(rest.device)
    starts = filler.answers & ~rest
    starts[vocabulary.unk_id] = False
    allowed_PV = torch.stack(
        [rest if place else starts for count in counts for place in range(count)]
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


def _spelled(filler: MaskFiller, pieces: Sequence[int]) -> str:
    names = filler.tokenizer.vocabulary.pieces
    return "".join(names[piece].removeprefix("##") for piece in pieces)


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
