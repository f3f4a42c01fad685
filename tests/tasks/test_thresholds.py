"""Thresholds against a search over every one that makes a difference."""

import numpy as np
import pytest
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

from bertsmith.tasks.metrics import best_thresholds, check_two_classes, label_threshold

TWO_CLASSES = {
    "accuracy": accuracy_score,
    "f1": f1_score,
    "macro_f1": lambda truth, answers: f1_score(truth, answers, average="macro"),
    "matthews": matthews_corrcoef,
}


def score(metric, truth, answers):
    return accuracy_score(truth, answers) if "accuracy" in metric else f1_score(truth, answers)


def best_score(metric, probability, truth):
    """The best of any threshold: at every probability, just below it, at 0 and at 1."""
    tried = [0.0, 1.0, *probability, *(probability - 1e-5)]
    return max(score(metric, truth, probability > threshold) for threshold in tried)


@pytest.mark.parametrize("metric", ["accuracy", "micro_f1", "macro_f1"])
def test_no_threshold_is_better(metric):
    random = np.random.default_rng(1)
    for size in [2, 3, 5, 8, 40] * 8:
        truth = random.random((size, 2)) < random.choice([0.2, 0.5, 0.8])
        # often few different values: many examples are equally probable
        probabilities = (random.random((size, 2)) * 0.8 + 0.2 * truth).round(random.integers(1, 4))
        found = best_thresholds(probabilities.astype(np.float32), truth, metric)
        for threshold, probability, right in zip(found, probabilities.T, truth.T, strict=True):
            if right.all() or not right.any():
                assert threshold == 0.5
                continue
            best = best_score(metric, probability, right)
            assert score(metric, right, probability > threshold) == pytest.approx(best)
            assert 0 <= threshold <= 1


@pytest.mark.parametrize("metric", TWO_CLASSES)
def test_of_two_classes_it_is_the_best_by_the_metric_itself(metric):
    random = np.random.default_rng(2)
    for size in [5, 12, 30] * 4:
        truth = random.random(size) < random.choice([0.2, 0.5, 0.8])
        truth[:2] = False, True
        probability = (random.random(size) * 0.8 + 0.2 * truth).round(2)
        found = probability > label_threshold(probability, truth, metric)
        tried = [0.0, 1.0, *probability, *(probability - 1e-5)]
        best = max(TWO_CLASSES[metric](truth, probability > threshold) for threshold in tried)
        assert TWO_CLASSES[metric](truth, found) == pytest.approx(best)


def test_of_equal_ones_the_nearest_to_one_half():
    probabilities = np.array([[0.1], [0.3], [0.4], [0.9]])
    truth = np.array([[False], [False], [True], [True]])
    assert best_thresholds(probabilities, truth, "accuracy") == [pytest.approx(0.35)]
    # 0.2 and 0.65 make one mistake each
    truth = np.array([[False], [True], [False], [True]])
    assert best_thresholds(probabilities, truth, "accuracy") == [pytest.approx(0.65)]


def test_a_label_that_all_have_or_none_says_nothing():
    probabilities = np.array([[0.9, 0.2], [0.3, 0.1]])
    truth = np.array([[True, False], [True, False]])
    assert best_thresholds(probabilities, truth, "micro_f1") == [0.5, 0.5]


def test_never_can_be_the_best_answer():
    probabilities = np.array([[1.0], [0.8], [0.1]])  # certain and wrong
    (threshold,) = best_thresholds(probabilities, np.array([[False], [False], [True]]), "accuracy")
    assert not (probabilities > threshold).any()


def test_probabilities_near_zero_and_one_are_told_apart():
    probabilities = np.array([[1e-9], [2e-9], [1 - 1e-7], [1 - 2e-7]]).astype(np.float32)
    for truth in ([0, 1, 1, 1], [0, 0, 1, 0]):
        right = np.array(truth, bool)
        (threshold,) = best_thresholds(probabilities, right[:, None], "micro_f1")
        assert ((probabilities[:, 0].astype(float) > threshold) == right).all()


def test_three_classes_have_no_one_threshold():
    check_two_classes(["a", "b"])
    with pytest.raises(ValueError, match="--tune-thresholds: for two classes .* are 3 classes"):
        check_two_classes(["a", "b", "c"])
