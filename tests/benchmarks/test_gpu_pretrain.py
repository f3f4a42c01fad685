"""The GPU's benchmark, rehearsed on the CPU at toy size, without the packages it may not need."""

import json
import subprocess
import sys

import pytest
import torch

from bertsmith.base.files import read_json
from bertsmith.model.config import config_for, training_flops
from bertsmith.training.engine import choose_engine

from .conftest import BENCHMARKS

OTHERS = (
    "rich", "pyarrow", "sklearn", "scipy", "matplotlib", "optuna", "huggingface_hub",
)  # fmt: skip
REHEARSAL = """
import runpy, sys
for name in sys.argv[2].split(","):
    sys.modules[name] = None  # an import of it fails
sys.path.insert(0, sys.argv[1])
sys.argv[:3] = ["gpu_pretrain.py"]
runpy.run_path(sys.path[0] + "/gpu_pretrain.py", run_name="__main__")
"""
OURS, OURS_EAGER, RECIPE = "bertsmith", "bertsmith, eager", "bertsmith, the recipe fast"
EAGER, COMPILED = "transformers, eager", "transformers, compiled"
MASKED_HEAD = "transformers, masked head, compiled"
FAST, PAPER = "2x64-32-fast", "2x64-32-paper"
LOST = torch.AcceleratorError("lost")


def toy_on_cpu(folder):
    return "--device", "cpu", "--toy", "--out", str(folder)


def rehearse(missing, *arguments):
    command = [sys.executable, "-c", REHEARSAL, str(BENCHMARKS), ",".join(missing), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.fixture
def call(module, run_main, monkeypatch, tmp_path):
    """A call whose systems do nothing, but for those that raise: its results, what was built."""
    measure = module("gpu_pretrain_measure")
    monkeypatch.setattr(measure, "ROUND_SECONDS", 1e-5)
    monkeypatch.setattr(measure, "PROFILED", ())
    monkeypatch.setattr(measure, "free", lambda engine: None)  # Python's search takes a second

    def call(*words, only=FAST, raising=None, steps=None):
        built = []

        def build(name, case, engine, compiling):
            built.append(name)
            if raising and name in raising:
                raise raising[name]
            return measure.System((steps or {}).get(name, lambda number: None))

        monkeypatch.setattr(measure, "build", build)
        size, length, recipe = only.split("-")
        case = module("gpu_pretrain_systems").Case(size, int(length), recipe, rows=4, pieces=200)
        monkeypatch.setattr(module("gpu_pretrain"), "TOY", [case])
        run_main("gpu_pretrain", *toy_on_cpu(tmp_path), *words)
        return read_json(tmp_path / "gpu_pretrain.json")["results"][only], built

    return call


@pytest.mark.slow
def test_a_rehearsal_measures_profiles_and_merges(tmp_path):
    where = toy_on_cpu(tmp_path)
    done = rehearse(OTHERS[:5], *where, "--only", FAST)  # transformers wants a hub
    assert done.returncode == 0, done.stderr
    file = tmp_path / "gpu_pretrain.json"
    first = json.loads(file.read_text())["results"]
    assert list(first) == [FAST] and first[FAST]["profile"]
    assert rehearse(OTHERS[:5], *where).returncode == 0  # the other cases
    results = json.loads(file.read_text())["results"]
    assert results[FAST] == first[FAST] and len(results) == 3
    for result in results.values():
        assert set(result["ratio"]) == {*result["systems"]} - {OURS}
        assert all(0 < found["share_of_peak"] < 2 for found in result["systems"].values())
    assert set(results[PAPER]["systems"]) == {OURS, OURS_EAGER, EAGER, COMPILED, MASKED_HEAD}
    page = (tmp_path / "gpu_pretrain.md").read_text()
    assert f"## {PAPER}" in page and "time to ours" in page and str(tmp_path) not in page
    bad = rehearse(OTHERS[:5], *where, "--only", "nothing")
    assert bad.returncode == 1 and bad.stderr.startswith(f"unknown: nothing; known are {FAST}")


@pytest.mark.slow
def test_a_rehearsal_needs_pytorch_numpy_numba_and_safetensors_alone(tmp_path):
    missing = [*OTHERS, "transformers", "tokenizers", "accelerate"]
    done = rehearse(missing, *toy_on_cpu(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("transformers is not installed: its systems are left out\n")
    results = read_json(tmp_path / "gpu_pretrain.json")["results"]
    systems = [list(result["systems"]) for result in results.values()]
    assert systems == [[OURS], [OURS, OURS_EAGER], [OURS, RECIPE, OURS_EAGER]]
    assert all(result["rounds"] == 1 for result in results.values())
    assert "transformers is not installed" in (tmp_path / "gpu_pretrain.md").read_text()


def inductor_error():
    from torch._inductor.exc import InductorError  # seconds, which no other file should wait for

    return InductorError(ValueError("no such operator"), None)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("a kernel\nis missing"),
        torch.OutOfMemoryError("no memory for 2 GB | none"),
        inductor_error,
        ImportError("no name BertConfig"),
        FloatingPointError("step 1: loss nan"),
    ],
)
def test_a_system_that_fails_leaves_its_error_and_the_others_go_on(call, tmp_path, error):
    error = error() if callable(error) else error
    result, built = call(raising={EAGER: error})
    assert built == [OURS, EAGER, COMPILED]
    text = f"{type(error).__name__}: {error}"
    assert result["systems"][EAGER] == {"error": text}
    assert result["rounds"] == 1 and set(result["ratio"]) == {COMPILED}
    assert result["systems"][COMPILED]["tokens_per_second"] > 0
    first_line = text.split("\n")[0].replace("|", "/")
    assert f"| {EAGER} | {first_line} |" in (tmp_path / "gpu_pretrain.md").read_text()
    assert call()[1] == []  # all that the case has was tried
    result, built = call("--only", FAST)
    assert built == [OURS, EAGER, COMPILED] and set(result["ratio"]) == {EAGER, COMPILED}


def test_a_system_that_fails_in_its_rounds_is_left_out_of_them(call):
    count = iter(range(100))

    def step(number):
        if next(count) > 10:
            raise torch.OutOfMemoryError("no memory")

    result, _ = call(only=PAPER, steps={EAGER: step})
    assert result["systems"][EAGER] == {"error": "OutOfMemoryError: no memory"}
    assert set(result["ratio"]) == set(result["rounds_ms"]) - {OURS}
    assert set(result["ratio"]) == {COMPILED, MASKED_HEAD, OURS_EAGER}


def test_without_our_step_the_others_are_measured_and_nothing_is_a_ratio(call, tmp_path):
    result, built = call(raising={OURS: RuntimeError("no compiler")})
    assert built == [OURS, EAGER, COMPILED] and result["ratio"] == {}
    page = (tmp_path / "gpu_pretrain.md").read_text()
    assert f"| {OURS} | RuntimeError: no compiler |" in page and page.count("not measured") == 4


@pytest.mark.parametrize(
    ("error", "ends", "message", "kept"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt, None, "the call was cut off in its first steps"),
        (LOST, SystemExit, f"{FAST}: lost\n.*call again", f"AcceleratorError: {LOST}"),
    ],
    ids=["interrupt", "lost device"],
)
def test_a_call_that_ends_loses_one_system_and_the_next_goes_on(
    call, tmp_path, error, ends, message, kept
):
    with pytest.raises(ends, match=message):
        call(raising={EAGER: error})
    assert "Cut off before the rounds" in (tmp_path / "gpu_pretrain.md").read_text()
    systems = read_json(tmp_path / "gpu_pretrain.json")["results"][FAST]["systems"]
    assert systems[OURS]["tokens_per_second"] > 0 and list(systems) == [OURS, EAGER]
    result, built = call()
    assert built == [OURS, COMPILED] and result["rounds"] == 1
    assert result["systems"][EAGER] == {"error": kept}
    assert set(result["ratio"]) == {COMPILED}


def test_figures_of_a_case_stay_while_it_is_measured_again(call, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        call(raising={COMPILED: KeyboardInterrupt()})
    with pytest.raises(KeyboardInterrupt):
        call(raising={OURS: KeyboardInterrupt()})
    result, built = call()
    assert built == [OURS, EAGER] and set(result["ratio"]) == {EAGER}


def test_without_transformers_ours_are_measured_and_the_rest_by_a_later_call(
    call, monkeypatch, capsys, tmp_path
):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "transformers", None)
        result, built = call()
        assert built == [OURS] and list(result["systems"]) == [OURS]
        line = "transformers is not installed: its systems are left out"
        assert capsys.readouterr().err.startswith(line + "\n")
        assert line in (tmp_path / "gpu_pretrain.md").read_text()
        assert call()[1] == []
    result, built = call()
    assert built == [OURS, EAGER, COMPILED] and set(result["ratio"]) == {EAGER, COMPILED}


def test_a_profile_that_fails_costs_nothing_else(call, module, monkeypatch, tmp_path):
    def fails(system, engine):
        raise RuntimeError("no counters")

    monkeypatch.setattr(module("gpu_pretrain_measure"), "PROFILED", (FAST,))
    monkeypatch.setattr(module("gpu_pretrain_measure"), "kernels_of", fails)
    result, _ = call()
    assert result["rounds"] == 1 and result["profile"] == {"error": "RuntimeError: no counters"}
    assert "No profile: RuntimeError: no counters" in (tmp_path / "gpu_pretrain.md").read_text()


def test_no_case_is_begun_that_the_budget_may_not_hold(call, module, capsys):
    script = module("gpu_pretrain")
    job = script.Job(None, 100.0, [])
    assert script.expected(job, {"a": job}, {}) == 100
    results = {"a": {"seconds": 50.0}, "b": {"seconds": 300.0}, "unknown": {"seconds": 1e6}}
    assert script.expected(job, {"a": job, "b": script.Job(None, 200.0, [])}, results) == 150
    assert call()[1]  # and has its seconds
    with pytest.raises(KeyError):  # nothing is written
        call("--budget", "0", only=PAPER)
    assert f"{PAPER}: left for another call" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--out", "out"], "no CUDA device .*--toy --out DIR rehearses"),
        (["--device", "cpu", "--toy"], "--out DIR: a rehearsal must not take the place"),
        (["--toy"], "--out DIR: a rehearsal must not take the place"),
        (["--device", "cpu"], "--out DIR: a rehearsal must not take the place"),
    ],
)
def test_it_says_what_rehearses_and_that_never_writes_into_the_results(
    run_main, monkeypatch, tmp_path, words, says
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=f"missing: {says}"):
        run_main("gpu_pretrain", *words)


def test_what_the_bars_ask_comes_first_and_all_of_the_cpus_cases_are_there(module):
    cases = module("gpu_pretrain").all_cases()
    systems_of = module("gpu_pretrain_systems").systems_of
    assert [case.name for case in cases[:3]] == list(module("gpu_pretrain_report").BARS)
    assert all(systems_of(case) == [OURS, EAGER, COMPILED] for case in cases[:3])
    assert [case.rows for case in cases[:3]] == [256, 64, 128]
    there = {(case.size, case.length, case.recipe) for case in cases}
    assert len(there) == len(cases)
    for size in ("tiny", "mini", "6x384", "base", "large"):
        for length in (128, 512):
            assert {(size, length, recipe) for recipe in ("fast", "paper", "others")} <= there


def test_a_system_trains_by_its_recipe_and_a_peer_on_the_rows_of_ours(module):
    systems = module("gpu_pretrain_systems")

    def of(name, recipe):
        settings = systems.settings_of(systems.Case("tiny", 64, recipe, 8), name)
        assert (settings.size, settings.max_length, settings.batch_size) == ("tiny", 64, 8)
        assert len(settings.phases()) == 1 and settings.micro_batch_size is None
        return settings

    paper = of(OURS, "paper")
    assert (paper.optimizer, paper.activation) == ("paper-adam", "gelu_tanh")
    assert paper.objective == "mlm+nsp"
    assert paper.dropout == paper.attention_dropout == 0.1 and paper.mlm_probability == 0.15
    fast, recipe = of(OURS, "others"), of(RECIPE, "others")
    assert (fast.objective, fast.dropout, fast.mlm_probability) == ("mlm", 0.0, 0.15)
    assert (recipe.objective, recipe.dropout, recipe.mlm_probability) == ("mlm", 0.0, 0.25)
    for name, kind in ((EAGER, "fast"), (COMPILED, "paper"), (MASKED_HEAD, "others")):
        assert of(name, kind) == of(OURS, kind)


def test_tokens_and_operations_are_those_of_the_rows(module):
    systems, engine = module("gpu_pretrain_systems"), choose_engine("cpu", "float32")
    case = systems.Case("2x64", 40, "others", 8, pieces=200)
    for name, predictions in ((OURS, 6), (RECIPE, 10)):  # 15% and 25% of 40
        settings = systems.settings_of(case, name)
        tokens, operations = systems.work(settings, 200, engine)
        config = config_for("2x64", 200)
        assert tokens == 8 * 40
        assert operations == training_flops(config, 8, 40, predictions, predictions)
    paper = systems.settings_of(systems.Case("2x64", 40, "paper", 64, pieces=200), OURS)
    assert 0.85 * 64 * 40 < systems.work(paper, 200, engine)[0] < 64 * 40


def test_kernels_of_attention_that_a_device_lacks_say_so(module):
    measure, report = module("gpu_pretrain_measure"), module("gpu_pretrain_report")
    result, saved = {}, []
    engine = choose_engine("cpu", "float32")
    measure.attentions(2, 16, engine, result, lambda: saved.append(dict(result)))
    assert saved == [result] and result["milliseconds"]["flash, full rows"] > 0
    assert "error" in result["milliseconds"]["variable length, pieces"]
    about = dict.fromkeys(("command", "date", "device", "torch", "python", "transformers"), "")
    page = report.markdown({**about, "results": {"attention-16": result}})
    assert "## attention-16: 2 rows of 16" in page
    assert "| variable length, pieces | NotImplementedError: " in page
