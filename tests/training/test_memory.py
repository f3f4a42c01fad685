"""The estimate of memory against what autograd really keeps, and against a process' peak.

`python test_memory.py SIZE SHAPE` prints the bytes that steps took.
"""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bertsmith.base.processes import keep_freed_memory
from bertsmith.corpus.examples.settings import ExampleSettings
from bertsmith.model.config import SIZES, config_for
from bertsmith.model.heads import PreTrainingModel, Targets
from bertsmith.model.initialization import initialize
from bertsmith.model.kernels.masked_lm_loss import CUDA_BLOCK
from bertsmith.model.kernels.quantized_linear import has_int8
from bertsmith.training.engine import Engine, choose_engine
from bertsmith.training.loop.update import make_update
from bertsmith.training.memory import (
    StepShape,
    available_memory,
    parameters,
    step_memory,
)
from bertsmith.training.optimizers import build_optimizer
from bertsmith.training.pretraining.settings import PretrainSettings
from bertsmith.training.pretraining.task import rows_per_forward
from bertsmith.training.replicas import Replicas

CPU = torch.device("cpu")
WITHOUT_INT8 = pytest.mark.skipif(not has_int8(CPU), reason="no int8 products")
INT8 = pytest.param("int8", "adamw", marks=WITHOUT_INT8)
NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0}
BASE = config_for("base", 30522)


def gigabytes(config, shape):
    """As the table of docs/how-to/pretrain.md has them: in brackets with fewer activations kept."""
    fewer = replace(shape, activation_checkpointing=True)
    peaks = [step_memory(config, one).peak / 1e9 for one in (shape, fewer)]
    return "{} ({})".format(*(f"{peak:.{int(peak < 10)}f}" for peak in peaks))


def test_the_table_of_the_page_is_the_estimate():
    page = (Path(__file__).parents[2] / "docs/how-to/pretrain.md").read_text(encoding="utf-8")
    for size in SIZES:
        config, cells = config_for(size, 30_522), []
        for rows, length in ((32, 128), (256, 128), (32, 512), (256, 512)):
            masked = ExampleSettings(max_length=length).num_predictions
            shape = StepShape(rows, rows, length, masked, "bf16", device="cuda")
            cells.append(gigabytes(config, shape))
        two, settings = Engine(CPU, "bf16", threads=2), PretrainSettings(max_length=128)
        rows = rows_per_forward(settings, settings.phases()[0], two, config)
        shape = StepShape(32, rows, 128, 20, "bf16", workers=2)
        row = " | ".join([size, *cells, gigabytes(config, shape)])
        assert f"\n| {row} |\n" in page, row


def kept_bytes(config, shape):
    """Bytes of all that autograd saves in a forward pass and that is no parameter."""
    engine = Engine(CPU, shape.precision, threads=1)
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
    targets = Targets(positions, None, torch.zeros(masked, dtype=torch.int64))
    with torch.autograd.graph.saved_tensors_hooks(save, lambda t: t), engine.autocast():
        model.losses(ids, ids % 2, None, targets)
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize("precision", ["float32", "bf16", "int8"])
@pytest.mark.parametrize(
    "changes", [NO_DROPOUT, {}, {"gated": True}, {"pre_norm": True}], ids=lambda c: "-".join(c)
)
def test_activations_are_what_autograd_keeps(precision, changes):
    config = config_for("3x128", 64, **changes)  # so few pieces that the head's table is nothing
    shape = StepShape(8, 8, length=64, predictions=10, precision=precision)
    kept = kept_bytes(config, shape)
    # small vectors (norms' statistics, biases, the pooler) are left out of the estimate
    assert step_memory(config, shape).activations == pytest.approx(kept, rel=0.05)


def test_parameters_of_the_paper():
    assert parameters(BASE) == sum(p.numel() for p in PreTrainingModel(BASE).parameters())
    assert parameters(BASE) // 10**6 == 110  # paper, section 3


def test_what_each_setting_costs():
    shape = StepShape(batch_size=64, micro_batch_size=32, length=128, predictions=20, workers=2)

    def memory(start=shape, **changes):
        return step_memory(BASE, replace(start, **changes))

    plain = memory()
    assert plain.weights == 4 * parameters(BASE)
    assert plain.gradients == 2 * plain.weights == plain.optimizer
    layer = 768 * 12 * 768  # numbers in a layer's matrices
    assert plain.optimizer - memory(optimizer="muon").optimizer == 4 * 12 * layer
    half = memory(precision="bf16")
    assert 0.5 < half.activations / plain.activations < 0.55  # but for the embeddings' sum
    copied = 12 * layer + 30522 * 768
    assert half.weights - plain.weights == 2 * copied  # copies in bf16, one for all workers
    assert plain.gradients - half.gradients == 2 * 2 * copied
    few = StepShape(2, 1, length=8, predictions=1, precision="bf16", workers=2)
    # the gradients' sum, LAMB's step
    assert memory(few, optimizer="lamb").peak > 1.3 * memory(few).peak
    assert memory(precision="float8") == half
    # keeps a byte a weight and worker
    assert memory(precision="int8").activations - half.activations == 2 * 12 * layer
    quick, lean = (memory(precision=p, activation_checkpointing=True) for p in ("int8", "bf16"))
    assert quick.activations - lean.activations == 2 * layer
    again = memory(activation_checkpointing=True)
    assert again.activations < 0.25 * plain.activations and again.peak < plain.peak
    several = memory(batch_size=128)  # forward while gradients are held
    assert several.peak == pytest.approx(plain.peak + 1.1 * plain.gradients)
    one = memory(StepShape(1, 1, length=8, predictions=1, optimizer="lamb", device="cuda"))
    assert one.peak == one.weights * 5  # fullest when the weights move: gradients and LAMB's step


def test_a_gpu_computes_logits_in_blocks_of_its_own():
    config = config_for("1x64", 30522)
    shape = StepShape(512, 512, length=128, predictions=20, device="cuda")
    logits = 4 * 30522  # bytes of a slot; four steps to their gradient in float32 besides
    assert 1 < step_memory(config, shape).peak / (CUDA_BLOCK * 5 * logits) < 1.2


@pytest.mark.slow
@pytest.mark.parametrize("size", ["tiny", "mini", "base"])
@pytest.mark.parametrize(
    ("precision", "optimizer"),
    [("float32", "adamw"), ("float32", "muon"), ("bf16", "adamw"), ("bf16", "muon"), INT8],
)
def test_peak_is_that_of_a_process(size, precision, optimizer):
    how = {"precision": precision, "optimizer": optimizer}
    shape = StepShape(32, 16, length=128, predictions=20, workers=2, **how)
    command = [sys.executable, __file__, size, json.dumps(vars(shape))]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    measured = int(done.stdout.split()[-1])
    estimated = step_memory(config_for(size, 30522, **NO_DROPOUT), shape).peak
    assert estimated == pytest.approx(measured, rel=0.25), f"{measured:,} were used"


def steps(size, pieces, shape, count):
    config = config_for(size, pieces, **NO_DROPOUT)
    model = initialize(PreTrainingModel(config), 0.02, torch.Generator().manual_seed(1))
    optimizer = build_optimizer(model, shape.optimizer, 1e-4, 0.01)
    engine = choose_engine("cpu", shape.precision, shape.workers)
    engine.prepare(model)

    def gradients(replica, rows, number):
        replica.train()
        ids = torch.full((rows, shape.length), number + 5)
        positions = torch.arange(1, shape.predictions + 1).repeat(rows, 1)
        labels = torch.full((rows * shape.predictions,), 7)
        with engine.autocast():
            losses = replica.losses(ids, ids * 0, None, Targets(positions, None, labels))
        (losses.mlm_loss + losses.nsp_logits.sum()).backward()

    parts = [shape.micro_batch_size] * (shape.batch_size // shape.micro_batch_size)
    with Replicas(model, engine) as replicas:
        for _ in range(count):
            replicas.map(gradients, parts)
            update = make_update(optimizer, replicas, clip=1.0)
            update.norm()
            update.move()


def resident(what):
    with open("/proc/self/status", encoding="ascii") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith(what))


def print_bytes_of_steps(size, shape):
    keep_freed_memory()
    steps("1x64", 100, replace(shape, batch_size=2, micro_batch_size=1), 1)  # libraries
    before = resident("VmRSS")
    steps(size, 30522, shape, 3)
    print(resident("VmHWM") - before)  # ru_maxrss would be that of the process that started this


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


if __name__ == "__main__":
    print_bytes_of_steps(sys.argv[1], StepShape(**json.loads(sys.argv[2])))
