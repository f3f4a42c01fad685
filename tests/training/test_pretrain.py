"""Pre-training runs: they learn, resume bit for bit, stop cleanly and refuse what does not fit."""

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from bertsmith.base.files import read_json, write_json
from bertsmith.checkpoints.config_json import config_entries, read_config
from bertsmith.checkpoints.model_folder import save_model
from bertsmith.checkpoints.run_folder import RunFolder, write_manifest
from bertsmith.checkpoints.tensors import read_tensor_file
from bertsmith.cli.main import main
from bertsmith.corpus.build.build import build_store
from bertsmith.corpus.store.store import TokenStore
from bertsmith.model.config import config_for
from bertsmith.model.heads import PreTrainingModel
from bertsmith.model.kernels.quantized_linear import has_int8
from bertsmith.text.readers.documents import Document
from bertsmith.text.tokenizer.normalize import GOOGLE_CASED
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.training.engine import Engine, MatmulTimes
from bertsmith.training.loop import loop
from bertsmith.training.loop.log import read_log
from bertsmith.training.loop.step import Stepper
from bertsmith.training.pretraining import matmul_times as product_times
from bertsmith.training.pretraining.resume import resumed_settings
from bertsmith.training.pretraining.run import pretrain
from bertsmith.training.pretraining.settings import PretrainSettings, Recipe, read_recipe
from bertsmith.training.pretraining.task import Pretraining

from .steps import Killed, before_steps, killed_at

TIMED = ("seconds", "tokens_per_second", "mfu")  # differ from run to run


def tensors(run):
    """Weights, optimizer state and loop state of the newest checkpoint."""
    checkpoint = RunFolder(run).latest()
    weights = read_tensor_file(checkpoint / "model.safetensors")
    optimizer = read_tensor_file(checkpoint / "optimizer.safetensors")
    state = read_json(checkpoint / "state.json")["loop"]
    state.pop("seconds")
    state["since_log"].pop("seconds", None)
    return weights, optimizer, state


def figures(run):
    """The log without what measures time."""
    events = [line for line in read_log(run / "log.jsonl") if line["event"] != "message"]
    return [{k: v for k, v in line.items() if k not in TIMED} for line in events]


def assert_same_run(one, other):
    for left, right in zip(tensors(one)[:2], tensors(other)[:2], strict=True):
        assert left.keys() == right.keys()
        for name in left:
            assert torch.equal(left[name], right[name]), name
    assert tensors(one)[2] == tensors(other)[2]
    assert figures(one) == figures(other)


@pytest.fixture
def whole_run(store_folder, tmp_path, settings):
    result = pretrain(store_folder, tmp_path / "whole", settings)
    return tmp_path / "whole", result


def test_a_killed_run_resumes_bit_for_bit(store_folder, tmp_path, settings, whole_run, monkeypatch):
    out = tmp_path / "killed"
    with monkeypatch.context() as patch, pytest.raises(Killed):
        killed_at(13, patch)
        pretrain(store_folder, out, settings)
    assert RunFolder(out).latest().name == "step-00000008"
    # 24 steps of 16 rows cross the end of an epoch: otherwise this would prove less
    assert tensors(whole_run[0])[2]["position"]["epoch"] >= 1
    other_loader = dataclasses.replace(settings, num_workers=3)
    pretrain(store_folder, out, resume=True, num_workers=other_loader.num_workers)
    assert_same_run(whole_run[0], out)


def test_a_process_killed_by_the_system_resumes_bit_for_bit(store_folder, tmp_path, recipe):
    recipe |= {"steps": 120, "checkpoint_every": 10}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in recipe.items()]
    command = [sys.executable, "-m", "bertsmith", "pretrain", f"--corpus={store_folder}", *flags]
    out, whole = tmp_path / "killed", tmp_path / "whole"
    process = subprocess.Popen([*command, f"--out={out}"], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while RunFolder(out).latest() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    settings = PretrainSettings(**recipe)
    pretrain(store_folder, out, settings, resume=True)
    pretrain(store_folder, whole, settings)
    assert_same_run(whole, out)


def test_held_out_figures_and_learning(store_folder, tmp_path, settings):
    longer = dataclasses.replace(
        settings,
        steps=400,
        dropout=0.0,
        attention_dropout=0.0,
        initializer_range=0.05,
        nsp_sampling="paper",
    )  # (clean pairs are cut so that the words of these sentences have no places of their own)
    result = pretrain(store_folder, tmp_path / "run", longer)
    held_out = result.eval_metrics
    # each sentence has two words to guess among five, and they tell each other
    assert held_out["mlm_loss"] < held_out["unigram_entropy"] - 1.5
    assert held_out["mlm_accuracy"] > 0.7
    assert read_json(tmp_path / "run" / "result.json") == result.to_dict()


def test_keywords_are_a_recipes_flags_and_the_result_is_one_line(store_folder, tmp_path, recipe):
    out = tmp_path / "run"
    named = {**recipe, "steps": 2, "log_every": 1}
    command = ["python", "mine.py"]
    result = pretrain(store_folder, str(out), "fast", command=command, loggers=(), **named)
    record = RunFolder(out).settings()
    assert record["command"] == command
    assert record["settings"]["mlm_probability"] == read_recipe("fast").mlm_probability
    assert {name: record["settings"][name] for name in recipe} == named
    assert (result.folder, result.finished, result.steps) == (out, True, 2)
    line = [line for line in read_log(out / "log.jsonl") if line["event"] == "train"][-1]
    assert result.losses["mlm_loss"] == pytest.approx(line["mlm_loss"])
    assert repr(result).startswith(f"<{out}: 2 steps, {result.tokens:,} tokens, held-out MLM loss")
    assert "\n" not in repr(result)
    further = pretrain(store_folder, out, resume=True, steps=3)
    assert further.steps == 3 and RunFolder(out).settings()["settings"]["steps"] == 3
    with pytest.raises(TypeError, match="stepz"):
        pretrain(store_folder, tmp_path / "other", stepz=3)


def test_unigram_entropy_is_the_cross_entropy_of_the_held_out_labels(
    store_folder, tmp_path, settings
):
    result = pretrain(store_folder, tmp_path / "run", dataclasses.replace(settings, steps=1))
    counts = TokenStore.open(store_folder).unigram_counts + 1
    entropy = -(counts / counts.sum() * np.log(counts / counts.sum())).sum()
    # the labels are drawn from another sample of the same text, hence the width
    assert result.eval_metrics["unigram_entropy"] == pytest.approx(entropy, abs=0.25)


def test_a_rate_nobody_gives_goes_by_the_width_and_is_stored(store_folder, tmp_path, settings):
    out, chosen = (
        tmp_path / "run",
        dataclasses.replace(settings, learning_rate=None, size="1x320", steps=1),
    )
    pretrain(store_folder, out, dataclasses.replace(chosen, warmup_ratio=0.0))
    assert RunFolder(out).settings()["settings"]["learning_rate"] == 0.256 / 320


def test_accumulated_micro_batches_are_one_batch(store_folder, tmp_path, settings):
    # no dropout: its draws depend on the shape of the micro-batch
    whole = dataclasses.replace(settings, steps=6, dropout=0.0, attention_dropout=0.0)
    parts = dataclasses.replace(whole, micro_batch_size=4)
    pretrain(store_folder, tmp_path / "whole", whole)
    pretrain(store_folder, tmp_path / "parts", parts)
    one, other = tensors(tmp_path / "whole")[0], tensors(tmp_path / "parts")[0]
    for name in one:  # sums in another order: float32 rounding, amplified by Adam's division
        assert torch.allclose(one[name], other[name], atol=2e-4), name


def test_a_loss_that_is_not_finite_stops_before_the_weights_move(
    store_folder, tmp_path, settings, monkeypatch
):
    def poison(run, batch):
        if run.state.step == 10:
            task = run.task
            with torch.no_grad():
                weights.extend(p.clone() for p in task.model.parameters())
            honest, task.loss = task.loss, lambda *given: (honest(*given)[0] * float("nan"), {})

    weights: list[torch.Tensor] = []
    before_steps(monkeypatch, poison)
    with pytest.raises(FloatingPointError, match=r"step 10: .* epoch \d+, index \d+"):
        pretrain(store_folder, tmp_path / "run", settings)
    saved = read_tensor_file(RunFolder(tmp_path / "run").latest() / "model.safetensors")
    assert RunFolder(tmp_path / "run").latest().name == "step-00000010"
    embeddings = saved["bert.embeddings.word_embeddings.weight"]
    assert torch.equal(embeddings, weights[0])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_leaves_and_the_run_goes_on(
    store_folder, tmp_path, settings, whole_run, monkeypatch, number
):
    def signal_self(run, batch):
        if run.state.step == 5:
            os.kill(os.getpid(), number)

    out = tmp_path / "stopped"
    with monkeypatch.context() as patch:
        before_steps(patch, signal_self)
        assert not pretrain(store_folder, out, settings).finished
    assert RunFolder(out).latest().name == "step-00000006"
    pretrain(store_folder, out, settings, resume=True)
    events = read_log(out / "log.jsonl")
    assert any("stopped by a signal at step 6" in line.get("text", "") for line in events)
    assert_same_run(whole_run[0], out)


def test_budgets_in_tokens_and_minutes_end(store_folder, tmp_path, settings):
    by_tokens = dataclasses.replace(settings, steps=None, tokens=5000)
    assert 5000 <= pretrain(store_folder, tmp_path / "a", by_tokens).tokens < 6000
    by_time = dataclasses.replace(settings, steps=None, minutes=0.02)
    assert 1.2 <= pretrain(store_folder, tmp_path / "b", by_time).seconds < 10


def test_continued_training_keeps_the_shape_of_its_model(store_folder, tmp_path, settings):
    pretrain(store_folder, tmp_path / "first", settings)
    second = dataclasses.replace(settings, size="tiny", steps=4)
    pretrain(store_folder, tmp_path / "second", second, model=tmp_path / "first")
    assert read_json(tmp_path / "second" / "config.json")["hidden_size"] == 64


def test_continued_training_starts_from_its_model_and_resumes(store_folder, tmp_path, settings):
    pretrain(store_folder, tmp_path / "first", settings)
    start = read_tensor_file(tmp_path / "first" / "model.safetensors")
    still = dataclasses.replace(settings, steps=1, learning_rate=1e-12)
    pretrain(store_folder, tmp_path / "still", still, model=tmp_path / "first")
    same = read_tensor_file(tmp_path / "still" / "model.safetensors")
    for name, tensor in start.items():
        torch.testing.assert_close(same[name], tensor, msg=name)

    half = tmp_path / "half"
    on = dataclasses.replace(settings, steps=16)
    pretrain(store_folder, half, on, model=tmp_path / "first")
    end = read_tensor_file(half / "model.safetensors")
    shutil.rmtree(half / "checkpoints" / "step-00000016")
    pretrain(store_folder, half, on, model=tmp_path / "first", resume=True)
    again = read_tensor_file(half / "model.safetensors")
    assert all(torch.equal(end[name], again[name]) for name in start)
    assert not torch.equal(end["cls.predictions.bias"], start["cls.predictions.bias"])
    assert read_json(half / "run.json")["base_model"] == str(tmp_path / "first")


def test_a_run_that_was_stopped_before_its_first_checkpoint_begins_again_as_it_was(
    store_folder, tmp_path, settings
):
    pretrain(store_folder, tmp_path / "first", dataclasses.replace(settings, steps=1))
    out, short = tmp_path / "run", dataclasses.replace(settings, steps=4)
    pretrain(store_folder, out, short, model=tmp_path / "first")
    end = read_tensor_file(out / "model.safetensors")
    shutil.rmtree(out / "checkpoints")
    for file in ("model.safetensors", "result.json"):
        (out / file).unlink()
    pretrain(store_folder, out, PretrainSettings(), resume=True)
    again = read_tensor_file(out / "model.safetensors")
    assert all(torch.equal(end[name], again[name]) for name in end)


def test_no_run_goes_into_a_store_or_from_a_poisoned_optimizer(store_folder, tmp_path, settings):
    with pytest.raises(ValueError, match="holds a token store: name another --out"):
        pretrain(store_folder, store_folder, settings)
    out = tmp_path / "run"
    pretrain(store_folder, out, dataclasses.replace(settings, steps=2))
    checkpoint = out / "checkpoints" / "step-00000002"
    file, manifest = checkpoint / "optimizer.safetensors", checkpoint / "manifest.json"
    tensors = load_file(file)
    name = next(name for name in tensors if name.startswith("exp_avg:"))
    tensors[name].flatten()[0] = float("nan")
    save_file(tensors, file)
    facts = {name: read_json(manifest)[name] for name in ("step", "identity")}
    manifest.unlink()
    write_manifest(checkpoint, facts)  # as if it had been written so
    with pytest.raises(ValueError, match=f"'{name}' holds NaN or infinity: remove this"):
        pretrain(store_folder, out, resume=True, steps=4)


def test_infinite_weights_do_not_take_a_checkpoints_place(store_folder, tmp_path, settings):
    wild = dataclasses.replace(
        settings,
        learning_rate=3e38,
        max_grad_norm=1e9,
        warmup_ratio=0.0,
        schedule="constant",
        checkpoint_every=100,
    )
    with pytest.raises(FloatingPointError):
        pretrain(store_folder, tmp_path / "run", wild)
    assert not list((tmp_path / "run").rglob("*.safetensors"))


def test_what_does_not_fit_the_run_is_refused(store_folder, tmp_path, settings):
    out = tmp_path / "run"
    pretrain(store_folder, out, dataclasses.replace(settings, steps=2))
    with pytest.raises(
        ValueError, match="holds a model already: name another --out or add --resume"
    ):
        pretrain(store_folder, out, settings)
    with pytest.raises(ValueError, match="was started without --model, not from"):
        pretrain(store_folder, out, settings, model=out, resume=True)
    larger = dataclasses.replace(settings, size="mini", steps=4)
    with pytest.raises(ValueError, match="started with size = 2x64, not mini"):
        pretrain(store_folder, out, resume=True, size=larger.size, steps=larger.steps)
    warming = tmp_path / "warming"
    pretrain(store_folder, warming, dataclasses.replace(settings, steps=2, warmup_steps=1))
    before = (warming / "run.json").read_bytes()
    minutes = dataclasses.replace(settings, steps=None, minutes=1)
    with pytest.raises(ValueError, match="warmup_steps = 1: needs a budget in --steps"):
        pretrain(store_folder, warming, resume=True, minutes=minutes.minutes)
    assert (warming / "run.json").read_bytes() == before
    record = read_json(out / "run.json")
    record["corpus"]["fingerprint"] = "of another store"
    write_json(out / "run.json", record)
    with pytest.raises(
        ValueError, match=r"has changed since .*run began .*: put the old store back"
    ):
        pretrain(store_folder, out, resume=True, steps=settings.steps)
    record["corpus"]["path"] = "elsewhere"
    write_json(out / "run.json", record)
    with pytest.raises(ValueError, match="on another corpus .*: resume with --corpus elsewhere"):
        pretrain(store_folder, out, resume=True, steps=settings.steps)


def test_a_model_of_another_vocabulary_is_refused(store_folder, tmp_path, settings):
    pretrain(store_folder, tmp_path / "run", dataclasses.replace(settings, steps=1))
    other = tmp_path / "other"
    tokenizer = Tokenizer.from_pretrained(store_folder)
    shorter = type(tokenizer.vocabulary)(tokenizer.vocabulary.pieces[:-1])
    documents = [Document("made", n, [f"The cat sleeps. The dog {n} sleeps."]) for n in range(9)]
    build_store([], Tokenizer(shorter), other, documents=documents)
    with pytest.raises(ValueError, match=r"another vocabulary \(70 pieces\) than the store \(69"):
        pretrain(other, tmp_path / "new", settings, model=tmp_path / "run")


def test_a_model_with_fewer_rows_than_pieces_is_refused(store_folder, tmp_path, settings):
    tokenizer = Tokenizer.from_pretrained(store_folder)
    config = config_for("1x64", len(tokenizer.vocabulary) - 1)
    short = tmp_path / "short"
    short.mkdir()
    tokenizer.save(short)
    write_json(short / "config.json", config_entries(config))
    with pytest.raises(ValueError, match="a tokenizer of 70 pieces for a model of 69"):
        pretrain(store_folder, tmp_path / "new", settings, model=short)


def test_a_model_of_another_normalization_is_refused(store_folder, tmp_path, settings):
    pretrain(store_folder, tmp_path / "run", dataclasses.replace(settings, steps=1))
    cased = Tokenizer(Tokenizer.from_pretrained(store_folder).vocabulary, GOOGLE_CASED)
    documents = [Document("made", n, [f"the cat sleeps. the dog {n} sleeps."]) for n in range(9)]
    build_store([], cased, tmp_path / "cased", documents=documents)
    with pytest.raises(ValueError, match=r"another normalization \(.*lowercase=True.* than the "):
        pretrain(tmp_path / "cased", tmp_path / "new", settings, model=tmp_path / "run")


def test_settings_that_contradict_each_other_are_refused(recipe, settings):
    with pytest.raises(ValueError, match="exactly one of --steps, --tokens and --minutes"):
        PretrainSettings(**recipe, tokens=10).budget()
    with pytest.raises(ValueError, match="--minutes 0: must be above 0"):
        PretrainSettings(minutes=0).budget()
    with pytest.raises(
        ValueError, match="batch_size = 16 is not a multiple of micro_batch_size = 5"
    ):
        dataclasses.replace(settings, micro_batch_size=5)
    with pytest.raises(ValueError, match="max_length = 4"):
        dataclasses.replace(settings, max_length=4)
    with pytest.raises(ValueError, match="warmup_ratio = 1"):
        dataclasses.replace(settings, warmup_ratio=1)
    with pytest.raises(ValueError, match="batch_size = 0"):
        dataclasses.replace(settings, batch_size=0)


CONTRADICTIONS = {
    "phase2_length = 48: must be above max_length = 48": {"phase2_length": 48},
    "phase2_ratio = 0.2: there is no second phase: give phase2_length": {"phase2_ratio": 0.2},
    "phase2_batch_size = 8: there is no second phase": {"phase2_batch_size": 8},
    "phase2_ratio = 1.0: must be above 0": {"phase2_length": 64, "phase2_ratio": 1.0},
    "warmup_ratio = 0.1 and warmup_steps = 5: give one": {"warmup_ratio": 0.1, "warmup_steps": 5},
    "mlm_probability = 0: must be above 0": {"masking": "span", "mlm_probability": 0},
    "mlm_probability = 0.3: the objective ltr masks nothing": {
        "objective": "ltr",
        "mlm_probability": 0.3,
    },
    "masking = word: the objective ltr masks nothing": {"objective": "ltr", "masking": "word"},
    "nsp_sampling = clean: the objective mlm has no pairs": {
        "objective": "mlm",
        "nsp_sampling": "clean",
    },
    "max_predictions_per_seq = 46: a row of max_length = 48 has 45 tokens": {
        "max_predictions_per_seq": 46
    },
    "mask_replace_prob = 0.8, random_replace_prob = 0.3": {"random_replace_prob": 0.3},
    "dropout = 1.0: must be in": {"dropout": 1.0},
    "micro_batch_size = 0: must be at least 1": {"micro_batch_size": 0},
}


@pytest.mark.parametrize("says", CONTRADICTIONS)
def test_a_contradiction_is_one_line_with_the_remedy(says, settings):
    with pytest.raises(ValueError) as error:
        dataclasses.replace(settings, **CONTRADICTIONS[says])
    assert says in str(error.value) and "\n" not in str(error.value)


def test_a_budget_must_be_longer_than_its_warmup(settings):
    with pytest.raises(ValueError, match="warmup_steps = 24: .* raise --steps"):
        dataclasses.replace(settings, warmup_steps=24).budget()
    with pytest.raises(ValueError, match="warmup_steps = 5: needs a budget in --steps"):
        dataclasses.replace(settings, warmup_steps=5, steps=None, minutes=1).budget()


def test_rows_longer_than_the_positions_of_init_are_refused(store_folder, tmp_path, settings):
    pretrain(store_folder, tmp_path / "run", dataclasses.replace(settings, steps=1))
    longer = dataclasses.replace(settings, phase2_length=600)
    with pytest.raises(ValueError, match="phase2_length = 600: .*run knows 512 positions: lower"):
        pretrain(store_folder, tmp_path / "new", longer, model=tmp_path / "run")
    with pytest.raises(ValueError, match="norm: fixed by the model that --model goes on from"):
        pretrain(
            store_folder,
            tmp_path / "new",
            settings,
            model=tmp_path / "run",
            layer_norm=settings.layer_norm,
        )
    assert not (tmp_path / "new").exists()


def test_norm_and_gated_reach_the_model_and_a_resume(store_folder, tmp_path, settings):
    pre = dataclasses.replace(
        settings, layer_norm="pre", glu=True, activation_checkpointing=True, optimizer="lamb",
        schedule="cosine", warmup_steps=3, steps=8, checkpoint_every=4, loggers=(),
    )  # fmt: skip
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    pretrain(store_folder, whole, pre)
    config = read_config(whole)
    assert config.pre_norm and config.gated
    pretrain(store_folder, cut, pre)
    shutil.rmtree(cut / "checkpoints" / "step-00000008")
    pretrain(store_folder, cut, pre, resume=True)
    assert_same_run(whole, cut)
    assert not (whole / "tensorboard").exists()


def test_what_auto_chose_is_stored_and_kept(store_folder, tmp_path, settings):
    auto = dataclasses.replace(settings, micro_batch_size="auto", steps=2)
    pretrain(store_folder, tmp_path / "run", auto)
    stored = read_json(tmp_path / "run" / "run.json")["settings"]["micro_batch_size"]
    assert 16 % stored == 0
    rule = f"micro-batch {stored} of batch 16: "
    texts = [line.get("text", "") for line in read_log(tmp_path / "run" / "log.jsonl")]
    assert any(text.startswith(rule) for text in texts)
    record = read_json(tmp_path / "run" / "run.json")
    record["settings"]["micro_batch_size"] = 2
    write_json(tmp_path / "run" / "run.json", record)
    more = dataclasses.replace(auto, steps=3)
    pretrain(
        store_folder,
        tmp_path / "run",
        resume=True,
        micro_batch_size=more.micro_batch_size,
        steps=more.steps,
    )
    assert read_json(tmp_path / "run" / "run.json")["settings"]["micro_batch_size"] == 2


def test_memory_that_runs_out_names_the_settings(store_folder, tmp_path, settings, monkeypatch):
    def hungry(*given):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9")

    monkeypatch.setattr(Stepper, "step", hungry)
    with pytest.raises(MemoryError, match=r"--micro-batch-size \(now 16\).*; nothing was saved"):
        pretrain(store_folder, tmp_path / "run", settings)
    monkeypatch.setattr(Engine, "workers", 2)  # each with half of the rows
    with pytest.raises(MemoryError, match=r"--micro-batch-size \(now 8\)"):
        pretrain(store_folder, tmp_path / "two", settings)

    with pytest.raises(ValueError, match="stopped before its first checkpoint: name another"):
        pretrain(store_folder, tmp_path / "run", settings)
    shutil.rmtree(tmp_path / "run")  # as it said
    monkeypatch.undo()
    pretrain(store_folder, tmp_path / "run", dataclasses.replace(settings, steps=2))
    monkeypatch.setattr(Stepper, "step", hungry)
    more = dataclasses.replace(settings, steps=3)
    with pytest.raises(MemoryError) as raised:
        pretrain(store_folder, tmp_path / "run", resume=True, steps=more.steps)
    assert "--max-length" not in str(raised.value) and "--size" not in str(raised.value)
    assert str(raised.value).endswith("; go on with --resume")

    def broken(*given):
        raise RuntimeError("something else")

    monkeypatch.setattr(Stepper, "step", broken)
    with pytest.raises(RuntimeError, match="something else"):
        pretrain(store_folder, tmp_path / "other", settings)


def test_a_run_in_int8_goes_on_where_there_is_none(
    store_folder, tmp_path, settings, monkeypatch, capsys
):
    if not has_int8(torch.device("cpu")):
        pytest.skip("no int8 products")
    out, words = tmp_path / "run", ["pretrain", "--corpus", str(store_folder), "--size", "1x64"]
    words += ["--config", "fast", "--max-length", "48", "--threads", "1", "--out", str(out)]
    faster = MatmulTimes(1536, bf16=0.2, int8=0.1)
    monkeypatch.setattr(product_times, "measure_matmuls", lambda *shapes: faster)
    assert main([*words, "--steps", "2"]) == 0
    stored = RunFolder(out).settings()
    assert stored["machine"]["precision"] == stored["settings"]["precision"] == "int8"
    monkeypatch.setattr("bertsmith.training.engine.has_int8", lambda device: False)
    assert main([*words, "--resume", "--steps", "3"]) == 2
    assert "cpu has no AVX-512 VNNI and bf16; use bf16 or float32" in capsys.readouterr().err
    assert main([*words, "--resume", "--steps", "3", "--precision", "bf16"]) == 0
    assert RunFolder(out).settings()["settings"]["precision"] == "bf16"


def test_a_resume_says_and_keeps_what_it_changes(store_folder, tmp_path, settings, capsys):
    out, steps = tmp_path / "run", dataclasses.replace(settings, steps=2)
    pretrain(store_folder, out, steps)
    assert "changes" not in RunFolder(out).settings()
    capsys.readouterr()
    for step, rate, said in ((3, 1e-3, "learning_rate 0.003 -> 0.001, steps 2 -> 3 from step 2 on"),
                             (4, 1e-3, "steps 3 -> 4 from step 3 on")):  # fmt: skip
        changed = dataclasses.replace(settings, steps=step, learning_rate=rate)
        pretrain(
            store_folder, out, resume=True, steps=changed.steps, learning_rate=changed.learning_rate
        )
        assert f"{out}: {said}" in capsys.readouterr().err.splitlines()
    pretrain(store_folder, out, changed, resume=True)  # nothing is new
    assert " -> " not in capsys.readouterr().err
    assert RunFolder(out).settings()["changes"] == [
        {"setting": "learning_rate", "step": 2, "old": 3e-3, "new": 1e-3},
        {"setting": "steps", "step": 2, "old": 2, "new": 3},
        {"setting": "steps", "step": 3, "old": 3, "new": 4},
    ]


def test_a_recipe_does_not_undo_what_flags_set(store_folder, tmp_path, settings, capsys):
    """The command of a queue says its recipe each time; a person gave flags once."""
    out, recipe = tmp_path / "run", tmp_path / "mine.toml"
    recipe.write_text(
        'steps = 40\nlearning_rate = 1e-3\nbatch_size = 16\nprecision = "auto-int8"\n'
    )
    words = ["--corpus", store_folder, "--out", out, "--config", recipe]
    words += ["--max-length", 48, "--threads", 1, "--size", "tiny"]
    assert (
        main([str(word) for word in ("pretrain", *words, "--steps", 2, "--learning-rate", 5e-4)])
        == 0
    )
    capsys.readouterr()

    def goes_on(*flags):
        assert main([str(word) for word in ("pretrain", *words, "--resume", *flags)]) == 0
        stored = RunFolder(out).settings()["settings"]
        return stored["steps"], stored["learning_rate"], capsys.readouterr().err

    steps, rate, said = goes_on()
    assert (steps, rate) == (2, 5e-4)
    assert (
        f"{out}: goes on with learning_rate = 0.0005, not the recipe's learning_rate = 0.001: give"
        in said
    )
    assert f"{out}: goes on with steps = 2, not the recipe's steps = 40: give --steps to" in said
    steps, rate, said = goes_on("--steps", 3)
    assert (steps, rate) == (3, 5e-4) and "goes on with steps" not in said
    steps, rate, said = goes_on("--learning-rate", 1e-3)
    assert (steps, rate) == (3, 1e-3) and "goes on with rate" not in said
    assert "precision" not in said + goes_on("--precision", "auto-int8")[2]
    assert goes_on("--minutes", 1e-3)[0] is None
    line = "goes on with minutes = 0.001, not the recipe's steps = 40: give --steps to change it"
    assert line in goes_on()[2]


def test_what_a_run_does_not_have_a_recipe_gives(store_folder, settings, whole_run):
    """Threads are chosen anew for another number of ranks: there the recipe's count."""
    run, store = RunFolder(whole_run[0]), TokenStore.open(store_folder)
    named = frozenset({"threads"})
    recipe = Recipe(dataclasses.replace(settings, threads=3), explicit=named, from_file=named)

    def threads(ranks):
        return resumed_settings(run, recipe, store, None, ranks).threads

    assert (threads(1), threads(2)) == (1, 3)


@pytest.mark.parametrize("more", [{}, {"precision": "bf16", "threads": 2}])
def test_first_passes_leave_nothing(store_folder, tmp_path, settings, whole_run, monkeypatch, more):
    """In them kernels compile, before the minutes of a budget begin."""
    settings, whole = dataclasses.replace(settings, **more), whole_run[0]
    if more:
        pretrain(store_folder, whole := tmp_path / "plain", settings)
    real = loop.begin

    def after_first_passes(run, stepper):
        stepper.first_passes()
        assert stepper.replicas.trained() == []
        return real(run, stepper)

    monkeypatch.setattr(loop, "begin", after_first_passes)
    pretrain(store_folder, tmp_path / "run", settings)
    assert_same_run(tmp_path / "run", whole)


LOADED = """
import sys
from pathlib import Path
from numba.core.dispatcher import Dispatcher
from bertsmith.training.loop.step import Stepper
from bertsmith.training.pretraining.run import pretrain
from bertsmith.training.pretraining.settings import PretrainSettings, Recipe, read_recipe

def loaded():
    ours = [m for name, m in [*sys.modules.items()] if name.startswith("bertsmith.")]
    kernels = [k for module in ours for k in vars(module).values() if isinstance(k, Dispatcher)]
    return {(kernel.__name__, types) for kernel in kernels for types in kernel.signatures}

seen, step = [], Stepper.step
Stepper.step = lambda *arguments: seen.append(loaded()) or step(*arguments)
settings = PretrainSettings(
    size="2x64", max_length=48, batch_size=16, minutes=0.01, masking="span", precision="bf16",
    threads=2, checkpoint_every=5, eval_rows=8, num_evals=2,
)
pretrain(Path(sys.argv[1]), Path(sys.argv[2]), settings)
late = loaded() - seen[0]
assert len(seen) > 2 and len(seen[0]) > 20 and not late, (len(seen), len(seen[0]), late)
"""


def test_every_kernel_is_loaded_before_the_clock_of_a_budget_in_minutes(store_folder, tmp_path):
    """What is loaded from disk here is compiled on a new machine, which takes up to half a minute;
    held-out rows are masked in another way than these training rows."""
    command = [sys.executable, "-c", LOADED, str(store_folder), str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def evaluated(store_folder, out, settings, monkeypatch, seconds):
    """How many evaluations a run has on its way when each takes so long."""
    begun = []

    def slow(task, rows=None):
        if rows is None:
            begun.append(task)
            time.sleep(seconds)
        return {"mlm_loss": 1.0, "mlm_accuracy": 0.5, "mlm_cases": 2000}

    monkeypatch.setattr(Pretraining, "evaluate", slow)
    result = pretrain(store_folder, out, settings)
    assert "mlm_loss" in result.eval_metrics  # the end is measured in any case
    return len(begun)


def test_evaluations_keep_their_share_of_a_budget_in_minutes(
    store_folder, tmp_path, settings, monkeypatch
):
    minutes = dataclasses.replace(settings, steps=None, minutes=2 / 60, num_evals=40)
    few = evaluated(store_folder, tmp_path / "few", minutes, monkeypatch, 0.02)
    assert 1 <= few <= 3  # 0.06 s of 2 s
    assert 0.02 * few <= tensors(tmp_path / "few")[2]["evaluating"] <= 0.1
    assert evaluated(store_folder, tmp_path / "none", minutes, monkeypatch, 0.5) <= 1
    # steps are to be the same on every machine, and so are their evaluations
    every = evaluated(store_folder, tmp_path / "steps", settings, monkeypatch, 0.02)
    assert every == settings.num_evals - 1
    assert tensors(tmp_path / "steps")[2]["evaluating"] == 0


def test_a_model_of_one_segment_reads_no_pairs(store_folder, tmp_path, settings):
    tokenizer = Tokenizer.from_pretrained(store_folder)
    config = config_for("1x64", len(tokenizer.vocabulary), max_positions=64, type_vocab_size=1)
    save_model(PreTrainingModel(config), tokenizer, tmp_path / "model")
    with pytest.raises(ValueError, match=r"type_vocab_size of 1 .* needs two: use --objective mlm"):
        pretrain(store_folder, tmp_path / "run", settings, model=tmp_path / "model")
