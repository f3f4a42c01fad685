"""What stands behind the [MASK] of a text: each mask by itself, or all of them together."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bertsmith.model.heads import PreTrainingModel
from bertsmith.text.given_texts import texts_of
from bertsmith.text.sequences import pad
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.training.cores import computed, row_batches
from bertsmith.training.engine import Engine

MASK = "[MASK]"
NEVER_ANSWERS = re.compile(r"\[(PAD|CLS|SEP|MASK|unused\d+)\]")
BEAM = 20  # fillings that the search goes on with, or as many as are asked for
BATCH_TOKENS = 1024  # each masked position among them costs a row of the vocabulary's size


class Filling(NamedTuple):
    pieces: tuple[int, ...]  # one a mask, in the order of the text
    log_probability: float


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


def _filled(row: np.ndarray, positions: np.ndarray, state: Sequence[int | None]) -> np.ndarray:
    filled = row.copy()
    for position, piece in zip(positions, state, strict=True):
        if piece is not None:
            filled[position] = piece
    return filled


def _check_top(top: int) -> None:
    if top < 1:
        raise ValueError(f"top = {top}: ask for at least 1 answer")
