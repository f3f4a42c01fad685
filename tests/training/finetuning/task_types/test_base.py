"""Losses against PyTorch's own, against the formulas of the papers, and by hand."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from bertsmith.training.finetuning.task_types.base import balanced_weights
from bertsmith.training.finetuning.task_types.losses import (
    Objective,
    class_loss,
    label_set_loss,
    score_loss,
)

GENERATOR = torch.Generator().manual_seed(1)
LOGITS = torch.randn(7, 4, generator=GENERATOR) * 3
CLASSES = torch.tensor([0, 3, 1, 1, 2, 0, 3])
SETS = torch.rand(7, 4, generator=GENERATOR) > 0.6
TEACHER = torch.randn(7, 4, generator=GENERATOR) * 3
WEIGHTS = torch.tensor([0.5, 2.0, 1.0, 3.0])


@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_classes_are_pytorchs_cross_entropy(weights):
    expected = F.cross_entropy(LOGITS, CLASSES, weight=weights, reduction="sum")
    torch.testing.assert_close(class_loss(LOGITS, CLASSES, Objective(weights)), expected)


@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_focal_loss_is_that_of_the_paper(weights):
    """FL(p) = -alpha (1 - p)^gamma log(p), arXiv 1708.02002, equation 5, one example at a time."""
    expected = 0.0
    for logits, label in zip(LOGITS.tolist(), CLASSES.tolist(), strict=True):
        p = math.exp(logits[label]) / sum(map(math.exp, logits))
        alpha = 1.0 if weights is None else weights[label].item()
        expected -= alpha * (1 - p) ** 1.5 * math.log(p)
    loss = class_loss(LOGITS, CLASSES, Objective(weights, focal_gamma=1.5))
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_focal_loss_without_focus_is_cross_entropy():
    near = class_loss(LOGITS, CLASSES, Objective(focal_gamma=1e-9))
    torch.testing.assert_close(near, class_loss(LOGITS, CLASSES, Objective()))


@pytest.mark.parametrize("gamma", [1e-3, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("loss", [class_loss, label_set_loss])
def test_focal_gradients_are_finite_where_the_model_is_certain(loss, gamma):
    """Certain to all digits, right and wrong, nearly so, and not at all."""
    rows = [[200.0, -200.0], [-200.0, 200.0], [9.0, -9.0], [8.0, -8.0], [0.0, 0.0]]
    logits = torch.tensor(rows, requires_grad=True)
    labels = torch.tensor([0, 0, 0, 0, 1])
    if loss is label_set_loss:
        labels = F.one_hot(labels, 2).bool()
    loss(logits, labels, Objective(focal_gamma=gamma)).backward()
    assert logits.grad is not None and logits.grad.isfinite().all()


@pytest.mark.parametrize("gamma", [1.0, 2.0])
def test_a_focus_of_one_or_more_is_the_papers_to_the_last_bit(gamma):
    logits = torch.tensor([[30.0, 0.0], [16.0, 0.0], [15.0, 0.0], [1.0, 0.0]])
    labels = torch.tensor([0, 0, 0, 0])
    nats = F.cross_entropy(logits, labels, reduction="none")
    assert nats[0] == 0  # no doubt is left
    expected = (nats * (1 - (-nats).exp()) ** gamma).sum()
    assert torch.equal(class_loss(logits, labels, Objective(focal_gamma=gamma)), expected)


def test_a_teachers_classes_are_hintons():
    """T^2 times the cross-entropy with the teacher's soft labels: T^2 (KL + the teacher's entropy).

    The entropy does not hang on the student.
    """
    soft = Objective(distillation_weight=1.0, temperature=2.5)
    log_teacher = (TEACHER / 2.5).log_softmax(-1)
    log_student = (LOGITS / 2.5).log_softmax(-1)
    kl = F.kl_div(log_student, log_teacher, log_target=True, reduction="sum")
    entropy = -(log_teacher.exp() * log_teacher).sum()
    expected = 2.5**2 * (kl + entropy)
    torch.testing.assert_close(class_loss(LOGITS, CLASSES, soft, TEACHER), expected)
    mixed = Objective(WEIGHTS, focal_gamma=1.0, distillation_weight=0.3, temperature=2.5)
    hard = class_loss(LOGITS, CLASSES, Objective(WEIGHTS, focal_gamma=1.0))
    torch.testing.assert_close(
        class_loss(LOGITS, CLASSES, mixed, TEACHER), 0.3 * expected + 0.7 * hard
    )


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_a_label_of_a_set_is_taught_as_a_class_of_two(temperature):
    """sigmoid(x) is the first class of softmax(x, 0)."""
    soft = Objective(distillation_weight=0.7, temperature=temperature)

    def two(logits):
        return torch.stack([logits.flatten(), torch.zeros(logits.numel())], dim=1)

    classes = (~SETS).long().flatten()
    expected = class_loss(two(LOGITS), classes, soft, two(TEACHER))
    torch.testing.assert_close(label_set_loss(LOGITS, SETS, soft, TEACHER), expected)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_a_student_like_its_teacher_has_nothing_to_learn(temperature):
    soft = Objective(distillation_weight=1.0, temperature=temperature)
    for loss, labels in ((class_loss, CLASSES), (label_set_loss, SETS)):
        student = TEACHER.clone().requires_grad_()
        loss(student, labels, soft, TEACHER).backward()
        assert student.grad is not None
        torch.testing.assert_close(student.grad, torch.zeros_like(TEACHER), atol=1e-6, rtol=0)


def test_label_sets_by_hand():
    logits, truth = torch.tensor([[0.0, math.log(3)]]), torch.tensor([[True, False]])
    halves = math.log(2)  # -log(1/2), and 1 - 3/4 = 1/4
    plain = label_set_loss(logits, truth, Objective())
    assert plain.item() == pytest.approx(halves + 2 * halves)
    weighted = label_set_loss(logits, truth, Objective(torch.tensor([5.0, 7.0])))
    assert weighted.item() == pytest.approx(5 * halves + 2 * halves)  # only those that have it
    focal = label_set_loss(logits, truth, Objective(focal_gamma=2.0))
    assert focal.item() == pytest.approx(halves / 4 + 2 * halves * 9 / 16)
    teacher = torch.zeros(1, 2)  # says one half to both
    soft = label_set_loss(logits, truth, Objective(distillation_weight=1.0), teacher)
    assert soft.item() == pytest.approx(halves - 0.5 * math.log(3 / 4) - 0.5 * math.log(1 / 4))
    half = label_set_loss(logits, truth, Objective(distillation_weight=0.5), teacher)
    assert half.item() == pytest.approx((soft + plain).item() / 2)


def test_scores_by_hand():
    scores, labels = torch.tensor([1.0, 2.0]), torch.tensor([0.0, 4.0])
    assert score_loss(scores, labels, Objective()).item() == 5
    teacher = torch.tensor([1.0, 5.0])
    objective = Objective(distillation_weight=0.25)
    assert score_loss(scores, labels, objective, teacher).item() == 0.25 * 9 + 0.75 * 5


def test_balanced_weights_are_scikit_learns():
    from sklearn.utils.class_weight import compute_class_weight

    labels = np.random.default_rng(1).choice(5, 200, p=[0.5, 0.3, 0.1, 0.07, 0.03])
    expected = compute_class_weight("balanced", classes=np.arange(5), y=labels)
    weights = balanced_weights(labels, 5)
    np.testing.assert_allclose(weights, expected, rtol=1e-6)
    assert weights.dtype == np.float32
    assert weights[labels].mean() == pytest.approx(1)
    with_empty = balanced_weights(np.array([0, 0, 2]), 3)
    np.testing.assert_allclose(with_empty, [0.5, 1.0, 1.0])


def test_balanced_label_sets_count_having_and_not_having_alike():
    labels = np.random.default_rng(2).random((300, 4)) < [0.5, 0.1, 0.0, 1.0]
    weights = balanced_weights(labels, 4)
    having = (labels * weights).sum(axis=0)
    np.testing.assert_allclose(having[:2], (~labels).sum(axis=0)[:2], rtol=1e-6)
    # of a label that none has or all have: it is to be learned too
    assert weights[2] == weights[3] == 1 and weights.dtype == np.float32
