"""Losses of fine-tuning, summed over examples: plain, weighted, focal, from a teacher."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

LEAST_DOUBT = 2.0**-24  # the smallest 1 - p above 0 that a p of float32 can have


@dataclass(frozen=True)
class Objective:
    """What is asked of the loss besides the labels."""

    class_weights: Tensor | None = None  # float32 [K]
    focal: float = 0.0
    """gamma of the focal loss (Lin et al. 2017, arXiv 1708.02002); 0: plain cross-entropy."""
    teacher_share: float = 0.0
    """Weight of the teacher's distribution in the loss, that of the labels being the rest."""
    temperature: float = 1.0


def class_loss(
    logits_NK: Tensor, labels_N: Tensor, objective: Objective, teacher_NK: Tensor | None = None
) -> Tensor:
    """Cross-entropy in nats, summed: one class of K an example.

    With `focal` gamma an example counts (1 - p)^gamma, p being the probability of its class; with
    class weights w[label]. Soft labels of a teacher are softmax(teacher / temperature), against
    the student's at that temperature, times temperature^2 (Hinton et al. 2015, arXiv 1503.02531).

    >>> logits, labels = torch.tensor([[0.0, 0.0], [0.0, 9.0]]), torch.tensor([1, 1])
    >>> round(class_loss(logits, labels, Objective()).item(), 3)
    0.693
    >>> round(class_loss(logits, labels, Objective(focal=2.0)).item(), 3)
    0.173
    """
    weights = objective.class_weights
    if objective.focal:
        nats_N = F.cross_entropy(logits_NK, labels_N, reduction="none")
        nats_N = nats_N * _focus(torch.exp(-nats_N), objective.focal)
        hard = (nats_N if weights is None else nats_N * weights[labels_N]).sum()
    else:
        hard = F.cross_entropy(logits_NK, labels_N, weight=weights, reduction="sum")
    if teacher_NK is None:
        return hard
    soft_labels = (teacher_NK / objective.temperature).softmax(dim=-1)
    logits = logits_NK / objective.temperature
    soft = objective.temperature**2 * F.cross_entropy(logits, soft_labels, reduction="sum")
    return objective.teacher_share * soft + (1 - objective.teacher_share) * hard


def _focus(right: Tensor, gamma: float) -> Tensor:
    """What an example counts in the focal loss: (1 - p)^gamma, p being the probability of what is
    right.

    A power below 1 has an infinite slope at 0, where p rounds to 1, and the gradient 0 * inf: there
    1 - p counts as the smallest number above 0 that it can be.

    >>> _focus(torch.tensor([0.75, 1.0]), 2.0).tolist(), _focus(torch.tensor(1.0), 0.5).item()
    ([0.0625, 0.0], 0.000244140625)
    """
    least = LEAST_DOUBT if gamma < 1 else 0.0
    return (1 - right).clamp(min=least) ** gamma


def label_set_loss(
    logits_NK: Tensor, labels_NK: Tensor, objective: Objective, teacher_NK: Tensor | None = None
) -> Tensor:
    """Binary cross-entropy in nats of each of K labels of an example, summed.

    Class weights are those of the examples that have a label, as pos_weight of PyTorch. `focal` and
    the temperature of a teacher are as in `class_loss`, a label for itself.
    """
    truth = labels_NK.float()
    nats = F.binary_cross_entropy_with_logits(
        logits_NK, truth, reduction="none", pos_weight=objective.class_weights
    )
    if objective.focal:
        right = torch.where(labels_NK.bool(), logits_NK.sigmoid(), (-logits_NK).sigmoid())
        nats = nats * _focus(right, objective.focal)
    if teacher_NK is None:
        return nats.sum()
    soft_labels = (teacher_NK / objective.temperature).sigmoid()
    logits = logits_NK / objective.temperature
    soft = F.binary_cross_entropy_with_logits(logits, soft_labels, reduction="sum")
    soft = objective.temperature**2 * soft
    return objective.teacher_share * soft + (1 - objective.teacher_share) * nats.sum()


def score_loss(
    scores_N: Tensor, labels_N: Tensor, objective: Objective, teacher_N: Tensor | None = None
) -> Tensor:
    """Squared error, summed. A temperature is of logits, which scores are not."""
    hard = F.mse_loss(scores_N, labels_N, reduction="sum")
    if teacher_N is None:
        return hard
    soft = F.mse_loss(scores_N, teacher_N, reduction="sum")
    return objective.teacher_share * soft + (1 - objective.teacher_share) * hard


def balanced_weights(labels: np.ndarray, num_classes: int) -> np.ndarray:
    """A weight a class that makes every class count alike, float32 [K].

    Classes int [N]: N / (K count), scikit-learn's "balanced"; their mean over the examples is 1.
    Label sets bool [N, K]: examples without over examples with a label. A class without an example
    counts 1, and a label that every example has.

    >>> balanced_weights(np.array([0, 0, 0, 0, 0, 0, 1, 1]), 2).tolist()[1]
    2.0
    """
    if labels.ndim == 2:
        have = labels.sum(axis=0)
        lack = len(labels) - have
        weights = np.where((have > 0) & (lack > 0), lack / np.maximum(have, 1), 1.0)
    else:
        have = np.bincount(labels, minlength=num_classes)
        weights = np.where(have, len(labels) / (num_classes * np.maximum(have, 1)), 1.0)
    return weights.astype(np.float32)


def entropy(labels: np.ndarray) -> float:
    """Of classes int [N], in nats: what the cross-entropy is when only their shares are known.

    >>> round(entropy(np.array([0, 1, 1, 0])), 3)
    0.693
    """
    shares = np.bincount(labels) / len(labels)
    shares = shares[shares > 0]
    return float(-(shares * np.log(shares)).sum())
