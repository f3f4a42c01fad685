"""What is measured and chosen before a run: each phase's estimate, rows at once, compiling."""

import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from bertsmith.checkpoints.run_folder import RunFolder
from bertsmith.model.config import config_for
from bertsmith.training.engine import Engine
from bertsmith.training.loop.schedule import Budget
from bertsmith.training.loop.step import Stepper
from bertsmith.training.loop.task import StepBatch
from bertsmith.training.memory import StepShape, step_memory
from bertsmith.training.pretraining import trial
from bertsmith.training.pretraining.estimate import Speed
from bertsmith.training.pretraining.trial import (
    compile_tasks,
    compiled_losses,
    dry_run,
    find_micro_batch,
    fits_cpu,
    fits_cuda,
)
from bertsmith.training.ranks import Ranks

from ...tiny import bertsmith, cli, refused
from ..runs import CPU, before_steps, weights

CUDA = Engine(torch.device("cuda"), "bf16", 1)
BY_TIME = {"steps": None, "minutes": 10}


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(trial, "SECONDS_A_PHASE", 0.0)
    monkeypatch.setattr(trial, "SECONDS_A_SIZE", 0.0)


@pytest.fixture
def tried(store_folder, settings):
    """The estimates of a dry run of `settings` with changes, and the rule of its rows."""
    return lambda **changes: dry_run(store_folder, replace(settings, **changes))


@pytest.fixture
def speeds(monkeypatch):
    """Make a function what measures the speed of a step."""
    return lambda measure: monkeypatch.setattr(trial, "measure_speed", measure)


def test_the_phases_share_the_budget(tried):
    phases = {"phase2_length": 64, "phase2_batch_size": 8}
    (first, second), rule = tried(steps=100, **phases)
    assert rule is None
    assert (first.steps, second.steps) == (90, 10)
    for one, rows, length in ((first, 16, 48), (second, 8, 64)):
        assert one.tokens == round(one.steps * rows * length * (1 - one.padding))
    assert first.speed.measured and first.speed.tokens_per_second > 0
    by_tokens, _ = tried(steps=None, tokens=100_000, **phases)
    for one, share in zip(by_tokens, (90_000, 10_000), strict=True):
        assert share <= one.tokens <= share + 2 * one.step_tokens
    hours = [one.hours for one in tried(**BY_TIME, **phases)[0]]
    assert hours == pytest.approx([0.15, 1 / 60], rel=0.01)


def test_the_tokens_promised_are_those_that_a_run_counts(train, tried):
    """Of rows that are half a sentence, which the first row of the text does not tell."""
    short = {"short_seq_prob": 0.9, "num_evals": 1}
    (found,), _ = tried(**short, steps=40)
    made = train(**short, steps=40)
    assert made.finished and found.padding > 0.2
    assert found.tokens == pytest.approx(made.tokens, rel=0.05)
    (by_tokens,), _ = tried(**short, steps=None, tokens=made.tokens)
    assert by_tokens.steps == pytest.approx(40, abs=2)


def test_held_out_figures_on_the_way_take_of_the_budget(tried, speeds):
    speeds(lambda *given: Speed(1000.0, measured=True))
    steps = []
    for evaluations in (1, 2, 4):
        (found,), _ = tried(steps=None, minutes=1.0, eval_rows=50, num_evals=evaluations)
        steps.append(found.steps)
        assert found.hours == pytest.approx(1 / 60, rel=0.02)
    # 78.1 steps of 16 rows, less 50 rows in half of their steps' time, less at most 3%
    assert steps == [78, 76, 75]


def test_a_step_of_several_parts_has_one_update(tried, speeds):
    """A part of 4 rows of 48 takes 1 s, with an update 3 s: a step of 16 rows takes 6 s."""
    found = iter([Speed(4 * 48 / 1.0, measured=True), Speed(4 * 48 / 3.0, measured=True)])
    speeds(lambda *given: next(found))
    (found,), _ = tried(micro_batch_size=4, num_evals=1, steps=600)
    assert found.hours == pytest.approx(1.0)


def test_without_the_memory_nothing_is_tried(tried, monkeypatch):
    monkeypatch.setattr(trial, "available_memory", lambda: 1000)
    monkeypatch.setattr(trial, "start_model", None)
    (found,), _ = tried()
    assert not found.speed.measured and found.available == 1000


def test_auto_tries_sizes_and_tells_its_rule(tried, speeds, monkeypatch):
    speeds(lambda step, seconds: Speed(step(), measured=True))  # twice the rows, twice the speed
    (found,), rule = tried(micro_batch_size="auto")
    assert found.shape.micro_batch_size == 16
    assert rule is not None and rule.startswith("micro-batch 16 of batch 16")
    monkeypatch.setattr(trial, "available_memory", lambda: 1000)
    with pytest.raises(ValueError, match="not even one row fits"):
        tried(micro_batch_size="auto")


def test_steps_are_tried_as_the_run_will_do_them(tried, monkeypatch):
    prepared, replicas = [], []

    class Noted(trial.Replicas):
        def __init__(self, *given):
            replicas.append(self)
            super().__init__(*given)

    monkeypatch.setattr(Engine, "prepare", lambda self, model: prepared.append(model))
    monkeypatch.setattr(trial, "Replicas", Noted)
    tried()
    # the copies of the model are made once, not for every step
    assert len(prepared) == len(replicas) == 1


@pytest.fixture
def shapes(monkeypatch):
    """(of the ids, of the masked positions) of every micro-batch of every step that is tried."""
    steps = []

    def note(run, batch):
        steps.append([(m["ids"].shape, m["positions"].shape) for m in batch.micro_batches])

    before_steps(monkeypatch, note)
    return steps


@pytest.mark.parametrize(("tokens", "rows"), [(2048, (8, 4)), (192, (4, 2)), (1, (1, 1))])
def test_a_phase_is_tried_with_rows_of_its_own(tried, shapes, monkeypatch, tokens, rows):
    monkeypatch.setattr(trial, "MEASURED_TOKENS", tokens)
    phases, _ = tried(micro_batch_size=8, phase2_length=96, max_predictions_per_seq=5)
    assert [phase.shape.micro_batch_size for phase in phases] == [8, 4]
    expected = [[((rows[0], 48), (rows[0], 5))], [((rows[1], 96), (rows[1], 10))]]
    assert shapes == [step for step in expected for _ in range(2)]  # the first is not timed


def test_the_search_on_a_cpu_computes_gradients_alone(store_folder, settings, monkeypatch):
    passes, real = [], Stepper.gradients

    def noting(self, batch):
        weights = [weight for model in self.replicas.models for weight in model.parameters()]
        assert all(weight.grad is None for weight in weights)  # none of the step before
        sums = real(self, batch)
        assert any(weight.grad is not None for weight in weights)
        passes.append(self.run.task.phase.batch)
        return sums

    monkeypatch.setattr(Stepper, "gradients", noting)
    monkeypatch.setattr(Stepper, "step", None)
    monkeypatch.setattr(trial, "build_optimizer", None)
    auto = replace(settings, micro_batch_size="auto")
    found, _, rule = trial.resolve(store_folder, auto, None)
    assert passes[:4] == [1, 1, 2, 2] and found.micro_batch_size in {1, 2, 4, 8, 16} and rule


@pytest.mark.parametrize(
    ("changes", "engine", "chosen"),
    [
        ({}, CPU, "muon"),
        ({"size": "2x128"}, CPU, "adamw"),  # wide for steps of 768 tokens
        ({"size": "2x128", "batch_size": 32}, CPU, "muon"),
        ({"shard": True}, CPU, "adamw"),
        ({}, CUDA, "adamw"),
        ({"optimizer": "lamb"}, CPU, "lamb"),
    ],
)
def test_the_optimizer_of_a_new_model(store_folder, settings, changes, engine, chosen, monkeypatch):
    monkeypatch.setattr(trial, "choose_engine", lambda *asked: engine)
    found, *_ = trial.resolve(store_folder, replace(settings, **changes), None)
    assert found.optimizer == chosen


def test_each_rank_moves_all_matrices_for_its_part_of_the_batch(store_folder, settings):
    for size, chosen in ((1, "muon"), (2, "adamw")):
        found, *_ = trial.resolve(store_folder, settings, None, Ranks(size=size))
        assert found.optimizer == chosen


def test_a_model_to_go_on_from_keeps_to_adamw(store_folder, settings, whole_run):
    found, *_ = trial.resolve(store_folder, settings, whole_run)
    assert found.optimizer == "adamw"


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """The way of a trial on a GPU; the steps that its compiled form would do are noted."""
    compiled = []

    def compile_tasks(setting, tasks, peak):
        assert setting == "auto" and peak > 0
        for task in tasks:
            task.compiled = noting(task)

    def noting(task):
        def losses(ids, *rest, **named):
            compiled.append(tuple(ids.shape))
            return task.model.losses(ids, *rest, **named)

        return losses

    monkeypatch.setattr(trial.Trial, "_on_gpu", True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 40, 1 << 40))
    monkeypatch.setattr(trial, "compile_tasks", compile_tasks)
    return compiled


def test_on_a_gpu_the_runs_own_steps_are_timed(tried, as_on_a_gpu, shapes):
    phases, _ = tried(micro_batch_size=8, phase2_length=96, phase2_batch_size=4)
    assert all(found.speed.measured for found in phases)
    whole = [(8, 48), (8, 48)], [(4, 96)]
    assert [[ids for ids, _ in step] for step in shapes] == [whole[0]] * 2 + [whole[1]] * 2
    assert as_on_a_gpu == [*whole[0], *whole[0], *whole[1], *whole[1]]


def test_a_gpu_that_is_too_small_for_the_step_says_what_to_lower(tried, as_on_a_gpu, monkeypatch):
    def full(*given):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    monkeypatch.setattr(Stepper, "step", full)
    says = r"out of memory: lower `micro_batch_size` \(now 16\), lower"
    with pytest.raises(MemoryError, match=says):
        tried()


def test_a_gpu_is_tried_with_the_gradients_of_another_micro_batch(
    store_folder, settings, monkeypatch
):
    done = []

    def fits_cuda(step, device, more):
        def fits(rows):
            done.append((rows, step(rows), more))
            return True

        return fits

    monkeypatch.setattr(trial.Trial, "_on_gpu", True)
    monkeypatch.setattr(trial, "fits_cuda", fits_cuda)
    settings = replace(settings, optimizer="adamw")
    tried = trial.Trial(store_folder, settings, CPU, None)
    assert tried.micro_batch().rows == settings.batch_size == 16
    tokens = {rows: tokens for rows, tokens, _ in done}
    assert tokens[4] == 2 * 4 * 48 and tokens[16] == 16 * 48  # the whole batch is one
    assert {more for *_, more in done} == {0}
    done.clear()
    auto = replace(settings, micro_batch_size="auto", threads=1, precision="float32")
    monkeypatch.setattr(Ranks, "broadcast", lambda ranks, name, value: value)
    trial.resolve(store_folder, auto, None, Ranks(size=2))
    numbers = sum(weight.numel() for weight in tried._model.parameters())
    assert {more for *_, more in done} == {4 * numbers}  # DDP's buckets


def test_the_shape_of_a_recipe_gives_way_to_a_models(train, store_folder):
    small = train(size="1x64", steps=1).folder
    words = ["pretrain", "--corpus", store_folder, "--model", small, "--config", "paper"]
    words += ["--threads", 1, "--batch-size", 4, "--max-length", 48, "--phase2-length", 64]
    phases = json.loads(bertsmith(*words, "--dry-run", "--json"))["phases"]
    numbers = sum(weight.numel() for weight in weights(small).values())
    assert {phase["parameters"] for phase in phases} == {numbers}
    said = refused(*words, "--size", "1x64", "--dry-run")
    assert "size: fixed by --model, from which this run begins; leave" in said


def test_the_command_prints_it_and_writes_nothing(store_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = ["pretrain", "--corpus", store_folder, "--size", "1x64", "--threads", "1"]
    words = [*first, "--steps", "10", "--max-length", "16", "--phase2-length", "24", "--dry-run"]
    ran = cli(*words)
    text = ran.out
    assert (
        ran.code == 0
        and not ran.err
        and text.startswith("phase 1\nmodel ")
        and "\n\nphase 2\nmodel " in text
    )
    assert "\ntogether " in text
    found = json.loads(bertsmith(*words, "--micro-batch-size", "auto", "--json"))
    assert len(found["phases"]) == 2 and found["rows"].startswith("micro-batch ")
    assert list(tmp_path.iterdir()) == []
    # as the run would
    assert "compile = on: a CPU's kernels" in refused(*words, "--compile", "on")
    assert "missing --out" in refused(*first)
    assert "exactly one of --steps" in refused(*first, "--dry-run")


def search(limit):
    """(fits, the sizes that were tried)."""
    seen = []
    return (lambda rows: seen.append(rows) or rows <= limit), seen


@pytest.mark.parametrize(
    ("batch", "limit", "rows", "sizes"),
    [
        (256, 1000, 256, [1, 2, 4, 8, 16, 32, 64, 128, 256]),
        (256, 100, 64, [1, 2, 4, 8, 16, 32, 64, 128]),
        (96, 50, 48, [1, 2, 4, 8, 16, 32, 96, 48]),
        (7, 6, 1, [1, 7]),
        (1, 1, 1, [1]),
    ],
)
def test_the_largest_divisor_that_fits(batch, limit, rows, sizes):
    fits, seen = search(limit)
    found = find_micro_batch(batch, fits)
    assert (found.rows, seen) == (rows, sizes)
    assert f"micro-batch {rows} of batch {batch}: " in found.rule
    assert ("fit" if rows == batch else "90% of the memory") in found.rule


def test_speed_stops_the_search_on_a_cpu():
    speeds = {1: 100.0, 2: 180.0, 4: 200.0, 8: 205.0, 16: 500.0}
    found = find_micro_batch(32, lambda rows: True, speeds.__getitem__)
    assert found.rows == 4 and "8 rows are not 5% faster" in found.rule
    assert find_micro_batch(32, lambda rows: rows <= 2, speeds.__getitem__).rows == 2


@pytest.mark.parametrize(
    ("batch", "workers", "rows"), [(32, 2, 16), (24, 4, 6), (33, 2, 11), (1, 2, 1)]
)
def test_workers_share_the_batch(batch, workers, rows):
    found = find_micro_batch(batch, lambda rows: True, float, workers)
    assert found.rows == rows and f"each of {workers} cores" in found.rule


def test_not_even_one_row():
    with pytest.raises(ValueError, match="not even one row .*`max_length`.*`size`.*`activation_"):
        find_micro_batch(8, lambda rows: False)


def test_a_cpu_fits_what_the_estimate_says():
    config = config_for("mini", 8000)
    shape = StepShape(batch_size=64, micro_batch_size=64, length=128, predictions=20)
    needed = step_memory(config, StepShape(64, 16, 128, 20)).peak
    fits = partial(fits_cpu, config, shape, int(needed / 0.9) + 1)
    assert fits(16) and not fits(32)
    assert fits_cpu(config, shape, None, 64)


def test_a_gpu_fits_what_runs_and_leaves_a_margin(monkeypatch):
    """A device of 100 bytes, of which others hold 10; a row takes 8."""
    taken = []
    fake = {
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda device: taken.clear(),
        "mem_get_info": lambda device: (100 - 10 - taken[-1], 100),
        "memory_reserved": lambda device: taken[-1],
        "max_memory_reserved": lambda device: taken[-1],
    }
    for name, function in fake.items():
        monkeypatch.setattr(trial.torch.cuda, name, function)

    def step(rows):
        if 8 * rows > 90:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        taken.append(8 * rows)

    fits = fits_cuda(step, CUDA.device)
    assert [fits(rows) for rows in (1, 10, 11, 12)] == [True, True, False, False]
    with_buckets = fits_cuda(step, CUDA.device, more=16)
    assert [with_buckets(rows) for rows in (8, 9)] == [True, False]


@pytest.mark.gpu
def test_a_real_gpu_runs_out():
    total = torch.cuda.mem_get_info("cuda")[1]

    def step(rows):  # a row takes a tenth of the memory
        torch.empty(rows * total // 40, device="cuda").sum()

    assert find_micro_batch(64, fits_cuda(step, CUDA.device)).rows == 8


def test_on_a_cpu_nothing_is_compiled_nor_said_and_on_is_refused(capsys):
    task = SimpleNamespace(engine=CPU)
    assert compile_tasks("auto", [task], 1e12) == compile_tasks("off", [task], 1e12) == "off"
    assert not capsys.readouterr().err
    with pytest.raises(ValueError, match="compile = on: .*`device='cuda'`"):
        compile_tasks("on", [task], 1e12)


def test_a_run_on_a_cpu_decides_once(train, capsys):
    out = train(steps=1).folder
    assert "compile" not in capsys.readouterr().err
    assert RunFolder(out).settings()["settings"]["compile"] == "off"
    train(resume=True)
    assert "compile" not in capsys.readouterr().err


@pytest.fixture
def compiling(monkeypatch):
    """A task that looks as if on a GPU: 1e12 FLOPs and 100 tokens a step, 12 layers."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: (function, options))

    def task(micro_batches=1, engine=CUDA, flops=1e12, **budget):
        config = SimpleNamespace(num_layers=12, hidden_size=256)
        return SimpleNamespace(
            engine=engine,
            settings=SimpleNamespace(budget=lambda: Budget(**(budget or {"steps": 1}))),
            model=SimpleNamespace(config=config, losses=len),
            batch=lambda position: (StepBatch([{}] * micro_batches, {}, tokens=100), position),
            flops=lambda batch: flops,
            compiled=None,
        )

    return task


@pytest.mark.parametrize(
    ("width", "rows", "length", "message"),
    [
        (312, 32, 128, "hidden size, 312, must be .* of 16: .*: use `precision='bf16'`$"),
        (256, 30, 100, r"tokens at once .*, 3,000, must .* of 16: .*, or another `micro_batch_s"),
    ],
)
def test_float8_that_would_be_bf16_is_refused(compiling, width, rows, length, message):
    task = compiling(engine=replace(CUDA, precision="float8"))
    task.model.config.one_direction = SimpleNamespace(hidden_size=width)
    task.rows_per_forward, task.phase = rows, SimpleNamespace(length=length)
    with pytest.raises(ValueError, match=message):
        compile_tasks("on", [task], 1e12)
    task.model.config.one_direction.hidden_size, task.rows_per_forward = 256, 32
    task.phase.length = 128
    assert compile_tasks("on", [task], 1e12) == "on"


@pytest.mark.parametrize(
    ("setting", "budget", "expected"),
    [
        ("auto", {"minutes": 20}, "on"),
        ("auto", {"minutes": 1}, "off"),
        ("auto", {"steps": 1000}, "on"),  # 1e15 FLOPs at a quarter of 1e12 a second
        ("auto", {"tokens": 1000}, "off"),
        ("on", {"minutes": 1}, "on"),
        ("off", {"minutes": 1}, "off"),
    ],
)
def test_auto_compiles_when_the_budget_pays_and_says_so(
    compiling, capsys, setting, budget, expected
):
    task = compiling(**budget)
    assert compile_tasks(setting, [task], 1e12) == expected
    assert (task.compiled is not None) == (expected == "on")
    said = capsys.readouterr().err
    assert said.startswith(f"compile: {expected} (saves about ") if setting == "auto" else not said


@pytest.mark.parametrize(("steps", "expected"), [(4000, "off"), (6000, "on")])
def test_a_second_phase_compiles_again_and_makes_no_step_longer(compiling, steps, expected):
    """Steps of 30 ms, of which 9 ms are saved, and 48.8 s of compiling."""
    tasks = [compiling(flops=1e9, steps=steps) for _ in range(2)]
    assert compile_tasks("auto", tasks, 1e12) == expected


@pytest.mark.parametrize(
    ("flops", "micro_batches", "mode"),
    [(1e12, 1, "reduce-overhead"), (1e12, 2, None), (1e13, 1, None)],
)
def test_only_small_steps_of_one_micro_batch_become_a_graph(compiling, flops, micro_batches, mode):
    function, options = compiled_losses(compiling(micro_batches, flops=flops))
    assert function is len and options["mode"] == mode and options["fullgraph"]


def test_several_ranks_have_no_graph_and_shards_are_not_compiled(compiling, capsys):
    task = compiling(engine=replace(CUDA, ranks=Ranks(0, size=2)))
    assert compiled_losses(task)[1]["mode"] is None
    task.engine = replace(CUDA, ranks=Ranks(0, size=2, shard=True))
    assert compile_tasks("auto", [task], 1e12) == "off" and task.compiled is None
    assert capsys.readouterr().err == "compile: off (not with shard = true)\n"
    with pytest.raises(ValueError, match="compile = on: not with shard = true"):
        compile_tasks("on", [task], 1e12)


def test_a_small_step_takes_as_long_as_its_kernels_need_to_be_sent(compiling):
    found = [compile_tasks("auto", [compiling(flops=1.0, steps=n)], 1e12) for n in (1000, 10_000)]
    assert found == ["off", "on"]  # 30 ms for 12 layers
