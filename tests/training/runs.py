"""A small recipe and model, incidents in the loop's steps, and what a run left."""

import torch

from bertsmith.base.files import read_json, read_json_lines
from bertsmith.checkpoints.run_folder import RunFolder
from bertsmith.checkpoints.tensors import read_tensor_file
from bertsmith.corpus.examples.stream import PretrainingStream
from bertsmith.corpus.store.store import TokenStore
from bertsmith.model.config import config_for
from bertsmith.model.heads import PreTrainingModel
from bertsmith.model.initialization import initialize
from bertsmith.training.engine import Engine
from bertsmith.training.loop.step import Stepper

CPU = Engine(torch.device("cpu"), "float32", 1)
RECIPE = {
    "size": "2x64",
    "max_length": 48,
    "batch_size": 16,
    "steps": 24,
    "learning_rate": 3e-3,
    "dropout": 0.1,
    "attention_dropout": 0.1,
    "precision": "float32",
    "threads": 1,
    "checkpoint_every": 8,
    "log_every": 4,
    "num_evals": 2,
    "eval_rows": 16,
}
NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0}
TIMED = ("seconds", "tokens_per_second", "mfu")  # differ from run to run


def random_model(pieces, size="2x64", deviation=0.1, kind=PreTrainingModel, labels=(), **shape):
    model = kind(config_for(size, pieces, **shape), *labels)
    return initialize(model, deviation, torch.Generator().manual_seed(1))


def train_stream(store_folder, settings):
    store = TokenStore.open(store_folder)
    examples = settings.examples(settings.max_length)
    return PretrainingStream(store.train, store.tokenizer.vocabulary, examples, settings.seed)


class Killed(BaseException):
    """Stands for a kill: nothing in the package catches it."""


def before_steps(monkeypatch, act):
    """Have the loop call act(its `Training`, the batch) before every step."""
    real = Stepper.step

    def step(self, batch, rate):
        act(self.run, batch)
        return real(self, batch, rate)

    monkeypatch.setattr(Stepper, "step", step)


def at_step(step, monkeypatch, act):
    """Have the loop call `act` before that step."""
    before_steps(monkeypatch, lambda run, batch: act() if run.state.step == step else None)


def killed_at(step, monkeypatch):
    """Make the loop die inside the given step, as a kill would."""

    def die():
        raise Killed

    at_step(step, monkeypatch, die)


def lines(run, event="train"):
    """The lines of one kind in a run's log."""
    return [line for line in read_json_lines(run / "log.jsonl") if line["event"] == event]


def messages(run):
    return [line["text"] for line in lines(run, "message")]


def weights(run, file="model.safetensors"):
    return read_tensor_file(run / file)


def assert_same_weights(one, other, file="model.safetensors"):
    first, second = weights(one, file), weights(other, file)
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


def loop_state(run):
    """That of the newest checkpoint, without what measures time."""
    state = read_json(RunFolder(run).latest() / "state.json")["loop"]
    state.pop("seconds")
    state["since_log"].pop("seconds", None)
    return state


def assert_same_run(one, other):
    """Weights, optimizer state and loop state of the newest checkpoint, and the log's figures."""
    checkpoints = [RunFolder(run).latest() for run in (one, other)]
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert_same_weights(*checkpoints, file)
    assert loop_state(one) == loop_state(other)
    logs = [
        [{name: line[name] for name in line if name not in TIMED} for line in read_json_lines(path)]
        for path in (one / "log.jsonl", other / "log.jsonl")
    ]
    left, right = ([line for line in log if line["event"] != "message"] for log in logs)
    assert left == right
