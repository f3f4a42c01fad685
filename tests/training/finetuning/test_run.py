"""All seeds of a run: the best one is kept, collapse is seen, and what was stopped goes on."""

import copy
import json
import shutil
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from bertsmith.base.files import read_json_lines
from bertsmith.checkpoints.config_json import label_names
from bertsmith.checkpoints.convert import convert
from bertsmith.checkpoints.model_folder import load_model, save_model
from bertsmith.checkpoints.run_folder import RunFolder
from bertsmith.cli.predict import metric_lines
from bertsmith.inference.evaluation.labelled import evaluate_on
from bertsmith.inference.model_task import read_model_task
from bertsmith.inference.predictor import load
from bertsmith.model.heads import PreTrainingModel, SequenceClassifier
from bertsmith.reports.finetuning import restart_table
from bertsmith.reports.runs import read_run
from bertsmith.tasks.task import own_task
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.training.checkpointing import SeedCheckpoint, checkpoints_in
from bertsmith.training.finetuning import run as run_summary
from bertsmith.training.finetuning.run import collapse, notable_examples, train_seeds
from bertsmith.training.finetuning.settings import Provenance
from bertsmith.training.finetuning.trainer import Trainer


@pytest.fixture
def quick(toy):
    """One epoch, whatever comes of it."""
    return replace(toy.settings, epochs=1, max_retries=0)


def names_in(folder):
    return [path.name for path in folder.iterdir()]


def test_it_learns_and_leaves_the_best_seed(trainer, toy, tmp_path):
    run = tmp_path / "run"
    result = train_seeds(trainer, run, toy.settings, [1, 2])
    assert result["metrics"]["accuracy"] > 0.95
    best = max(result["seeds"], key=lambda seed: result["seeds"][seed]["accuracy"])
    assert result["seeds"][best] == result["metrics"]
    assert list(label_names(run)) == ["weather", "food"]
    model = load_model(run, SequenceClassifier).model.eval()
    dev = trainer.dev[0].features
    with torch.inference_mode():
        scores = model(*(torch.from_numpy(array) for array in dev.padded(np.arange(40), 0)))
    accuracy = (scores.argmax(1).numpy() == dev.labels).mean()
    assert accuracy == result["metrics"]["accuracy"]  # what is saved is what was measured
    assert np.sum(result["confusion"]) == 40
    record = json.loads((run / "run.json").read_text())
    assert record["kind"] == "finetune" and record["settings"]["task"] == "classify"


def test_a_left_to_right_model_learns(toy, model_folder, tmp_path):
    """Its [CLS] sees nothing of the text: the last token is read."""
    loaded = load_model(model_folder, PreTrainingModel, causal=True)
    save_model(loaded.model, Tokenizer.from_pretrained(model_folder), tmp_path / "causal")
    trainer = toy.prepare(model=tmp_path / "causal")
    result = train_seeds(trainer, tmp_path / "run", toy.settings, [1])
    assert result["metrics"]["accuracy"] > 0.95 and result["restarts"] == []


def test_a_folder_of_another_run_is_refused(trainer, toy, quick, tmp_path):
    def refuses(folder, message, settings=toy.settings, seeds=(1,)):
        with pytest.raises(ValueError, match=message):
            train_seeds(trainer, tmp_path / folder, settings, seeds)

    train_seeds(trainer, tmp_path / "run", quick, [1])
    refuses("run", "holds a finished run, ready to use")
    with RunFolder(tmp_path / "busy").locked():
        refuses("busy", "another process is training here")
    own = tmp_path / "project"
    (own / "seeds" / "maize").mkdir(parents=True)
    refuses("project", "project holds 'seeds', which is of no run: name another")
    assert (own / "seeds" / "maize").is_dir() and names_in(own) == ["seeds"]
    same = replace(toy.settings, init_seed=1, order_seed=1, dropout_seed=1)
    refuses("other", "are all set: `seeds` has no effect", same, [1, 2])


def test_weights_that_cannot_be_read_leave_no_folder(toy, model_folder, quick, tmp_path):
    broken = shutil.copytree(model_folder, tmp_path / "broken")
    trainer = toy.prepare(model=broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ValueError, match="model.safetensors: truncated or damaged"):
        train_seeds(trainer, tmp_path / "run", quick, [1])
    assert not (tmp_path / "run").exists()


def test_what_an_unfinished_run_left_is_not_of_the_next(trainer, quick, tmp_path):
    run = tmp_path / "run"
    train_seeds(trainer, run, quick, [1, 2])
    (run / "result.json").unlink()
    (run / "seeds" / ".DS_Store").touch()  # a file manager was here
    train_seeds(trainer, run, quick, [3])
    (run / "seeds" / ".DS_Store").unlink()
    assert names_in(run / "seeds") == ["3"]


def test_telling_examples_come_worst_first():
    rows = [("a", "a", 0.99), ("a", "b", 0.7), ("b", "a", 0.95), ("b", "b", 0.55)]
    records = [
        {"text": f"text {k}", "label": label, "predicted": predicted}
        | {"probabilities": [p, 1 - p] if predicted == "a" else [1 - p, p]}
        for k, (label, predicted, p) in enumerate(rows)
    ]
    told = notable_examples(records, ("a", "b"))
    assert [row["text"] for row in told[:3]] == ["text 2", "text 1", "text 3"]
    assert told[0]["label"] != told[0]["predicted"]
    assert notable_examples([{"predicted": 2.5, "label": 2.0}], ()) == []
    at_a_threshold = {"label": "a", "predicted": "b", "probabilities": [0.75, 0.25]}
    assert notable_examples([at_a_threshold], ("a", "b"))[0]["probability"] == 0.25


def test_a_model_that_was_written_wrong_is_no_model(trainer, toy, tmp_path, monkeypatch):
    """As by a faulty disk: the classes' weights change their sign on the way."""

    def save_altered(model, *args, **settings):
        altered = copy.deepcopy(model)
        altered.classifier.weight.data.neg_()
        save_model(altered, *args, **settings)

    monkeypatch.setattr(run_summary, "save_model", save_altered)
    message = r"accuracy was .* in training, and is .* of the model th"
    with pytest.raises(RuntimeError, match=message):
        train_seeds(trainer, tmp_path / "run", toy.settings, [1])
    assert not list((tmp_path / "run").rglob("*.safetensors"))


def test_a_copy_of_a_run_knows_its_columns(toy, quick, tmp_path):
    task = own_task("classify", "body", "premise", "gold", separator=";")
    train, dev = (replace(data, pairs=data.texts) for k in (1, 2) for data in [toy.examples(8, k)])
    train_seeds(toy.prepare(train, dev, task), tmp_path / "run", quick, [1])
    convert(tmp_path / "run", tmp_path / "copy")  # which has no run.json
    copied = read_model_task(tmp_path / "copy").task
    assert copied == read_model_task(tmp_path / "run").task and copied.text_pair == "premise"
    with pytest.raises(ValueError, match="trained on pairs of texts"):
        load(tmp_path / "copy").classify(["today there was rain again"])


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
def test_thresholds_are_tuned_by_the_metric_and_stored(toy, quick, tmp_path, kind, metric):
    data, task = uneven(toy, kind)

    def trained(name, **changes):
        settings = replace(quick, learning_rate=3e-4, metric=metric, **changes)
        trainer = toy.prepare(data, data, task, settings)
        return train_seeds(trainer, tmp_path / name, settings, [1])

    plain, tuned = trained("plain"), trained("tuned", tune_thresholds=True)
    assert tuned["main_metric"] == next(iter(tuned["metrics"])) == metric
    assert tuned["metrics"][metric] > plain["metrics"][metric]
    assert plain["thresholds"] == {}
    assert len(tuned["thresholds"]["thresholds"]) == (1 if kind == "classify" else 2)
    found = evaluate_on(load(tmp_path / "tuned"), data)["metrics"]
    assert found == pytest.approx(tuned["metrics"])


def test_a_metric_without_a_value_is_told(toy, tmp_path, capsys):
    dev = toy.examples(20, 2)
    dev = dev.select(np.flatnonzero(dev.labels == 0))
    settings = replace(toy.settings, metric="matthews", epochs=1)
    trainer = toy.prepare(dev=dev, settings=settings, dev_mixed=toy.examples(20, 3))
    result = train_seeds(trainer, tmp_path / "run", settings, [1])
    assert result["notes"]["matthews"] == "no value, counts 0: every label is weather"
    assert result["metrics"]["matthews"] == 0.0
    told = "warning: seed 1: matthews on dev: no value, counts 0: every label is weather\n"
    assert told in capsys.readouterr().err
    found = evaluate_on(load(tmp_path / "run"), dev)
    assert found["notes"] == {
        "matthews": "no value, counts 0: every label is weather",
        "macro_f1": "counts 0 for each class without an example: food",
    }
    lines = [*metric_lines(found)]
    assert any(
        line.endswith("0.0000  (no value, counts 0: every label is weather)") for line in lines
    )


def test_figures_of_some_questions_are_not_said_to_be_of_all():
    metrics = {"answer_f1": 0.5, "has_answer_exact_match": 0.0, "no_answer_exact_match": 1.0}
    assert [*metric_lines({"metrics": metrics, "examples": 40})] == [
        "answer_f1              0.5000 of 40 examples",
        "has_answer_exact_match 0.0000",
        "no_answer_exact_match  1.0000",
    ]


# --- collapse ----------------------------------------------------------------------------------


def test_one_answer_is_no_collapse_where_the_loss_says_otherwise(
    trainer, toy, tmp_path, monkeypatch
):
    trained = trainer.run(toy.settings, 1, tmp_path)

    def told(log="log.jsonl", loss=None, answer="food"):
        monkeypatch.setattr(type(trainer.task_type), "constant_prediction", lambda *_: answer)
        if loss is not None:
            lines = [{"event": "train", "step": 100 + k, "loss": loss} for k in range(3)]
            (tmp_path / log).write_text("\n".join(map(json.dumps, lines)))
        return collapse(trainer, trained, toy.settings, tmp_path / log)

    assert told() is None
    near = told("near.jsonl", 0.65)
    assert near is not None and near.startswith("every dev example gets 'food'")
    assert told("near.jsonl", answer=None) is None
    # the toy's two classes are about as frequent: log 2 = 0.693 is the loss of guessing
    at = told("at.jsonl", 0.7, answer=None)
    assert at is not None and "that of guessing" in at


def test_a_collapsed_run_is_made_again_with_the_next_seed(
    trainer, toy, tmp_path, before_training, capsys
):
    too_high = replace(toy.settings, learning_rate=1.0)
    before_training(lambda settings, seed, _: too_high if seed == 1 else settings)
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
    told = capsys.readouterr().err
    assert "seed 2 collapsed" in told and "lower the learning rate" in told


@pytest.fixture
def not_finite(before_training):
    """Have the trainings of these seeds fail."""

    def patch(*wrong):
        def fail(_settings, seed, _folder):
            if seed in wrong:
                raise FloatingPointError(f"step 3 of seed {seed}: loss nan")

        before_training(fail)

    return patch


def test_a_seed_that_is_not_finite_is_a_collapse(trainer, toy, tmp_path, not_finite, capsys):
    not_finite(1)
    result = train_seeds(trainer, tmp_path / "run", toy.settings, [1, 2])
    assert list(result["seeds"]) == ["3", "2"]
    (restart,) = result["restarts"]
    assert restart == {"seed": 1, "instead_of": 1, "reason": "step 3 of seed 1: loss nan"}
    assert "again with seed 3" in capsys.readouterr().err


def test_seeds_that_ended_stay_when_another_cannot(trainer, toy, tmp_path, not_finite, capsys):
    not_finite(2)
    result = train_seeds(trainer, tmp_path / "run", replace(toy.settings, max_retries=0), [1, 2])
    assert list(result["seeds"]) == ["1"] and result["best_seed"] == 1
    assert "warning: seed 2 collapsed (step 3 of seed 2" in capsys.readouterr().err
    assert "step 3 of seed 2" in restart_table(result["restarts"], result["seeds"])
    assert read_run(tmp_path / "run").result["restarts"] == result["restarts"]


def test_without_any_sound_seed_it_is_an_error(trainer, toy, tmp_path, not_finite):
    not_finite(*range(9))
    with pytest.raises(FloatingPointError, match="step 3 of seed 4"):
        train_seeds(trainer, tmp_path / "run", replace(toy.settings, max_retries=1), [1, 2])
    assert not (tmp_path / "run/result.json").exists()
    not_finite()
    slower = replace(toy.settings, learning_rate=1e-3, epochs=1)  # as the error has told
    assert train_seeds(trainer, tmp_path / "run", slower, [1])["steps"] == 6


# --- a run that was stopped goes on as if it had not been --------------------------------------


@pytest.fixture
def settings(toy):
    """36 steps, a checkpoint every 8, dev every 6."""
    return replace(toy.settings, checkpoint_every=8)


@pytest.fixture
def stopped(stop_at_evaluation):
    """Train, and stop at an evaluation, counted over all seeds."""

    def train(evaluation, function, *arguments, **others):
        stop_at_evaluation(evaluation)
        with pytest.raises(KeyboardInterrupt):
            function(*arguments, **others)

    return train


def test_a_seed_goes_on_from_its_checkpoint_as_if_it_had_not_stopped(
    trainer, settings, tmp_path, monkeypatch
):
    whole = trainer.run(settings, 3, tmp_path / "whole", resume=True)
    write, steps = SeedCheckpoint.write, []

    def killed(folder, model, optimizer, state, *best):
        steps.append(state.step)
        if state.step == 24:
            raise KeyboardInterrupt  # eight steps and an evaluation after the last checkpoint
        write(folder, model, optimizer, state, *best)

    monkeypatch.setattr(SeedCheckpoint, "write", killed)
    folder = tmp_path / "stopped"
    with pytest.raises(KeyboardInterrupt):
        trainer.run(settings, 3, folder, resume=True)
    assert steps == [8, 16, 24]
    assert [path.name for path in checkpoints_in(folder)] == ["checkpoint-00000016"]
    monkeypatch.setattr(SeedCheckpoint, "write", write)
    again = trainer.run(settings, 3, folder, resume=True)
    dev = trainer.dev[0].features
    assert np.array_equal(again.outputs(dev), whole.outputs(dev))
    assert again.evaluation.metrics == whole.evaluation.metrics
    assert (again.best_step, again.steps) == (whole.best_step, whole.steps)
    tables = [one.model.encoder.embeddings.token.weight for one in (whole, again)]
    assert torch.equal(*tables)  # with the rows that training leaves out

    def events(name):
        lines = read_json_lines(tmp_path / name / "log.jsonl")
        return [(line["event"], line["step"], line.get("loss")) for line in lines]

    assert events("stopped") == events("whole")


def test_the_same_command_goes_on(trainer, settings, tmp_path, stopped, before_training, capsys):
    whole = train_seeds(trainer, tmp_path / "whole", settings, [1, 2, 3])
    run = tmp_path / "run"
    # at the third evaluation of seed 2
    stopped(9, train_seeds, trainer, run, settings, [1, 2, 3])
    told = "seed 2 was stopped: the same command goes on from its last checkpoint\n"
    assert told in capsys.readouterr().err
    assert not (run / "config.json").exists() and (run / "seeds/1/model/config.json").exists()
    assert [path.name for path in checkpoints_in(run / "seeds/2")] == ["checkpoint-00000018"]
    seeds = []
    before_training(lambda _settings, seed, _folder: seeds.append(seed))
    result = train_seeds(trainer, run, settings, [1, 2, 3])
    assert seeds == [2, 3]
    assert "going on with the run that was stopped here" in capsys.readouterr().err
    assert result == whole
    first, second = (load_file(tmp_path / n / "model.safetensors") for n in ("whole", "run"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert sorted(names_in(run)) == sorted(names_in(tmp_path / "whole"))
    left = {name for seed in "123" for name in names_in(run / "seeds" / seed)}
    assert not [name for name in left if name == "model" or name.startswith("checkpoint")]


def test_a_stopped_run_is_not_lost_to_other_settings(trainer, settings, tmp_path, stopped):
    run, other = tmp_path / "run", replace(settings, learning_rate=1e-3)
    stopped(2, train_seeds, trainer, run, settings, [1])
    message = r"unfinished run of other settings \(learning_rate 0.003, not 0.0"
    with pytest.raises(ValueError, match=message):
        train_seeds(trainer, run, other, [1])
    assert checkpoints_in(run / "seeds/1")
    elsewhere = replace(settings, threads=None, checkpoint_every=100)
    assert train_seeds(trainer, run, elsewhere, [1, 2])["metrics"]["accuracy"] > 0.95


def test_before_anything_is_kept_other_settings_begin_anew(
    trainer, settings, tmp_path, monkeypatch, capsys
):
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Trainer, "run", Mock(side_effect=KeyboardInterrupt))
        train_seeds(trainer, tmp_path / "run", settings, [1])
    capsys.readouterr()
    result = train_seeds(trainer, tmp_path / "run", replace(settings, epochs=1), [1])
    assert result["steps"] == 6
    told = "begins anew: the unfinished run of other settings (epochs 6, not 1) that was here"
    assert told in capsys.readouterr().err


def test_a_damaged_checkpoint_is_told_of_and_left(trainer, settings, tmp_path, stopped, capsys):
    whole = trainer.run(settings, 1, tmp_path / "whole")
    assert checkpoints_in(tmp_path / "whole") == []  # without `resume` none is written
    stopped(2, trainer.run, settings, 1, tmp_path / "run", resume=True)
    (checkpoint,) = checkpoints_in(tmp_path / "run")
    tensors = checkpoint / "training.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1])
    again = trainer.run(settings, 1, tmp_path / "run", resume=True)
    assert f"skipped {checkpoint}: training.safetensors is truncated" in capsys.readouterr().err
    dev = trainer.dev[0].features
    assert np.array_equal(again.outputs(dev), whole.outputs(dev))


def test_patience_is_kept(trainer, settings, tmp_path, stopped):
    """The toy is right on all of dev early: each evaluation after that is one without a gain."""
    patient = replace(settings, early_stopping_patience=3)
    whole = trainer.run(patient, 1, tmp_path / "whole")
    assert whole.steps < 36
    last = whole.steps // 6 - 1  # evaluation before it stops early
    stopped(last, trainer.run, patient, 1, tmp_path / "run", resume=True)
    again = trainer.run(patient, 1, tmp_path / "run", resume=True)
    assert (again.steps, again.best_step) == (whole.steps, whole.best_step)


def rising(monkeypatch, accuracy):
    """Dev figures that are told for each seed; the seeds trained are in the list returned."""
    train, trained = Trainer.run, []

    def run(self, settings, seed, *rest):
        trained.append(seed)
        found = train(self, settings, seed, *rest)
        metrics = found.evaluation.metrics | {"accuracy": accuracy[seed]}
        return replace(found, evaluation=replace(found.evaluation, metrics=metrics))

    monkeypatch.setattr(Trainer, "run", run)
    monkeypatch.setattr(run_summary, "_check_written", lambda *_: None)
    return trained


def test_the_best_of_the_seeds_that_ended_stays(trainer, quick, tmp_path, monkeypatch):
    """Seed 2 is better than 1, whose model is gone by then, and 3 is the one under way."""
    run = tmp_path / "run"
    trained = rising(monkeypatch, {1: 0.7, 2: 0.8, 4: 0.75})
    with pytest.raises(KeyError):  # seed 3, as a kill
        train_seeds(trainer, run, quick, [1, 2, 3, 4])
    assert trained == [1, 2, 3]
    assert [path.parent.name for path in run.glob("seeds/*/model")] == ["2"]
    monkeypatch.undo()
    trained = rising(monkeypatch, {3: 0.6, 4: 0.75})
    result = train_seeds(trainer, run, quick, [1, 2, 3, 4])
    assert trained == [3, 4] and result["best_seed"] == 2
    assert [seed["accuracy"] for seed in result["seeds"].values()] == [0.7, 0.8, 0.6, 0.75]
    assert (run / "model.safetensors").exists() and not list(run.glob("seeds/*/model"))


def test_a_best_seed_whose_model_is_gone_is_trained_again(trainer, quick, tmp_path, monkeypatch):
    """When the command names other seeds than before, and the best of those is left out."""
    run = tmp_path / "run"
    rising(monkeypatch, {1: 0.7, 2: 0.8})
    with pytest.raises(KeyError):
        train_seeds(trainer, run, quick, [1, 2, 3])
    monkeypatch.undo()
    trained = rising(monkeypatch, {1: 0.7})
    result = train_seeds(trainer, run, quick, [1])
    assert trained == [1] and result["best_seed"] == 1
    assert (run / "model.safetensors").exists()
    assert names_in(run / "seeds") == ["1"]


def test_what_a_kill_left_is_cleared_away(trainer, settings, tmp_path, monkeypatch):
    run = tmp_path / "run"
    train_seeds(trainer, run, settings, [1])
    (run / "result.json").unlink()
    for name in ("seeds/1/checkpoint-00000008", "seeds/1/.partial-9-model", ".partial-9-x"):
        (run / name).mkdir()
    assert train_seeds(trainer, run, settings, [1])["best_seed"] == 1
    assert not list(run.glob("seeds/1/checkpoint-*")) and not list(run.rglob(".partial-*"))


def test_other_weights_to_start_from_are_refused(
    trainer, model_folder, settings, tmp_path, stopped
):
    start = shutil.copytree(model_folder, tmp_path / "start")
    moving = replace(trainer, start=replace(trainer.start, folder=start))
    stopped(2, train_seeds, moving, tmp_path / "run", settings, [1])
    weights = load_file(start / "model.safetensors")
    save_file({name: weight + 1 for name, weight in weights.items()}, start / "model.safetensors")
    with pytest.raises(ValueError, match="unfinished run of other settings .model_sha256"):
        train_seeds(moving, tmp_path / "run", settings, [1])


def test_a_stopped_run_goes_on_when_its_files_have_moved(
    trainer, model_folder, settings, tmp_path, stopped, capsys
):
    moved = replace(trainer, start=replace(trainer.start, folder=tmp_path / "moved"))
    hashes = {"train": "ab12", "teacher": "cd34", "teacher_data": "ef56"}
    here, there = (
        Provenance(
            data={
                "data": f"{folder}t.csv",
                "dev": "10% of train",
                "teacher": f"{folder}large",
                "teacher_data": f"{folder}more.txt",
                "data_sha256": hashes,
            }
        )
        for folder in ("", "/home/ada/")
    )
    stopped(2, train_seeds, trainer, tmp_path / "run", settings, [1], provenance=here)
    shutil.copytree(model_folder, tmp_path / "moved")
    train_seeds(moved, tmp_path / "run", settings, [1], provenance=there)
    assert "going on with the run that was stopped here" in capsys.readouterr().err
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["settings"]["data"] == "/home/ada/t.csv"
