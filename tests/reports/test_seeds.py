import re

import pytest
from scipy import stats

from bertsmith.reports.finetuning import restart_table, seed_table, student_interval, welch_interval


def words(page):
    return " ".join(re.sub("<[^>]*>", " ", page).split())


def test_interval_is_that_of_scipy():
    values = [0.71, 0.74, 0.69, 0.75, 0.72]
    low, high = stats.t.interval(0.95, 4, loc=stats.tmean(values), scale=stats.sem(values))
    assert student_interval(values) == pytest.approx((low, high))


def test_welch_is_that_of_scipy():
    first, second = [0.71, 0.74, 0.69], [0.80, 0.78, 0.79, 0.85]
    theirs = stats.ttest_ind(second, first, equal_var=False).confidence_interval(0.95)
    assert welch_interval(first, second) == pytest.approx((theirs.low, theirs.high))


def test_seeds_that_are_all_alike_have_no_width():
    assert welch_interval([0.5, 0.5], [0.75, 0.75]) == (0.25, 0.25)


def test_table_of_seeds():
    seeds = {str(k): {"pearson": value} for k, value in enumerate((0.5, 0.7, 0.6), 1)}
    shown = words(seed_table(seeds, best_seed=2))
    assert "1 0.5 2 (kept) 0.7 3 0.6 mean 0.6 standard deviation 0.1" in shown
    assert "95% interval of the mean 0.352 to 0.848 lowest 0.5 highest 0.7" in shown  # t = 4.303
    del seeds["3"]
    assert words(seed_table(seeds)) == "seed pearson 1 0.5 2 0.7 mean 0.6"
    assert "mean" not in words(seed_table({"1": {"accuracy": 0.5}}))
    assert seed_table({"1": {"note": "x"}}) == ""


def test_collapsed_trainings_are_counted():
    collapsed = [
        {"seed": 2, "instead_of": 2, "reason": "every dev example gets '<a>'"},
        {"seed": 4, "instead_of": 2, "reason": "loss at log K"},
    ]
    shown = words(restart_table(collapsed, {"1": {}, "3": {}, "5": {}}))
    assert "2 of 5 trainings collapsed" in shown and "not in the figures above." in shown
    assert "2 2 every dev example gets &#x27;&lt;a&gt;&#x27; 4 2 loss at log K" in shown
    shown = words(restart_table(collapsed, {"1": {}, "4": {}}))
    assert "2 of 3 trainings collapsed" in shown
    assert "not in the figures above, but for seed 4, the last that was tried." in shown
    assert restart_table([], {"1": {}}) == ""
