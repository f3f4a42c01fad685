"""int8 is taken where the run's own products are faster by it, and by the same figures for good."""

import dataclasses
import json
import shutil

import pytest
import torch

from bertsmith.checkpoints.run_folder import RunFolder
from bertsmith.cli.main import main
from bertsmith.model.config import config_for
from bertsmith.model.kernels.quantized_linear import has_int8
from bertsmith.training import engine
from bertsmith.training.engine import MatmulTimes
from bertsmith.training.loop.log import read_log
from bertsmith.training.pretraining import matmul_times as product_times
from bertsmith.training.pretraining import trial
from bertsmith.training.pretraining.matmul_times import measure_matmuls
from bertsmith.training.ranks import Ranks
from bertsmith.training.replicas import Replicas

CPU = torch.device("cpu")


@pytest.fixture
def figures(monkeypatch):
    """A CPU with int8 whose layer takes 100 ms in bf16, and as long in int8 as is said; with it
    the (hidden size, tokens, threads) that were measured."""
    measured = []

    def take(int8):
        def measure(config, tokens, threads):
            measured.append((config.hidden_size, tokens, threads))
            return MatmulTimes(tokens, bf16=0.1, int8=int8)

        for module in (engine, product_times):
            monkeypatch.setattr(module, "has_int8", lambda device: True)
        monkeypatch.setattr(engine, "has_bf16", lambda device: True)
        monkeypatch.setattr(product_times, "measure_matmuls", measure)
        return measured

    return take


@pytest.mark.parametrize(
    ("int8", "taken"), [(0.04, "int8"), (0.09, "int8"), (0.091, "bf16"), (0.15, "bf16")]
)
def test_int8_is_taken_for_a_tenth_of_the_time(store_folder, settings, figures, int8, taken):
    measured = figures(int8)
    recipe = dataclasses.replace(settings, precision="auto-int8", micro_batch_size=8)
    found, chosen, _ = trial.resolve(store_folder, recipe, None)
    assert found.precision == chosen.precision == taken
    assert measured == [(64, 8 * 48, 1)]  # the run's own shapes, as one worker has them
    said = chosen.reason
    assert said is not None and said.startswith(f"{taken}: ") and "100 ms in bf16 (384 tok" in said


@pytest.mark.parametrize("precision", ["int8", "bf16", "auto", "float32"])
def test_what_is_named_is_not_measured(store_folder, settings, figures, precision):
    measured = figures(0.5)
    recipe = dataclasses.replace(settings, precision=precision)
    _, chosen, _ = trial.resolve(store_folder, recipe, None)
    assert chosen.precision == ("bf16" if precision == "auto" else precision)
    assert not measured and chosen.reason is None


@pytest.mark.parametrize("best", ["bf16", "float32"])
def test_without_int8_the_recipe_is_auto(store_folder, settings, figures, monkeypatch, best):
    measured = figures(0.05)
    monkeypatch.setattr(product_times, "has_int8", lambda device: False)
    monkeypatch.setattr(engine, "has_bf16", lambda device: best == "bf16")
    recipe = dataclasses.replace(settings, precision="auto-int8")
    assert trial.resolve(store_folder, recipe, None)[1].precision == best
    assert not measured


def test_the_micro_batch_is_tried_in_what_was_taken(store_folder, settings, figures, monkeypatch):
    measured, tried = figures(0.15), []
    monkeypatch.setattr(trial, "SECONDS_A_SIZE", 0.0)
    monkeypatch.setattr(trial.Trial, "micro_batch", lambda self, _: tried.append(self) or FOUND)
    recipe = dataclasses.replace(settings, precision="auto-int8", micro_batch_size="auto")
    assert trial.resolve(store_folder, recipe, None)[0].micro_batch_size == 4
    assert [one._engine.precision for one in tried] == ["bf16"]
    assert measured == [(64, 16 * 48, 1)]


FOUND = trial.MicroBatch(4, "of a test")


def test_all_ranks_take_what_rank_0_has_measured(store_folder, settings, figures, monkeypatch):
    figures(0.05)
    told = json.dumps({"tokens": 384, "bf16": 0.1, "int8": 0.2})
    monkeypatch.setattr(Ranks, "broadcast", lambda ranks, key, text: told)
    recipe = dataclasses.replace(settings, precision="auto-int8", threads=1)
    _, chosen, _ = trial.resolve(store_folder, recipe, None, Ranks(rank=1, size=2))
    assert chosen.precision == "bf16" and chosen.product_times == MatmulTimes(384, 0.1, 0.2)
    monkeypatch.setattr(Ranks, "broadcast", lambda ranks, key, text: "null")  # no int8 there
    _, chosen, _ = trial.resolve(store_folder, recipe, None, Ranks(rank=1, size=2))
    assert chosen.precision == "bf16" and chosen.product_times is None


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_a_run_keeps_its_choice(store_folder, tmp_path, figures, has_checkpoint):
    out = tmp_path / "run"
    words = ["pretrain", "--corpus", str(store_folder), "--out", str(out), "--config", "fast"]
    words += ["--size", "1x64", "--max-length", "48", "--threads", "1"]
    figures(0.095)
    assert main([*words, "--steps", "2"]) == 0
    first = RunFolder(out).settings()
    times = {"bf16": 100.0, "int8": 95.0}
    assert first["settings"]["precision"] == first["machine"]["precision"] == "bf16"
    assert first["products"] == {"taken": "bf16", "tokens": 32 * 48, "milliseconds": times}
    (line,) = [
        event["text"] for event in read_log(out / "log.jsonl") if "bf16" in event.get("text", "")
    ]
    assert line == (
        "bf16: the products of a layer take 95 ms in int8, 100 ms in bf16 (1,536 tokens a core)"
    )
    if not has_checkpoint:  # stopped before its first one: it begins anew with its settings
        (begun := tmp_path / "begun").mkdir()
        shutil.copy(out / "run.json", begun)
        out = begun
        words[4] = str(begun)
    measured = figures(0.01)
    measured.clear()
    assert main([*words, "--resume", "--steps", "3"]) == 0
    assert main([*words, "--resume", "--steps", "4", "--precision", "auto-int8"]) == 0
    again = RunFolder(out).settings()
    assert not measured and again["products"] == first["products"]
    assert again["settings"]["precision"] == "bf16"


@pytest.mark.skipif(not has_int8(CPU), reason="no int8 products")
@pytest.mark.parametrize("gated", [False, True])
def test_both_are_measured_in_little_time(monkeypatch, gated):
    monkeypatch.setattr(product_times, "SECONDS", 0.0)
    config = config_for("1x64", 100, gated=gated)
    times = measure_matmuls(config, tokens=32, threads=2)
    assert times.tokens == 32 and times.bf16 > 0 and times.int8 > 0
    monkeypatch.setattr(product_times, "OPERATIONS", 1e6)
    assert 1 <= measure_matmuls(config, tokens=32, threads=1).tokens < 32


@pytest.mark.skipif(not has_int8(CPU), reason="no int8 products")
def test_a_measurement_that_fails_leaves_no_threads(monkeypatch):
    closed = []
    close = Replicas.close
    monkeypatch.setattr(Replicas, "close", lambda self: closed.append(self) or close(self))
    monkeypatch.setattr(product_times, "without_bias", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        measure_matmuls(config_for("1x64", 100), tokens=32, threads=1)
    assert len(closed) == 2
