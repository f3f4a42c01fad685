import sys

import numpy as np
import pytest

from bertsmith.tasks.metrics import compute_metrics, confusion_matrix

TRUE = np.array([1, 1, 1, 0, 0, 0, 0, 1])
GUESS = np.array([1, 1, 0, 0, 0, 1, 0, 1])  # 3 right of class 1, 3 of class 0, one wrong each way


def test_two_classes_by_hand():
    scores = compute_metrics(["accuracy", "f1", "macro_f1", "matthews"], GUESS, TRUE, 2)
    assert scores["accuracy"] == pytest.approx(6 / 8)
    assert scores["f1"] == pytest.approx(3 / 4)  # precision and recall 3/4
    assert scores["macro_f1"] == pytest.approx(3 / 4)
    assert scores["matthews"] == pytest.approx((3 * 3 - 1 * 1) / 16)


def test_three_classes_by_hand():
    true, guess = np.array([0, 0, 1, 1]), np.array([0, 0, 0, 1])
    # F1: class 0: 2*2/(3+2) = 0.8; class 1: 2*1/(1+2) = 2/3; class 2: nobody, 0
    scores = compute_metrics(["macro_f1"], guess, true, 3)
    assert scores["macro_f1"] == pytest.approx((0.8 + 2 / 3 + 0) / 3)
    assert confusion_matrix(guess, true, 3).tolist() == [[2, 0, 0], [1, 1, 0], [0, 0, 0]]


def test_a_constant_answer_scores_zero_without_a_warning(recwarn):
    scores = compute_metrics(["f1", "matthews"], np.zeros(4, int), np.array([0, 1, 1, 0]), 2)
    assert scores == {"f1": 0.0, "matthews": 0.0}
    assert not recwarn.list


def test_unknown_or_unfitting_metric():
    with pytest.raises(ValueError, match="unknown metric 'acuracy': did you mean 'accuracy'?"):
        compute_metrics(["acuracy"], GUESS, TRUE, 2)
    with pytest.raises(ValueError, match="f1 is for two classes, not 3"):
        compute_metrics(["f1"], GUESS, TRUE, 3)


def test_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'bertsmith\[train\]'") as error:
        compute_metrics(["accuracy"], GUESS, TRUE, 2)
    assert error.value.name == "sklearn"  # the command line asks for it
