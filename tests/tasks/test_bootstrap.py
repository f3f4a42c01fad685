"""The bootstrap against the normal distribution that large samples follow."""

import numpy as np
import pytest
from scipy import stats

from bertsmith.tasks.bootstrap import bootstrap, paired_bootstrap


def test_interval_and_p_of_a_mean_are_those_of_theory():
    """The mean of 400 differences is nearly normal: the bootstrap must find its z interval."""
    generator = np.random.default_rng(6)
    first, second = generator.normal(size=400), generator.normal(0.1, 1, size=400)
    metrics = {"mean": (lambda w: w @ first / 400, lambda w: w @ second / 400)}
    found = paired_bootstrap(metrics, 400, 20_000, seed=1)["mean"]
    differences = second - first
    error = differences.std() / 20  # the bootstrap's variance is that of the sample, not n - 1
    low, high = differences.mean() - 1.96 * error, differences.mean() + 1.96 * error
    # quantiles of 20,000 draws scatter by about 1% of the interval's width
    assert found["interval"] == pytest.approx([low, high], abs=0.05 * (high - low))
    p = 2 * stats.norm.sf(abs(differences.mean()) / error)
    assert found["p"] == pytest.approx(p, abs=0.02)
    assert found["difference"] == pytest.approx(differences.mean())
    assert found == paired_bootstrap(metrics, 400, 20_000, seed=1)["mean"]
    assert found != paired_bootstrap(metrics, 400, 20_000, seed=2)["mean"]


def test_the_interval_of_a_mean_is_that_of_theory():
    values = np.random.default_rng(6).normal(size=400)
    found = bootstrap(lambda weights: weights @ values / 400, 400, 20_000, seed=1)
    half = 1.96 * values.std() / 20
    assert found["score"] == pytest.approx(values.mean())
    interval = [values.mean() - half, values.mean() + half]
    assert found["interval"] == pytest.approx(interval, abs=0.1 * half)


def test_draws_in_blocks_are_those_in_one(monkeypatch):
    values = np.arange(7.0)
    metrics = {"mean": (lambda w: w @ values * 0, lambda w: w @ values / 7)}
    whole = paired_bootstrap(metrics, 7, 1000, seed=0)
    monkeypatch.setattr("bertsmith.tasks.bootstrap.BLOCK", 7 * 64)
    assert paired_bootstrap(metrics, 7, 1000, seed=0) == whole
