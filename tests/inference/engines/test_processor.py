"""PyTorch is asked only where something else than float32 on a CPU may answer."""

import pytest

from bertsmith.inference.engines import processor
from bertsmith.inference.engines.processor import Processor, choose_processor
from bertsmith.training.engine import choose_engine, has_bf16


@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_a_machine_without_a_gpu(monkeypatch, tmp_path, device):
    monkeypatch.setattr(processor, "DEVICES", tmp_path)
    monkeypatch.setattr("bertsmith.training.engine.choose_engine", pytest.fail)
    monkeypatch.setattr(processor, "computing_threads", lambda: 3)
    assert choose_processor(device, "float32") == Processor("cpu", "float32", 3)


def test_where_there_may_be_a_gpu_pytorch_says(monkeypatch, tmp_path):
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(processor, "DEVICES", tmp_path)
    engine = choose_engine("auto", "float32")
    found = choose_processor("auto", "float32")
    assert found == Processor(str(engine.device), "float32", engine.threads)
    assert choose_processor("cpu", "bf16").of_torch().precision == "bf16"


def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="`device='tpu'`: use cpu, cuda or cuda:N"):
        choose_processor("tpu", "float32")


def test_bf16_is_what_pytorch_says_of_the_machine():
    here = Processor("cpu", "float32", 1)
    assert here.has_bf16() == has_bf16(here.of_torch().device)
