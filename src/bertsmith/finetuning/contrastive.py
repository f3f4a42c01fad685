"""Training sentence vectors from pairs that belong together, with the batch as what does not.

Multiple negatives ranking loss (Henderson et al. 2017, arXiv 1705.00652; with cosines, Gao et al.
2021, arXiv 2104.08821): of a group of G pairs (a_k, b_k), a_k must find b_k among b_1 ... b_G by
softmax over scale * cos(a_k, b_j).

A group is one micro-batch of the loop: the cosines of a pair with all others must be computed
where all of them are. A step holds one group or more, which do not see each other, and the cores
compute them side by side; that the group has a size of its own keeps the result independent of
how many cores there are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bertsmith.checkpoints.folder import BareModel
from bertsmith.corpus.stream import Position
from bertsmith.finetuning.sentence_vectors import Pool, pooled, text_features
from bertsmith.model.operations import training_operations
from bertsmith.tasks.features import Features, training_batches
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.training.engine import Engine
from bertsmith.training.task import StepBatch


@dataclass(frozen=True)
class PairFeatures:
    """N pairs: row k is the first text of pair k, row N + k its second text."""

    rows: Features  # 2 N
    texts: np.ndarray  # int64 [2 N], the number of the row's text among the distinct ones

    def __len__(self) -> int:
        return len(self.texts) // 2

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, firsts: Sequence[str], seconds: Sequence[str], max_length: int
    ) -> PairFeatures:
        texts = [*firsts, *seconds]
        numbers: dict[str, int] = {}
        distinct = np.array([numbers.setdefault(text.strip(), len(numbers)) for text in texts])
        return cls(text_features(tokenizer, texts, max_length), distinct)


def ranking_loss(
    firsts_GH: Tensor, seconds_GH: Tensor, texts_2G: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """(loss summed over a group of pairs, how many first texts are nearest to their own second).

    texts_2G: numbers of the texts. A second text is no negative where it, or a text it is paired
    with, is also the first text's own: data with several partners a text would else teach that
    they are unlike.
    """
    scores_GG = scale * F.normalize(firsts_GH, dim=1) @ F.normalize(seconds_GH, dim=1).T
    first, second = texts_2G.chunk(2)
    own = torch.arange(len(first), device=first.device)
    alike_GG = (first[:, None] == first) | (second[:, None] == second) | (first[:, None] == second)
    alike_GG[own, own] = False
    scores_GG = scores_GG.masked_fill(alike_GG, -torch.inf)
    loss = F.cross_entropy(scores_GG, own, reduction="sum")
    return loss, (scores_GG.argmax(dim=1) == own).sum()


class Contrastive:
    """The loop's task. A position's index counts batches, not pairs."""

    def __init__(
        self,
        model: BareModel,
        pairs: PairFeatures,
        engine: Engine,
        evaluate: Callable[[], dict[str, float]],
        *,
        batch: int,
        group: int,
        scale: float,
        pool: Pool,
        seed: int,
    ) -> None:
        self.model, self.pairs, self.engine, self.evaluate = model, pairs, engine, evaluate
        self.batch_size, self.group, self.scale, self.seed = batch, group, scale, seed
        self.pool: Pool = pool
        self.batches_per_epoch = len(self._batches(0))
        self._batches = functools.lru_cache(maxsize=2)(self._batches)

    def _batches(self, epoch: int) -> list[np.ndarray]:
        lengths = self.pairs.rows.lengths.reshape(2, -1).max(axis=0)
        return training_batches(lengths, self.batch_size, self.seed, epoch)

    def batch(self, position: Position) -> tuple[StepBatch, Position]:
        pairs = self._batches(position.epoch)[position.index]
        groups = []
        for part in np.array_split(pairs, -(-len(pairs) // self.group)):
            chosen = np.concatenate([part, part + len(self.pairs)])
            ids, types, lengths = self.pairs.rows.padded(chosen, self.model.config.pad_id)
            arrays = {"ids": ids, "types": types, "lengths": lengths}
            groups.append({**arrays, "texts": self.pairs.texts[chosen]})
        tokens = sum(int(group["lengths"].sum()) for group in groups)
        return StepBatch(groups, {"pairs": len(pairs)}, tokens), self.advance(position)

    def advance(self, position: Position) -> Position:
        if position.index + 1 < self.batches_per_epoch:
            return Position(position.epoch, position.index + 1)
        return Position(position.epoch + 1, 0)

    def loss(
        self, model: BareModel, micro: dict[str, np.ndarray], counts: dict[str, int]
    ) -> tuple[Tensor, dict[str, Tensor | float]]:
        tensor = self.engine.tensor
        lengths = tensor(micro["lengths"])
        hidden_BSH = model.encoder(tensor(micro["ids"]), tensor(micro["types"]), lengths)
        assert isinstance(hidden_BSH, Tensor)
        vectors_BH = pooled(hidden_BSH.float(), lengths, self.pool)
        firsts, seconds = vectors_BH.chunk(2)
        loss, right = ranking_loss(firsts, seconds, tensor(micro["texts"]), self.scale)
        return loss / counts["pairs"], {"right": right, "pairs": float(len(firsts))}

    def figures(self, window: dict[str, float]) -> dict[str, float]:
        return {"accuracy": window["right"] / window["pairs"]}

    def operations(self, batch: StepBatch) -> float:
        config = self.model.config
        shapes = [group["ids"].shape for group in batch.micro_batches]
        return sum(training_operations(config, rows, size, size, 0) for rows, size in shapes)
