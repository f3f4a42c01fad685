import re

import pytest
from scipy import stats

from bertsmith.reports.finetuning import (
    restart_table,
    seed_table,
    student_interval,
    sweep_parts,
    welch_interval,
)


def words(page):
    return " ".join(re.sub("<[^>]*>", " ", re.sub("(?s)<svg.*?</svg>", "", page)).split())


def test_interval_is_that_of_scipy():
    values = [0.71, 0.74, 0.69, 0.75, 0.72]
    low, high = stats.t.interval(0.95, 4, loc=stats.tmean(values), scale=stats.sem(values))
    assert student_interval("accuracy", values) == pytest.approx((low, high))


@pytest.mark.parametrize(
    ("name", "values", "ends"),
    [
        ("dev_mismatched_accuracy", [0.9, 1.0, 1.0], (0.8232, 1.0)),  # +- 4.3027 * 0.0577 / sqrt(3)
        ("f1", [0.0, 0.0, 0.1], (0.0, 0.1768)),
        ("matthews", [0.9, 1.0, 1.0], (0.8232, 1.0)),
        ("matthews", [0.0, 0.0, 0.1], (-0.1101, 0.1768)),
        ("mse", [0.9, 1.0, 1.0], (0.8232, 1.1101)),
        ("held_out_loss", [0.0, 0.0, 0.1], (-0.1101, 0.1768)),
    ],
)
def test_an_interval_ends_where_the_metric_does(name, values, ends):
    assert student_interval(name, values) == pytest.approx(ends, abs=1e-4)


def test_welch_is_that_of_scipy():
    first, second = [0.71, 0.74, 0.69], [0.80, 0.78, 0.79, 0.85]
    theirs = stats.ttest_ind(second, first, equal_var=False).confidence_interval(0.95)
    assert welch_interval(first, second) == pytest.approx((theirs.low, theirs.high))


def test_seeds_that_are_all_alike_have_no_width():
    assert welch_interval([0.5, 0.5], [0.75, 0.75]) == (0.25, 0.25)


def test_table_of_seeds():
    seeds = {str(k): {"pearson": value} for k, value in enumerate((0.5, 0.7, 0.6), 1)}
    shown = words(seed_table(seeds, best_seed=2))
    assert "1 0.5 2 (kept) 0.7 3 0.6 mean 0.6 std 0.1" in shown
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


GRID = [
    {"batch": 16, "learning_rate": 5e-5, "optimizer": "<adamw>", "accuracy": 0.6},
    {"batch": 32, "learning_rate": 5e-5, "optimizer": "<adamw>", "accuracy": 0.8},
    {"batch": 16, "learning_rate": 3e-5, "optimizer": "paper", "accuracy": None},
]


def test_tries_are_sorted_and_a_failed_one_is_last():
    shown = words("".join(sweep_parts(GRID, ["accuracy"], "accuracy")))
    assert "A dot is a trial, its height the accuracy on the development set" in shown
    rows = "batch learning_rate optimizer accuracy 32 5e-05 &lt;adamw&gt; 80.0% "
    rows += "16 5e-05 &lt;adamw&gt; 60.0%"
    assert f"{rows} 16 3e-05 paper –" in shown


def test_a_setting_that_never_varies_has_no_picture():
    page = "".join(sweep_parts(GRID, ["accuracy"], "accuracy"))
    assert re.findall("<h3>(.*?)</h3>", page) == ["batch"]  # the failed try is in no picture
    alike = [{"batch": 16, "accuracy": 0.6}, {"batch": 16, "accuracy": 0.7}]
    assert "<svg" not in "".join(sweep_parts(alike, ["accuracy"], "accuracy"))
    assert sweep_parts([], [], "accuracy") == []


def test_settings_are_not_rounded():
    first = {"batch": 1024, "seed": 12345, "learning_rate": 1.25e-5, "accuracy": 0.5}
    tried = [first, first | {"seed": 12346, "accuracy": 0.4}]
    shown = words("".join(sweep_parts(tried, ["accuracy"], "accuracy")))
    assert "1024 12345 1.25e-05 50.0% 1024 12346 1.25e-05 40.0%" in shown


def test_of_an_error_the_least_is_first():
    tried = [{"learning_rate": 1, "mse": 0.5}, {"learning_rate": 2, "mse": 0.25}]
    assert "2 0.25 1 0.5" in words("".join(sweep_parts(tried, ["mse"], "mse")))


def test_many_values_are_an_axis_and_few_are_columns():
    rates = enumerate(1e-5 * 1.5**k for k in range(12))
    tried = [{"learning_rate": rate, "layers": str(k % 2), "f1": k / 20} for k, rate in rates]
    page = "".join(sweep_parts(tried, ["f1"], "f1"))
    assert re.findall("<h3>(.*?)</h3>", page) == ["learning_rate", "layers"]
    rate, layers = re.findall("(?s)<svg.*?</svg>", page)
    assert "10" in rate  # powers of ten: the axis is logarithmic
    ticks = re.findall("<text[^>]*>([^<]*)</text>", layers)
    assert ticks[:2] == ["1", "0"]  # in the order of the best try


def test_words_of_settings_are_escaped():
    tried = [{"manner": "<script>", "f1": 0.5}, {"manner": ["a", "b"], "f1": 0.6}]
    page = "".join(sweep_parts(tried, ["f1"], "f1"))
    assert "<script>" not in page and "&lt;script&gt;" in page


def test_a_long_search_shows_its_best():
    tried = [{"learning_rate": k, "f1": k / 100} for k in range(80)]
    page = "".join(sweep_parts(tried, ["f1"], "f1"))
    assert "20 worse trials are left out" in page and "79.0%" in page and ">1.0%<" not in page
