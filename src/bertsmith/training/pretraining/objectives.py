"""Inputs, losses and figures of the objectives (paper section 3.1)."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from bertsmith.corpus.examples.pairs import PretrainingBatch
from bertsmith.corpus.examples.settings import NEXT_TOKEN, PAIR_NAMES, Objective
from bertsmith.model.heads import PreTrainingModel, Targets
from bertsmith.model.kernels.masked_lm_loss import UNUSED
from bertsmith.training.engine import Engine


def even_order(lengths: np.ndarray, size: int) -> np.ndarray:
    """The order int64 [B] of rows of which every `size` in turn have about as many tokens.

    The longest row that is left goes where fewest tokens are. Rows of one length stay.

    >>> even_order(np.array([9, 8, 2, 7, 1]), 2)
    array([0, 4, 1, 2, 3])
    >>> even_order(np.array([9, 9, 9]), 1)
    array([0, 1, 2])
    """
    count = -(-len(lengths) // size)
    if (lengths == lengths[0]).all():
        return np.arange(len(lengths))
    room = [size] * (count - 1) + [len(lengths) - size * (count - 1)]
    batches: list[list[int]] = [[] for _ in range(count)]
    tokens = [(0, number) for number in range(count)]  # a heap of batches that have room
    for row in np.argsort(-lengths, kind="stable").tolist():
        sum_so_far, number = heappop(tokens)
        batches[number].append(row)
        if len(batches[number]) < room[number]:
            heappush(tokens, (sum_so_far + int(lengths[row]), number))
    return np.concatenate([np.sort(batch) for batch in batches])


def micro_arrays(
    batch: PretrainingBatch, objective: Objective, start: int, stop: int, static: bool = False
) -> dict[str, np.ndarray]:
    """Rows start..stop as the arrays that a forward pass reads.

    With `static` slots without a prediction stay, labelled `UNUSED`, for constant shapes.
    """
    weights = batch.masked_weights[start:stop] > 0
    labels = np.where(weights, batch.masked_labels[start:stop], UNUSED).astype(np.int64)
    if objective in NEXT_TOKEN:  # every position but the last of a row predicts: none is picked
        last = ((0, 0), (0, 1))
        weights, labels = np.pad(weights, last), np.pad(labels, last, constant_values=UNUSED)
    micro = {
        "ids": batch.input_ids[start:stop],
        "types": batch.token_types[start:stop],
        "lengths": batch.lengths[start:stop],
        "labels": labels.flatten() if static else labels[weights],
    }
    if not static:
        micro["masked"] = np.flatnonzero(weights)
    if objective in NEXT_TOKEN:
        return micro
    micro["positions"] = batch.masked_positions[start:stop].astype(np.int64)
    if objective in PAIR_NAMES:
        micro["next"] = batch.next_labels[start:stop]
    return micro


def pretraining_sums(
    model: PreTrainingModel,
    micro: dict[str, np.ndarray],
    engine: Engine,
    losses: Callable[..., Any] | None = None,
) -> dict[str, Tensor | float]:
    """Summed losses (nats), correct predictions and their number, by `losses` or the model's own.

    "mlm_..." are those of the tokens and "nsp_..." those of the pairs, whatever the objective;
    "rtl_..." those of the tokens from the right where the model reads in two directions.
    """
    full = bool((micro["lengths"] == micro["ids"].shape[1]).all())
    if engine.static_shapes and "next" in micro:
        full = False  # a batch of pairs that happens to be full would be compiled again
    batch = {name: engine.tensor(array) for name, array in micro.items()}
    picks = batch.get("positions"), batch.get("masked")
    targets = Targets(*picks, batch["labels"], batch.get("words"), next_sentence="next" in batch)
    lengths = None if full else batch["lengths"]
    output = (losses or model.losses)(batch["ids"], batch["types"], lengths, targets)
    sums: dict[str, Tensor | float] = {
        "mlm_loss": output.mlm_loss,
        "mlm_right": output.mlm_right,
        "masked": float((micro["labels"] != UNUSED).sum()),
        "rows": float(len(micro["ids"])),
    }
    if output.nsp_logits is not None:
        logits, following = output.nsp_logits.float(), batch["next"]
        sums["nsp_loss"] = F.cross_entropy(logits, following, reduction="sum")
        sums["nsp_right"] = (logits.argmax(1) == following).sum()
    if output.rtl_loss is not None and output.rtl_right is not None:
        sums |= {"rtl_loss": output.rtl_loss, "rtl_right": output.rtl_right}
    if output.bow_loss is not None:
        sums["bow_loss"] = output.bow_loss
        sums["words"] = float((micro["words"] != UNUSED).sum())
    return sums


def token_name(objective: Objective) -> str:
    """Prefix of the figures of predicted tokens."""
    return "ltr" if objective in NEXT_TOKEN else "mlm"


def named_figures(objective: Objective, sums: dict[str, Any]) -> dict[str, float]:
    """Mean losses (nats) and accuracies under the objective's names.

    >>> sums = {"mlm_loss": 60.0, "mlm_right": 5.0, "masked": 20.0}
    >>> named_figures("ltr", sums)
    {'ltr_loss': 3.0, 'ltr_accuracy': 0.25}
    """
    token, pair = token_name(objective), PAIR_NAMES.get(objective)
    figures = {
        f"{token}_loss": sums["mlm_loss"] / sums["masked"],
        f"{token}_accuracy": sums["mlm_right"] / sums["masked"],
    }
    if pair:
        figures[f"{pair}_loss"] = sums["nsp_loss"] / sums["rows"]
        figures[f"{pair}_accuracy"] = sums["nsp_right"] / sums["rows"]
    if "rtl_loss" in sums:
        figures["rtl_loss"] = sums["rtl_loss"] / sums["masked"]
        figures["rtl_accuracy"] = sums["rtl_right"] / sums["masked"]
    if "words" in sums:
        figures["bow_loss"] = sums["bow_loss"] / sums["words"]
    return figures
