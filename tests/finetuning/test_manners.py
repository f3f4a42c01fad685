"""The manners of training: fresh layers, what is kept, seeds apart, weighted losses, restarts."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from bertsmith.checkpoints.model_folder import load_model, save_model
from bertsmith.cli.predict import show_metrics
from bertsmith.inference.ensemble import evaluate_on
from bertsmith.inference.predictor import load
from bertsmith.model.config import config_for
from bertsmith.model.heads import PreTrainingModel, SequenceClassifier
from bertsmith.model.initialization import initialize
from bertsmith.tasks.examples import Examples
from bertsmith.tasks.task import own_task
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.training.finetuning import fit
from bertsmith.training.finetuning.run import train_seeds
from bertsmith.training.finetuning.task_types.texts import Classify
from bertsmith.training.finetuning.trainer import InitialModel, Trainer
from bertsmith.training.loop import step


@pytest.fixture(scope="module")
def deep_folder(model_folder, tmp_path_factory):
    """Three layers, with weights larger than fresh ones."""
    folder, config = tmp_path_factory.mktemp("deep"), config_for("3x64", 54, max_positions=32)
    model = initialize(PreTrainingModel(config), 0.1, torch.Generator().manual_seed(1))
    save_model(model, Tokenizer.from_pretrained(model_folder), folder)
    return folder


def whole_batch(toy, **changes):
    """Ten steps with all examples in each, whose weights stay where they are."""
    still = {
        "batch_size": 999,
        "epochs": 10,
        "learning_rate": 1e-12,
        "dropout": 0.0,
        "attention_dropout": 0.0,
    }
    return replace(toy.settings, **still, **changes)


def logged_loss(folder):
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    (loss,) = [line["loss"] for line in lines if line["event"] == "train"]
    return loss


def evaluations(folder):
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if line["event"] == "evaluate"]


@pytest.mark.parametrize("fresh", [0, 1, 2, 3])
def test_reinitialised_layers_are_the_top_ones_and_the_pooler(deep_folder, toy, fresh):
    stored = load_model(deep_folder, PreTrainingModel).model.state_dict()
    settings = replace(toy.settings, reinit_layers=fresh)
    model = InitialModel(deep_folder).model(SequenceClassifier, 2, settings, seed=3)
    for name, weight in model.state_dict().items():
        layer = int(name.split(".")[2]) if "layers" in name else -1
        is_fresh = layer >= 3 - fresh or (name.startswith("pooler") and fresh > 0)
        if name.startswith("classifier"):
            continue
        if not is_fresh:
            assert torch.equal(weight, stored[name]), name
        elif weight.ndim == 2:
            # the config's 0.02, cut off at two deviations (std 0.8796), where 0.1 was stored;
            # of 4,096 draws or more the deviation is known to 1%
            assert weight.std().item() == pytest.approx(0.8796 * 0.02, rel=0.05), name
    again = InitialModel(deep_folder).model(SequenceClassifier, 2, settings, seed=3).state_dict()
    assert all(torch.equal(weight, again[name]) for name, weight in model.state_dict().items())


def test_more_fresh_layers_than_there_are_is_refused(deep_folder, toy):
    with pytest.raises(ValueError, match="--reinit-layers 4: the model has 3"):
        settings = replace(toy.settings, reinit_layers=4)
        InitialModel(deep_folder).model(SequenceClassifier, 2, settings, seed=3)


def test_it_stops_when_dev_gets_no_better(trainer, toy, tmp_path):
    still = replace(
        toy.settings, learning_rate=1e-12, epochs=10, early_stopping_patience=2
    )  # six batches an epoch
    trained = trainer.run(still, 1, tmp_path)
    assert evaluations(tmp_path) == [6, 12, 18]  # the first, and two without a gain
    assert trained.steps == 18
    assert "stopped early: no gain in 2 evaluations" in (tmp_path / "log.jsonl").read_text()
    with pytest.raises(
        ValueError, match="early_stopping_patience compares evaluations: leave --evals-per-epoch 0"
    ):
        replace(still, evals_per_epoch=0)
    with pytest.raises(ValueError, match="early_stopping_patience keeps the weights best"):
        replace(still, keep="last")


def test_without_evaluations_on_the_way_dev_is_measured_at_the_end(trainer, toy, tmp_path, capsys):
    settings = replace(toy.settings, epochs=2, evals_per_epoch=0)
    trained = trainer.run(settings, 1, tmp_path)
    assert evaluations(tmp_path) == [12] and trained.best_step == 12
    (line,) = [line for line in capsys.readouterr().err.splitlines() if ", step" in line]
    accuracy = trained.evaluation.metrics["accuracy"]
    assert line == f"finetune, step 12: dev accuracy {accuracy:.4f} of 40 examples"
    with pytest.raises(ValueError, match="evals_per_epoch = -1: must be at least 0"):
        replace(toy.settings, evals_per_epoch=-1)


@pytest.mark.parametrize(
    ("keep", "accuracies", "kept"),
    [
        ("best", [0.5, 0.9, 0.4, 0.8], 2),
        ("best", [0.5, 0.9, 0.9, 0.8], 3),  # of equally good ones the later saw more
        ("last", [0.5, 0.9, 0.4, 0.8], 4),
    ],
)
def test_which_weights_are_kept(trainer, toy, tmp_path, monkeypatch, keep, accuracies, kept):
    seen = []

    def measure(self, answers, data, model_task):
        seen.append(answers.probabilities)
        return {"accuracy": accuracies[len(seen) - 1]}

    monkeypatch.setattr(Classify, "measure", measure)
    settings = replace(toy.settings, epochs=2, evals_per_epoch=2, keep=keep)
    trained = trainer.run(settings, 1, tmp_path)
    assert trained.evaluation.metrics == {"accuracy": accuracies[kept - 1]}
    assert evaluations(tmp_path) == [3, 6, 9, 12] and trained.best_step == 3 * kept
    logits = torch.from_numpy(trained.outputs(trainer.dev[0].features))
    np.testing.assert_allclose(logits.softmax(-1).numpy(), seen[kept - 1], atol=1e-6)
    others = [one for number, one in enumerate(seen, start=1) if number != kept]
    assert all(np.abs(one - seen[kept - 1]).max() > 1e-4 for one in others)


def test_seeds_go_where_they_say(trainer, toy, tmp_path, monkeypatch):
    used = {"init": set(), "order": set(), "dropout": set()}
    model, batches, step_seed = InitialModel.model, fit.training_batches, step.step_seed

    def spy_model(self, head, num_outputs, settings, seed, *others):
        used["init"].add(seed)
        return model(self, head, num_outputs, settings, seed, *others)

    def spy_batches(lengths, batch_size, seed, epoch, together):
        used["order"].add(seed)
        return batches(lengths, batch_size, seed, epoch, together)

    def spy_step(seed, step):
        used["dropout"].add(seed)
        return step_seed(seed, step)

    monkeypatch.setattr(InitialModel, "model", spy_model)
    monkeypatch.setattr(fit, "training_batches", spy_batches)
    monkeypatch.setattr(step, "step_seed", spy_step)
    once = replace(toy.settings, epochs=1)
    trainer.run(once, 5, tmp_path / "one")
    assert used == {"init": {5}, "order": {5}, "dropout": {5}}
    for seeds in used.values():
        seeds.clear()
    trainer.run(replace(once, init_seed=0, order_seed=22, dropout_seed=33), 5, tmp_path / "apart")
    assert used == {"init": {0}, "order": {22}, "dropout": {33}}


def test_a_seed_changes_its_own_part_alone(trainer, toy, tmp_path):
    dev = trainer.dev[0].features
    plain = replace(toy.settings, epochs=2, dropout=0.0, attention_dropout=0.0)

    def outputs(settings, **seeds):
        name = "-".join(map(str, (settings.dropout, *seeds.values())))
        return trainer.run(replace(settings, **seeds), 1, tmp_path / name).outputs(dev)

    start = outputs(plain)
    assert np.array_equal(outputs(plain, dropout_seed=9), start)  # nothing is dropped
    assert np.array_equal(outputs(plain, order_seed=1, init_seed=1), start)  # as that of the run
    assert not np.array_equal(outputs(plain, order_seed=9), start)
    assert not np.array_equal(outputs(plain, init_seed=9), start)
    dropping = replace(plain, dropout=0.1)
    assert not np.array_equal(outputs(dropping, dropout_seed=9), outputs(dropping))


def log_softmax(logits):
    return logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)


@pytest.mark.parametrize("weights", ["none", "balanced"])
@pytest.mark.parametrize("focal", [0.0, 2.0])
def test_weighted_and_focal_losses_reach_the_steps(model_folder, toy, tmp_path, weights, focal):
    data = toy.examples(96, 1)
    rare = data.select(np.flatnonzero((data.labels == 0) | (np.arange(96) % 8 == 0)))
    settings = whole_batch(toy, class_weights=weights, focal_gamma=focal)
    trainer = Trainer.prepare(InitialModel(model_folder), toy.task, rare, {"dev": data}, settings)
    trained = trainer.run(settings, 1, tmp_path)
    logs, labels = log_softmax(trained.outputs(trainer.train)), rare.labels
    nats = -logs[np.arange(len(labels)), labels]
    counts = np.bincount(labels)
    assert counts[0] > 3 * counts[1]
    shares = len(labels) / (2 * counts) if weights == "balanced" else np.ones(2)
    expected = (shares[labels] * (1 - np.exp(-nats)) ** focal * nats).mean()
    assert logged_loss(tmp_path) == pytest.approx(expected, rel=1e-4)


def test_balanced_labels_count_by_those_who_have_them(model_folder, toy, tmp_path):
    texts = toy.examples(40, 1).texts
    labels = np.random.default_rng(1).random((40, 2)) < [0.2, 0.6]
    data = Examples(texts, None, labels, ("a", "b"), "made", list(range(1, 41)))
    settings = whole_batch(toy, class_weights="balanced")
    task = own_task("multilabel", "text", None, "label")
    trainer = Trainer.prepare(InitialModel(model_folder), task, data, {"dev": data}, settings)
    logits = trainer.run(settings, 1, tmp_path).outputs(trainer.train).astype(np.float64)
    have = np.log1p(np.exp(-logits)) * (1 - labels.mean(axis=0)) / labels.mean(axis=0)
    expected = np.where(labels, have, np.log1p(np.exp(logits))).mean()
    assert logged_loss(tmp_path) == pytest.approx(expected, rel=1e-4)


def test_scores_have_no_classes_to_balance(model_folder, toy, tmp_path):
    labels = np.arange(8, dtype=np.float32)
    data = Examples(toy.examples(8, 1).texts, None, labels, (), "made", list(range(1, 9)))
    task = own_task("regress", "text", None, "label")
    settings = replace(toy.settings, class_weights="balanced")
    trainer = Trainer.prepare(InitialModel(model_folder), task, data, {"dev": data}, settings)
    with pytest.raises(ValueError, match="--class-weights balanced: a regress has no classes"):
        trainer.run(settings, 1, tmp_path)


def uneven(toy, kind):
    """Texts of which a quarter have label 1, told by a word; of a set, label 0 too."""
    data = toy.examples(80, 3)
    kept = np.concatenate([np.flatnonzero(data.labels == 0), np.flatnonzero(data.labels == 1)[:12]])
    data = data.select(kept)
    if kind == "multilabel":
        data = replace(data, labels=np.stack([data.labels == 0, data.labels == 1], axis=1))
    return data, own_task(kind, "text", None, "label")


@pytest.mark.parametrize(
    ("kind", "metric"), [("classify", "f1"), ("classify", "matthews"), ("multilabel", "macro_f1")]
)
def test_thresholds_are_tuned_by_the_metric_and_stored(model_folder, toy, tmp_path, kind, metric):
    data, task = uneven(toy, kind)
    plain = replace(toy.settings, epochs=1, learning_rate=3e-4, metric=metric, max_retries=0)
    figures = {}
    for name, settings in (("plain", plain), ("tuned", replace(plain, tune_thresholds=True))):
        trainer = Trainer.prepare(InitialModel(model_folder), task, data, {"dev": data}, settings)
        figures[name] = train_seeds(trainer, tmp_path / name, settings, [1])
    assert figures["tuned"]["main_metric"] == next(iter(figures["tuned"]["metrics"])) == metric
    assert figures["tuned"]["metrics"][metric] > figures["plain"]["metrics"][metric]
    assert figures["plain"]["thresholds"] == {}
    assert len(figures["tuned"]["thresholds"]["thresholds"]) == (1 if kind == "classify" else 2)
    found = evaluate_on(load(tmp_path / "tuned"), data)["metrics"]
    assert found == pytest.approx(figures["tuned"]["metrics"])


def test_a_collapsed_run_is_made_again_with_the_next_seed(
    trainer, toy, tmp_path, monkeypatch, capsys
):
    """Seed 1 is made to collapse by a rate far too high."""
    run = Trainer.run

    def collapsing(self, settings, seed, *args):
        return run(
            self, replace(settings, learning_rate=1.0) if seed == 1 else settings, seed, *args
        )

    monkeypatch.setattr(Trainer, "run", collapsing)
    result = train_seeds(trainer, tmp_path / "run", toy.settings, [1, 2])
    assert list(result["seeds"]) == ["3", "2"]  # 2 was asked for, so 3 is the next
    assert all(figures["accuracy"] > 0.95 for figures in result["seeds"].values())
    (restart,) = result["restarts"]
    assert (restart["seed"], restart["instead_of"]) == (1, 1)
    assert restart["reason"].startswith("every dev example gets '")
    assert json.loads((tmp_path / "run/result.json").read_text())["restarts"] == [restart]
    assert "warning: seed 1 collapsed (every dev example" in capsys.readouterr().err


def test_what_always_collapses_is_told_and_kept(trainer, toy, tmp_path, capsys):
    settings = replace(toy.settings, learning_rate=1.0, max_retries=1)
    result = train_seeds(trainer, tmp_path / "run", settings, [1])
    assert [row["seed"] for row in result["restarts"]] == [1, 2]
    assert list(result["seeds"]) == ["2"] and result["best_seed"] == 2
    assert (
        "seed 2 collapsed" in (told := capsys.readouterr().err) and "lower --learning-rate" in told
    )


def test_a_metric_without_a_value_is_told(model_folder, toy, tmp_path, capsys):
    dev = toy.examples(20, 2)
    dev = dev.select(np.flatnonzero(dev.labels == 0))
    settings = replace(toy.settings, metric="matthews", epochs=1)
    data = {"dev": dev, "dev_mixed": toy.examples(20, 3)}
    trainer = Trainer.prepare(
        InitialModel(model_folder), toy.task, toy.examples(96, 1), data, settings
    )
    result = train_seeds(trainer, tmp_path / "run", settings, [1])
    assert result["undefined"]["matthews"] == "every label is 0"
    assert result["metrics"]["matthews"] == 0.0
    told = "warning: seed 1: matthews has no value on dev and counts 0: every label is 0\n"
    assert told in capsys.readouterr().err
    found = evaluate_on(load(tmp_path / "run"), dev)
    assert found["undefined"] == {"matthews": "every label is 0"}
    show_metrics(found)
    assert "0.0000  (no value: every label is 0)\n" in capsys.readouterr().out
