"""The fast step (compiled kernels, bf16, a replica a core) against the plain one.

The plain path is the same encoder in float32 with PyTorch's attention, cross-entropy and one
thread; both start from the same weights and see the same batches in the same order.
"""

import copy

import pytest
import torch

from bertsmith.corpus.store import TokenStore
from bertsmith.corpus.stream import Position, PretrainingStream
from bertsmith.kernels.numbers import without_kernels
from bertsmith.model.heads import PreTrainingModel
from bertsmith.model.initial_weights import initialize
from bertsmith.model.sizes import config_for
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.training.engine import Engine
from bertsmith.training.loop import LoopSettings, State, optimizer_step
from bertsmith.training.optimizers import build_optimizer
from bertsmith.training.pretrain_settings import PretrainSettings
from bertsmith.training.pretraining import Pretraining
from bertsmith.training.replicas import Replicas
from bertsmith.training.schedule import Budget

STEPS, WINDOW = 200, 20


def started(store_folder, seed=1):
    vocabulary = Tokenizer.from_pretrained(store_folder).vocabulary
    settings = PretrainSettings(size="2x64", length=48, batch=16, steps=STEPS)
    stream = PretrainingStream(
        TokenStore.open(store_folder).train, vocabulary, settings.examples(settings.length), seed=1
    )
    config = config_for("2x64", len(vocabulary), dropout=0.0, attention_dropout=0.0)
    model = initialize(PreTrainingModel(config), 0.1, torch.Generator().manual_seed(seed))
    return model, stream, settings


def losses(model, stream, settings, engine, steps=STEPS):
    """Means of WINDOW steps each."""
    task = Pretraining(model, stream, None, settings, engine)
    optimizer = build_optimizer(model, "adamw", 1e-3, 0.01)
    loop = LoopSettings(Budget(steps=steps), 1e-3, "linear", 0.1, 1.0, seed=1)
    found, position = [], Position(0, 0)
    with Replicas(model, engine) as replicas:
        for step in range(steps):
            batch, position = task.batch(position)
            state = State(step=step)
            sums = optimizer_step(task, optimizer, batch, 1e-3, loop, engine, state, replicas)
            found.append(sums["loss"])
    return torch.tensor(found).view(-1, WINDOW).mean(1)


def gradients(model, stream, settings, engine):
    task = Pretraining(model, stream, None, settings, engine)
    batch, _ = task.batch(Position(0, 0))

    def compute(replica, micro, number):
        with engine.autocast():
            loss, _ = task.loss(replica, micro, batch.counts)
        loss.backward()

    with Replicas(model, engine) as replicas:
        replicas.map(compute, batch.micro_batches)
        replicas.gather()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


# float32: the same sums in another order. bf16 keeps 8 bits: each of some ten roundings on the way
# is off by up to 0.4%, independently.
@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-5), ("bf16", 2e-2)])
@pytest.mark.parametrize("workers", [1, 2])
def test_the_gradient_of_a_step_is_that_of_the_plain_path(
    store_folder, precision, workers, tolerance
):
    model, stream, settings = started(store_folder)
    plain = copy.deepcopy(model)
    found = gradients(model, stream, settings, Engine(torch.device("cpu"), precision, workers))
    with without_kernels():
        expected = gradients(plain, stream, settings, Engine(torch.device("cpu"), "float32", 1))
    assert (found - expected).norm() < tolerance * expected.norm()


def test_200_steps_follow_the_plain_curve(store_folder):
    model, stream, settings = started(store_folder)
    plain, other = copy.deepcopy(model), started(store_folder, seed=2)[0]
    found = losses(model, stream, settings, Engine(torch.device("cpu"), "bf16", 2))
    one = Engine(torch.device("cpu"), "float32", 1)
    with without_kernels():
        expected = losses(plain, stream, settings, one)
        noise = (losses(other, stream, settings, one) - expected).abs().mean()  # another start
    assert expected[-1] < 0.7 * expected[0]  # it learns
    assert (found - expected).abs().mean() < noise / 2
    assert (found - expected).abs().max() < 0.05
