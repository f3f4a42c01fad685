"""The memory that `pretrain` fetches ahead of its first step."""

import pytest

from bertsmith.cli.pretrain import HEADS, TOKEN_BYTES, WEIGHT_BYTES, Pretrain, _first_memory
from bertsmith.training.pretraining.settings import PretrainSettings

WEIGHTS = WEIGHT_BYTES * (12 * (4 * 768 * 768 + 2 * 768 * 3072) + HEADS * 768 * 768)
ROW = TOKEN_BYTES * 12 * 768 * 128
FIRST_STEP = WEIGHTS + 32 * ROW


@pytest.fixture(autouse=True)
def one_process_without_a_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr("bertsmith.cli.pretrain.GRAPHICS", [tmp_path / "absent"])
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def fetched(corpus=("no-store",), settings=None, **flags):
    recipe = PretrainSettings(size="base", steps=1, **(settings or {}))
    return _first_memory(Pretrain(corpus=list(corpus), **flags), recipe)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, FIRST_STEP),
        ({"batch_size": 256}, FIRST_STEP),  # what a core has at once
        ({"micro_batch_size": 8}, FIRST_STEP - 24 * ROW),
        ({"activation_checkpointing": True}, WEIGHTS),
        ({"micro_batch_size": "auto"}, 0),  # it looks at what is free
    ],
    ids=str,
)
def test_of_a_new_model_on_a_processor(settings, expected):
    assert fetched(settings=settings) == expected


@pytest.mark.parametrize("flags", [{"model": "model"}, {"resume": True}], ids=str)
def test_none_for_a_model_that_is_there(flags):
    assert fetched(["store"], **flags) == 0


def test_none_for_one_of_several_ranks(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert fetched() == 0


def test_none_beside_a_gpu_unless_the_cpu_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr("bertsmith.cli.pretrain.GRAPHICS", [tmp_path / "absent", tmp_path])
    assert fetched() == 0
    assert fetched(settings={"device": "cpu"}) == FIRST_STEP


def test_the_stores_pieces_have_rows(tmp_path):
    (tmp_path / "vocab.txt").write_text("one\ntwo\nthree\n")
    for corpus in ([f"{tmp_path}=0.7", "other=0.3"], [str(tmp_path)]):
        assert fetched(corpus) == FIRST_STEP + WEIGHT_BYTES * 3 * 768
