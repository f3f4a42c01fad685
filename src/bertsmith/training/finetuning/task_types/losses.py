"""The losses of the task types, summed over examples, and the settings they share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bertsmith.tasks.tagging.features import IGNORED

Batch = dict[str, Tensor]  # of `Features.batch`
Loss = tuple[Tensor, Tensor | None]  # summed over the labels; the number of correct ones or None


@dataclass(frozen=True)
class Objective:
    """Settings of the loss besides the labels."""

    class_weights: Tensor | None = None  # float32 [K]
    focal_gamma: float = 0.0
    """gamma of the focal loss (Lin et al. 2017, arXiv 1708.02002); 0: plain cross-entropy."""
    distillation_weight: float = 0.0
    """Weight of the teacher's answers in the loss; the labels have the rest."""
    temperature: float = 1.0

    def focus(self, correct: Tensor) -> Tensor:
        """The weight (1 - p)^gamma of an example, p being the probability of the correct answer.

        A power below 1 has an infinite slope at 0, where p rounds to 1, and the gradient 0 * inf:
        there 1 - p counts as the smallest number above 0 that it can be.

        >>> Objective(focal_gamma=0.5).focus(torch.tensor([0.75, 1.0])).tolist()
        [0.5, 0.000244140625]
        """
        smallest = SMALLEST_DOUBT if self.focal_gamma < 1 else 0.0
        return (1 - correct).clamp(min=smallest) ** self.focal_gamma

    def mixed(self, soft: Tensor, hard: Tensor) -> Tensor:
        """The loss of a teacher's answers and that of the labels, as one."""
        return self.distillation_weight * soft + (1 - self.distillation_weight) * hard


SMALLEST_DOUBT = 2.0**-24  # the smallest 1 - p above 0 that a p of float32 can have


def class_loss(
    logits_NK: Tensor, labels_N: Tensor, objective: Objective, teacher_NK: Tensor | None = None
) -> Tensor:
    """Cross-entropy in nats, summed: one class of K an example.

    With `focal_gamma` an example counts (1 - p)^gamma, p being the probability of its class; with
    class weights w[label]. Soft labels of a teacher are softmax(teacher / temperature), against
    the student's at that temperature, times temperature^2 (Hinton et al. 2015, arXiv 1503.02531).

    >>> logits, labels = torch.tensor([[0.0, 0.0], [0.0, 9.0]]), torch.tensor([1, 1])
    >>> round(class_loss(logits, labels, Objective()).item(), 3)
    0.693
    >>> round(class_loss(logits, labels, Objective(focal_gamma=2.0)).item(), 3)
    0.173
    """
    weights = objective.class_weights
    if objective.focal_gamma:
        nats_N = F.cross_entropy(logits_NK, labels_N, reduction="none")
        nats_N = nats_N * objective.focus(torch.exp(-nats_N))
        hard = (nats_N if weights is None else nats_N * weights[labels_N]).sum()
    else:
        hard = F.cross_entropy(logits_NK, labels_N, weight=weights, reduction="sum")
    if teacher_NK is None:
        return hard
    soft_labels = (teacher_NK / objective.temperature).softmax(dim=-1)
    logits = logits_NK / objective.temperature
    soft = objective.temperature**2 * F.cross_entropy(logits, soft_labels, reduction="sum")
    return objective.mixed(soft, hard)


def label_set_loss(
    logits_NK: Tensor, labels_NK: Tensor, objective: Objective, teacher_NK: Tensor | None = None
) -> Tensor:
    """Binary cross-entropy in nats of each of K labels of an example, summed.

    Class weights are those of the examples that have a label, as pos_weight of PyTorch. The focal
    loss and a teacher's temperature are as in `class_loss`, a label for itself.
    """
    nats = F.binary_cross_entropy_with_logits(
        logits_NK, labels_NK.float(), reduction="none", pos_weight=objective.class_weights
    )
    if objective.focal_gamma:
        correct = torch.where(labels_NK.bool(), logits_NK.sigmoid(), (-logits_NK).sigmoid())
        nats = nats * objective.focus(correct)
    if teacher_NK is None:
        return nats.sum()
    soft_labels = (teacher_NK / objective.temperature).sigmoid()
    logits = logits_NK / objective.temperature
    soft = F.binary_cross_entropy_with_logits(logits, soft_labels, reduction="sum")
    return objective.mixed(objective.temperature**2 * soft, nats.sum())


def score_loss(
    scores_N: Tensor, labels_N: Tensor, objective: Objective, teacher_N: Tensor | None = None
) -> Tensor:
    """Squared error, summed. A temperature is of logits, which scores are not."""
    hard = F.mse_loss(scores_N, labels_N, reduction="sum")
    if teacher_N is None:
        return hard
    return objective.mixed(F.mse_loss(scores_N, teacher_N, reduction="sum"), hard)


def _one_class(outputs: Tensor, batch: Batch, objective: Objective) -> Loss:
    """Cross-entropy of one class an example."""
    labels = batch["labels"]
    logits = outputs.view(len(labels), -1)  # of options [B * n, 1] -> [B, n]
    loss = class_loss(logits, labels, objective, batch.get("teacher"))
    return loss, (logits.argmax(1) == labels).sum()


def _one_score(outputs: Tensor, batch: Batch, objective: Objective) -> Loss:
    teacher = batch["teacher"][:, 0] if "teacher" in batch else None
    return score_loss(outputs[:, 0], batch["labels"], objective, teacher), None


def _label_set(outputs: Tensor, batch: Batch, objective: Objective) -> Loss:
    labels = batch["labels"]
    loss = label_set_loss(outputs, labels, objective, batch.get("teacher"))
    return loss, ((outputs > 0) == labels).sum()


def _tags(outputs: Tensor, batch: Batch, objective: Objective) -> Loss:
    is_labelled = batch["labels"] != IGNORED  # [B, S]
    logits, labels = outputs[is_labelled], batch["labels"][is_labelled]  # [N, K], [N]
    loss = class_loss(logits, labels, objective)
    return loss, (logits.argmax(1) == labels).sum()


def _span(outputs: Tensor, batch: Batch, objective: Objective) -> Loss:
    """Mean cross-entropy of start and end over the tokens of a window; both must be right.

    A window without the answer has both at [CLS].
    """
    places_S = torch.arange(outputs.shape[1], device=outputs.device)
    is_padding_BS1 = (places_S >= batch["lengths"][:, None])[..., None]
    logits_BS2 = outputs.masked_fill(is_padding_BS1, float("-inf"))
    logits_NS = logits_BS2.transpose(1, 2).flatten(0, 1)  # N = 2B: start, end, start ...
    labels_N = batch["labels"].flatten()
    is_right_B = (logits_NS.argmax(dim=1) == labels_N).view(-1, 2).all(dim=1)
    return class_loss(logits_NS, labels_N, objective) / 2, is_right_B.sum()


LOSSES: dict[str, Callable[[Tensor, Batch, Objective], Loss]] = {
    "classify": _one_class,
    "choice": _one_class,
    "regress": _one_score,
    "multilabel": _label_set,
    "tag": _tags,
    "answer": _span,
}
"""Task type -> the loss of a batch, a differentiable sum."""
