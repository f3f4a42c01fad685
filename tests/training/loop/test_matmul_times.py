"""int8 is taken where the run's own products are faster by it, and by the same figures for good."""

import shutil
from dataclasses import replace

import pytest
import torch

from bertsmith.checkpoints.run_folder import RunFolder
from bertsmith.model.config import config_for
from bertsmith.model.kernels.masked_lm_loss import masked_lm_loss
from bertsmith.model.kernels.quantized_linear import has_int8
from bertsmith.training import engine
from bertsmith.training.engine import MatmulTimes
from bertsmith.training.loop import matmul_times
from bertsmith.training.loop.matmul_times import measure_matmuls
from bertsmith.training.pretraining import trial
from bertsmith.training.ranks import Ranks
from bertsmith.training.replicas import Replicas

from ...tiny import bertsmith
from ..runs import messages

needs_int8 = pytest.mark.skipif(not has_int8(torch.device("cpu")), reason="no int8 products")


@pytest.fixture
def resolved(store_folder, settings):
    """The settings and the engine that a recipe ends in."""

    def resolve(*ranks, precision="auto-int8", **changes):
        recipe = replace(settings, precision=precision, **changes)
        return trial.resolve(store_folder, recipe, None, *ranks)[:2]

    return resolve


@pytest.mark.parametrize(
    ("int8", "taken"), [(0.04, "int8"), (0.09, "int8"), (0.091, "bf16"), (0.15, "bf16")]
)
def test_int8_is_taken_for_a_tenth_of_the_time(resolved, figures, int8, taken):
    measured = figures(int8)
    found, chosen = resolved(micro_batch_size=8)
    assert found.precision == chosen.precision == taken
    assert measured == [(64, 8 * 48, 1, 8 * 7)]  # the run's own shapes, as one worker has them
    said = chosen.reason
    assert said is not None and said.startswith(f"{taken}: ") and "100 ms in bf16 (384 tok" in said
    assert "of a layer, with its share of the loss, take" in said


@pytest.mark.parametrize("what", ["nothing", "tokens", "processor", "sources"])
def test_what_was_measured_is_kept(resolved, figures, monkeypatch, tmp_path, what):
    measured = figures(0.05)
    assert resolved(micro_batch_size=8)[0].precision == "int8"
    monkeypatch.setattr(matmul_times, "measure_matmuls", lambda *what: MatmulTimes(1, 0.1, 0.2))
    if what == "processor":
        monkeypatch.setattr(matmul_times, "cpu_name", lambda: "another")
    if what == "sources":
        monkeypatch.setattr(matmul_times, "source_digest", lambda module: "changed")
    found, chosen = resolved(micro_batch_size=16 if what == "tokens" else 8)
    assert found.precision == ("int8" if what == "nothing" else "bf16")
    if what == "nothing":
        (file,) = tmp_path.glob("cache*/matmul_times/*")
        assert chosen.reason.endswith(f"; as measured before: {file}")
        file.write_text("{")  # damaged
        assert resolved(micro_batch_size=8)[0].precision == "bf16"
    assert len(measured) == 1


@pytest.mark.parametrize("precision", ["int8", "bf16", "auto", "float32"])
def test_what_is_named_is_not_measured(resolved, figures, precision):
    measured = figures(0.5)
    _, chosen = resolved(precision=precision)
    assert chosen.precision == ("bf16" if precision == "auto" else precision)
    assert not measured and chosen.reason is None


@pytest.mark.parametrize("best", ["bf16", "float32"])
def test_without_int8_the_recipe_is_auto(resolved, figures, monkeypatch, best):
    measured = figures(0.05)
    monkeypatch.setattr(matmul_times, "has_int8", lambda device: False)
    monkeypatch.setattr(engine, "has_bf16", lambda device: best == "bf16")
    assert resolved()[1].precision == best and not measured


def test_the_micro_batch_is_tried_in_what_was_taken(resolved, figures, monkeypatch):
    measured, tried, found = figures(0.15), [], trial.MicroBatch(4, "of a test")
    monkeypatch.setattr(trial, "SECONDS_A_SIZE", 0.0)
    monkeypatch.setattr(trial.Trial, "micro_batch", lambda self, _: tried.append(self) or found)
    assert resolved(micro_batch_size="auto")[0].micro_batch_size == 4
    assert [one._engine.precision for one in tried] == ["bf16"]
    assert measured == [(64, 16 * 48, 1, 16 * 7)]


@pytest.mark.parametrize(
    ("told", "times"),
    [
        ('{"tokens": 384, "bf16": 0.1, "int8": 0.2}', MatmulTimes(384, 0.1, 0.2)),
        ("null", None),  # no int8 there
    ],
)
def test_all_ranks_take_what_rank_0_has_measured(resolved, figures, monkeypatch, told, times):
    figures(0.05)
    monkeypatch.setattr(Ranks, "broadcast", lambda ranks, key, text: told)
    _, chosen = resolved(Ranks(rank=1, size=2), threads=1)
    assert chosen.precision == "bf16" and chosen.matmul_times == times


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_a_run_keeps_its_choice(store_folder, tmp_path, figures, has_checkpoint):
    out = tmp_path / "run"
    words = ["--corpus", store_folder, "--config", "fast", "--size", "1x64", "--threads", "1"]
    words = ["pretrain", *words, "--max-length", "48", "--out"]
    measured = figures(0.095)
    bertsmith(*words, out, "--steps", "2")
    first = RunFolder(out).settings()
    times, (kept,) = {"bf16": 100.0, "int8": 95.0}, tmp_path.glob("cache*/matmul_times/*")
    assert first["settings"]["precision"] == first["machine"]["precision"] == "bf16"
    assert first["matmul_times"] == {"taken": "bf16", "tokens": 32 * 48, "milliseconds": times}
    assert [text for text in messages(out) if "bf16" in text] == [
        "bf16: the products of a layer, with its share of the loss, take 95 ms in int8, 100 ms in "
        "bf16 (1,536 tokens a core); "
        f"kept in {kept}"
    ]
    if not has_checkpoint:  # stopped before its first one: it begins anew with its settings
        (begun := tmp_path / "begun").mkdir()
        shutil.copy(out / "run.json", begun)
        out = begun
    figures(0.01)
    measured.clear()
    bertsmith(*words, out, "--resume", "--steps", "3")
    bertsmith(*words, out, "--resume", "--steps", "4", "--precision", "auto-int8")
    again = RunFolder(out).settings()
    assert not measured and again["matmul_times"] == first["matmul_times"]
    assert again["settings"]["precision"] == "bf16"


@needs_int8
@pytest.mark.parametrize("gated", [False, True])
def test_both_are_measured_in_little_time(monkeypatch, gated):
    monkeypatch.setattr(matmul_times, "SECONDS", 0.0)
    config = config_for("1x64", 100, gated=gated)
    times = measure_matmuls(config, tokens=32, threads=2)
    assert times.tokens == 32 and times.bf16 > 0 and times.int8 > 0


@needs_int8
def test_the_loss_is_measured_where_there_are_predictions(monkeypatch):
    computed = []

    def recorded(hidden, table, *others, int8):
        computed.append((tuple(hidden.shape), tuple(table.shape), int8))
        return masked_lm_loss(hidden, table, *others, int8=int8)

    monkeypatch.setattr(matmul_times, "SECONDS", 0.0)
    monkeypatch.setattr(matmul_times, "masked_lm_loss", recorded)
    assert measure_matmuls(config_for("2x64", 100), tokens=32, threads=1).predictions == 0
    assert not computed
    times = measure_matmuls(config_for("2x64", 100), tokens=32, threads=1, predictions=5)
    assert times.predictions == 5 and times.bf16 > 0 and times.int8 > 0
    assert set(computed) == {((5, 64), (100, 64), int8) for int8 in (False, True)}


@needs_int8
def test_a_measurement_that_fails_leaves_no_threads(monkeypatch):
    closed = []
    close = Replicas.close
    monkeypatch.setattr(Replicas, "close", lambda self: closed.append(self) or close(self))
    monkeypatch.setattr(matmul_times, "without_bias", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        measure_matmuls(config_for("1x64", 100), tokens=32, threads=1)
    assert len(closed) == 2
