"""Pre-training runs: they learn, end with their budget, and refuse what does not fit."""

import shutil
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from bertsmith.base.files import read_json, write_json
from bertsmith.checkpoints.config_json import read_config
from bertsmith.checkpoints.convert import convert
from bertsmith.checkpoints.formats.google import PREFIX
from bertsmith.checkpoints.formats.tensorflow_bundle import Bundle, write_bundle
from bertsmith.checkpoints.model_folder import save_model
from bertsmith.checkpoints.run_folder import RunFolder, write_manifest
from bertsmith.checkpoints.snapshots import load_training_state
from bertsmith.corpus.build.build import build_store
from bertsmith.corpus.store.store import TokenStore
from bertsmith.model.config import config_for
from bertsmith.model.heads import PreTrainingModel
from bertsmith.text.readers.documents import Document
from bertsmith.text.tokenizer.normalize import GOOGLE_CASED
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.text.tokenizer.wordpiece import Vocabulary
from bertsmith.training.engine import Engine
from bertsmith.training.loop import loop
from bertsmith.training.loop.step import Stepper
from bertsmith.training.pretraining.run import pretrain
from bertsmith.training.pretraining.settings import read_recipe
from bertsmith.training.pretraining.task import Pretraining

from ..runs import NO_DROPOUT, assert_same_run, before_steps, lines, loop_state, messages, weights


def test_held_out_figures_and_learning(train, tmp_path):
    # clean pairs are cut so that the words of these sentences have no places of their own
    result = train(steps=400, **NO_DROPOUT, initializer_range=0.05, nsp_sampling="paper")
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
    assert result.losses["mlm_loss"] == pytest.approx(lines(out)[-1]["mlm_loss"])
    assert repr(result).startswith(f"<{out}: 2 steps, {result.tokens:,} tokens, held-out MLM loss")
    assert "\n" not in repr(result)
    further = pretrain(store_folder, out, resume=True, steps=3)
    assert further.steps == 3 and RunFolder(out).settings()["settings"]["steps"] == 3
    with pytest.raises(ValueError, match="unknown setting 'stepz': did you mean 'steps'"):
        pretrain(store_folder, tmp_path / "other", stepz=3)


def test_unigram_entropy_is_the_cross_entropy_of_the_held_out_labels(train, store_folder):
    counts = TokenStore.open(store_folder).unigram_counts + 1
    entropy = -(counts / counts.sum() * np.log(counts / counts.sum())).sum()
    # the labels are drawn from another sample of the same text, hence the width
    assert train(steps=1).eval_metrics["unigram_entropy"] == pytest.approx(entropy, abs=0.25)


def test_a_rate_nobody_gives_goes_by_the_width_and_is_stored(train, tmp_path):
    train(learning_rate=None, size="1x320", steps=1, warmup_ratio=0.0)
    assert RunFolder(tmp_path / "run").settings()["settings"]["learning_rate"] == 0.256 / 320


def test_accumulated_micro_batches_are_one_batch(train, tmp_path):
    # no dropout: its draws depend on the shape of the micro-batch
    train("whole", steps=6, **NO_DROPOUT)
    train("parts", steps=6, **NO_DROPOUT, micro_batch_size=4)
    one, other = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    for name in one:  # sums in another order: float32 rounding, amplified by Adam's division
        assert torch.allclose(one[name], other[name], atol=2e-4), name


def test_a_loss_that_is_not_finite_stops_before_the_weights_move(train, tmp_path, monkeypatch):
    before: list[torch.Tensor] = []

    def poison(run, batch):
        if run.state.step == 10:
            task = run.task
            before.extend(p.detach().clone() for p in task.model.parameters())
            honest, task.loss = task.loss, lambda *given: (honest(*given)[0] * float("nan"), {})

    before_steps(monkeypatch, poison)
    with pytest.raises(FloatingPointError, match=r"step 10: .* epoch \d+, index \d+"):
        train()
    newest = RunFolder(tmp_path / "run").latest()
    assert newest.name == "step-00000010"
    assert torch.equal(weights(newest)["bert.embeddings.word_embeddings.weight"], before[0])


def test_infinite_weights_do_not_take_a_checkpoints_place(train, tmp_path):
    wild = {"learning_rate": 3e38, "max_grad_norm": 1e9, "warmup_ratio": 0.0}
    with pytest.raises(FloatingPointError):
        train(**wild, schedule="constant", checkpoint_every=100)
    assert not list((tmp_path / "run").rglob("*.safetensors"))


def test_budgets_in_tokens_and_minutes_end(train):
    assert 5000 <= train("a", steps=None, tokens=5000).tokens < 6000
    assert 1.2 <= train("b", steps=None, minutes=0.02).seconds < 10


def test_continued_training_starts_from_its_model_and_resumes(train, tmp_path, whole_run):
    start = weights(whole_run)
    # the model's shape, not the recipe's
    train("still", steps=1, learning_rate=1e-12, size="tiny", model=whole_run)
    assert read_json(tmp_path / "still" / "config.json")["hidden_size"] == 64
    same = weights(tmp_path / "still")
    for name, tensor in start.items():
        torch.testing.assert_close(same[name], tensor, msg=name)

    base = tmp_path / "base"
    shutil.copytree(whole_run, base)
    half = train("half", steps=16, model=base).folder
    end = weights(half)
    shutil.rmtree(half / "checkpoints" / "step-00000016")
    shutil.rmtree(base)  # the checkpoint has all that is needed
    train("half", steps=16, resume=True)
    again = weights(half)
    assert all(torch.equal(end[name], again[name]) for name in start)
    assert not torch.equal(end["cls.predictions.bias"], start["cls.predictions.bias"])
    assert read_json(half / "run.json")["base_model"] == str(base)


def test_a_run_of_google_s_is_gone_on_with(train, tmp_path, whole_run):
    """Weights and Adam's state; another optimizer begins its own."""
    folder = tmp_path / "google"
    convert(whole_run, folder, to="tensorflow")
    bundle = Bundle(folder / PREFIX)
    arrays = {name: bundle.read(name) for name in bundle.names}
    slots = {f"{name}/adam_{slot}": np.full_like(values, 1e-4)
             for name, values in arrays.items() for slot in "mv"}  # fmt: skip
    write_bundle(folder / PREFIX, arrays | slots | {"global_step": np.array(20)})
    settings = {"steps": 2, "model": folder, "warmup_steps": 0, **NO_DROPOUT}
    runs = [
        train(name, optimizer=optimizer, **settings).folder
        for name, optimizer in (("on", "paper-adam"), ("anew", "adamw"))
    ]
    said = [any(f"of step 20 in {folder}" in line for line in messages(run)) for run in runs]
    assert said == [True, False]
    path = sorted((runs[0] / "checkpoints").iterdir())[-1]
    state, _ = load_training_state(path)
    # a tenth of it is forgotten in a step
    assert state["exp_avg:encoder.layers.1.qkv.weight"].mean() == pytest.approx(0.81e-4, rel=0.02)


def test_no_run_goes_into_a_store_or_from_a_poisoned_optimizer(
    train, store_folder, tmp_path, settings
):
    with pytest.raises(ValueError, match="holds a token store: name another `out`"):
        pretrain(store_folder, store_folder, settings)
    train(steps=2)
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000002"
    file, manifest = checkpoint / "optimizer.safetensors", checkpoint / "manifest.json"
    tensors = load_file(file)
    name = next(name for name in tensors if name.startswith("exp_avg:"))
    tensors[name].flatten()[0] = float("nan")
    save_file(tensors, file)
    facts = {name: read_json(manifest)[name] for name in ("step", "identity")}
    manifest.unlink()
    write_manifest(checkpoint, facts)  # as if it had been written so
    with pytest.raises(ValueError, match=f"'{name}' holds NaN or infinity: remove this"):
        train(resume=True, steps=4)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (lambda v: Tokenizer(Vocabulary(v.pieces[:-1])), r"vocabulary \(70 pieces\) than the sto"),
        (lambda v: Tokenizer(v, GOOGLE_CASED), r"normalization \(.*lowercase=True.* than the "),
    ],
    ids=["vocabulary", "normalization"],
)
def test_a_model_of_another_tokenizer_is_refused(
    train, store_folder, tmp_path, whole_run, other, says
):
    tokenizer = other(Tokenizer.from_pretrained(store_folder).vocabulary)
    documents = [Document("made", n, [f"the cat sleeps. the dog {n} sleeps."]) for n in range(9)]
    build_store([], tokenizer, tmp_path / "other", documents=documents)
    with pytest.raises(ValueError, match=f"another {says}"):
        train(corpus=tmp_path / "other", model=whole_run)


@pytest.mark.parametrize(
    ("shape", "entries", "says"),
    [
        ({}, {"vocab_size": 69}, "a tokenizer of 70 pieces for a model of 69"),
        ({"type_vocab_size": 1}, {}, r"type_vocab_size of 1 .* needs two: use `objective='mlm'`"),
        ({"family": "electra"}, {}, r"model: ELECTRA can learn only with `objective='mlm'`, not"),
    ],
    ids=["rows", "segments", "relative"],
)
def test_a_model_that_cannot_learn_the_objective_is_refused(
    train, store_folder, tmp_path, shape, entries, says
):
    tokenizer, model = Tokenizer.from_pretrained(store_folder), tmp_path / "model"
    config = config_for("1x64", len(tokenizer.vocabulary), max_positions=64, **shape)
    save_model(PreTrainingModel(config), tokenizer, model)
    write_json(model / "config.json", read_json(model / "config.json") | entries)
    with pytest.raises(ValueError, match=says):
        train(model=model)


def test_what_the_model_to_start_from_has_fixed_is_refused(
    train, store_folder, tmp_path, settings, whole_run
):
    says = f"phase2_length = 600: .*{whole_run.name} knows 512 positions: lower"
    with pytest.raises(ValueError, match=says):
        train(phase2_length=600, model=whole_run)
    with pytest.raises(ValueError, match="norm: fixed by `model`, from which"):
        pretrain(store_folder, tmp_path / "run", settings, model=whole_run, layer_norm="post")
    assert not (tmp_path / "run").exists()


def test_norm_and_gated_reach_the_model_and_a_resume(train, tmp_path):
    shape = {"layer_norm": "pre", "glu": True, "activation_checkpointing": True}
    recipe = {"optimizer": "lamb", "schedule": "cosine", "warmup_steps": 3, "loggers": ()}
    whole, cut = (
        train(name, **shape, **recipe, steps=8, checkpoint_every=4).folder
        for name in ("whole", "cut")
    )
    config = read_config(whole)
    assert config.pre_norm and config.gated
    shutil.rmtree(cut / "checkpoints" / "step-00000008")
    train("cut", resume=True)
    assert_same_run(whole, cut)
    assert not (whole / "tensorboard").exists()


def test_what_auto_chose_is_stored_and_kept(train, tmp_path):
    run = tmp_path / "run"
    train(micro_batch_size="auto", steps=2)
    record = read_json(run / "run.json")
    stored = record["settings"]["micro_batch_size"]
    assert 16 % stored == 0
    rule = f"micro-batch {stored} of batch 16: "
    assert any(text.startswith(rule) for text in messages(run))
    record["settings"]["micro_batch_size"] = 2
    write_json(run / "run.json", record)
    train(resume=True, micro_batch_size="auto", steps=3)
    assert read_json(run / "run.json")["settings"]["micro_batch_size"] == 2


def test_memory_that_runs_out_names_the_settings(train, tmp_path, monkeypatch):
    def failing(message):
        def step(*given):
            raise RuntimeError(message)

        return step

    hungry = failing("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9")
    monkeypatch.setattr(Stepper, "step", hungry)
    with pytest.raises(MemoryError, match=r"`micro_batch_size` \(now 16\).*; nothing was saved"):
        train()
    monkeypatch.setattr(Engine, "workers", 2)  # each with half of the rows
    with pytest.raises(MemoryError, match=r"`micro_batch_size` \(now 8\)"):
        train("two")

    with pytest.raises(ValueError, match="stopped before its first checkpoint: name another"):
        train()
    shutil.rmtree(tmp_path / "run")  # as it said
    monkeypatch.undo()
    train(steps=2)
    monkeypatch.setattr(Stepper, "step", hungry)
    with pytest.raises(MemoryError) as raised:
        train(resume=True, steps=3)
    assert "--max-length" not in str(raised.value) and "--size" not in str(raised.value)
    assert str(raised.value).endswith("; go on with `resume=True`")

    monkeypatch.setattr(Stepper, "step", failing("something else"))
    with pytest.raises(RuntimeError, match="something else"):
        train("other")


@pytest.mark.parametrize("more", [{}, {"precision": "bf16", "threads": 2}])
def test_first_passes_leave_nothing(train, tmp_path, whole_run, monkeypatch, more):
    """In them kernels compile, before the minutes of a budget begin."""
    plain = train("plain", **more).folder if more else whole_run
    real = loop.begin

    def after_first_passes(run, stepper):
        stepper.first_passes()
        assert stepper.replicas.trained() == []
        return real(run, stepper)

    monkeypatch.setattr(loop, "begin", after_first_passes)
    assert_same_run(train(**more).folder, plain)


LOADED = """
import sys
from pathlib import Path
from numba.core.dispatcher import Dispatcher
from bertsmith.training.loop.step import Stepper
from bertsmith.training.pretraining.run import pretrain
from bertsmith.training.pretraining.settings import PretrainSettings

def loaded():
    ours = [m for name, m in [*sys.modules.items()] if name.startswith("bertsmith.")]
    kernels = [k for module in ours for k in vars(module).values() if isinstance(k, Dispatcher)]
    return {(kernel.__name__, types) for kernel in kernels for types in kernel.signatures}

seen, step = [], Stepper.step
Stepper.step = lambda *arguments: seen.append(loaded()) or step(*arguments)
settings = PretrainSettings(
    size="2x64", max_length=48, batch_size=16, minutes=0.01, masking="span", precision="bf16",
    threads=2, checkpoint_every=5, eval_rows=8, num_evals=2, optimizer=sys.argv[3],
)
pretrain(Path(sys.argv[1]), Path(sys.argv[2]), settings)
late, least = loaded() - seen[0], {"adamw": 20, "muon": 15}[sys.argv[3]]
assert len(seen) > 2 and len(seen[0]) > least and not late, (len(seen), len(seen[0]), late)
"""


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_every_kernel_is_loaded_before_the_clock_of_a_budget_in_minutes(
    store_folder, tmp_path, optimizer
):
    """What is loaded from disk here is compiled on a new machine, which takes up to half a minute;
    held-out rows are masked in another way than these training rows."""
    command = [sys.executable, "-c", LOADED, store_folder, tmp_path / "run", optimizer]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_evaluations_keep_their_share_of_a_budget_in_minutes(
    train, tmp_path, settings, monkeypatch
):
    def evaluations(name, seconds, **changes):
        """How many a run has on its way when each takes so long."""
        begun = []

        def slow(task, rows=None):
            if rows is None:
                begun.append(task)
                time.sleep(seconds)
            return {"mlm_loss": 1.0, "mlm_accuracy": 0.5, "mlm_cases": 2000}

        monkeypatch.setattr(Pretraining, "evaluate", slow)
        result = train(name, **changes)
        assert "mlm_loss" in result.eval_metrics  # the end is measured in any case
        return len(begun)

    minutes = {"steps": None, "minutes": 2 / 60, "num_evals": 40}
    few = evaluations("few", 0.02, **minutes)
    assert 1 <= few <= 3  # 0.06 s of 2 s
    assert 0.02 * few <= loop_state(tmp_path / "few")["evaluating"] <= 0.1
    assert evaluations("none", 0.5, **minutes) <= 1
    # steps are to be the same on every machine, and so are their evaluations
    assert evaluations("steps", 0.02) == settings.num_evals - 1
    assert evaluations("by-default", 0.0, steps=24, num_evals=None) == 1
    assert loop_state(tmp_path / "steps")["evaluating"] == 0
