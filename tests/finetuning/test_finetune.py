"""Fine-tuning learns what can be learned, keeps the best seed, refuses what does not fit."""

import copy
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from bertsmith.checkpoints.config_json import label_names
from bertsmith.checkpoints.convert import convert
from bertsmith.checkpoints.model_folder import load_model, save_model
from bertsmith.checkpoints.run_folder import RunFolder
from bertsmith.inference.model_task import read_model_task
from bertsmith.inference.predictor import load
from bertsmith.model.config import config_for
from bertsmith.model.heads import PreTrainingModel, SequenceClassifier
from bertsmith.tasks.task import own_task
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.text.tokenizer.wordpiece import Vocabulary
from bertsmith.training.finetuning import run as run_summary
from bertsmith.training.finetuning.run import collapse, notable_examples, train_seeds
from bertsmith.training.finetuning.settings import FinetuneSettings
from bertsmith.training.finetuning.trainer import InitialModel, Trainer


def test_it_learns_and_leaves_the_best_seed(trainer, toy, tmp_path):
    result = train_seeds(trainer, tmp_path / "run", toy.settings, [1, 2])
    assert result["metrics"]["accuracy"] > 0.95
    best = max(result["seeds"], key=lambda seed: result["seeds"][seed]["accuracy"])
    assert result["seeds"][best] == result["metrics"]
    assert list(label_names(tmp_path / "run")) == ["weather", "food"]
    model = load_model(tmp_path / "run", SequenceClassifier).model.eval()
    dev = trainer.dev[0].features
    ids, types, lengths = dev.padded(np.arange(40), 0)
    with torch.inference_mode():
        scores = model(*(torch.from_numpy(array) for array in (ids, types, lengths)))
    accuracy = (scores.argmax(1).numpy() == dev.labels).mean()
    assert accuracy == result["metrics"]["accuracy"]  # what is saved is what was measured
    assert np.sum(result["confusion"]) == 40
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["kind"] == "finetune" and record["settings"]["task"] == "classify"


def test_a_seed_gives_the_same_model_again(trainer, toy, tmp_path):
    dev = trainer.dev[0].features
    one = trainer.run(toy.settings, 3, tmp_path / "one").outputs(dev)
    two = trainer.run(toy.settings, 3, tmp_path / "two").outputs(dev)
    other = trainer.run(toy.settings, 4, tmp_path / "three").outputs(dev)
    assert np.array_equal(one, two) and not np.array_equal(one, other)


def test_from_scratch_takes_the_shape_but_not_the_weights(model_folder, toy):
    scratch, start = InitialModel(model_folder, from_scratch=True), InitialModel(model_folder)
    model = scratch.model(SequenceClassifier, 2, toy.settings, seed=1)
    start = start.model(SequenceClassifier, 2, toy.settings, seed=1)
    assert model.encoder.config == start.encoder.config
    ours = model.encoder.embeddings.token.weight
    assert not torch.equal(ours, start.encoder.embeddings.token.weight)


def test_what_does_not_fit_is_refused(trainer, model_folder, toy, tmp_path):
    with pytest.raises(ValueError, match="--max-length 64: the model knows 32 positions"):
        longer = replace(toy.settings, max_length=64)
        Trainer.prepare(
            InitialModel(model_folder),
            toy.task,
            toy.examples(8, 1),
            {"dev": toy.examples(8, 2)},
            longer,
        )
    train_seeds(
        trainer, tmp_path / "run", FinetuneSettings(epochs=1, max_length=16, threads=1), [1]
    )
    with pytest.raises(ValueError, match="holds a run already"):
        train_seeds(trainer, tmp_path / "run", toy.settings, [1])
    busy = tmp_path / "busy"
    with (
        RunFolder(busy).locked(),
        pytest.raises(ValueError, match="another process is training here"),
    ):
        train_seeds(trainer, busy, toy.settings, [1])
    same = replace(toy.settings, init_seed=1, order_seed=1, dropout_seed=1)
    with pytest.raises(ValueError, match="are all set: --seeds has no effect"):
        train_seeds(trainer, tmp_path / "other", same, [1, 2])
    own = tmp_path / "project"
    (own / "seeds" / "maize").mkdir(parents=True)
    with pytest.raises(ValueError, match="project holds 'seeds', which is of no run: name another"):
        train_seeds(trainer, own, toy.settings, [1])
    assert (own / "seeds" / "maize").is_dir() and len(list(own.iterdir())) == 1
    with pytest.raises(ValueError, match="epochs = -1"):
        FinetuneSettings(epochs=-1)
    with pytest.raises(ValueError, match="warmup_ratio = 1"):
        FinetuneSettings(warmup_ratio=1)
    with pytest.raises(ValueError, match=r"layer_decay = 1\.5: must be above 0 and at most 1"):
        FinetuneSettings(layer_decay=1.5)


def test_what_an_unfinished_run_left_is_not_of_the_next(trainer, toy, tmp_path):
    run, settings = tmp_path / "run", replace(toy.settings, epochs=1, max_retries=0)
    train_seeds(trainer, run, settings, [1, 2])
    (run / "result.json").unlink()
    (run / "seeds" / ".DS_Store").touch()  # a file manager was here
    train_seeds(trainer, run, settings, [3])
    (run / "seeds" / ".DS_Store").unlink()
    assert [folder.name for folder in (run / "seeds").iterdir()] == ["3"]


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


def test_batch_epochs_and_rate_are_chosen_where_they_are_left_open(trainer):
    # 96 examples in batches of 16: 6 steps an epoch, 500 would be 84 epochs; the toy is 64 wide
    chosen = trainer.with_defaults(FinetuneSettings(batch_size=16))
    assert (chosen.epochs, chosen.learning_rate) == (20, pytest.approx(6e-4))
    assert FinetuneSettings().with_defaults(100_000, 768, 32).epochs == 3
    assert FinetuneSettings().with_defaults(100, 64, 8).batch_size == 8
    frozen = FinetuneSettings(freeze_encoder=True).with_defaults(100_000, 64, 8)
    assert (frozen.epochs, frozen.learning_rate) == (10, 1e-3)
    given = FinetuneSettings(batch_size=8, epochs=1, learning_rate=1e-5)
    assert given.with_defaults(10, 64, 32) == given


def test_a_head_is_kept_for_the_same_classes_alone(trainer, toy, tmp_path):
    train_seeds(trainer, tmp_path / "run", replace(toy.settings, epochs=1), [1])
    start, settings = InitialModel(tmp_path / "run"), toy.settings
    same = start.model(SequenceClassifier, 2, settings, 5, ("weather", "food"))
    other = start.model(SequenceClassifier, 2, settings, 5, ("food", "weather"))
    stored = load_model(tmp_path / "run", SequenceClassifier).model.classifier.weight
    assert torch.equal(same.classifier.weight, stored)
    assert not torch.equal(other.classifier.weight, stored)


def test_a_model_that_was_written_wrong_is_no_model(trainer, toy, tmp_path, monkeypatch):
    """As by a faulty disk: the classes' weights change their sign on the way."""

    def save_altered(model, *args, **settings):
        altered = copy.deepcopy(model)
        altered.classifier.weight.data.neg_()
        save_model(altered, *args, **settings)

    monkeypatch.setattr(run_summary, "save_model", save_altered)
    with pytest.raises(
        RuntimeError, match=r"accuracy was .* in training, and is .* of the model th"
    ):
        train_seeds(trainer, tmp_path / "run", toy.settings, [1])
    assert not list((tmp_path / "run").rglob("*.safetensors"))


def test_two_data_sets_that_number_their_classes_share_no_head(trainer, toy, tmp_path):
    train_seeds(trainer, tmp_path / "run", replace(toy.settings, epochs=1), [1])
    config = tmp_path / "run" / "config.json"
    about = json.loads(config.read_text())
    about["bertsmith"]["task"] = "sst2"
    config.write_text(json.dumps(about))
    stored = load_model(tmp_path / "run", SequenceClassifier).model.classifier.weight
    for task, is_kept in (("sst2", True), ("classify", True), ("mrpc", False)):
        names = ("weather", "food")
        model = InitialModel(tmp_path / "run").model(
            SequenceClassifier, 2, toy.settings, 5, names, task=task
        )
        assert torch.equal(model.classifier.weight, stored) == is_kept


def test_one_answer_is_no_collapse_where_the_loss_says_otherwise(
    trainer, toy, tmp_path, monkeypatch
):
    trained = trainer.run(toy.settings, 1, tmp_path)
    monkeypatch.setattr(type(trainer.task_type), "constant_prediction", lambda *_: "food")
    assert collapse(trainer, trained, toy.settings, tmp_path / "log.jsonl") is None
    lines = [{"event": "train", "step": 100 + k, "loss": 0.65} for k in range(3)]
    (tmp_path / "near.jsonl").write_text("\n".join(map(json.dumps, lines)))
    told = collapse(trainer, trained, toy.settings, tmp_path / "near.jsonl")
    assert told is not None and told.startswith("every dev example gets 'food'")
    monkeypatch.setattr(type(trainer.task_type), "constant_prediction", lambda *_: None)
    assert collapse(trainer, trained, toy.settings, tmp_path / "near.jsonl") is None
    # the toy's two classes are about as frequent: log 2 = 0.693 is the loss of guessing
    lines = [{**line, "loss": 0.7} for line in lines]
    (tmp_path / "at.jsonl").write_text("\n".join(map(json.dumps, lines)))
    told = collapse(trainer, trained, toy.settings, tmp_path / "at.jsonl")
    assert told is not None and "that of guessing" in told


def test_a_tokenizer_with_more_pieces_than_the_model_is_refused_at_once(
    model_folder, toy, tmp_path
):
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    pieces = Tokenizer.from_pretrained(folder).vocabulary.pieces
    Tokenizer(Vocabulary([*pieces, "another"])).save(folder)
    with pytest.raises(
        ValueError, match="55 pieces, but its model 54: take the model's own tokenizer"
    ):
        data = toy.examples(8, 1), {"dev": toy.examples(8, 2)}
        Trainer.prepare(InitialModel(folder), toy.task, *data, toy.settings)


def test_a_left_to_right_model_learns(toy, model_folder, tmp_path):
    """Its [CLS] sees nothing of the text: the last token is read."""
    folder = tmp_path / "causal"
    loaded = load_model(model_folder, PreTrainingModel, causal=True)
    save_model(loaded.model, Tokenizer.from_pretrained(model_folder), folder)
    data = toy.examples(96, 1), {"dev": toy.examples(40, 2)}
    trainer = Trainer.prepare(InitialModel(folder), toy.task, *data, toy.settings)
    result = train_seeds(trainer, tmp_path / "run", toy.settings, [1])
    assert result["metrics"]["accuracy"] > 0.95 and result["restarts"] == []


def test_a_model_of_one_segment_reads_no_pairs(toy, model_folder, tmp_path):
    tokenizer = Tokenizer.from_pretrained(model_folder)
    config = config_for("1x64", 54, max_positions=32, type_vocab_size=1)
    save_model(PreTrainingModel(config), tokenizer, tmp_path / "model")
    single = toy.examples(8, 1), {"dev": toy.examples(8, 2)}
    Trainer.prepare(InitialModel(tmp_path / "model"), toy.task, *single, toy.settings)
    pairs = [replace(data, pairs=data.texts) for data in (single[0], single[1]["dev"])]
    with pytest.raises(ValueError, match="type_vocab_size of 1 .* or leave --text-pair out"):
        task = own_task("classify", "text", "pair", "label")
        Trainer.prepare(
            InitialModel(tmp_path / "model"), task, pairs[0], {"dev": pairs[1]}, toy.settings
        )


def test_a_copy_of_a_run_knows_its_columns(toy, model_folder, tmp_path):
    task = own_task("classify", "body", "premise", "gold", separator=";")
    sets = [replace(toy.examples(8, k), pairs=toy.examples(8, k).texts) for k in (1, 2)]
    trainer = Trainer.prepare(
        InitialModel(model_folder), task, sets[0], {"dev": sets[1]}, toy.settings
    )
    train_seeds(trainer, tmp_path / "run", replace(toy.settings, epochs=1, max_retries=0), [1])
    convert(tmp_path / "run", tmp_path / "copy")  # which has no run.json
    assert read_model_task(tmp_path / "copy").task == read_model_task(tmp_path / "run").task
    assert read_model_task(tmp_path / "copy").task.text_pair == "premise"
    with pytest.raises(ValueError, match="trained on pairs of texts"):
        load(tmp_path / "copy").classify(["today there was rain again"])
