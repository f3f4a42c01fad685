import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bertsmith.checkpoints.run_folder import RunFolder
from bertsmith.corpus.examples.pairs import PretrainingBatch
from bertsmith.model.config import config_for
from bertsmith.model.heads import PreTrainingModel
from bertsmith.model.initialization import initialize
from bertsmith.model.kernels.masked_lm_loss import UNUSED
from bertsmith.training.engine import Engine, choose_engine
from bertsmith.training.loop.schedule import Budget
from bertsmith.training.loop.task import StepBatch
from bertsmith.training.pretraining import trial as accelerator
from bertsmith.training.pretraining.objectives import micro_arrays, pretraining_sums
from bertsmith.training.pretraining.run import pretrain
from bertsmith.training.pretraining.trial import compile_tasks, compiled_losses
from bertsmith.training.ranks import Ranks

ENGINE = Engine(torch.device("cpu"), "float32", 1)
PIECES, S, P = 60, 12, 4


def batch():
    """Three rows with 4, 2 and 0 predictions."""
    random = np.random.default_rng(1)
    made = PretrainingBatch.empty(3, S, P, pad_id=0)
    made.input_ids[:] = random.integers(5, PIECES, (3, S))
    made.lengths[:] = [S, 9, 3]
    for row, count in enumerate((4, 2, 0)):
        made.masked_positions[row, :count] = np.arange(1, count + 1)
        made.masked_labels[row, :count] = random.integers(5, PIECES, count)
        made.masked_weights[row, :count] = 1.0
    return made


def next_tokens():
    made = PretrainingBatch.empty(3, S, S - 1, pad_id=0)
    made.input_ids[:] = batch().input_ids
    made.lengths[:] = [S, 9, 3]
    made.masked_positions[:] = np.arange(S - 1)
    made.masked_labels[:] = made.input_ids[:, 1:]
    made.masked_weights[:] = np.arange(1, S) < made.lengths[:, None]
    return made


def model(**changes):
    made = PreTrainingModel(config_for("2x64", PIECES, dropout=0.0, attention_dropout=0.0))
    return initialize(made, 0.1, torch.Generator().manual_seed(1))


@pytest.mark.parametrize("objective", ["mlm+nsp", "mlm", "ltr"])
def test_static_shapes_give_the_same_sums_and_gradients(objective, monkeypatch):
    monkeypatch.setattr("bertsmith.model.kernels.masked_lm_loss.has_kernels", lambda x: False)
    made = next_tokens() if objective == "ltr" else batch()
    results = []
    for static in (False, True):
        net = model()
        micro = micro_arrays(made, objective, 0, 3, static)
        sums = pretraining_sums(net, micro, ENGINE)
        sums["mlm_loss"].backward()
        results.append((sums, net.encoder.layers[0].qkv.weight.grad))
    slots = 3 * (S if objective == "ltr" else P)
    assert len(micro["labels"]) == slots and (micro["labels"] == UNUSED).any()
    assert "masked" not in micro
    for name, value in results[0][0].items():
        both = [torch.as_tensor(found).item() for found in (value, results[1][0][name])]
        assert both[0] == pytest.approx(both[1], rel=1e-5), name
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-4, atol=1e-6)


def test_on_a_cpu_nothing_is_compiled_nor_said_and_on_is_refused(capsys):
    class Task:
        engine = ENGINE

    assert compile_tasks("auto", [Task()], 1e12) == "off"
    assert compile_tasks("off", [Task()], 1e12) == "off"
    assert not capsys.readouterr().err
    with pytest.raises(ValueError, match="compile = on: .*--device cuda"):
        compile_tasks("on", [Task()], 1e12)


def test_a_run_on_a_cpu_decides_once(store_folder, tmp_path, settings, capsys):
    out, short = tmp_path / "run", dataclasses.replace(settings, steps=1)
    pretrain(store_folder, out, short)
    assert "compile" not in capsys.readouterr().err
    assert RunFolder(out).settings()["settings"]["compile"] == "off"
    pretrain(store_folder, out, short, resume=True)
    assert "compile" not in capsys.readouterr().err


def test_float8_where_there_is_none_is_one_line():
    with pytest.raises(ValueError, match="precision='float8': cpu has no float8 products") as error:
        choose_engine("cpu", "float8")
    assert "\n" not in str(error.value) and str(error.value).endswith("; use bf16")


@pytest.mark.parametrize(
    ("width", "rows", "length", "message"),
    [
        (312, 32, 128, "hidden size, 312, must be .* of 16: .*: use --precision bf16$"),
        (
            256,
            30,
            100,
            r"tokens at once .*, 3,000, must .* of 16: .*, or another --micro-batch-size$",
        ),
    ],
)
def test_float8_that_would_be_bf16_is_refused(monkeypatch, width, rows, length, message):
    task = compiling_task(monkeypatch, Budget(steps=1))
    task.engine = Engine(torch.device("cuda"), "float8", 1)
    task.model.config.hidden_size = width
    task.rows_per_forward, task.phase = rows, SimpleNamespace(length=length)
    with pytest.raises(ValueError, match=message):
        compile_tasks("on", [task], 1e12)
    task.model.config.hidden_size, task.rows_per_forward = 256, 32
    task.phase.length = 128
    assert compile_tasks("on", [task], 1e12) == "on"


def test_bf16_on_a_gpu_without_it_is_one_line(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(ValueError, match="precision='bf16': cuda has no bf16 products"):
        choose_engine("cuda", "bf16")
    with pytest.raises(ValueError, match="precision='float8': cuda has no float8 products"):
        choose_engine("cuda", "float8")


def compiling_task(monkeypatch, budget):
    """A task that looks as if on a GPU: 1e12 FLOPs and 100 tokens a step, 12 layers."""
    monkeypatch.setattr(accelerator, "compiled_losses", lambda task: "compiled")
    return SimpleNamespace(
        engine=Engine(torch.device("cuda"), "bf16", 1),
        settings=SimpleNamespace(budget=lambda: budget),
        model=SimpleNamespace(config=SimpleNamespace(num_layers=12)),
        batch=lambda position: (StepBatch([], {}, tokens=100), position),
        flops=lambda batch: 1e12,
        compiled=None,
    )


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (Budget(minutes=20), "on"),
        (Budget(minutes=1), "off"),
        (Budget(steps=1000), "on"),  # 1e15 FLOPs at a quarter of 1e12 a second
        (Budget(tokens=1000), "off"),
    ],
)
def test_auto_compiles_when_the_budget_pays_and_says_so(monkeypatch, capsys, budget, expected):
    task = compiling_task(monkeypatch, budget)
    assert compile_tasks("auto", [task], 1e12) == expected
    assert capsys.readouterr().err.startswith(f"compile: {expected} (saves about ")
    assert task.compiled == ("compiled" if expected == "on" else None)


@pytest.mark.parametrize(
    ("flops", "micro_batches", "mode"),
    [(1e12, 1, "reduce-overhead"), (1e12, 2, None), (1e13, 1, None)],
)
def test_only_small_steps_of_one_micro_batch_become_a_graph(
    monkeypatch, flops, micro_batches, mode
):
    task = compiling_task(monkeypatch, Budget(steps=1))
    task.batch = lambda position: (StepBatch([{}] * micro_batches, {}, 100), position)
    task.flops, task.model.losses = lambda batch: flops, len
    monkeypatch.setattr(torch, "compile", lambda function, **options: (function, options))
    function, options = compiled_losses(task)
    assert function is len and options["mode"] == mode and options["fullgraph"]


def test_several_ranks_have_no_graph_and_shards_are_not_compiled(monkeypatch, capsys):
    task = compiling_task(monkeypatch, Budget(steps=1))
    task.batch = lambda position: (StepBatch([{}], {}, tokens=100), position)
    task.engine = Engine(torch.device("cuda"), "bf16", 1, Ranks(0, size=2))
    task.flops, task.model.losses = lambda batch: 1e12, len
    monkeypatch.setattr(torch, "compile", lambda function, **options: options["mode"])
    assert compiled_losses(task) is None
    task.engine = Engine(torch.device("cuda"), "bf16", 1, Ranks(0, size=2, shard=True))
    assert compile_tasks("auto", [task], 1e12) == "off" and task.compiled is None
    assert capsys.readouterr().err == "compile: off (not with shard = true)\n"
    with pytest.raises(ValueError, match="compile = on: not with shard = true"):
        compile_tasks("on", [task], 1e12)


def test_on_and_off_are_obeyed(monkeypatch, capsys):
    for setting in ("on", "off"):
        task = compiling_task(monkeypatch, Budget(minutes=1))
        assert compile_tasks(setting, [task], 1e12) == setting
        assert (task.compiled is not None) == (setting == "on")
    assert not capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_whole_step_can_be_compiled_for_static_shapes(dropout, monkeypatch):
    """As on a GPU, but for the kernels: the CPU's own cannot be traced, PyTorch's can."""
    monkeypatch.setattr("bertsmith.model.kernels.masked_lm_loss.has_kernels", lambda x: False)
    monkeypatch.setattr("bertsmith.model.kernels.attention.has_kernels", lambda x: False)
    monkeypatch.setattr("bertsmith.model.kernels.elementwise.has_kernels", lambda x: False)
    torch._dynamo.reset()
    micro = micro_arrays(batch(), "mlm+nsp", 0, 3, static=True)
    micro["words"] = batch().words(UNUSED)
    net = model()
    for module in net.modules():
        if hasattr(module, "learning_rate"):
            module.rate = dropout
    compiled = torch.compile(net.losses, dynamic=False, fullgraph=True)
    losses = []
    for function in (net.losses, compiled):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            sums = pretraining_sums(net, micro, ENGINE, function)
        (sums["mlm_loss"] + sums["nsp_loss"] + sums["bow_loss"]).backward()
        losses.append((sums["mlm_loss"] + sums["bow_loss"]).item())
    # bf16; with dropout two draws are compared: the loss of an untrained model hardly moves
    assert losses[0] == pytest.approx(losses[1], rel=0.02 if dropout == 0 else 0.2)
    assert all(p.grad is None or p.grad.isfinite().all() for p in net.parameters())
