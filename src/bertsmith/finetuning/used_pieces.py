"""Fine-tuning with the rows of the token table that its data uses.

A task's texts have a few thousand of the vocabulary's pieces. The other rows have no gradient: all
that AdamW does to them is decay them, each step by one factor for all. Yet half of a small model's
weights are such rows, and the optimizer would read and write them in every step. So they are left
out while training goes on, and come back decayed at its end: the same weights, up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from bertsmith.model.heads import TaskModel
from bertsmith.tasks.features import Features


class UsedPieces:
    """The pieces that some features have, and the token table of a model without the others.

    One row that is not used stays, the longest: what becomes of it is what decay does to all.
    """

    def __init__(self, features: Sequence[Features], table: torch.Tensor, pad_id: int) -> None:
        """`table` [V, H] is that of the model before training."""
        counts = np.zeros(len(table), np.int64)
        for part in features:
            counts += np.bincount(part.ids, minlength=len(table))
        used = counts > 0
        used[pad_id] = True
        unused = np.flatnonzero(~used)
        self.witness = None
        if len(unused):
            norms = table.detach().norm(dim=1).cpu().numpy()
            self.witness = int(unused[norms[unused].argmax()])
            used[self.witness] = True
        self.rows = np.flatnonzero(used)  # int64 [U]
        self._places = np.zeros(len(table), np.int32)
        self._places[self.rows] = np.arange(len(self.rows), dtype=np.int32)

    def renumbered(self, features: Features) -> Features:
        """The features for the smaller table."""
        return replace(features, ids=self._places[features.ids])

    def shrink(self, model: TaskModel) -> None:
        """Take the rows that are not used out of the model."""
        table = model.encoder.embeddings.token
        self._whole = table.weight.detach()
        rows = torch.from_numpy(self.rows).to(table.weight.device)
        self._set(model, self._whole[rows], int(self._places[model.config.pad_id]))

    def grow(self, model: TaskModel) -> None:
        """Put them back, decayed as the witness was."""
        trained = model.encoder.embeddings.token.weight.detach()
        pad_id = int(self.rows[model.config.pad_id])
        whole = self._whole
        if self.witness is not None:
            before = whole[self.witness].double()
            after = trained[int(self._places[self.witness])].double()
            norm = (before @ before).item()
            if norm > 0:  # else they all are zeros, which decay leaves as they are
                whole = whole * ((before @ after).item() / norm)
        whole = whole.clone()
        whole[torch.from_numpy(self.rows).to(whole.device)] = trained
        self._set(model, whole, pad_id)

    @staticmethod
    def _set(model: TaskModel, weight: torch.Tensor, pad_id: int) -> None:
        model.encoder.embeddings.token = nn.Embedding.from_pretrained(weight, freeze=False)
        config = replace(model.config, vocab_size=len(weight), pad_id=pad_id)
        model.config = model.encoder.config = config
