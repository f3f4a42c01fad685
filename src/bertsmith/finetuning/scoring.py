"""Outputs of a fine-tuned model for many rows, in length-sorted batches of a token budget."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from bertsmith.model.heads import TaskModel
from bertsmith.tasks.features import Features
from bertsmith.text.sequences import concatenated_ranges
from bertsmith.training.cores import computed, row_batches
from bertsmith.training.engine import Engine


def head_outputs(
    model: TaskModel,
    features: Features,
    pad_id: int,
    engine: Engine,
    budget_tokens: int = 8192,
    on_batch: Callable[[int], None] | None = None,
) -> np.ndarray:
    """What the head gives, in the order of the rows, float32; dropout is off.

    [R, K] where it gives K numbers a row, [T, K] where it gives them for every token.
    `on_batch` is told after each batch how many rows were in it.
    """
    outputs = np.empty((0, model.num_outputs), np.float32)
    training = model.training
    model.eval()

    def given(rows: np.ndarray) -> np.ndarray:
        batch = map(engine.tensor, features.padded(rows, pad_id))
        return model(*batch).float().cpu().numpy()

    batches = row_batches(engine, features.lengths, budget_tokens)
    for rows, found in zip(batches, computed(engine, given, batches), strict=True):
        of_tokens = found.ndim == 3
        if not len(outputs):
            size = len(features.ids) if of_tokens else len(features)
            outputs = np.empty((size, model.num_outputs), np.float32)
        if of_tokens:
            lengths = features.lengths[rows]
            places = concatenated_ranges(features.boundaries[rows], lengths)
            outputs[places] = found[np.arange(found.shape[1]) < lengths[:, None]]
        else:
            outputs[rows] = found
        if on_batch:
            on_batch(len(rows))
    model.train(training)
    return outputs
