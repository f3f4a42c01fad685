"""A small store of made-up English that a small model can learn, and runs on it."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bertsmith.training import engine
from bertsmith.training.engine import MatmulTimes
from bertsmith.training.loop import matmul_times
from bertsmith.training.pretraining import run as pretrain_module
from bertsmith.training.pretraining.run import pretrain
from bertsmith.training.pretraining.settings import PretrainSettings

from ..tiny import animal_sentences, write_store
from .runs import RECIPE


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """Tests run side by side: more threads than cores would slow each other down."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_peak(monkeypatch):
    """Half a second at the start of every run, of which no weight hears."""
    monkeypatch.setattr(pretrain_module, "measure_peak", lambda engine: 0.0)


@pytest.fixture(scope="session")
def store_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    documents = [[" ".join(animal_sentences(12, n))] for n in range(60)]
    return write_store(tmp_path_factory.mktemp("store"), documents)


@pytest.fixture
def recipe() -> dict:
    """Settings of a run of a second or two; dropout is on, since it must resume exactly too."""
    return dict(RECIPE)


@pytest.fixture
def settings(recipe: dict) -> PretrainSettings:
    return PretrainSettings(**recipe)


@pytest.fixture
def train(store_folder, tmp_path, settings):
    """Pre-train in a folder of the test: `settings` or others, with changes; the result."""

    def run(
        name="run", base=settings, *, corpus=store_folder, model=None, resume=False,
        time_limit=math.inf, **changes,
    ):  # fmt: skip
        if not resume:  # of a resume only keywords change something
            base, changes = replace(base, **changes), {}
        given = {"model": model, "resume": resume, "time_limit": time_limit}
        return pretrain(corpus, tmp_path / name, base, **given, **changes)

    return run


@pytest.fixture
def figures(monkeypatch, tmp_path):
    """A CPU with int8, not measured before, whose layer takes 100 ms in bf16, and as long in int8
    as is said; with it the (hidden size, tokens, threads, predictions) measured."""
    measured = []

    def take(int8):
        monkeypatch.setenv("BERTSMITH_CACHE", str(tmp_path / f"cache-{int8}"))

        def measure(config, tokens, threads, predictions):
            measured.append((config.hidden_size, tokens, threads, predictions))
            return MatmulTimes(tokens, bf16=0.1, int8=int8, predictions=predictions)

        for module in (engine, matmul_times):
            monkeypatch.setattr(module, "has_int8", lambda device: True)
        monkeypatch.setattr(engine, "has_bf16", lambda device: True)
        monkeypatch.setattr(matmul_times, "measure_matmuls", measure)
        return measured

    return take


@pytest.fixture(scope="session")
def whole_run(store_folder, tmp_path_factory) -> Path:
    """The run of `settings`; not to be changed."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    pretrain(store_folder, out, PretrainSettings(**RECIPE))
    return out
