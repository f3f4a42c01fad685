"""The bootstrap beside the normal distribution, and its metrics beside those of the tasks."""

import numpy as np
import pytest
from scipy import stats

from bertsmith.tasks.bootstrap import bootstrap, dev_metrics, paired_bootstrap
from bertsmith.tasks.metrics import compute_metrics
from bertsmith.tasks.squad.answers import answer_scores
from bertsmith.tasks.tagging.schemes import tag_scores


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


def test_an_option_that_is_never_right_nor_chosen_counts_as_in_evaluate():
    truth, given = np.arange(N) % 4, np.arange(N) % 3
    sides = zip(truth, given, strict=True)
    examples = [{"options": list("abcde"), "label": str(a), "predicted": str(b)} for a, b in sides]
    metrics, _ = dev_metrics({"kind": "choice", "labels": [], "examples": examples})
    names = ["accuracy", "macro_f1"]
    check(metrics, names, by_task(names, truth, given, 5))


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
