"""Two runs compared, beside independent tests."""

import re

import pytest
from scipy import stats

from bertsmith import compare


def examples(right, count=100):
    return [
        {"text": f"t{k}", "label": "a", "predicted": "a" if k in right else "b"}
        for k in range(count)
    ]


OTHER = {"text": "z", "label": "a", "predicted": "a"}


def test_two_runs(tuned):
    first = tuned("classify", examples(range(60)), name="x", labels=["a", "b"])
    second = tuned("classify", examples(range(10, 80)), name="y", labels=["a", "b"])
    found = compare(str(first), second, resamples=2000)
    assert (found["better"], found["equal"], found["worse"]) == (20, 70, 10)
    accuracy = found["metrics"]["accuracy"]
    assert (accuracy["first"], accuracy["second"]) == (0.6, 0.7)
    assert accuracy["difference"] == pytest.approx(0.1)
    # differences are +1 of 20, -1 of 10: variance 0.3 - 0.1^2
    half = 1.96 * (0.29 / 100) ** 0.5
    assert accuracy["interval"] == pytest.approx([0.1 - half, 0.1 + half], abs=0.02)
    assert accuracy["p"] == pytest.approx(2 * stats.norm.sf(0.1 / (0.29 / 100) ** 0.5), abs=0.03)
    assert found["seeds"] == {} and found["main_metric"] == "accuracy"


def test_a_run_against_itself(tuned):
    run = tuned("classify", examples(range(60)))
    found = compare(run, run, 200)
    assert found["equal"] == 100
    assert found["metrics"]["accuracy"]["interval"] == [0, 0]
    assert found["metrics"]["accuracy"]["p"] == 1


def seeded(tuned, name, accuracies):
    seeds = {str(k): {"accuracy": value} for k, value in enumerate(accuracies)}
    return tuned("classify", examples(range(50)), name=name, seeds=seeds)


def test_means_over_seeds(tuned):
    sides = [(0.71, 0.74, 0.69), (0.80, 0.78, 0.79, 0.85)]
    found = compare(*[seeded(tuned, str(k), side) for k, side in enumerate(sides)], 100)
    found = found["seeds"]["accuracy"]
    theirs = stats.ttest_ind(sides[1], sides[0], equal_var=False).confidence_interval(0.95)
    assert found["interval"] == pytest.approx([theirs.low, theirs.high])
    assert found["difference"] == pytest.approx(0.805 - 2.14 / 3)


@pytest.mark.parametrize(("count", "is_told"), [(1, False), (2, True)])
def test_few_seeds_have_no_interval(tuned, count, is_told):
    accuracies = [0.5, 0.6, 0.7, 0.8, 0.9]
    runs = [seeded(tuned, "many", accuracies), seeded(tuned, "few", accuracies[:count])]
    found = compare(*runs, 100)["seeds"]
    assert bool(found) == is_told
    if is_told:
        assert found["accuracy"]["difference"] == pytest.approx(0.55 - 0.7)
        assert found["accuracy"]["interval"] is None


def test_less_error_is_said_to_be_better(tuned):
    numbers = [{"text": "x", "label": k / 5, "predicted": k / 4} for k in range(20)]
    closer = [{**item, "predicted": item["label"] + 0.01} for item in numbers]
    metrics = {"mse": 0.5, "pearson": 0.9}
    more, sides = {"metrics": metrics, "main_metric": "pearson"}, {"x": numbers, "y": closer}
    runs = [tuned("regress", part, name=name, **more) for name, part in sides.items()]
    found = compare(*runs, 100)
    assert found["metrics"]["mse"]["less_is_better"] and found["metrics"]["mse"]["difference"] < 0
    assert list(found["metrics"]) == ["pearson", "mse"]  # the main one first
    assert (found["better"], found["worse"]) == (19, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": "sst2"}, "different tasks, classify and sst2"),
        ({"labels": ["b", "a"]}, "different classes, or in another order"),
        ({"examples": examples([1], 99)}, "different dev sets, of 100 and 99 examples"),
        ({"examples": [*examples([1], 99), OTHER]}, "different dev sets, first at example 100"),
        ({"metrics": {"loss": 1}}, "none of its metrics is known here"),
        ({"examples": []}, "y/dev_scores.json is missing or empty"),
    ],
)
def test_what_cannot_be_compared(tuned, change, message):
    first = tuned("classify", examples([1]), name="x")
    settings = {"examples": examples([1]), **change}
    second = tuned("classify", settings.pop("examples"), name="y", **settings)
    with pytest.raises(ValueError, match=message) as caught:
        compare(first, second, 100)
    assert "\n" not in str(caught.value)


def test_another_dev_file_is_refused(tuned):
    first, second = (tuned("classify", examples([1]), name=name) for name in "xy")
    text = (second / "run.json").read_text()
    (second / "run.json").write_text(re.sub("cd34", "ef56", text))
    with pytest.raises(ValueError, match="different dev files, by their SHA-256"):
        compare(first, second, 100)
    (second / "run.json").write_text(re.sub('"dev": "cd34"', '"dev": null', text))
    compare(first, second, 100)  # cut off the training file: the examples are looked at


def test_an_interval_needs_resamples(tuned):
    run = tuned("classify", examples([1]))
    with pytest.raises(ValueError, match="`resamples=10`: an interval needs at least 100"):
        compare(run, run, 10)
