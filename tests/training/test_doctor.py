"""The doctor finds what it looks for: broken attention, undefined results, crowded threads."""

import json

import pytest
import torch

from bertsmith.model import variants
from bertsmith.model.kernels.quantized_linear import has_int8
from bertsmith.training import doctor
from bertsmith.training.engine import Engine, MatmulTimes

from ..tiny import bertsmith, cli

ATTENTION = variants.attention
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Less work: short rows, two paths, no measuring."""
    monkeypatch.setattr(doctor, "LENGTH", 16)
    monkeypatch.setattr(doctor, "devices", lambda: [CPU])
    monkeypatch.setattr(doctor, "measure_peak", lambda engine: 1e11)
    times = MatmulTimes(188, bf16=0.0416, int8=0.0325)
    monkeypatch.setattr(doctor, "measure_matmuls", lambda config, tokens, threads: times)
    paths = {name: doctor.ATTENTION[name] for name in ("automatic", "efficient")}
    monkeypatch.setattr(doctor, "ATTENTION", paths)


@pytest.fixture
def attention(monkeypatch):
    """Replaces attention below float64, which the reference keeps to itself."""

    def replace(broken):
        def chosen(query, *others, **settings):
            right = ATTENTION(query, *others, **settings)
            return right if query.dtype == torch.float64 else broken(right)

        monkeypatch.setattr(variants, "attention", chosen)

    return replace


def test_this_machine_passes_and_a_path_it_lacks_is_left_out():
    least = {"float32": 1e-7, "bf16": 1e-4}
    if has_int8(CPU):
        least["int8"] = 1e-2  # what bf16 alone does not reach
    for precision, error in least.items():
        checks = list(doctor.check_attention(Engine(CPU, precision, 1)))
        assert [check.attention for check in checks] == ["automatic"]
        assert checks[0].passed and error < checks[0].forward_error < checks[0].tolerance


@pytest.mark.parametrize("broken", [lambda right: right * 1.01, lambda right: right * torch.nan])
def test_wrong_attention_fails(attention, broken):
    attention(broken)
    ran, shown = cli("doctor", "--json"), cli("doctor")
    found = json.loads(ran.out)
    assert not found["passed"] and not found["checks"][0]["passed"]
    assert ran.code == shown.code == 1 and "FAILED" in shown.out


def test_another_fault_of_attention_is_not_swallowed(attention):
    def broken(right):
        raise RuntimeError("device-side assert")

    attention(broken)
    with pytest.raises(RuntimeError, match="device-side assert"):
        list(doctor.check_attention(Engine(CPU, "float32", 1)))


def test_crowded_threads_are_warned_of(monkeypatch):
    monkeypatch.setattr(doctor, "usable_cores", lambda: 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    shown = bertsmith("doctor")
    assert "warning: 3 threads on 2 cores" in shown and "set OMP_NUM_THREADS=2" in shown


@pytest.mark.parametrize("has", [True, False])
def test_int8_and_bf16_are_timed_where_both_are(has, monkeypatch):
    monkeypatch.setattr(doctor, "has_int8", lambda device: has)
    monkeypatch.setattr(doctor, "check_attention", lambda engine: iter(()))
    shown = bertsmith("doctor")
    line = "  bf16 41.6 ms, int8 32.5 ms: int8 is what --precision auto-int8 would take now\n"
    assert (f"matmuls of a layer of base, 188 tokens a core:\n{line}" in shown) == has
    found = json.loads(bertsmith("doctor", "--json"))["matmul_times"]
    assert (found and found["taken"]) == ("int8" if has else None)


@pytest.mark.gpu
def test_a_gpu_passes(monkeypatch):
    monkeypatch.undo()
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    for precision in ("float32", "bf16"):
        engine = Engine(torch.device("cuda", 0), precision, 1)
        checks = list(doctor.check_attention(engine))
        assert checks and all(check.passed for check in checks), checks
