"""A run's task: its start, its rows at once, a rank's share, two lengths, memory that ran out."""

import os
import signal
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bertsmith.base.files import read_json_lines
from bertsmith.checkpoints.run_folder import RunFolder
from bertsmith.corpus.examples.mixture import Mixture, open_stream
from bertsmith.corpus.examples.stream import Position
from bertsmith.corpus.store.store import TokenStore
from bertsmith.model.config import config_for
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.training.engine import Engine
from bertsmith.training.loop.step import not_finite
from bertsmith.training.pretraining import task as task_module
from bertsmith.training.pretraining.diagnostics import replay
from bertsmith.training.pretraining.run import pretrain
from bertsmith.training.pretraining.settings import PretrainSettings, read_recipe
from bertsmith.training.pretraining.task import Pretraining, rows_per_forward, start_model
from bertsmith.training.ranks import Ranks

from ..runs import (
    RECIPE,
    Killed,
    assert_same_run,
    at_step,
    before_steps,
    killed_at,
    lines,
    loop_state,
    messages,
    random_model,
)

BASE = config_for("base", 8000)
TWO_PHASES = PretrainSettings(**{
    **RECIPE, "max_length": 24, "steps": 20, "checkpoint_every": 4, "log_every": 2,
    "phase2_length": 48, "phase2_ratio": 0.3, "phase2_batch_size": 8,
})  # fmt: skip


@pytest.fixture(scope="module")
def two_phases(store_folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("phases") / "whole"
    pretrain(store_folder, out, TWO_PHASES)
    return out


def test_the_second_phase_has_its_length_and_share(two_phases):
    found = lines(two_phases)
    assert [line["phase"] for line in found] == [1] * 7 + [2] * 3  # 14 of 20 steps
    assert "phase 2 from step 14 on: length 48, batch 8" in messages(two_phases)
    assert found[7]["epoch"] == 0 and found[6]["tokens"] == 14 * 16 * 24  # rows are full
    # the schedule runs through: the rate falls by the same amount from line to line
    falls = -np.diff([line["learning_rate"] for line in found[1:]])
    assert falls == pytest.approx([falls[0]] * len(falls))
    state = loop_state(two_phases)
    position = state["position"]
    assert (state["phase"], position["epoch"], position["index"]) == (2, 0, 6 * 8)


def test_a_second_phase_without_a_step_is_told_of(train, two_phases, capsys):
    says = "phase 2 has no step: give a longer budget, or a larger phase2_ratio"
    run = train(base=TWO_PHASES, steps=3)
    assert says in messages(run.folder) and says not in messages(two_phases)
    assert f"warning: {says}" in capsys.readouterr().err.splitlines()


@pytest.mark.parametrize("step", [6, 14, 17], ids=["first", "between", "second"])
def test_a_killed_run_resumes_bit_for_bit_in_its_phase(
    train, tmp_path, two_phases, monkeypatch, step
):
    with monkeypatch.context() as patch, pytest.raises(Killed):
        killed_at(step, patch)
        train(base=TWO_PHASES)
    assert loop_state(tmp_path / "run")["phase"] == (2 if step > 16 else 1)
    assert_same_run(two_phases, train(base=TWO_PHASES, resume=True).folder)


def test_a_signal_in_the_last_step_of_a_phase_is_heeded(train, tmp_path, two_phases, monkeypatch):
    with monkeypatch.context() as patch:
        at_step(13, patch, lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert not train(base=TWO_PHASES).finished
    assert RunFolder(tmp_path / "run").latest().name == "step-00000014"
    assert_same_run(two_phases, train(base=TWO_PHASES, resume=True).folder)


def test_a_bad_first_step_of_the_second_phase_is_replayed_there(
    train, store_folder, tmp_path, monkeypatch
):
    def poison(run, batch):
        if run.state.step == 14:
            raise not_finite(run.state, float("nan"), 0.0)

    with monkeypatch.context() as patch, pytest.raises(FloatingPointError, match="phase 2"):
        before_steps(patch, poison)
        train(base=TWO_PHASES)
    found = replay(store_folder, tmp_path / "run", TWO_PHASES)
    assert (found.step, found.phase, found.position, found.rows) == (14, 2, Position(0, 0), 8)


def test_the_two_streams_have_different_orders_and_masks(train, monkeypatch):
    batches = []
    before_steps(monkeypatch, lambda run, batch: batches.append(batch.micro_batches[0]["ids"]))
    train(base=TWO_PHASES, batch_size=8)
    # 14 steps of one micro-batch, then each of two, of half the rows
    assert [ids.shape for ids in (batches[0], batches[14])] == [(8, 24), (4, 48)]
    assert not (batches[0][:4, 1:] == batches[14][:, 1:24]).all(1).any()


def test_a_run_of_one_phase_says_nothing_of_phases(train):
    run = train(steps=4).folder
    assert all("phase" not in line for line in read_json_lines(run / "log.jsonl"))
    assert RunFolder(run).latest() is not None


def cores(count, ranks=1):
    return Engine(torch.device("cpu"), "bf16", count, Ranks(0, size=ranks))


def rows_at_once(recipe, engine, config=BASE):
    """Of each phase."""
    return [rows_per_forward(recipe, phase, engine, config) for phase in recipe.phases()]


def test_a_longer_row_takes_fewer_at_once():
    whole = replace(TWO_PHASES, batch_size=16, phase2_batch_size=None)
    assert rows_at_once(replace(whole, micro_batch_size=8), cores(1)) == [8, 4]
    assert rows_at_once(whole, cores(1)) == [16, 8]
    # 3 workers: 6 rows each, then half of them, evenly cut
    assert rows_at_once(whole, cores(3)) == [6, 3]


def test_without_a_word_a_core_takes_its_share_in_parts_and_a_gpu_the_batch():
    paper = read_recipe("paper")
    assert paper.micro_batch_size is None
    assert [rows_at_once(paper, cores(count)) for count in (1, 2, 8)] == [[32, 8]] * 3
    assert rows_at_once(paper, cores(16)) == [16, 4]  # its share
    assert rows_at_once(paper, cores(2), config_for("mini", 8000)) == [128, 32]  # little: whole
    assert rows_at_once(paper, Engine(torch.device("cuda"), "bf16", 8)) == [256, 64]
    # two pieces for each core, not three for both
    assert rows_at_once(PretrainSettings(batch_size=80), cores(2)) == [20]
    assert rows_at_once(PretrainSettings(batch_size=2, max_length=8192), cores(1)) == [1]


def test_micro_batches_are_those_of_one_rank_that_makes_as_many():
    four = PretrainSettings(batch_size=32, micro_batch_size=4)
    assert rows_at_once(four, cores(1)) == rows_at_once(four, cores(1, ranks=2)) == [4]
    free = PretrainSettings(batch_size=32)
    assert rows_at_once(free, cores(4)) == rows_at_once(free, cores(2, ranks=2)) == [8]


@pytest.mark.parametrize(("batch", "stores"), [(16, 1), (15, 1), (16, 2)])
def test_the_ranks_make_the_rows_of_one_batch(store_folder, batch, stores):
    settings = PretrainSettings(size="2x64", max_length=48, batch_size=batch, steps=1)
    store = TokenStore.open(store_folder)
    corpus = store if stores == 1 else Mixture([store, store], [3, 1])
    vocabulary = store.tokenizer.vocabulary
    stream = open_stream(corpus.train, vocabulary, settings.examples(48), 1)
    model = random_model(len(vocabulary), deviation=0.02)
    # of the epoch: some rows of the batch lie behind its end
    near_the_end = stream.advance(Position(), stream.streams[0].examples_in_epoch(0) - 6)

    def made(*ranks):
        engine = Engine(torch.device("cpu"), "float32", 1, *ranks)
        return Pretraining(model, stream, None, settings, engine).batch(near_the_end)

    whole, following = made()
    parts = [made(Ranks(rank, size=3)) for rank in range(3)]
    assert [part[1] for part in parts] == [following] * 3
    assert sum(part[0].counts["masked"] for part in parts) == whole.counts["masked"]
    assert sum(part[0].counts["rows"] for part in parts) == batch
    assert sum(part[0].tokens for part in parts) == whole.tokens
    assert [part[0].first for part in parts] == [0, 1, 2]  # of one micro-batch each
    for name in ("ids", "lengths", "labels", "next"):
        found = np.concatenate([micro[name] for part in parts for micro in part[0].micro_batches])
        assert np.array_equal(found, whole.micro_batches[0][name]), name


def test_a_second_phase_of_fewer_rows_than_ranks_is_named():
    settings, engine = replace(TWO_PHASES, phase2_batch_size=2), cores(1, ranks=3)
    with pytest.raises(ValueError, match="^phase2_batch_size = 2: too few for 3 ranks: raise it"):
        Pretraining(random_model(50), None, None, settings, engine, settings.phases()[1])


@pytest.mark.parametrize(
    ("length", "by_rows", "dropout", "deals"),
    [(256, False, 0.1, True), (128, True, 0.0, True), (128, True, 0.1, False)],
)
def test_rows_are_dealt_so_that_micro_batches_have_like_numbers_of_tokens(
    store_folder, monkeypatch, length, by_rows, dropout, deals
):
    """Short ones where attention reads rows, and no mask hangs on a row's place."""
    monkeypatch.setattr(task_module, "has_row_attention", lambda *given: by_rows)
    settings = PretrainSettings(
        size="2x64", max_length=length, batch_size=16, steps=1, bag_of_words=0.1, dropout=dropout,
        objective="mlm+nsp", nsp_sampling="paper", short_seq_prob=0.5, micro_batch_size=4,
    )  # fmt: skip
    store = TokenStore.open(store_folder)
    vocabulary = store.tokenizer.vocabulary
    stream = open_stream(store.train, vocabulary, settings.examples(length), 1)
    model = random_model(len(vocabulary), deviation=0.02)

    def micro(device, rows=4):
        engine, own = (
            Engine(torch.device(device), "float32", 1),
            replace(settings, micro_batch_size=rows),
        )
        return Pretraining(model, stream, None, own, engine).batch(Position())[0].micro_batches

    dealt, kept = micro("cpu"), micro("meta")
    single = [int(part["lengths"][0]) for part in micro("cpu", 1)]  # as a replay looks at them
    assert single == np.concatenate([part["lengths"] for part in kept]).tolist()
    assert all(len(part["ids"]) == 4 for part in dealt)

    def tokens(parts):
        return [int(part["lengths"].sum()) for part in parts]

    assert sum(tokens(dealt)) == sum(tokens(kept))
    if not deals:
        assert tokens(dealt) == tokens(kept)
        return
    assert max(tokens(dealt)) - min(tokens(dealt)) < (max(tokens(kept)) - min(tokens(kept))) / 2

    def rows(parts):
        """Each row with all that belongs to it."""
        names = ("ids", "types", "lengths", "positions", "next", "words")
        return sorted(
            b"".join(part[name][row].tobytes() for name in names)
            for part in parts
            for row in range(4)
        )

    assert rows(dealt) == rows(kept)
    for part in dealt:  # the labels are of the slots in the rows' order
        row, slot = np.divmod(part["masked"], part["positions"].shape[1])
        places = part["positions"][row, slot]
        assert np.array_equal(part["words"][row, places], part["labels"])


def test_a_local_start_knows_how_often_each_piece_occurs(store_folder, settings):
    tokenizer, counts = Tokenizer.from_pretrained(store_folder), np.arange(100, 0, -1)
    counts = np.resize(counts, len(tokenizer.vocabulary))
    model = start_model(tokenizer, settings, None, counts)
    shares = model.mlm.bias.softmax(0).detach().numpy()
    assert shares == pytest.approx((counts + 1) / (counts + 1).sum(), rel=1e-5)
    paper = replace(settings, init_scheme="paper")
    assert not start_model(tokenizer, paper, None, counts).mlm.bias.any()


def test_pieces_that_are_no_words_look_for_no_equal(store_folder, settings):
    tokenizer = Tokenizer.from_pretrained(store_folder)
    model = start_model(tokenizer, replace(settings, size="1x64x4"), None)
    empty = (model.encoder.embeddings.token.weight == 0).sum(dim=1)
    special = [tokenizer.vocabulary.pieces.index(f"[{name}]") for name in ("CLS", "SEP", "MASK")]
    assert empty[special].tolist() == [32] * 3  # the dimensions of two heads
    assert empty.count_nonzero() == 5


ROWS, LENGTH = "lower `micro_batch_size` (now 32)", "lower `max_length` (now 512)"
ANEW, SIZE = "add `activation_checkpointing=True`", "take a smaller `size` (now base)"
LEAST = {"rows": 1, "activation_checkpointing": True}
PHASE_2 = "lower `phase2_length` (now 512)"


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({}, f"{ROWS}, {LENGTH}, {ANEW}, or {SIZE}"),
        (LEAST, f"{LENGTH}, or {SIZE}"),
        # phase 2, with a base model
        ({**LEAST, "sized": False, "phase": 2}, PHASE_2),
        # 8 rows of 512, for which 32 of 128 are to be lowered
        ({"rows": 8, "begun": True, "phase": 2, "max_length": 128}, f"{ROWS}, or {ANEW}"),
        ({"begun": True}, f"{ROWS}, or {ANEW}"),
        ({**LEAST, "begun": True}, "no setting of this run lowers it"),
    ],
    ids=["all", "least", "phase 2", "rows of phase 2", "fixed", "none"],
)
def test_out_of_memory_names_the_settings(changes, remedy):
    now = {"rows": 32, "phase": 1, "activation_checkpointing": False, "sized": True, "begun": False}
    now |= {"max_length": 512, **changes}
    task = SimpleNamespace(
        rows_per_forward=now["rows"],
        phase=SimpleNamespace(number=now["phase"], length=512),
        settings=SimpleNamespace(
            size="base",
            max_length=now["max_length"],
            activation_checkpointing=now["activation_checkpointing"],
        ),
    )

    def line(error):
        return Pretraining.out_of_memory(task, error, now["sized"], now["begun"])

    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**60)
    on_a_gpu = torch.OutOfMemoryError("CUDA out of memory.")
    for error in (on_a_gpu, MemoryError(), raised.value):
        assert line(error) == f"out of memory: {remedy}"
    assert line(RuntimeError("shape mismatch")) is None
