"""Logits of a classifier for many examples, in length-sorted batches of a token budget."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from bertsmith.model.heads import SequenceClassifier
from bertsmith.tasks.features import Features, token_budget_batches


def logits(
    model: SequenceClassifier,
    features: Features,
    pad_id: int,
    budget_tokens: int = 8192,
    device: torch.device | str = "cpu",
    autocast: torch.dtype | None = None,
    on_batch: Callable[[int], None] | None = None,
) -> np.ndarray:
    """Class scores, float32 [N, K], in the order of the examples; dropout is off.

    `autocast` is the precision of the matrix products (None: that of the weights). `on_batch` is
    told after each batch how many examples were in it.
    """
    scores = np.empty((len(features), model.classifier.out_features), np.float32)
    kind = torch.device(device).type
    training = model.training
    model.eval()
    with (
        torch.inference_mode(),
        torch.autocast(kind, dtype=autocast, enabled=autocast is not None),
    ):
        for indices in token_budget_batches(features.lengths, budget_tokens):
            arrays = features.padded(indices, pad_id)
            batch = (torch.from_numpy(array).to(device) for array in arrays)
            scores[indices] = model(*batch).float().cpu().numpy()
            if on_batch:
                on_batch(len(indices))
    model.train(training)
    return scores
