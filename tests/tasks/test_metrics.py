"""Scores against their definitions, thresholds against a search over every one."""

import sys

import numpy as np
import pytest
from scipy import stats
from sklearn import metrics as sklearn
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

from bertsmith.tasks.metrics import (
    METRICS,
    best_thresholds,
    check_metrics,
    check_two_classes,
    compute_metrics,
    label_threshold,
    metric_notes,
)

TRUE = np.array([1, 1, 1, 0, 0, 0, 0, 1])
GUESS = np.array([1, 1, 0, 0, 0, 1, 0, 1])  # 3 right of class 1, 3 of class 0, one wrong each way


def scores(answers, truth, classes, **expected):
    assert compute_metrics(list(expected), answers, truth, classes) == pytest.approx(expected)


def test_classes_by_hand():
    # precision and recall 3/4
    scores(GUESS, TRUE, 2, accuracy=6 / 8, f1=3 / 4, macro_f1=3 / 4, matthews=(3 * 3 - 1 * 1) / 16)
    # F1: class 0: 2*2/(3+2) = 0.8; class 1: 2*1/(1+2) = 2/3; class 2: nobody, 0
    three = (0.8 + 2 / 3 + 0) / 3
    scores(np.array([0, 0, 0, 1]), np.array([0, 0, 1, 1]), 3, macro_f1=three)


def test_scores_by_hand():
    # deviations -1.5 -0.5 0.5 1.5 and -3 -1 -2 6: products 13, squares 5 and 50
    pearson = 13 / np.sqrt(5 * 50)
    spearman = 1 - 6 * 2 / (4 * 15)  # two ranks changed places
    true, guess = np.array([1.0, 2, 3, 4]), np.array([1.0, 3, 2, 10])
    scores(guess, true, 0, pearson=pearson, spearman=spearman, mse=(0 + 1 + 1 + 36) / 4)


def test_sets_by_hand():
    true = np.array([[1, 1, 0], [0, 1, 0], [1, 0, 0]], bool)
    guess = np.array([[1, 0, 0], [0, 1, 0], [1, 1, 0]], bool)
    micro = 2 * 3 / (2 * 3 + 1 + 1)  # 3 hits, 1 miss, 1 false
    scores(guess, true, 3, micro_f1=micro, macro_f1=(1 + 1 / 2 + 0) / 3, accuracy=1 / 3)
    scores(guess[:, :1], true[:, :1], 1, micro_f1=1.0, macro_f1=1.0, accuracy=1.0)


def test_what_has_no_value_is_zero_with_a_reason(recwarn):
    constant = np.zeros(4, int), np.array([0, 1, 1, 0])
    assert compute_metrics(["f1", "matthews"], *constant, 2) == {"f1": 0.0, "matthews": 0.0}
    assert metric_notes(["f1", "matthews"], *constant) == {
        "matthews": "no value, counts 0: every answer is 0"
    }
    flat = np.full(3, 2.5), np.array([1.0, 2, 3])
    zero = {"pearson": 0.0, "spearman": 0.0}
    assert compute_metrics(["pearson", "spearman"], *flat, 0) == zero
    assert compute_metrics(["pearson", "spearman"], *flat[::-1], 0) == zero
    assert metric_notes(["spearman", "mse"], *flat[::-1]) == {
        "spearman": "no value, counts 0: every label is 2.5"
    }
    assert metric_notes(["matthews"], *constant, ("1", "2")) == {
        "matthews": "no value, counts 0: every answer is 1"  # the class, not its number
    }
    assert compute_metrics(["pearson"], np.ones(1), np.ones(1), 0) == {"pearson": 0.0}
    assert metric_notes(["pearson", "spearman"], np.arange(3.0), np.arange(3.0)) == {}
    assert not recwarn.list


def generated(kind: str, number: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Truth, answer and number of classes: few examples, ties, classes nobody has, constants."""
    random = np.random.default_rng([number, len(kind)])
    count, classes = int(random.integers(1, 30)), int(random.integers(2, 6))
    if kind == "classify":
        used = int(random.integers(1, classes + 1))
        return random.integers(0, used, count), random.integers(0, classes, count), classes
    if kind == "multilabel":
        density = random.choice([0.0, 0.1, 0.5, 1.0], 2)
        true, guess = (random.random((count, classes)) < share for share in density)
        return true, guess, classes
    digits = int(random.integers(0, 3))  # rounded, so that there are ties
    true = random.uniform(0, 5, count).round(digits).astype(np.float32)
    guess = (true * random.normal() + random.normal(0, 1, count)).round(digits).astype(np.float32)
    if random.random() < 0.1:
        guess[:] = guess[0]
    return true, guess, 0


def counted_f1(true: np.ndarray, guess: np.ndarray) -> float:
    hits, asked = (true & guess).sum(), true.sum() + guess.sum()
    return 2 * hits / asked if asked else 0.0


def counted_accuracy(true: np.ndarray, guess: np.ndarray) -> float:
    return (true == guess).mean()


def counted_matthews(true: np.ndarray, guess: np.ndarray, classes: int) -> float:
    """Gorodkin's R_K as the correlation of the two one-hot matrices."""
    one, two = np.eye(classes)[true], np.eye(classes)[guess]
    one, two = one - one.mean(axis=0), two - two.mean(axis=0)
    norm = np.sqrt((one**2).sum() * (two**2).sum())
    return (one * two).sum() / norm if norm > 1e-12 else 0.0


def counted_correlation(true: np.ndarray, guess: np.ndarray) -> float:
    one, two = true - true.mean(), guess - guess.mean()
    norm = np.sqrt((one**2).sum() * (two**2).sum())
    return (one * two).sum() / norm if norm > 1e-12 else 0.0


def ranks(values: np.ndarray) -> np.ndarray:
    """How many are smaller plus half of how many are as large: ties share the middle."""
    return (values[:, None] > values).sum(1) + (values[:, None] == values).sum(1) / 2


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tens", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_generated_cases_equal_the_libraries_and_the_formulas(tens):
    """Of ten 4 are of classes, 3 of scores, 3 of sets; 1e-9 is rounding of float64 sums."""
    for number in range(4 * tens):
        true, guess, classes = generated("classify", number)
        names = ["accuracy", "macro_f1", "matthews"] + ["f1"] * (classes == 2)
        ours = compute_metrics(names, guess, true, classes)
        each = [counted_f1(true == k, guess == k) for k in range(classes)]
        assert ours["accuracy"] == pytest.approx(counted_accuracy(true, guess), abs=1e-9)
        assert ours["macro_f1"] == pytest.approx(np.mean(each), abs=1e-9)
        assert ours["matthews"] == pytest.approx(counted_matthews(true, guess, classes), abs=1e-9)
        if not metric_notes(["matthews"], guess, true):
            assert ours["matthews"] == sklearn.matthews_corrcoef(true, guess)
        if classes == 2:
            assert ours["f1"] == pytest.approx(each[1], abs=1e-9)
            assert ours["f1"] == sklearn.f1_score(true, guess, zero_division=0)
    for number in range(3 * tens):
        true, guess, _ = generated("regress", number)
        ours = compute_metrics(["pearson", "spearman", "mse"], guess, true, 0)
        true, guess = true.astype(float), guess.astype(float)
        assert ours["pearson"] == pytest.approx(counted_correlation(true, guess), abs=1e-9)
        of_ranks = counted_correlation(ranks(true), ranks(guess))
        assert ours["spearman"] == pytest.approx(of_ranks, abs=1e-9)
        assert ours["mse"] == pytest.approx(((true - guess) ** 2).mean(), abs=1e-9)
        if len(true) > 1 and np.ptp(true) and np.ptp(guess):
            assert ours["pearson"] == stats.pearsonr(true, guess).statistic
            assert ours["spearman"] == stats.spearmanr(true, guess).statistic
        else:
            assert metric_notes(["pearson"], guess, true)
    for number in range(3 * tens):
        true, guess, classes = generated("multilabel", number)
        ours = compute_metrics(["micro_f1", "macro_f1", "accuracy"], guess, true, classes)
        for average in ("micro", "macro"):
            theirs = sklearn.f1_score(true, guess, average=average, zero_division=0)
            assert ours[f"{average}_f1"] == pytest.approx(theirs, abs=1e-9)
        assert ours["micro_f1"] == pytest.approx(counted_f1(true, guess), abs=1e-9)
        assert ours["accuracy"] == pytest.approx((true == guess).all(axis=1).mean(), abs=1e-9)


def test_only_mse_is_better_when_less():
    assert [name for name, metric in METRICS.items() if metric.less_is_better] == ["mse"]


def test_unknown_or_unfitting_metric():
    with pytest.raises(ValueError, match="unknown metric 'acuracy': did you mean 'accuracy'?"):
        compute_metrics(["acuracy"], GUESS, TRUE, 2)
    with pytest.raises(ValueError, match="f1 is for two classes, not 3"):
        compute_metrics(["f1"], GUESS, TRUE, 3)
    with pytest.raises(ValueError, match="metric 'f1' is not for regress: use one of pearson, spe"):
        check_metrics(["pearson", "f1"], "regress", 0)
    message = "metric 'f1' is not for choice: use one of accuracy, macro_f1, matthews$"
    with pytest.raises(ValueError, match=message):
        check_metrics(["f1", "accuracy"], "choice", 0)
    message = "the model's answers are not finite numbers: lower `learning_rate`"
    with pytest.raises(ValueError, match=message):
        compute_metrics(["mse"], np.array([np.nan]), np.ones(1), 0)


def test_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'bertsmith\[train\]'") as error:
        compute_metrics(["f1"], GUESS, TRUE, 2)
    assert error.value.name == "sklearn"  # the command line asks for it
    compute_metrics(["accuracy"], GUESS, TRUE, 2)


TWO_CLASSES = {
    "accuracy": accuracy_score,
    "f1": f1_score,
    "macro_f1": lambda truth, answers: f1_score(truth, answers, average="macro"),
    "matthews": matthews_corrcoef,
}


def best_score(score, probability, truth):
    """The best of any threshold: at every probability, just below it, at 0 and at 1."""
    tried = [0.0, 1.0, *probability, *(probability - 1e-5)]
    different = {tuple(probability > threshold) for threshold in tried}
    return max(score(truth, np.array(answers)) for answers in different)


@pytest.mark.parametrize("metric", ["accuracy", "micro_f1", "macro_f1"])
def test_no_threshold_is_better(metric):
    score = counted_accuracy if metric == "accuracy" else counted_f1
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
            best = best_score(score, probability, right)
            assert score(right, probability > threshold) == pytest.approx(best)
            assert 0 <= threshold <= 1


@pytest.mark.parametrize("metric", TWO_CLASSES)
def test_of_two_classes_it_is_the_best_by_the_metric_itself(metric):
    random = np.random.default_rng(2)
    for size in [5, 12, 30] * 4:
        truth = random.random(size) < random.choice([0.2, 0.5, 0.8])
        truth[:2] = False, True
        probability = (random.random(size) * 0.8 + 0.2 * truth).round(2)
        found = probability > label_threshold(probability, truth, metric)
        best = best_score(TWO_CLASSES[metric], probability, truth)
        assert TWO_CLASSES[metric](truth, found) == pytest.approx(best)


def test_of_equal_ones_the_nearest_to_one_half():
    probabilities = np.array([[0.1], [0.3], [0.4], [0.9]])
    truth = np.array([[False], [False], [True], [True]])
    assert best_thresholds(probabilities, truth, "accuracy") == [pytest.approx(0.35)]
    # 0.2 and 0.65 make one mistake each
    truth = np.array([[False], [True], [False], [True]])
    assert best_thresholds(probabilities, truth, "accuracy") == [pytest.approx(0.65)]


def test_a_label_that_all_have_or_none_says_nothing():
    truth = np.array([[True, False], [True, False]])
    assert best_thresholds(np.array([[0.9, 0.2], [0.3, 0.1]]), truth, "micro_f1") == [0.5, 0.5]


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
    with pytest.raises(ValueError, match="`tune_thresholds`: for two classes .* are 3 classes"):
        check_two_classes(["a", "b", "c"])


@pytest.mark.parametrize(
    ("labels", "predicted", "absent"),
    [
        ([0, 1, 1], [0, 1, 2], "c"),  # given by the model, but no example has it
        ([0, 1, 2], [0, 0, 0], None),
        ([[True, False, False], [True, True, False]], [[True, False, True]] * 2, "c"),
    ],
)
def test_classes_that_macro_f1_counts_0_are_named(labels, predicted, absent):
    found = metric_notes(["macro_f1"], np.array(predicted), np.array(labels), "abc")
    told = {"macro_f1": f"counts 0 for each class without an example: {absent}"}
    assert found == (told if absent else {})
    assert metric_notes(["accuracy"], np.array(predicted), np.array(labels), "abc") == {}
