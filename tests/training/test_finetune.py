"""Fine-tuning learns what can be learned, keeps the best seed, refuses what does not fit."""

import json

import numpy as np
import pytest
import torch

from bertsmith.checkpoints.folder import load_model, save_model
from bertsmith.checkpoints.model_config import label_names
from bertsmith.model.encoder import initialize
from bertsmith.model.heads import PreTrainingModel, SequenceClassifier
from bertsmith.model.sizes import config_for
from bertsmith.tasks.reading import Examples
from bertsmith.tasks.table import own_task
from bertsmith.text.vocabulary_trainer import train_vocabulary
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.training.finetune import (
    PAPER_SWEEP,
    Job,
    Start,
    finetune,
    telling_examples,
)
from bertsmith.training.finetune_settings import FinetuneSettings

SETTINGS = FinetuneSettings(
    epochs=6, batch=16, rate=3e-3, max_length=16, precision="float32", threads=1
)
TASK = own_task("classify", "text", None, "label")


def examples(count, seed):
    """Weather or food, told by one word."""
    random = np.random.default_rng(seed)
    words = (("rain", "snow", "wind"), ("bread", "soup", "fish"))
    labels = random.integers(0, 2, count)
    texts = [f"today there was {words[k][random.integers(3)]} again" for k in labels]
    return Examples(texts, None, labels, ("weather", "food"), "made", list(range(1, count + 1)))


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(train_vocabulary(examples(200, 0).texts, 54))
    config = config_for("1x64", 54, max_positions=32)
    generator = torch.Generator().manual_seed(1)
    save_model(initialize(PreTrainingModel(config), 0.05, generator), tokenizer, folder)
    return folder


@pytest.fixture
def job(model_folder):
    return Job.prepare(Start(model_folder), TASK, examples(96, 1), examples(40, 2), 16)


def test_it_learns_and_leaves_the_best_seed(job, tmp_path):
    result = finetune(job, tmp_path / "run", SETTINGS, [1, 2])
    assert result["metrics"]["accuracy"] > 0.95
    best = max(result["seeds"], key=lambda seed: result["seeds"][seed]["accuracy"])
    assert result["seeds"][best] == result["metrics"]
    assert list(label_names(tmp_path / "run")) == ["weather", "food"]
    model = load_model(tmp_path / "run", SequenceClassifier).model.eval()
    ids, types, lengths = job.dev.padded(np.arange(40), 0)
    with torch.inference_mode():
        scores = model(*(torch.from_numpy(array) for array in (ids, types, lengths)))
    accuracy = (scores.argmax(1).numpy() == job.dev.labels).mean()
    assert accuracy == result["metrics"]["accuracy"]  # what is saved is what was measured
    assert np.sum(result["confusion"]) == 40
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["kind"] == "finetune" and record["settings"]["task"] == "classify"


def test_a_seed_gives_the_same_model_again(job, tmp_path):
    one = job.run(SETTINGS, 3, tmp_path / "one").scores(job.dev)
    two = job.run(SETTINGS, 3, tmp_path / "two").scores(job.dev)
    other = job.run(SETTINGS, 4, tmp_path / "three").scores(job.dev)
    assert np.array_equal(one, two) and not np.array_equal(one, other)


def test_from_scratch_takes_the_shape_but_not_the_weights(model_folder):
    model = Start(model_folder, from_scratch=True).model(2, SETTINGS, seed=1)
    start = Start(model_folder).model(2, SETTINGS, seed=1)
    assert model.encoder.config == start.encoder.config
    ours = model.encoder.embeddings.token.weight
    assert not torch.equal(ours, start.encoder.embeddings.token.weight)


def test_the_sweep_tries_the_whole_grid_of_the_paper(job, tmp_path, monkeypatch):
    assert PAPER_SWEEP["rate"] == (5e-5, 3e-5, 2e-5)  # A.3
    monkeypatch.setitem(PAPER_SWEEP, "rate", (1e-6, 1e-3))
    monkeypatch.setitem(PAPER_SWEEP, "epochs", (1, 8))
    result = finetune(job, tmp_path / "run", SETTINGS, [1], sweep=True)
    assert len(result["sweep"]) == 8
    best = max(result["sweep"], key=lambda row: row["accuracy"])
    record = json.loads((tmp_path / "run" / "run.json").read_text())["settings"]
    assert (record["rate"], record["epochs"]) == (best["rate"], best["epochs"]) == (1e-3, 8)


def test_what_does_not_fit_is_refused(job, model_folder, tmp_path):
    with pytest.raises(ValueError, match="--max-length 64: the model knows 32 positions"):
        Job.prepare(Start(model_folder), TASK, examples(8, 1), examples(8, 2), 64)
    finetune(job, tmp_path / "run", FinetuneSettings(epochs=1, max_length=16, threads=1), [1])
    with pytest.raises(ValueError, match="holds a run already"):
        finetune(job, tmp_path / "run", SETTINGS, [1])
    with pytest.raises(ValueError, match="epochs = 0"):
        FinetuneSettings(epochs=0)
    with pytest.raises(ValueError, match="warmup = 1"):
        FinetuneSettings(warmup=1)


def test_telling_examples_come_worst_first():
    data = examples(4, 5)
    right, wrong = np.eye(2)[data.labels], np.eye(2)[1 - data.labels]
    scores = np.stack([5 * right[0], 1 * wrong[1], 3 * wrong[2], 0.1 * right[3]])
    told = telling_examples(data, scores.astype(np.float32))
    assert [row["text"] for row in told[:3]] == [data.texts[2], data.texts[1], data.texts[3]]
    assert told[0]["label"] != told[0]["predicted"]
