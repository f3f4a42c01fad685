"""Initial models and their trainings: fresh layers, heads, what is kept, seeds, losses, int8."""

import json
import os
import shutil
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch

from bertsmith.base.terminal import ignore
from bertsmith.checkpoints.config_json import read_config
from bertsmith.checkpoints.model_folder import load_model, save_model
from bertsmith.checkpoints.run_folder import RunFolder
from bertsmith.model.config import config_for
from bertsmith.model.heads import PreTrainingModel, SequenceClassifier
from bertsmith.model.initialization import initialize
from bertsmith.tasks.examples import Examples
from bertsmith.tasks.task import own_task
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.text.tokenizer.wordpiece import Vocabulary
from bertsmith.training import engine
from bertsmith.training.checkpointing import checkpoints_in
from bertsmith.training.finetuning import fit, hidden_states
from bertsmith.training.finetuning import trainer as trainer_module
from bertsmith.training.finetuning.run import train_seeds
from bertsmith.training.finetuning.settings import FinetuneSettings
from bertsmith.training.finetuning.task_types.texts import Classify
from bertsmith.training.finetuning.trainer import InitialModel
from bertsmith.training.loop import matmul_times, step

from ...tiny import bertsmith, cli
from ..runs import at_step, lines


def classifier(folder, settings, seed=1, names=("weather", "food"), task=None, from_scratch=False):
    start = InitialModel(folder, from_scratch)
    return start.model(SequenceClassifier, 2, settings, seed, names, task=task)


def evaluations(folder):
    return [line["step"] for line in lines(folder, "evaluate")]


# --- initial models ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def deep_folder(model_folder, tmp_path_factory):
    """Three layers, with weights larger than fresh ones."""
    folder, config = tmp_path_factory.mktemp("deep"), config_for("3x64", 54, max_positions=32)
    model = initialize(PreTrainingModel(config), 0.1, torch.Generator().manual_seed(1))
    save_model(model, Tokenizer.from_pretrained(model_folder), folder)
    return folder


@pytest.mark.parametrize("fresh", [0, 1, 2, 3])
def test_reinitialised_layers_are_the_top_ones_and_the_pooler(deep_folder, toy, fresh):
    stored = load_model(deep_folder, PreTrainingModel).model.state_dict()
    settings = replace(toy.settings, reinit_layers=fresh)
    model, again = (classifier(deep_folder, settings, 3).state_dict() for _ in range(2))
    assert all(torch.equal(weight, again[name]) for name, weight in model.items())
    for name, weight in model.items():
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


def test_more_fresh_layers_than_there_are_is_refused(deep_folder, toy):
    with pytest.raises(ValueError, match="`reinit_layers=4`: the model has 3"):
        classifier(deep_folder, replace(toy.settings, reinit_layers=4))


def test_from_scratch_takes_the_shape_but_not_the_weights(model_folder, toy):
    scratch = classifier(model_folder, toy.settings, from_scratch=True).encoder
    start = classifier(model_folder, toy.settings).encoder
    assert scratch.config == start.config
    assert not torch.equal(scratch.embeddings.token.weight, start.embeddings.token.weight)


def test_a_head_is_kept_for_the_same_classes_of_one_data_set(trainer, toy, tmp_path):
    run, settings = tmp_path / "run", toy.settings
    train_seeds(trainer, run, replace(settings, epochs=1), [1])
    stored = load_model(run, SequenceClassifier).model.classifier.weight

    def is_kept(**others):
        return torch.equal(classifier(run, settings, 5, **others).classifier.weight, stored)

    assert is_kept() and not is_kept(names=("food", "weather"))
    # two published data sets that number their classes have nothing in common
    about = json.loads((run / "config.json").read_text())
    about["bertsmith"]["task"] = "sst2"
    (run / "config.json").write_text(json.dumps(about))
    assert is_kept(task="sst2") and is_kept(task="classify") and not is_kept(task="mrpc")
    assert not is_kept(task="multilabel")  # each label by itself, not one of them


def test_what_does_not_fit_the_model_is_refused(toy, model_folder, tmp_path):
    with pytest.raises(ValueError, match="`max_length=64`: the model knows 32 positions"):
        toy.prepare(settings=replace(toy.settings, max_length=64))
    folder = shutil.copytree(model_folder, tmp_path / "model")
    tokenizer = Tokenizer.from_pretrained(folder)
    Tokenizer(Vocabulary([*tokenizer.vocabulary.pieces, "another"])).save(folder)
    with pytest.raises(
        ValueError, match="55 pieces, but its model 54: take the model's own tokenizer"
    ):
        toy.prepare(model=folder)
    # a model of one segment
    config = config_for("1x64", 54, max_positions=32, type_vocab_size=1)
    save_model(PreTrainingModel(config), tokenizer, tmp_path / "single")
    toy.prepare(model=tmp_path / "single")
    train, dev = (replace(data, pairs=data.texts) for data in (toy.examples(8, 1),) * 2)
    with pytest.raises(ValueError, match="type_vocab_size of 1 .* or leave `text_pair` out"):
        toy.prepare(train, dev, own_task("classify", "text", "pair", "label"),
                    model=tmp_path / "single")  # fmt: skip
    # a DistilBERT reads pairs without segments
    config = replace(config, type_vocab_size=0, family="distilbert")
    save_model(PreTrainingModel(config), tokenizer, tmp_path / "none")
    toy.prepare(train, dev, own_task("classify", "text", "pair", "label"), model=tmp_path / "none")


def test_batch_epochs_and_rate_are_chosen_where_they_are_left_open(trainer):
    # 96 examples in batches of 16: 6 steps an epoch, 500 would be 84 epochs; the toy is 64 wide
    chosen = trainer.with_defaults(FinetuneSettings(batch_size=16))
    assert (chosen.epochs, chosen.learning_rate) == (20, pytest.approx(6e-4))
    base, tiny = (config_for(size, 100, dropout=0.2) for size in ("base", "tiny"))
    assert FinetuneSettings().with_defaults(100_000, base, 32).epochs == 3
    assert FinetuneSettings().with_defaults(100, tiny, 8).batch_size == 8
    frozen = FinetuneSettings(freeze_encoder=True).with_defaults(100_000, tiny, 8)
    assert (frozen.epochs, frozen.learning_rate, frozen.dropout) == (10, 1e-3, 0.1)
    given = FinetuneSettings(batch_size=8, epochs=1, learning_rate=1e-5, dropout=0.0)
    given = replace(given, attention_dropout=0.3)
    assert given.with_defaults(10, tiny, 32) == given


def test_dropout_is_the_model_s_own_where_it_is_left_open(trainer):
    for own in ({"dropout": 0.0, "attention_dropout": 0.0}, {"dropout": 0.2}):
        config = config_for("tiny", 100, **own)
        chosen = FinetuneSettings(batch_size=8).with_defaults(10, config, 32)
        kept = chosen.dropout, chosen.attention_dropout
        assert kept == (config.dropout, config.attention_dropout)
    chosen = trainer.with_defaults(FinetuneSettings(dropout=0.3))
    there = read_config(trainer.start.folder)
    model = trainer.fresh_model(replace(chosen, attention_dropout=None), 1)
    assert model.config.dropout == 0.3
    assert model.config.attention_dropout == there.attention_dropout


# --- trainings ---------------------------------------------------------------------------------


def test_a_seed_gives_the_same_model_again(trainer, toy, tmp_path):
    dev = trainer.dev[0].features
    one, two, other = (
        trainer.run(toy.settings, seed, tmp_path / name).outputs(dev)
        for name, seed in (("one", 3), ("two", 3), ("three", 4))
    )
    assert np.array_equal(one, two) and not np.array_equal(one, other)


def test_it_stops_when_dev_gets_no_better(trainer, toy, tmp_path):
    still = replace(toy.settings, learning_rate=1e-12, epochs=10, early_stopping_patience=2)
    trained = trainer.run(still, 1, tmp_path)
    # six batches an epoch: the first, and two without a gain
    assert evaluations(tmp_path) == [6, 12, 18] and trained.steps == 18
    assert "stopped early: no gain in 2 evaluations" in (tmp_path / "log.jsonl").read_text()


def test_without_evaluations_on_the_way_dev_is_measured_at_the_end(trainer, toy, tmp_path, capsys):
    settings = replace(toy.settings, epochs=2, evals_per_epoch=0)
    trained = trainer.run(settings, 1, tmp_path)
    assert evaluations(tmp_path) == [12] and trained.best_step == 12
    (line,) = [line for line in capsys.readouterr().err.splitlines() if ", step" in line]
    accuracy = trained.evaluation.metrics["accuracy"]
    assert line == f"finetune, step 12: dev accuracy {accuracy:.4f} of 40 examples"


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

    def spy(owner, function, part, place):
        """Note the seed, which is the argument at that place."""
        real = getattr(owner, function)
        monkeypatch.setattr(
            owner, function, lambda *args: used[part].add(args[place]) or real(*args)
        )

    spy(InitialModel, "model", "init", 4)
    spy(fit, "training_batches", "order", 2)
    spy(step, "step_seed", "dropout", 0)
    once = replace(toy.settings, epochs=1)
    trainer.run(once, 5, tmp_path / "one")
    assert used == {"init": {5}, "order": {5}, "dropout": {5}}
    for seeds in used.values():
        seeds.clear()
    trainer.run(replace(once, init_seed=0, order_seed=22, dropout_seed=33), 5, tmp_path / "apart")
    assert used == {"init": {0}, "order": {22}, "dropout": {33}}


def test_a_seed_changes_its_own_part_alone(trainer, toy, tmp_path):
    dev, plain = trainer.dev[0].features, replace(toy.still, epochs=2)

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


# --- weighted losses reach the steps -----------------------------------------------------------


def logged_loss(toy, folder, data, dev=None, task=None, **changes):
    """Of ten steps with all examples in each, whose weights stay where they are: loss, logits."""
    changes |= {"batch_size": 999, "epochs": 10, "learning_rate": 1e-12}
    settings = replace(toy.still, **changes)
    trainer = toy.prepare(data, dev or data, task or toy.task, settings)
    logits = trainer.run(settings, 1, folder).outputs(trainer.train)
    (line,) = lines(folder, "train")
    return line["loss"], logits


@pytest.mark.parametrize("weights", ["none", "balanced"])
@pytest.mark.parametrize("focal", [0.0, 2.0])
def test_weighted_and_focal_losses_reach_the_steps(toy, tmp_path, weights, focal):
    data = toy.examples(96, 1)
    rare = data.select(np.flatnonzero((data.labels == 0) | (np.arange(96) % 8 == 0)))
    changes = {"class_weights": weights, "focal_gamma": focal}
    loss, logits = logged_loss(toy, tmp_path, rare, data, **changes)
    logs, labels = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True), rare.labels
    nats = -logs[np.arange(len(labels)), labels]
    counts = np.bincount(labels)
    assert counts[0] > 3 * counts[1]
    shares = len(labels) / (2 * counts) if weights == "balanced" else np.ones(2)
    expected = (shares[labels] * (1 - np.exp(-nats)) ** focal * nats).mean()
    assert loss == pytest.approx(expected, rel=1e-4)


def relabelled(toy, labels, names=()):
    """The toy's texts with other labels."""
    texts, count = toy.examples(len(labels), 1).texts, len(labels)
    return Examples(texts, None, labels, names, "made", list(range(1, count + 1)))


def test_balanced_labels_count_by_those_who_have_them(toy, tmp_path):
    labels = np.random.default_rng(1).random((40, 2)) < [0.2, 0.6]
    data, task = relabelled(toy, labels, ("a", "b")), own_task("multilabel", "text", None, "label")
    loss, logits = logged_loss(toy, tmp_path, data, task=task, class_weights="balanced")
    logits = logits.astype(np.float64)
    have = np.log1p(np.exp(-logits)) * (1 - labels.mean(axis=0)) / labels.mean(axis=0)
    expected = np.where(labels, have, np.log1p(np.exp(logits))).mean()
    assert loss == pytest.approx(expected, rel=1e-4)


def test_scores_have_no_classes_to_balance(toy, tmp_path):
    data = relabelled(toy, np.arange(8, dtype=np.float32))
    task = own_task("regress", "text", None, "label")
    with pytest.raises(ValueError, match="`class_weights='balanced'`: a regress has no classes"):
        logged_loss(toy, tmp_path, data, task=task, class_weights="balanced")


# --- int8 or bf16 ------------------------------------------------------------------------------


@pytest.mark.parametrize(("int8", "taken"), [(0.05, "int8"), (0.095, "bf16")])
def test_the_faster_precision_is_measured(trainer, toy, figures, capsys, int8, taken):
    measured = figures(int8)
    asked = replace(toy.settings, precision="auto-int8")
    assert trainer.with_faster_precision(asked) == replace(asked, precision=taken)
    assert measured == [(64, 128, 1, 0)]  # 16 rows of 7 tokens, rounded
    assert f"finetune: {taken}: the products of a layer take" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["named", "frozen", "without int8"])
def test_nothing_is_measured_without_a_choice(trainer, toy, figures, monkeypatch, what):
    measured = figures(0.05)
    asked = replace(toy.settings, precision="auto" if what == "named" else "auto-int8")
    asked = replace(asked, freeze_encoder=what == "frozen")
    if what == "without int8":
        monkeypatch.setattr(matmul_times, "has_int8", lambda device: False)
    found = trainer.with_faster_precision(asked)
    assert found == replace(asked, precision="bf16" if what == "without int8" else asked.precision)
    assert not measured


@pytest.mark.parametrize("has_int8", [True, False])
def test_a_run_that_goes_on_keeps_its_precision(
    toy_files, model_folder, tmp_path, figures, monkeypatch, stop_at_evaluation, has_int8
):
    run = tmp_path / "run"
    words = ["finetune", "classify", "--model", model_folder, "--data", toy_files, "--out", run]
    words += ["--threads", "1", "--epochs", "3", "--batch-size", "16", "--checkpoint-every", "2"]
    figures(0.095)
    stop_at_evaluation(2)
    assert "interrupted" in cli(*words).err
    assert RunFolder(run).settings()["settings"]["precision"] == "bf16"
    measured = figures(0.05)
    measured.clear()
    if not has_int8:
        for module in (matmul_times, engine):
            monkeypatch.setattr(module, "has_int8", lambda device: False)
        for module in (engine, trainer_module):
            monkeypatch.setattr(module, "has_bf16", lambda device: False)
    bertsmith(*words)
    settings = RunFolder(run).settings()["settings"]
    assert settings["precision"] == ("bf16" if has_int8 else "float32")
    assert not measured


# --- stopped -----------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [2, 6], ids=["on the way", "at the end"])
def test_an_evaluation_stops_between_its_batches_and_is_made_when_the_run_goes_on(
    trainer, toy, tmp_path, monkeypatch, stop_at_evaluation, number
):
    real, batches = trainer_module.head_outputs, []

    def head_outputs(model, rows, engine, on_batch=ignore):
        return real(model, rows, engine, lambda count: batches.append(count) or on_batch(count))

    monkeypatch.setattr(trainer_module, "head_outputs", head_outputs)
    monkeypatch.setattr(
        hidden_states, "row_batches", lambda _, rows: np.split(np.arange(len(rows)), 4)
    )
    whole = trainer.run(toy.settings, 1, tmp_path / "whole", resume=True)
    assert len(batches) == 6 * 4
    stop_at_evaluation(number)
    with pytest.raises(KeyboardInterrupt):
        trainer.run(toy.settings, 1, tmp_path / "run", resume=True)
    assert len(batches) == 6 * 4 + (number - 1) * 4 + 1
    assert evaluations(tmp_path / "run") == [6, 12, 18, 24, 30][: number - 1]
    (checkpoint,) = checkpoints_in(tmp_path / "run")
    assert checkpoint.name == f"checkpoint-{6 * number:08d}"
    again = trainer.run(toy.settings, 1, tmp_path / "run", resume=True)
    assert evaluations(tmp_path / "run") == evaluations(tmp_path / "whole")
    assert again.evaluation.metrics == whole.evaluation.metrics
    assert again.best_step == whole.best_step
    assert np.array_equal(*(one.outputs(trainer.dev[0].features) for one in (again, whole)))


def test_a_signal_in_the_last_step_of_a_seed_is_heeded(trainer, toy, tmp_path, monkeypatch):
    short = replace(toy.settings, epochs=1, max_retries=0)
    whole = train_seeds(trainer, tmp_path / "whole", short, [1, 2])
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        at_step(5, patch, lambda: os.kill(os.getpid(), signal.SIGTERM))
        train_seeds(trainer, tmp_path / "run", short, [1, 2])
    assert [path.name for path in (tmp_path / "run/seeds").iterdir()] == ["1"]
    assert train_seeds(trainer, tmp_path / "run", short, [1, 2]) == whole
