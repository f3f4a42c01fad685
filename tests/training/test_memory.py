"""The estimate of memory against what autograd really keeps, and against a process' peak."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bertsmith.model.config import config_for
from bertsmith.model.heads import PreTrainingModel, Targets
from bertsmith.model.kernels.masked_lm_loss import CUDA_BLOCK
from bertsmith.training.engine import Engine
from bertsmith.training.memory import (
    StepShape,
    available_memory,
    out_of_memory,
    parameters,
    step_memory,
)
from bertsmith.training.replicas import Replicas

NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0}


def kept_bytes(config, shape):
    """Bytes of all that autograd saves in a forward pass and that is no parameter."""
    engine = Engine(torch.device("cpu"), shape.precision, threads=1)
    pretrained = PreTrainingModel(config)
    engine.prepare(pretrained)
    with Replicas(pretrained, engine) as replicas:
        model = replicas.models[0].train()
    weights = [*model.parameters(), *([model.output_table] if replicas.has_copies else [])]
    own = {weight.untyped_storage().data_ptr() for weight in weights}
    kept = {}

    def save(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # alive, so addresses differ
        return tensor

    rows, masked = shape.micro_batch_size, shape.micro_batch_size * shape.predictions
    ids = torch.randint(config.vocab_size, (rows, shape.length))
    positions = torch.arange(1, shape.predictions + 1).repeat(rows, 1)
    with torch.autograd.graph.saved_tensors_hooks(save, lambda t: t), engine.autocast():
        model.losses(
            ids, ids % 2, None, Targets(positions, None, torch.zeros(masked, dtype=torch.int64))
        )
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize("precision", ["float32", "bf16", "int8"])
@pytest.mark.parametrize(
    "changes", [NO_DROPOUT, {}, {"gated": True}, {"pre_norm": True}], ids=lambda c: "-".join(c)
)
def test_activations_are_what_autograd_keeps(precision, changes):
    config = config_for("3x128", 64, **changes)  # so few pieces that the head's table is nothing
    shape = StepShape(8, 8, length=64, predictions=10, precision=precision)
    # small vectors (norms' statistics, biases, the pooler) are left out of the estimate
    assert step_memory(config, shape).activations == pytest.approx(
        kept_bytes(config, shape), rel=0.05
    )


def test_parameters_of_the_paper():
    config = config_for("base", 30522)
    assert parameters(config) == sum(p.numel() for p in PreTrainingModel(config).parameters())
    assert parameters(config) // 10**6 == 110  # paper, section 3


def test_what_each_setting_costs():
    config = config_for("base", 30522)
    shape = StepShape(batch_size=64, micro_batch_size=32, length=128, predictions=20, workers=2)
    plain = step_memory(config, shape)
    assert plain.weights == 4 * parameters(config)
    assert plain.gradients == 2 * plain.weights == plain.optimizer
    layer = 768 * 12 * 768  # numbers in a layer's matrices
    muon = step_memory(config, replace(shape, optimizer="muon"))
    assert plain.optimizer - muon.optimizer == 4 * 12 * layer
    half = step_memory(config, replace(shape, precision="bf16"))
    assert 0.5 < half.activations / plain.activations < 0.55  # but for the embeddings' sum
    copied = 12 * layer + 30522 * 768
    assert half.weights - plain.weights == 2 * copied  # copies in bf16, one for all workers
    assert plain.gradients - half.gradients == 2 * 2 * copied
    few = StepShape(2, 1, length=8, predictions=1, precision="bf16", workers=2)
    moved = step_memory(config, replace(few, optimizer="lamb"))  # the gradients' sum, LAMB's step
    assert moved.peak > 1.3 * step_memory(config, few).peak
    assert step_memory(config, replace(shape, precision="float8")) == half
    quick = replace(shape, precision="int8")  # keeps a byte a weight and worker
    assert step_memory(config, quick).activations - half.activations == 2 * 12 * layer
    quick, lean = (replace(s, activation_checkpointing=True) for s in (quick, shape))
    lean = step_memory(config, replace(lean, precision="bf16"))
    assert step_memory(config, quick).activations - lean.activations == 2 * layer
    again = step_memory(config, replace(shape, activation_checkpointing=True))
    assert again.activations < 0.25 * plain.activations and again.peak < plain.peak
    several = step_memory(
        config, replace(shape, batch_size=128)
    )  # forward while gradients are held
    assert several.peak == pytest.approx(plain.peak + 1.1 * plain.gradients)
    one = StepShape(1, 1, length=8, predictions=1, optimizer="lamb", device="cuda")
    small = step_memory(config, one)  # fullest when the weights move: gradients and LAMB's step
    assert small.peak == small.weights * 5


def test_a_gpu_computes_logits_in_blocks_of_its_own():
    config = config_for("1x64", 30522)
    shape = StepShape(512, 512, length=128, predictions=20, device="cuda")
    logits = 4 * 30522  # bytes of a slot; four steps to their gradient in float32 besides
    assert 1 < step_memory(config, shape).peak / (CUDA_BLOCK * 5 * logits) < 1.2


CASE = Path(__file__).with_name("memory_of_steps.py")


@pytest.mark.slow
@pytest.mark.parametrize("size", ["tiny", "mini", "base"])
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_peak_is_that_of_a_process(size, precision):
    shape = {"batch": 32, "micro_batch": 16, "length": 128, "predictions": 20, "workers": 2}
    shape |= {"precision": precision}
    done = subprocess.run(
        [sys.executable, str(CASE), size, json.dumps(shape)],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    measured = int(done.stdout.split()[-1])
    estimated = step_memory(config_for(size, 30522, **NO_DROPOUT), StepShape(**shape)).peak
    assert estimated == pytest.approx(measured, rel=0.25), f"{measured:,} were used"


def machine(folder, available, groups="", files=()):
    (folder / "proc" / "self").mkdir(parents=True)
    (folder / "proc" / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {available} kB\n")
    (folder / "proc" / "self" / "cgroup").write_text(groups)
    for name, text in files:
        path = folder / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return available_memory(folder / "proc", folder / "groups")


def test_available_memory_of_a_plain_machine(tmp_path):
    assert machine(tmp_path, 1000) == 1000 * 1024
    assert available_memory(tmp_path / "none") is None


def test_available_memory_in_a_container(tmp_path):
    version_2 = [
        ("a/b/memory.max", "max\n"),
        ("a/memory.max", "5000\n"),
        ("a/memory.current", "4000\n"),
        ("a/memory.stat", "anon 1\ninactive_file 700\n"),
    ]
    assert machine(tmp_path / "2", 1000, "0::/a/b\n", version_2) == 5000 - 4000 + 700
    version_1 = [
        ("memory/a/memory.limit_in_bytes", "6000\n"),
        ("memory/a/memory.usage_in_bytes", "1000\n"),
        ("memory/a/memory.stat", "inactive_file 1\ntotal_inactive_file 0\n"),
    ]
    groups = "3:cpuset:/a\n2:memory:/a\n0::/\n"
    assert machine(tmp_path / "1", 1000, groups, version_1) == 5000


def test_out_of_memory_names_the_settings():
    now = {"micro_batch": 32, "length": 512, "size": "base", "activation_checkpointing": False}
    expected = (
        "out of memory: lower --micro-batch-size (now 32), lower --max-length (now 512), "
        "add --activation-checkpointing, or take a smaller --size (now base)"
    )
    assert out_of_memory(torch.OutOfMemoryError("CUDA out of memory."), **now) == expected
    assert out_of_memory(MemoryError(), **now) == expected
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**60)
    assert out_of_memory(raised.value, **now) == expected
    least = {**now, "micro_batch": 1, "activation_checkpointing": True}
    assert out_of_memory(MemoryError(), **least) == (
        "out of memory: lower --max-length (now 512), or take a smaller --size (now base)"
    )
    given = {**least, "size": None, "length_flag": "--phase2-length"}  # phase 2, with --model
    assert out_of_memory(MemoryError(), **given) == "out of memory: lower --phase2-length (now 512)"
    fixed = {"length": None, "size": None}
    assert out_of_memory(MemoryError(), **{**now, **fixed}) == (
        "out of memory: lower --micro-batch-size (now 32), or add --activation-checkpointing"
    )
    assert out_of_memory(MemoryError(), **{**least, **fixed}) == (
        "out of memory: no setting of this run lowers it"
    )
    assert out_of_memory(RuntimeError("shape mismatch"), **now) is None
