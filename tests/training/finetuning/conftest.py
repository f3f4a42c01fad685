"""A toy task that a toy model learns in a second: weather or food, told by one word."""

import csv
import os
import signal
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bertsmith.checkpoints.model_folder import save_model
from bertsmith.model.config import config_for
from bertsmith.model.heads import PreTrainingModel
from bertsmith.model.initialization import initialize
from bertsmith.tasks.examples import Examples
from bertsmith.tasks.task import own_task
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.text.vocabulary.train import train_vocabulary
from bertsmith.training.finetuning.settings import FinetuneSettings
from bertsmith.training.finetuning.task import BestOnDev
from bertsmith.training.finetuning.trainer import InitialModel, Trainer

SETTINGS = FinetuneSettings(
    epochs=6, batch_size=16, learning_rate=3e-3, max_length=16, precision="float32", threads=1
)
STILL = replace(SETTINGS, dropout=0.0, attention_dropout=0.0)
TASK = own_task("classify", "text", None, "label")


def examples(count, seed):
    """Weather or food, told by one word."""
    random = np.random.default_rng(seed)
    words = (("rain", "snow", "wind"), ("bread", "soup", "fish"))
    labels = random.integers(0, 2, count)
    texts = [f"today there was {words[k][random.integers(3)]} again" for k in labels]
    return Examples(texts, None, labels, ("weather", "food"), "made", list(range(1, count + 1)))


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(train_vocabulary(examples(200, 0).texts, 54))
    config = config_for("1x64", 54, max_positions=32)
    generator = torch.Generator().manual_seed(1)
    save_model(initialize(PreTrainingModel(config), 0.05, generator), tokenizer, folder)
    return folder


@pytest.fixture(scope="session")
def toy(model_folder):
    """settings, also without dropout (still), task, examples(count, seed), and prepare(...)."""

    def prepare(train=None, dev=None, task=TASK, settings=SETTINGS, model=model_folder, **sets):
        data = train or examples(96, 1), {"dev": dev or examples(40, 2), **sets}
        return Trainer.prepare(InitialModel(model), task, *data, settings)

    return SimpleNamespace(
        settings=SETTINGS, still=STILL, task=TASK, examples=examples, prepare=prepare
    )


@pytest.fixture(scope="session")
def trainer(toy):
    return toy.prepare()


@pytest.fixture(scope="session")
def toy_files(tmp_path_factory):
    """A folder with train.csv and dev.csv of the toy task."""
    folder = tmp_path_factory.mktemp("data")
    for name, count in (("train", 96), ("dev", 40)):
        made = examples(count, len(name))
        labels = [made.label_names[label] for label in made.labels]
        with (folder / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("text", "label"), *zip(made.texts, labels, strict=True)])
    return folder


@pytest.fixture
def before_training(monkeypatch):
    """Have a function of (settings, seed, folder) called; settings that it returns are taken."""
    run = Trainer.run

    def patch(function):
        def patched(self, settings, seed, folder, *others, **more):
            chosen = function(settings, seed, folder) or settings
            return run(self, chosen, seed, folder, *others, **more)

        monkeypatch.setattr(Trainer, "run", patched)

    return patch


@pytest.fixture
def stop_at_evaluation(monkeypatch):
    """Have SIGTERM sent at that evaluation, counted over all seeds; from then on none."""
    measure = BestOnDev.__call__

    def patch(evaluation):
        left = [evaluation]

        def call(self):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGTERM)
            return measure(self)

        monkeypatch.setattr(BestOnDev, "__call__", call)

    return patch
