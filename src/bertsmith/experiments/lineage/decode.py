"""Beam search over any translation model: the likeliest target, kept a few at a time.

A sentence begins with `beam` places. In every step its open hypotheses are continued by every
piece, and the likeliest continuations take the places. One that ends keeps its place for good: the
beam narrows, nothing ends twice, and a beam of 1 is greedy search.

A finished hypothesis' score is its log probability over a length penalty (Wu et al. 2016, arXiv
1609.08144, section 7), without which the shortest would win. A sentence is done when no open one
can reach its best score; it then leaves the batch.

Letters: N sentences under way, K places of each, R = N x K rows, T pieces so far, V pieces that
there are, H hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bertsmith.experiments.lineage.settings import DecodingSettings
from bertsmith.training.engine import Engine
from bertsmith.training.replicas import computed, row_batches

PAD = 0


class Hypothesis(NamedTuple):
    ids: list[int]  # without begin and end
    log_prob: float  # of these and the end, in nats
    score: float


class TranslationModel(Protocol):
    """The part of a model that the search needs; memory and state are tensors or tuples of them."""

    @property
    def output_weight(self) -> Tensor: ...  # [V, H]

    @property
    def output_bias(self) -> Tensor: ...  # [V]

    def eval(self) -> Any: ...

    def encode(self, source_BS: Tensor, lengths_B: Tensor) -> Any: ...

    def start(self, memory: Any) -> Any: ...

    # hidden states [B, H] behind one piece more
    def step(self, memory: Any, state: Any, token_B: Tensor) -> tuple[Tensor, Any]: ...


class Search(NamedTuple):
    """A model, its marks of begin and end, and how to search."""

    model: TranslationModel
    bos: int
    eos: int
    settings: DecodingSettings


def translate_ids(
    search: Search, sources: Sequence[Sequence[int]], engine: Engine
) -> list[list[Hypothesis]]:
    """The `n_best` hypotheses of each source, best first; sources end with `eos`.

    Sentences of like length are translated together, one batch a core.

    Errors: ValueError for a beam larger than the vocabulary, and for logits that are not finite.
    """
    beam, pieces = search.settings.beam, len(search.model.output_weight)
    if beam > pieces:
        raise ValueError(f"`beam={beam}`: the vocabulary has {pieces} pieces; take a smaller beam")
    search.model.eval()
    lengths = np.array([len(source) for source in sources], np.int64)

    def translate(rows: np.ndarray) -> list[list[Hypothesis]]:
        source_BS = np.full((len(rows), lengths[rows].max()), PAD)
        for row, number in enumerate(rows):
            source_BS[row, : lengths[number]] = sources[number]
        return beam_search(search, engine.tensor(source_BS), engine.tensor(lengths[rows]))

    batches = row_batches(engine, beam * lengths)
    found: list[list[Hypothesis]] = [[] for _ in sources]
    for rows, hypotheses in zip(batches, computed(engine, translate, batches), strict=True):
        for number, own in zip(rows, hypotheses, strict=True):
            found[number] = own
    return found


@dataclass
class Sentence:
    """The part of the search that tensors do not hold."""

    settings: DecodingSettings
    limit: int  # pieces of a translation, its end included
    finished: list[Hypothesis] = field(default_factory=list)

    def end(self, ids: list[int], log_prob: float) -> None:
        score = self.settings.score(log_prob, len(ids) + 1)
        self.finished.append(Hypothesis(ids, log_prob, score))

    def best(self) -> list[Hypothesis]:
        """The finished hypotheses that are wanted, best first."""
        ranked = sorted(self.finished, key=lambda own: -own.score)
        return ranked[: self.settings.n_best]

    def is_done(self, open_log_prob: float) -> bool:
        """True if the likeliest open hypothesis cannot come among the best, at any length."""
        best = self.best()
        worst = best[-1].score if len(best) == self.settings.n_best else -math.inf
        return self.settings.score(open_log_prob, self.limit) <= worst


def beam_search(search: Search, source_BS: Tensor, lengths_B: Tensor) -> list[list[Hypothesis]]:
    """The best hypotheses of each row of a batch; see `translate_ids`."""
    model, bos, eos, settings = search
    beam, size, device = settings.beam, len(model.output_weight), source_BS.device
    sentences = [Sentence(settings, settings.longest(own)) for own in lengths_B.tolist()]
    under_way = sentences
    places_K = torch.arange(beam, device=device)
    rows_R = torch.arange(len(source_BS), device=device).repeat_interleave(beam)
    memory = select(model.encode(source_BS, lengths_B), rows_R)
    state = model.start(memory)
    targets_NKT = torch.full((len(source_BS), beam, 1), bos, device=device)
    # log probabilities; -inf: nothing is open at this place
    open_NK = torch.where(places_K == 0, 0.0, -math.inf).expand(len(source_BS), -1)
    while under_way:
        hidden_RH, state = model.step(memory, state, targets_NKT[:, :, -1].flatten())
        logits_RV = F.linear(hidden_RH, model.output_weight, model.output_bias)
        log_probs_NKV = logits_RV.float().log_softmax(dim=1).view(-1, beam, size)
        log_probs_NKV[:, :, [PAD, bos]] = -math.inf
        length = targets_NKT.shape[2]  # of what ends in this step, its end included
        must_end_N = torch.tensor([own.limit == length for own in under_way], device=device)
        ends_NK = log_probs_NKV[:, :, eos].clone()
        log_probs_NKV.masked_fill_(must_end_N[:, None, None], -math.inf)
        log_probs_NKV[:, :, eos] = ends_NK

        continued_NKV = log_probs_NKV.add_(open_NK[:, :, None])
        scores_NK, before_NK, piece_NK = likeliest(continued_NKV, beam)
        targets_NKT = targets_NKT.take_along_dim(before_NK[:, :, None], dim=1)
        targets_NKT = torch.cat((targets_NKT, piece_NK[:, :, None]), dim=2)
        free_N = torch.tensor([beam - len(own.finished) for own in under_way], device=device)
        scores_NK = scores_NK.masked_fill(places_K >= free_N[:, None], -math.inf)
        ended_NK = (piece_NK == eos) & scores_NK.isfinite()
        for n, k in ended_NK.nonzero().tolist():
            under_way[n].end(targets_NKT[n, k, 1:-1].tolist(), scores_NK[n, k].item())
        open_NK = scores_NK.masked_fill(ended_NK, -math.inf)

        best_N = open_NK.amax(dim=1).tolist()
        if any(map(math.isnan, best_N)):  # no hypothesis would ever end
            raise ValueError("the model's logits are not finite: its weights are damaged")
        kept = [n for n, own in enumerate(under_way) if not own.is_done(best_N[n])]
        kept_N1 = torch.tensor(kept, dtype=torch.int64, device=device)[:, None]
        if len(kept) < len(under_way):
            under_way = [under_way[n] for n in kept]
            memory = select(memory, (beam * kept_N1 + places_K).flatten())
            before_NK, targets_NKT, open_NK = select(
                (before_NK, targets_NKT, open_NK), kept_N1[:, 0]
            )
        state = select(state, (beam * kept_N1 + before_NK).flatten())
    return [own.best() for own in sentences]


def likeliest(values_NKV: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """(Values, k, v) [N, count] of each sentence's largest; of equal ones the lowest k, then v.

    `values_NKV` is destroyed.

    >>> values, places, pieces = likeliest(torch.tensor([[[1.0, 0.0], [2.0, 2.0]]]), 2)
    >>> values.tolist(), places.tolist(), pieces.tolist()
    ([[2.0, 2.0]], [[1, 1]], [[0, 1]])
    """
    sentences_N = torch.arange(len(values_NKV), device=values_NKV.device)
    found = []
    for _ in range(count):  # `topk` takes equal ones in any order
        place_N = values_NKV.amax(dim=2).argmax(dim=1)
        value_N, piece_N = values_NKV[sentences_N, place_N].max(dim=1)
        values_NKV[sentences_N, place_N, piece_N] = -math.inf
        found.append((value_N, place_N, piece_N))
    values, places, pieces = (torch.stack(own, dim=1) for own in zip(*found, strict=True))
    return values, places, pieces


def select(tensors: Any, rows_R: Tensor) -> Any:
    """These rows of a tensor, or of each in a (named) tuple of tensors and tuples."""
    if isinstance(tensors, Tensor):
        return tensors.index_select(0, rows_R)
    chosen = [select(own, rows_R) for own in tensors]
    return type(tensors)(*chosen) if hasattr(tensors, "_fields") else tuple(chosen)
