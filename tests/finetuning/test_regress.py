"""Regression from a made set to a file of numbers: what is measured is what is written."""

import csv
import json
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import rankdata

from bertsmith.inference.ensemble import evaluate_on
from bertsmith.inference.predictor import load
from bertsmith.tasks.examples import Examples
from bertsmith.tasks.task import Layout, own_task
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.training.finetuning.run import finetune
from bertsmith.training.finetuning.task_types.base import Purpose
from bertsmith.training.finetuning.task_types.texts import Labelled, Regress
from bertsmith.training.finetuning.trainer import Job, Start

from .tiny import bertsmith

KIND, TASK = Regress(), own_task("regress", "text", None, "label")
WORTH = {"rain": 0.0, "snow": 0.2, "wind": 0.4, "bread": 0.6, "soup": 0.8, "fish": 1.0}


def worths(count, seed):
    """The score is what one word is worth."""
    words = np.random.default_rng(seed).choice(list(WORTH), count)
    texts = [f"today there was {word} again" for word in words]
    labels = np.array([WORTH[word] for word in words], np.float32)
    return Examples(texts, None, labels, (), "made", list(range(1, count + 1)))


def correlation(a, b):
    a, b = (np.asarray(values, np.float64) - np.mean(values) for values in (a, b))
    return (a @ b) / np.sqrt((a @ a) * (b @ b))


def test_it_learns_scores_and_writes_them(model_folder, toy, tmp_path):
    settings = replace(toy.settings, epochs=12, dropout=0.0, attention_dropout=0.0)
    dev = worths(40, 2)
    job = Job.prepare(Start(model_folder), TASK, worths(128, 1), {"dev": dev}, settings)
    run = tmp_path / "run"
    result = finetune(job, run, settings, [1])
    metrics = result["metrics"]
    assert list(metrics) == ["pearson", "spearman", "mse"] and result["main_metric"] == "pearson"
    assert metrics["pearson"] > 0.95 and metrics["spearman"] > 0.9
    assert metrics["mse"] < 0.1 * dev.labels.var()
    assert (result["restarts"], result["labels"], result["undefined"]) == ([], [], {})
    assert json.loads((run / "config.json").read_text())["problem_type"] == "regression"
    assert evaluate_on(load(run), dev)["metrics"] == pytest.approx(metrics)

    with (tmp_path / "new.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("id", "text"), *enumerate(dev.texts)])
    bertsmith("predict", run, tmp_path / "new.csv", "--out", tmp_path / "out.csv")
    with (tmp_path / "out.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["text"] for row in rows] == dev.texts and list(rows[0]) == ["id", "text", "label"]
    scores = [float(row["label"]) for row in rows]
    # the figures again, out of the file and by hand
    assert correlation(scores, dev.labels) == pytest.approx(metrics["pearson"], rel=1e-5)
    ranks = rankdata(scores), rankdata(dev.labels)
    assert correlation(*ranks) == pytest.approx(metrics["spearman"], rel=1e-5)
    assert np.mean((scores - dev.labels) ** 2) == pytest.approx(metrics["mse"], rel=1e-4)
    stored = json.loads((run / "dev_scores.json").read_text())
    records = stored["examples"]
    assert stored["kind"] == "regress" and stored["labels"] == []
    assert [record["predicted"] for record in records] == pytest.approx(scores, abs=1e-4)
    assert [record["label"] for record in records] == pytest.approx(dev.labels.tolist(), abs=1e-5)

    bertsmith("predict", run, tmp_path / "new.csv", "--out", tmp_path / "out.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["label"] for line in lines] == pytest.approx(scores)
    answers = load(run).classify(dev.texts[:2])
    assert [answer["score"] for answer in answers] == pytest.approx(scores[:2], abs=1e-5)


@pytest.mark.parametrize(("times", "plus"), [(1000.0, 250_000.0), (0.001, 2005.0)])
def test_scores_of_any_scale_are_learned(model_folder, toy, tmp_path, times, plus):
    """Prices far from 0, years close together: what the same scores between 0 and 1 give."""
    settings = replace(toy.settings, epochs=12, dropout=0.0, attention_dropout=0.0)
    train, dev = worths(128, 1), worths(40, 2)
    plain = Job.prepare(Start(model_folder), TASK, train, {"dev": dev}, settings)
    train, dev = (
        replace(part, labels=(times * part.labels.astype(np.float64) + plus).astype(np.float32))
        for part in (train, dev)
    )
    job = Job.prepare(Start(model_folder), TASK, train, {"dev": dev}, settings)
    result = finetune(job, run := tmp_path / "run", settings, [1])
    metrics = result["metrics"]
    assert result["restarts"] == [] and metrics["pearson"] > 0.95
    # float32 knows numbers around 2005 to 0.0001, a tenth of what they differ by at most
    alike = plain.run(settings, 1, tmp_path / "plain").judged.figures
    assert metrics["pearson"] == pytest.approx(alike["pearson"], abs=0.02)
    # the written model gives scores by itself, to transformers too
    assert evaluate_on(load(run), dev)["metrics"] == pytest.approx(metrics)
    assert metrics["mse"] < 0.2 * dev.labels.astype(np.float64).var()


@pytest.mark.parametrize("unit", [1e-7, 1.0, 1e6])
def test_records_tell_as_much_as_the_scores(unit):
    """Of rates of 1e-6 five decimals would leave 0."""
    labels = (unit * np.array([0.1, 2.000001, 3.25])).astype(np.float32)
    data = Examples(["a", "b", "c"], None, labels, (), "made", [1, 2, 3])
    answers = Labelled(labels[::-1] * np.float32(1.1), None)
    records = json.loads(json.dumps(KIND.records(answers, data, Purpose(TASK, (), Layout()))))
    for name, values in (("label", labels), ("predicted", answers.predicted)):
        assert np.array_equal(np.array([r[name] for r in records], np.float32), values)
    assert [records[0]["label"]] == [float(f"{0.1 * unit:.7g}")]  # as it was in the file


def test_a_further_fine_tuning_begins_with_the_head_of_the_first(model_folder, toy, tmp_path):
    settings = replace(toy.settings, epochs=12, dropout=0.0, attention_dropout=0.0)
    train, dev = (
        replace(part, labels=100 * part.labels + 500) for part in (worths(128, 1), worths(40, 2))
    )
    job = Job.prepare(Start(model_folder), TASK, train, {"dev": dev}, settings)
    first = finetune(job, run := tmp_path / "run", settings, [1])["metrics"]
    still = replace(settings, epochs=1, rate=1e-12)
    again = Job.prepare(Start(run), TASK, train, {"dev": dev}, still).run(still, 1, tmp_path / "b")
    assert again.judged.figures == pytest.approx(first, rel=1e-3)


def test_a_dead_model_is_seen_where_the_labels_differ(model_folder):
    """Its scores differ by rounding alone."""
    data, purpose = worths(8, 1), Purpose(TASK, (), Layout())
    rows = KIND.featurise(Tokenizer.from_pretrained(model_folder), data, purpose.layout, ())
    answers = KIND.answers(np.full((8, 1), 0.75, np.float32), rows, data, purpose)
    assert answers.probabilities is None and answers.predicted.shape == (8,)
    wavering = answers._replace(predicted=0.75 + 1e-4 * np.arange(8, dtype=np.float32))
    assert KIND.constant(answers, data) == KIND.constant(wavering, data) == "0.75"
    assert KIND.constant(answers._replace(predicted=data.labels), data) is None
    assert KIND.constant(answers, replace(data, labels=np.full(8, 0.75, np.float32))) is None
    assert KIND.undefined(answers, data, purpose) == {
        "pearson": "every answer is 0.75",
        "spearman": "every answer is 0.75",
    }
    figures = KIND.measure(answers, data, purpose)
    assert figures == {
        "pearson": 0.0,
        "spearman": 0.0,
        "mse": pytest.approx(np.mean((0.75 - data.labels) ** 2), rel=1e-5),
    }


def test_one_score_is_nothing_to_learn(model_folder, toy):
    one = replace(worths(4, 1), labels=np.full(4, 2.5, np.float32))  # the others were split off
    with pytest.raises(ValueError, match="made: every training example has the score 2.5: .*--dev"):
        Job.prepare(Start(model_folder), TASK, one, {"dev": worths(9, 2)}, toy.settings)
