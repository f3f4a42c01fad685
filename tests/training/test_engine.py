import os

import pytest
import torch

from bertsmith.base.processes import usable_cores
from bertsmith.model.kernels import quantized_linear
from bertsmith.training import engine as engine_module
from bertsmith.training.engine import Engine, choose_engine, cpu_name, machine, measure_peak

FLOAT8 = {"device": "cpu", "precision": "float8"}
CUDA_IS_HERE = pytest.mark.skipif(
    torch.cuda.is_available(), reason="this machine has a CUDA device"
)


@pytest.mark.parametrize(
    ("choice", "says"),
    [
        ({"threads": 5000}, "`threads=5000`: this machine has"),
        ({"precision": "half"}, "`precision='half'`: known are auto, auto-int8, float32"),
        ({"device": "abacus"}, "device='abacus'"),
        ({"device": "mps"}, "`device='mps'`: bertsmith computes on these here: cpu"),
        (FLOAT8, "`precision='float8'`: cpu has no float8 products.*; use bf16$"),
        pytest.param(
            {"device": "cuda"}, "sees no CUDA device; use `device='cpu'`", marks=CUDA_IS_HERE
        ),
    ],
    ids=str,
)
def test_choices_that_the_machine_does_not_have_are_refused(choice, says):
    with pytest.raises(ValueError, match=says) as error:
        choose_engine(**choice)
    assert "\n" not in str(error.value)


def test_a_gpu_that_is_not_there_is_told_those_that_are(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="^`device='cuda:2'`: .* here: cpu, cuda:0, cuda:1$"):
        choose_engine("cuda:2")


@pytest.mark.parametrize("precision", ["bf16", "float8"])
def test_a_gpu_without_the_products_is_refused(monkeypatch, precision):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(
        ValueError, match=f"`precision='{precision}'`: cuda has no {precision} prod"
    ):
        choose_engine("cuda", precision)


def test_never_more_threads_than_cores():
    assert choose_engine("cpu").threads <= usable_cores()


def test_threads_of_one_run_are_not_those_of_the_next(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setattr("bertsmith.base.processes.usable_cores", lambda: 2)
    monkeypatch.setattr(engine_module, "usable_cores", lambda: 2)
    assert [choose_engine("cpu", threads=n).threads for n in (1, None)] == [1, 2]
    torch.set_num_threads(1)


def test_huge_pages_are_asked_for_unless_the_user_has_said_otherwise(monkeypatch):
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE", raising=False)
    choose_engine("cpu")
    assert os.environ["THP_MEM_ALLOC_ENABLE"] == "1"
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "0")
    choose_engine("cpu")
    assert os.environ["THP_MEM_ALLOC_ENABLE"] == "0"


@pytest.mark.parametrize(
    ("has_vnni", "has_bf16", "best"),
    [(True, True, "bf16"), (False, True, "bf16"), (False, False, "float32")],
)
def test_int8_where_a_processor_has_it(monkeypatch, has_vnni, has_bf16, best):
    features = {name for name, has in (("avx512vnni", has_vnni), ("avx512bf16", has_bf16)) if has}
    monkeypatch.setattr(quantized_linear, "cpu_features", lambda: features)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_bf16)
    assert choose_engine("cpu", "auto").precision == best
    # until the products of the run's own layers are measured: loop/test_matmul_times.py
    assert choose_engine("cpu", "auto-int8").precision == best
    if best == "float32":
        says = "`precision='int8'`: cpu has no AVX-512 VNNI .*; use bf16 or float32$"
        with pytest.raises(ValueError, match=says):
            choose_engine("cpu", "int8")


def test_precision_is_that_of_the_products():
    left = torch.ones(4, 4)
    for precision in ("float32", "bf16", "int8"):  # int8 is for functions of ours
        dtype = torch.float32 if precision == "float32" else torch.bfloat16
        with Engine(torch.device("cpu"), precision, 1).autocast():
            assert (left @ left).dtype == dtype


def test_peak_and_record():
    engine = choose_engine("cpu", "float32", 1)
    peak = measure_peak(engine, size=128, seconds=0.0)
    assert peak > 1e6  # operations a second; any machine that runs Python does more
    assert measure_peak(engine, size=None, seconds=None) > 1e6
    assert machine(engine, 2.5e11)["peak_tflops"] == 0.25


ARM = "ARMv7 Processor rev 4: (v7l)"
NAMED = "cpu family\t: 26\nmodel\t\t: 2\nmodel name\t: Some Name\n\nprocessor\t: 1\n"


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (NAMED, "Some Name (family 26, model 2)"),
        (f"processor\t: 0\nmodel name\t: {ARM}\n", ARM),
        ("processor\t: 0\n", "a machine"),
        (None, "a machine"),
    ],
    ids=["x86", "arm", "nameless", "no file"],
)
def test_the_name_of_the_processor(told, expected, tmp_path, monkeypatch):
    if told is not None:
        (tmp_path / "cpuinfo").write_text(told)
    monkeypatch.setattr(engine_module, "Path", lambda _: tmp_path / "cpuinfo")
    monkeypatch.setattr(engine_module.platform, "processor", lambda: "")
    monkeypatch.setattr(engine_module.platform, "machine", lambda: "a machine")
    assert cpu_name() == expected
