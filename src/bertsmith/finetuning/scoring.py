"""Outputs of a fine-tuned model for many rows, in length-sorted batches of a token budget."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from bertsmith.model.heads import TaskModel
from bertsmith.tasks.features import Features, token_budget_batches
from bertsmith.text.sequences import concatenated_ranges


def head_outputs(
    model: TaskModel,
    features: Features,
    pad_id: int,
    budget_tokens: int = 8192,
    device: torch.device | str = "cpu",
    autocast: torch.dtype | None = None,
    on_batch: Callable[[int], None] | None = None,
) -> np.ndarray:
    """What the head gives, in the order of the rows, float32; dropout is off.

    [R, K] where it gives K numbers a row, [T, K] where it gives them for every token.
    `autocast` is the precision of the matrix products (None: that of the weights). `on_batch` is
    told after each batch how many rows were in it.
    """
    outputs = np.empty((0, model.num_outputs), np.float32)
    kind = torch.device(device).type
    training = model.training
    model.eval()
    with (
        torch.inference_mode(),
        torch.autocast(kind, dtype=autocast, enabled=autocast is not None),
    ):
        for rows in token_budget_batches(features.lengths, budget_tokens):
            arrays = features.padded(rows, pad_id)
            batch = (torch.from_numpy(array).to(device) for array in arrays)
            given = model(*batch).float().cpu().numpy()
            of_tokens = given.ndim == 3
            if not len(outputs):
                size = len(features.ids) if of_tokens else len(features)
                outputs = np.empty((size, model.num_outputs), np.float32)
            if of_tokens:
                lengths = features.lengths[rows]
                places = concatenated_ranges(features.boundaries[rows], lengths)
                given = given[np.arange(given.shape[1]) < lengths[:, None]]
                outputs[places] = given
            else:
                outputs[rows] = given
            if on_batch:
                on_batch(len(rows))
    model.train(training)
    return outputs
