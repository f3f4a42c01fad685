import numpy as np
import pytest
from sklearn.calibration import calibration_curve

from bertsmith.reports.text_answers import Bin, expected_calibration_error, reliability


def test_bins_are_those_of_scikit_learn():
    generator = np.random.default_rng(5)
    confidences = generator.random(500)
    right = generator.random(500) < confidences**2
    bins = reliability(confidences.tolist(), right.tolist())
    shares, means = calibration_curve(right, confidences, n_bins=10, strategy="uniform")
    np.testing.assert_allclose([one.right for one in bins], shares)
    np.testing.assert_allclose([one.confidence for one in bins], means)
    assert sum(one.count for one in bins) == 500


def test_error_by_hand():
    # nine sure answers of which six are right, one unsure and right
    bins = reliability([0.9] * 9 + [0.3], [True] * 6 + [False] * 3 + [True])
    assert [one.count for one in bins] == [1, 9]
    error = 0.9 * (0.9 - 6 / 9) + 0.1 * (1 - 0.3)
    assert expected_calibration_error(bins) == pytest.approx(error)


def test_the_ends_are_in_the_outer_bins():
    assert reliability([0.0, 1.0], [False, True]) == [Bin(1, 0.0, 0.0), Bin(1, 1.0, 1.0)]
    assert expected_calibration_error(reliability([0.0, 1.0], [False, True])) == 0
