"""Interrupted runs go on bit for bit, on mixtures and grown stores too, or are refused."""

import ast
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import fsspec
import pytest
import torch

from bertsmith.base.files import read_json, write_json
from bertsmith.checkpoints.run_folder import RunFolder
from bertsmith.cli.flags import as_flags
from bertsmith.cli.train import Pretrain
from bertsmith.corpus.build.build import append_text, build_store
from bertsmith.corpus.build.settings import BuildSettings
from bertsmith.corpus.examples.mixture import open_corpus
from bertsmith.corpus.store.store import TokenStore
from bertsmith.corpus.store.verify import publish
from bertsmith.model.kernels.quantized_linear import has_int8
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.training.engine import MatmulTimes
from bertsmith.training.loop import matmul_times
from bertsmith.training.loop.log import RunLog
from bertsmith.training.pretraining.resume import resumed_record, resumed_settings, run_record
from bertsmith.training.pretraining.settings import PretrainSettings, Recipe

from ...tiny import bertsmith, cli, refused, write
from ..runs import (
    CPU,
    Killed,
    assert_same_run,
    assert_same_weights,
    at_step,
    killed_at,
    loop_state,
    messages,
    random_model,
    weights,
)


def test_a_killed_run(train, tmp_path, whole_run, monkeypatch):
    out = tmp_path / "run"
    with monkeypatch.context() as patch, pytest.raises(Killed):
        killed_at(13, patch)
        train()
    assert RunFolder(out).latest().name == "step-00000008"
    # 24 steps of 16 rows cross the end of an epoch: otherwise this would prove less
    assert loop_state(whole_run)["position"]["epoch"] >= 1
    train(base=None, resume=True, num_workers=3)
    assert_same_run(whole_run, out)


def test_a_process_killed_by_the_system(train, store_folder, tmp_path, recipe):
    recipe |= {"steps": 120, "checkpoint_every": 10}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in recipe.items()]
    command = [sys.executable, "-m", "bertsmith", "pretrain", f"--corpus={store_folder}", *flags]
    out = tmp_path / "run"
    process = subprocess.Popen([*command, f"--out={out}"], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while RunFolder(out).latest() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    train(base=PretrainSettings(**recipe), resume=True)
    assert_same_run(train("whole", **recipe).folder, out)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_leaves_and_the_run_goes_on(
    train, tmp_path, whole_run, monkeypatch, number
):
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        at_step(5, patch, lambda: os.kill(os.getpid(), number))
        assert not train().finished
    assert RunFolder(out).latest().name == "step-00000006"
    train(resume=True)
    assert any("stopped by a signal at step 6" in text for text in messages(out))
    assert_same_run(whole_run, out)


def test_a_run_that_was_stopped_before_its_first_checkpoint_begins_again_as_it_was(
    train, whole_run
):
    out = train(steps=4, model=whole_run).folder
    end = weights(out)
    shutil.rmtree(out / "checkpoints")
    for file in ("model.safetensors", "result.json"):
        (out / file).unlink()
    train(base=PretrainSettings(), resume=True)
    again = weights(out)
    assert all(torch.equal(end[name], again[name]) for name in end)


def test_what_does_not_fit_the_run_is_refused(train, tmp_path):
    def refused_with(says, *given, error=ValueError, **named):
        with pytest.raises(error, match=says):
            train(*given, **named)

    out = train(steps=2).folder
    refused_with("holds a finished run, ready to use: name another `out` or add `resume=True`")
    refused_with("was started without `model`, not from", model=out, resume=True)
    refused_with("started with size = 2x64, not mini", size="mini", steps=4, resume=True)
    warming = train("warming", steps=2, warmup_steps=1).folder
    before = (warming / "run.json").read_bytes()
    says = "`warmup_steps=1`: needs a budget in `steps`"
    refused_with(says, "warming", None, minutes=1, resume=True)
    assert (warming / "run.json").read_bytes() == before
    record = read_json(out / "run.json")
    record["corpus"]["fingerprint"] = "of another store"
    write_json(out / "run.json", record)
    refused_with("has changed since .*run began .*: put the old store back", steps=24, resume=True)
    record["corpus"]["path"] = "elsewhere"
    write_json(out / "run.json", record)
    refused_with("on another corpus .*: resume with `corpus='elsewhere'`", steps=24, resume=True)


def test_a_resume_says_and_keeps_what_it_changes(train, capsys):
    out = train(steps=2).folder
    assert "changes" not in RunFolder(out).settings()
    capsys.readouterr()
    rate = "learning_rate 0.003 -> 0.001, "
    for step, said in (
        (3, f"{rate}steps 2 -> 3 from step 2 on"),
        (4, "steps 3 -> 4 from step 3 on"),
    ):
        train(resume=True, steps=step, learning_rate=1e-3)
        lines = capsys.readouterr().err.splitlines()
        assert f"{out}: {said}" in lines and not any("nothing is left" in line for line in lines)
    train(steps=4, learning_rate=1e-3, resume=True)  # nothing is new
    said = capsys.readouterr().err
    assert "nothing is left to train, the budget was used at step 4: " in said
    assert " -> " not in said
    assert RunFolder(out).settings()["changes"] == [
        {"setting": "learning_rate", "step": 2, "old": 3e-3, "new": 1e-3},
        {"setting": "steps", "step": 2, "old": 2, "new": 3},
        {"setting": "steps", "step": 3, "old": 3, "new": 4},
    ]


def test_a_recipe_does_not_undo_what_flags_set(store_folder, tmp_path):
    """The command of a queue says its recipe each time; a person gave flags once."""
    out = tmp_path / "run"
    given = ("steps = 40", "learning_rate = 1e-3", "batch_size = 16", 'precision = "auto-int8"')
    words = ["--corpus", store_folder, "--out", out, "--max-length", 48, "--threads", 1]
    words += ["--size", "tiny", "--config", write(tmp_path / "mine.toml", given)]
    bertsmith("pretrain", *words, "--steps", 2, "--learning-rate", 5e-4)

    def goes_on(*flags):
        ran = cli("pretrain", *words, "--resume", *flags)
        stored = RunFolder(out).settings()["settings"]
        assert ran.code == 0
        return stored["steps"], stored["learning_rate"], ran.err

    steps, rate, said = goes_on()
    assert (steps, rate) == (2, 5e-4)
    kept = f"{out}: goes on with"
    assert f"{kept} learning_rate = 0.0005, not the recipe's learning_rate = 0.001: give" in said
    assert f"{kept} steps = 2, not the recipe's steps = 40: give steps by" in said
    steps, rate, said = goes_on("--steps", 3)
    assert (steps, rate) == (3, 5e-4) and "goes on with steps" not in said
    steps, rate, said = goes_on("--learning-rate", 1e-3)
    assert (steps, rate) == (3, 1e-3) and "goes on with rate" not in said
    assert "precision" not in said + goes_on("--precision", "auto-int8")[2]
    assert goes_on("--minutes", 1e-3)[0] is None
    line = "goes on with minutes = 0.001, not the recipe's steps = 40: give steps by itself"
    assert line in goes_on()[2]


def test_what_a_run_does_not_have_a_recipe_gives(store_folder, settings, whole_run):
    """Threads are chosen anew for another number of ranks: there the recipe's count."""
    run, store = RunFolder(whole_run), TokenStore.open(store_folder)
    named = frozenset({"threads"})
    recipe = Recipe(replace(settings, threads=3), explicit=named, from_file=named)
    threads = [resumed_settings(run, recipe, store, None, ranks).threads for ranks in (1, 2)]
    assert threads == [1, 3]


@pytest.mark.skipif(not has_int8(torch.device("cpu")), reason="no int8 products")
def test_a_run_in_int8_goes_on_where_there_is_none(store_folder, tmp_path, monkeypatch):
    out, words = tmp_path / "run", ["pretrain", "--corpus", store_folder, "--size", "1x64"]
    words += ["--config", "fast", "--max-length", "48", "--threads", "1", "--out", out]
    faster = MatmulTimes(1536, bf16=0.2, int8=0.1)
    monkeypatch.setattr(matmul_times, "measure_matmuls", lambda *shapes: faster)
    bertsmith(*words, "--steps", "2")
    stored = RunFolder(out).settings()
    assert stored["machine"]["precision"] == stored["settings"]["precision"] == "int8"
    monkeypatch.setattr("bertsmith.training.engine.has_int8", lambda device: False)
    words += ["--resume", "--steps", "3"]
    assert "cpu has no AVX-512 VNNI and bf16; use bf16 or float32" in refused(*words)
    bertsmith(*words, "--precision", "bf16")
    assert RunFolder(out).settings()["settings"]["precision"] == "bf16"


@pytest.fixture
def other_folder(store_folder, tmp_path):
    """A smaller store of the same vocabulary, built from a file."""
    draw = random.Random(1)
    words = ("cat", "dog", "barn", "tree", "old", "near")
    text = "\n\n".join(
        "\n".join(" ".join(draw.choices(words, k=9)) for _ in range(6)) for _ in range(24)
    )
    file, tokenizer = write(tmp_path / "other.txt", text), Tokenizer.from_pretrained(store_folder)
    build_store([file], tokenizer, tmp_path / "other", BuildSettings(held_out=0.2))
    return tmp_path / "other"


def test_the_password_of_a_stores_url_is_not_written(store_folder, settings, tmp_path):
    url, shown = "memory://me:secret@host/store", "memory://me:***@host/store"
    publish(store_folder, url)
    store, run = TokenStore.open(url), RunFolder(tmp_path / "run")
    words, model = ["bertsmith", f"--corpus={url}"], random_model(50)
    run.write_settings(run_record(settings, store, model, CPU, 0.0, words, None))
    run.write_settings(resumed_record(run, run.settings(), words, 1))
    with RunLog(run.path, loggers=()) as log:
        log.message(f"{url}: read once, its rows begin again")
    record, text = run.settings(), (run.path / "run.json").read_text()
    assert "secret" not in text + (run.path / "log.jsonl").read_text()
    assert record["corpus"]["path"] == shown
    assert record["command"] == record["resumes"][0] == ["bertsmith", f"--corpus={shown}"]
    store.fingerprint = "of a store that has changed"
    changed = rf"^{re.escape(shown)} has changed since"  # it is known by its place
    with pytest.raises(ValueError, match=changed):
        resumed_settings(run, Recipe(settings), store, None)
    fsspec.filesystem("memory").rm("/me:secret@host", recursive=True)


SHORT = {"steps": 14, "num_evals": 1, "log_every": 2}


def whole_and_killed(train, monkeypatch, corpus):
    """A run, and another one that was killed in step 11."""
    whole = train("whole", corpus=corpus, **SHORT).folder
    with monkeypatch.context() as patch, pytest.raises(Killed):
        killed_at(11, patch)
        train("killed", corpus=corpus, **SHORT)
    return whole, whole.with_name("killed")


def test_a_mixture_says_what_it_repeats(train, store_folder, other_folder, monkeypatch, capsys):
    mixed = [f"{store_folder}=0.4", f"{other_folder}=0.6"]
    whole, killed = whole_and_killed(train, monkeypatch, mixed)
    assert f"{other_folder}: read once, its rows begin again" in capsys.readouterr().err
    train("killed", corpus=mixed, resume=True)
    assert_same_weights(whole, killed)
    record = read_json(whole / "run.json")["corpus"]
    assert record["path"] == " ".join(mixed) and len(record["stores"]) == 2
    said, again = messages(whole), messages(killed)
    assert sum(line.startswith("mixture: ") for line in said) == 1
    assert any(f"{store_folder} 40.0% of the rows" in line for line in said)
    assert read_json(whole / "result.json")["held_out"]["mlm_loss"] > 0
    repeats = {line for line in said if "begin again" in line}
    assert repeats and repeats == {line for line in again if "begin again" in line}


def test_another_mixture_is_no_resume(train, store_folder, other_folder):
    mixed = [f"{store_folder}=1", f"{other_folder}=2"]
    train(corpus=mixed, steps=2)
    thirds = [f"{store_folder}={1 / 3}", f"{other_folder}={2 / 3}"]  # to the last figure
    printed = open_corpus(thirds).folder.split()
    assert open_corpus(printed).fingerprint == open_corpus(thirds).fingerprint
    for sources in ([f"{store_folder}=2", f"{other_folder}=1"], store_folder, other_folder):
        with pytest.raises(ValueError, match="trained on another corpus.*`corpus=") as error:
            train(corpus=sources, resume=True)
        said = str(error.value)
        assert ast.literal_eval(said.partition("`corpus=")[2].removesuffix("`")) == mixed
        assert as_flags(said, Pretrain).endswith(f" --corpus {' '.join(mixed)}")


def test_a_run_goes_on_with_the_generation_on_which_it_began(
    train, other_folder, tmp_path, monkeypatch, capsys
):
    whole, killed = whole_and_killed(train, monkeypatch, other_folder)
    began = TokenStore.open(other_folder).fingerprint
    text = "\n\n".join("the old owl sleeps near the tree\nin summer" for _ in range(9))
    append_text([write(tmp_path / "new.txt", text)], other_folder)
    assert TokenStore.open(other_folder).fingerprint != began
    train("killed", corpus=other_folder, resume=True)
    assert "generation 1" in capsys.readouterr().err
    assert_same_weights(whole, killed)
    assert read_json(killed / "run.json")["corpus"]["fingerprint"] == began
    new = train("new", corpus=other_folder, steps=1).folder
    assert read_json(new / "run.json")["corpus"]["fingerprint"] != began


def test_the_command_reads_a_mixture(store_folder, other_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("BERTSMITH_CACHE", str(tmp_path / "cache"))
    words = ["--size", "2x64", "--max-length", "48", "--batch-size", "8", "--threads", "1"]
    mixed = ["pretrain", "--corpus", f"{store_folder}=0.5", f"file://{other_folder}=0.5"]
    run, steps = ["--out", tmp_path / "run"], ["--steps", "2"]
    assert "tokens" in bertsmith(*mixed, "--steps", "1", "--dry-run", *words)
    bertsmith(*mixed, *run, *steps, *words)
    assert "finite" in bertsmith(*mixed, *run, "--replay")
    assert "corpus" in refused("pretrain", "--corpus", *run, *steps).lower()
    two = ["pretrain", "--corpus", store_folder, other_folder, "--out", tmp_path / "new"]
    assert "several stores need weights" in refused(*two, *steps)
