"""The paired bootstrap, and its metrics against those of the tasks."""

import re

import numpy as np
import pytest
from scipy import stats

from bertsmith.reports.significance import compare, dev_metrics
from bertsmith.tasks.metrics import compute_metrics
from bertsmith.tasks.squad.answers import answer_scores
from bertsmith.tasks.tagging.schemes import tag_scores

N, R = 60, 5
CHOSEN = np.random.default_rng(9).integers(N, size=(R, N))  # examples of each resample
WEIGHTS = np.stack([np.bincount(row, minlength=N) for row in CHOSEN]).astype(float)


def check(metrics, names, theirs):
    """Each metric of all resamples at once equals the tasks' metric of each resample."""
    for name in names:
        ours = metrics[name](WEIGHTS)
        assert ours == pytest.approx([theirs(rows)[name] for rows in CHOSEN]), name


def scored(kind, truth, given, labels=None):
    """Metrics and goodness of answers."""
    examples = [{"label": a, "predicted": b} for a, b in zip(truth, given, strict=True)]
    return dev_metrics({"kind": kind, "labels": labels, "examples": examples})


def by_task(names, truth, given, num_outputs):
    """The tasks' metrics of some rows."""
    return lambda rows: compute_metrics(names, given[rows], truth[rows], num_outputs)


@pytest.mark.parametrize("num_classes", [2, 4])
def test_classes(num_classes):
    generator = np.random.default_rng(num_classes)
    truth, given = generator.integers(num_classes, size=(2, N))
    labels = [f"class {k}" for k in range(num_classes)]
    sides = ([labels[k] for k in side] for side in (truth, given))
    metrics, goodness = scored("classify", *sides, labels)
    names = ["accuracy", "macro_f1", "matthews", *(["f1"] if num_classes == 2 else [])]
    check(metrics, names, by_task(names, truth, given, num_classes))
    assert ("f1" in metrics) == (num_classes == 2)
    assert len(set(goodness[truth == given])) == 1
    assert goodness[truth == given].min() > goodness[truth != given].max()


def test_a_constant_answer_has_no_correlation_with_the_truth():
    metrics, _ = scored("classify", [str(k % 2) for k in range(N)], ["1"] * N, ["0", "1"])
    assert (metrics["matthews"](WEIGHTS) == 0).all()
    metrics, _ = scored("regress", [k / 3 for k in range(N)], [0.1] * N)
    assert (metrics["pearson"](WEIGHTS) == 0).all()
    assert (metrics["spearman"](WEIGHTS) == 0).all()


def test_options_need_no_names():
    sides = ([str(k % options) for k in range(N)] for options in (4, 3))
    metrics, _ = scored("choice", *sides, [])
    right = np.array([k % 4 == k % 3 for k in range(N)])
    assert metrics["accuracy"](WEIGHTS) == pytest.approx(right[CHOSEN].mean(axis=1))


def test_label_sets():
    generator = np.random.default_rng(2)
    truth, given = generator.random((2, N, 3)) < 0.4
    labels = np.array(["a", "b", "c"])
    sides = ([labels[row].tolist() for row in side] for side in (truth, given))
    metrics, goodness = scored("multilabel", *sides, labels.tolist())
    names = ["micro_f1", "macro_f1", "accuracy"]
    check(metrics, names, by_task(names, truth, given, 3))
    assert goodness.tolist() == (truth == given).sum(axis=1).tolist()


@pytest.mark.parametrize("scale", [1, 1e-7, 1e7])
def test_numbers(scale):
    generator = np.random.default_rng(3)
    truth = generator.integers(6, size=N) / 2 + 1e4  # with ties, and far from 0
    given = (truth + generator.normal(size=N)).round(1)
    truth, given = truth * scale, given * scale
    metrics, _ = scored("regress", truth, given)
    names = ["pearson", "spearman", "mse"]
    check(metrics, names, by_task(names, truth, given, 1))


@pytest.mark.parametrize(
    ("tags", "scheme"),
    [
        (["O", "B-X", "I-X", "B-Y", "I-Y"], "IOB2"),
        (["N", "V", "A"], "plain"),
        (["N", "V", "B", "I", "E", "S", "O", "I-A"], "plain"),  # letters that are no prefixes
    ],
)
def test_sentences(tags, scheme):
    generator = np.random.default_rng(4)
    lengths = generator.integers(1, 7, size=N)
    truth = [generator.choice(tags, size=length).tolist() for length in lengths]
    given = [
        [tag if generator.random() < 0.7 else str(generator.choice(tags)) for tag in sentence]
        for sentence in truth
    ]
    metrics, _ = scored("tag", truth, given, tags)

    def theirs(rows):
        flat = [[tag for row in rows for tag in side[row]] for side in (truth, given)]
        return tag_scores(*flat, np.concatenate([[0], lengths[rows].cumsum()]), scheme)

    check(metrics, ["entity_f1", "entity_precision", "entity_recall", "tag_accuracy"], theirs)


def test_questions():
    examples = [
        {"answers": ["the moon"] if k % 3 else [], "predicted": ["", "moon sun", "Moon"][k % 7 % 3]}
        for k in range(N)
    ]
    metrics, _ = dev_metrics({"kind": "answer", "task": "squad2", "examples": examples})
    pairs = np.array([answer_scores(e["answers"], e["predicted"]) for e in examples])
    has_answer = np.array([bool(e["answers"]) for e in examples])
    for name, column, part in (
        ("answer_f1", 1, has_answer | True),
        ("exact_match", 0, has_answer | True),
        ("has_answer_f1", 1, has_answer),
        ("has_answer_exact_match", 0, has_answer),
        ("no_answer_exact_match", 0, ~has_answer),
    ):
        theirs = [pairs[rows, column][part[rows]].mean() for rows in CHOSEN]
        assert metrics[name](WEIGHTS) == pytest.approx(theirs), name


def test_the_first_rules_of_squad_are_for_squad1_alone():
    examples = [{"answers": ["the"], "predicted": ""}]  # no word on either side
    for task, f1 in (("squad1", 0.0), ("answer", 1.0)):
        metrics, _ = dev_metrics({"kind": "answer", "task": task, "examples": examples})
        assert metrics["answer_f1"](np.ones((1, 1)))[0] == f1


def examples(right, count=100):
    return [
        {"text": f"t{k}", "label": "a", "predicted": "a" if k in right else "b"}
        for k in range(count)
    ]


OTHER = {"text": "z", "label": "a", "predicted": "a"}


def test_two_runs(tuned):
    first = tuned("classify", examples(range(60)), name="x", labels=["a", "b"])
    second = tuned("classify", examples(range(10, 80)), name="y", labels=["a", "b"])
    found = compare([first, second], 2000)
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
    found = compare([run, run], 200)
    assert found["equal"] == 100
    assert found["metrics"]["accuracy"]["interval"] == [0, 0]
    assert found["metrics"]["accuracy"]["p"] == 1


def seeded(tuned, name, accuracies):
    seeds = {str(k): {"accuracy": value} for k, value in enumerate(accuracies)}
    return tuned("classify", examples(range(50)), name=name, seeds=seeds)


def test_means_over_seeds(tuned):
    sides = [(0.71, 0.74, 0.69), (0.80, 0.78, 0.79, 0.85)]
    found = compare([seeded(tuned, str(k), side) for k, side in enumerate(sides)], 100)
    found = found["seeds"]["accuracy"]
    theirs = stats.ttest_ind(sides[1], sides[0], equal_var=False).confidence_interval(0.95)
    assert found["interval"] == pytest.approx([theirs.low, theirs.high])
    assert found["difference"] == pytest.approx(0.805 - 2.14 / 3)


@pytest.mark.parametrize(("count", "is_told"), [(1, False), (2, True)])
def test_few_seeds_have_no_interval(tuned, count, is_told):
    accuracies = [0.5, 0.6, 0.7, 0.8, 0.9]
    runs = [seeded(tuned, "many", accuracies), seeded(tuned, "few", accuracies[:count])]
    found = compare(runs, 100)["seeds"]
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
    found = compare(runs, 100)
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
        compare([first, second], 100)
    assert "\n" not in str(caught.value)


def test_another_dev_file_is_refused(tuned):
    first, second = (tuned("classify", examples([1]), name=name) for name in "xy")
    text = (second / "run.json").read_text()
    (second / "run.json").write_text(re.sub("cd34", "ef56", text))
    with pytest.raises(ValueError, match="different dev files, by their SHA-256"):
        compare([first, second], 100)
    (second / "run.json").write_text(re.sub('"dev": "cd34"', '"dev": null', text))
    compare([first, second], 100)  # cut off the training file: the examples are looked at


def test_an_interval_needs_resamples(tuned):
    run = tuned("classify", examples([1]))
    with pytest.raises(ValueError, match="resamples = 10: an interval needs at least 100"):
        compare([run, run], 10)
