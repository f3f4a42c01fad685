"""Two gloo ranks: the same weights as one rank, checkpoints for any number, one end for all.

All runs of two ranks are made by one start of torchrun (two_ranks.py), since a start takes seconds.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bertsmith.base.files import read_json
from bertsmith.checkpoints.run_folder import RunFolder
from bertsmith.corpus.examples.stream import Position
from bertsmith.corpus.store.store import TokenStore
from bertsmith.model.kernels.quantized_linear import has_int8
from bertsmith.training.pretraining import run as pretrain_module
from bertsmith.training.pretraining.resume import resumed_settings
from bertsmith.training.pretraining.run import pretrain
from bertsmith.training.pretraining.settings import PretrainSettings, Recipe

from .. import runs
from ..runs import NO_DROPOUT, lines, train_stream, weights

SIX = {
    "steps": 6,
    "device": "cpu",
    "optimizer": "adamw",
    "checkpoint_every": 3,
    "log_every": 1,
    "loggers": (),
}
RECIPE = {**runs.RECIPE, **SIX, "short_seq_prob": 0.5}  # rows of unequal length
# no dropout: its draws hang on a micro-batch's shape
UNEVEN = {"batch_size": 15, "objective": "mlm", "short_seq_prob": 0.0, "optimizer": "muon"}
UNEVEN |= NO_DROPOUT
PHASES = {"phase2_length": 64, "phase2_ratio": 0.5, "micro_batch_size": 4, **NO_DROPOUT}
SHARD = {"shard": True, "micro_batch_size": 4}
# what two ranks run -> the change of the recipe, and that with which one rank does the same
SAME = {
    "ddp": ({}, {"micro_batch_size": 8}),
    "accumulated, two phases": (PHASES, PHASES),
    "uneven, without pairs": (UNEVEN, UNEVEN),
    "bf16": ({"precision": "bf16"}, {"precision": "bf16", "micro_batch_size": 8}),
    "shard": ({**SHARD, "activation_checkpointing": True}, {"micro_batch_size": 4}),
}
if has_int8(torch.device("cpu")):
    int8 = {"micro_batch_size": 4, "precision": "int8"}
    SAME["shard, int8"] = {**SHARD, **int8}, int8
INCIDENTS = {
    "stopped": {"what": "SIGTERM", "rank": 1, "step": 2},
    "nan": {"what": "nan", "rank": 1, "step": 4},
}


def half_of(run, out):
    """A copy of a finished run as it stood at its first checkpoint."""
    shutil.copytree(run, out)
    (out / "result.json").unlink()
    shutil.rmtree(out / "checkpoints" / "step-00000006")
    return out


@pytest.fixture(scope="module")
def alone(store_folder, tmp_path_factory):
    """The runs of one rank, each made when it is first asked for."""
    folder, made = tmp_path_factory.mktemp("alone"), {}

    def run(**changes):
        key = json.dumps(changes, sort_keys=True)
        if key not in made:
            made[key] = folder / str(len(made))
            pretrain(store_folder, made[key], PretrainSettings(**{**RECIPE, **changes}))
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrain_module, "measure_peak", lambda engine: 1e9)
        yield run


@pytest.fixture(scope="module")
def together(store_folder, tmp_path_factory, alone):
    """Name of a run -> (its folder, what became of it at rank 0 and at rank 1)."""
    folder = tmp_path_factory.mktemp("together")
    runs = {name: {"settings": {**RECIPE, **change}} for name, (change, _) in SAME.items()}
    runs |= {name: {"settings": RECIPE, "incident": what} for name, what in INCIDENTS.items()}
    for name, shard in (("one-to-two", False), ("one-to-shard", True)):
        half_of(alone(micro_batch_size=8), folder / name)
        runs[name] = {"settings": {**RECIPE, "micro_batch_size": 8, "shard": shard}, "resume": True}
    timed = {name: value for name, value in RECIPE.items() if name != "steps"}
    runs["minutes"] = {"settings": {**timed, "minutes": 0.01}}
    runs["too small"] = {"settings": {**RECIPE, "batch_size": 1}}
    given = {name: value for name, value in RECIPE.items() if name != "loggers"}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    argv = ["pretrain", f"--corpus={store_folder}", f"--out={folder / 'command'}", *flags]
    runs["command"] = {"argv": argv}
    for name, run in runs.items():
        run |= {"corpus": str(store_folder), "out": str(folder / name)}
    plan = folder / "plan.json"
    plan.write_text(json.dumps(list(runs.values())))
    printed = torchrun(Path(__file__).with_name("two_ranks.py"), plan)
    outcomes = {}
    for number, name in enumerate(runs):
        found = [read_json(plan.with_suffix(f".{number}.{rank}.json")) for rank in range(2)]
        outcomes[name] = folder / name, *found
    return outcomes, printed


def torchrun(*words):
    """What two ranks print."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *map(str, words)], capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done


def tensors(run, step=6):
    checkpoint = RunFolder(run).checkpoints / f"step-{step:08d}"
    return {**weights(checkpoint), **weights(checkpoint, "optimizer.safetensors")}


def assert_same_to_rounding(run, expected, losses=1e-5, flipped=0.0, drawn=0.0):
    """The weights after six steps differ by sums in another order, amplified by Adam's division.

    `flipped`: the share of a tensor's gradients that may be so near 0 that rounding chooses their
    sign, and with it that of a whole step. `drawn`: the same of the token table's, which may be
    drawn by chance.
    """
    for event in ("train", "evaluate"):
        found, wanted = lines(run, event), lines(expected, event)
        assert [line["step"] for line in found] == [line["step"] for line in wanted]
        for name in ("loss", "mlm_loss", "nsp_loss", "grad_norm", "tokens", "padding_ratio"):
            if name in wanted[0]:
                expected_figures = pytest.approx([line[name] for line in wanted], rel=losses)
                assert [line[name] for line in found] == expected_figures, name
    one, other = tensors(run), tensors(expected)
    assert one.keys() == other.keys()
    for name in one:
        off, step = (one[name] - other[name]).abs(), RECIPE["learning_rate"] if flipped else 0.0
        # a key's bias has no gradient but roundings, since a softmax minds no constant
        if name.endswith("key.bias"):
            assert off.max() <= max(2e-4, losses, step * RECIPE["steps"]), name
            continue
        most = max(2e-4, 0.2 * losses)
        share = max(flipped, drawn) if "word_embeddings" in name else flipped
        assert (off > most).float().mean() <= share and off.max() <= max(most, step), name
    states = [RunFolder(path).latest() / "state.json" for path in (run, expected)]
    for state in (found := [read_json(path)["loop"] for path in states]):
        del state["seconds"], state["since_log"]
    assert found[0] == found[1]


@pytest.mark.parametrize("name", SAME)
def test_two_ranks_do_what_one_does(together, alone, name):
    # a weight that differs by a rounding may be rounded to another number of bf16 or int8; and a
    # gradient in bf16 is one of float32 where weights are sharded; a probability of the int8 loss
    # may be drawn to the other of two numbers
    limits = {"bf16": (1e-3, 0.0), "shard, int8": (3e-3, 2e-3, 1e-2)}.get(name, (1e-5, 0.0))
    assert_same_to_rounding(together[0][name][0], alone(**SAME[name][1]), *limits)


def test_the_ranks_had_unequal_numbers_of_masked_tokens(store_folder):
    batch, _ = train_stream(store_folder, PretrainSettings(**RECIPE)).batch(Position(), 16)
    assert batch.masked_weights[:8].sum() != batch.masked_weights[8:].sum()


@pytest.mark.parametrize("name", ["one-to-two", "one-to-shard"])
def test_a_checkpoint_of_one_rank_goes_on_with_two(together, alone, name):
    assert_same_to_rounding(together[0][name][0], alone(micro_batch_size=8))


@pytest.mark.parametrize("name", ["ddp", "shard"])
def test_a_checkpoint_of_two_ranks_goes_on_with_one(together, alone, store_folder, tmp_path, name):
    out = half_of(together[0][name][0], tmp_path / "run")
    pretrain(store_folder, out, resume=True, micro_batch_size=SAME[name][1]["micro_batch_size"])
    assert_same_to_rounding(out, alone(**SAME[name][1]))


def test_with_another_number_of_ranks_threads_are_chosen_anew(alone, store_folder):
    run, store = RunFolder(alone(micro_batch_size=8)), TokenStore.open(store_folder)
    recipe = Recipe(PretrainSettings())
    threads = [resumed_settings(run, recipe, store, None, ranks).threads for ranks in (1, 2)]
    assert threads == [1, None]


def test_nothing_of_a_checkpoint_is_pickled(together):
    files = {path.suffix for path in together[0]["shard"][0].rglob("*") if path.is_file()}
    assert files <= {".json", ".jsonl", ".safetensors", ".txt", ".lock"}


def test_a_signal_to_one_rank_stops_all_at_one_step(together):
    run, *found = together[0]["stopped"]
    assert found == [{"result": None}] * 2
    assert RunFolder(run).latest().name == "step-00000003"  # the step of the signal is the last
    assert "step 3; saved" in lines(run, "message")[-1]["text"]


def test_all_ranks_refuse_a_step_that_is_not_finite_at_one(together):
    run, *found = together[0]["nan"]
    assert [outcome["kind"] for outcome in found] == ["FloatingPointError"] * 2
    assert all("step 4: loss nan" in outcome["error"] for outcome in found)
    assert RunFolder(run).latest().name == "step-00000004"


def test_a_budget_of_minutes_ends_at_one_step(together):
    found = [outcome["result"] for outcome in together[0]["minutes"][1:]]
    assert found[0] == found[1] and found[0]["seconds"] >= 0.6


def test_results_are_the_same_on_all_ranks(together):
    run, *found = together[0]["ddp"]
    assert found[0] == found[1] == {"result": read_json(run / "result.json")}
    record = read_json(run / "run.json")
    assert record["machine"]["ranks"] == 2 and record["machine"]["threads"] == 1


def test_all_ranks_refuse_what_cannot_be_cut(together):
    for outcome in together[0]["too small"][1:]:
        assert outcome["error"].startswith("batch_size = 1: too few for 2 ranks")


def test_one_rank_speaks_for_all(together):
    _, *found = together[0]["command"]
    assert found == [{"code": 0}] * 2
    printed = together[1]
    assert printed.stdout.count("6 steps") == 1
    assert printed.stdout.count("held-out MLM loss") == 1
