"""The inference benchmark: the driver with our own system, its figures, and its page."""

import numpy as np
import pytest

from bertsmith.base.files import read_json

from ..tiny import write, write_model


@pytest.fixture
def model(tmp_path):
    """A folder with "hf", as `--models` takes one."""
    write_model(tmp_path / "tiny" / "hf", ["a good film"], max_positions=512)
    return tmp_path / "tiny"


@pytest.fixture
def data(tmp_path):
    """SST-2 of few sentences."""
    for name in ("dev", "train"):
        lines = [f"{'a good film ' * (k % 5 + 1)}\t1" for k in range(12)]
        write(tmp_path / f"data/glue/SST-2/{name}.tsv", ["sentence\tlabel", *lines])
    return tmp_path / "data"


@pytest.mark.slow  # it compiles, and measures the processor's peaks
def test_our_own_system_takes_its_turns(run_main, model, data, tmp_path, module, capsys):
    words = ("--models", model, "--data", data, "--out", tmp_path / "out", "--turns", 2)
    run_main("inference", *words, "--systems", "bertsmith, float32", "fastembed")
    kind = module("inference_report").kind_of_processor()
    [result] = read_json(tmp_path / "out" / f"{kind}.json")["results"]
    row = result["systems"]["bertsmith, float32"]
    assert result["count"] == 12
    assert result["tokens"] == sum(3 * (k % 5 + 1) + 2 for k in range(12))
    assert set(row["texts_per_second"]) == {"batch 1", "batch 8", "batch 32", "offline"}
    assert all(len(turns) == 2 for turns in row["turns"].values())
    assert row["cosine"] == [1.0, 1.0] and row["memory_mb"] > 50
    assert result["left_out"] == {"fastembed": "its environment is not prepared"}
    page = (tmp_path / "out" / f"{kind}.md").read_text()
    assert "## tiny, sst2: 12 texts" in page and "fastembed: its environment" in page
    assert str(tmp_path) not in page  # a page names no folder of this machine
    run_main("inference", *words, "--systems", "none", "--texts", "wikitext")
    assert "wikitext: --data has none: left out" in capsys.readouterr().err


def test_preparing_needs_a_folder(run_main):
    with pytest.raises(SystemExit, match="--peers DIR"):
        run_main("inference", "--prepare")


def test_rows_that_are_padded_come_back_in_the_order_of_the_texts(module, monkeypatch):
    peers = module("inference_peers")
    monkeypatch.setattr(peers, "BATCH", 2)

    class Tokenizer:
        def encode_batch_fast(self, texts):
            return [type("Row", (), {"ids": [ord(c) for c in text]}) for text in texts]

    padded = object.__new__(peers.Padded)
    padded.tokenizer, padded.pool = Tokenizer(), None
    padded.compute = lambda ids, mask: np.stack([ids.sum(axis=1), mask.sum(axis=1)], axis=1)
    texts = ["a", "bcd", "ef", "g", "hijkl"]
    expected = [[sum(map(ord, text)), len(text)] for text in texts]
    assert padded.all(texts).tolist() == padded.call(texts).tolist() == expected


def test_ratios_are_those_of_the_turns_that_both_had(module):
    def system(precision, *rates):
        turns = {str(k): rate for k, rate in enumerate(rates) if rate}
        modes = module("inference_report").MODES
        found = {mode: max(turns.values()) for mode in modes}
        return {
            "precision": precision,
            "texts_per_second": found,
            "turns": {mode: turns for mode in modes},
        }

    systems = {
        "bertsmith, int8": system("int8", 10, 30, 40),
        "slow": system("bf16", 5, 0, 10),  # of the turns 0 and 2
        "slower": system("int8", 1, 1, 1),
        "fast": system("float32", 99, 99, 99),  # of another precision
    }
    line = module("inference_report").ratios(systems)
    assert "offline **3.00x** of slow;" in line and "of fast" not in line


@pytest.mark.slow
def test_a_system_that_loads_too_long_is_left_out(
    module, run_main, model, data, tmp_path, monkeypatch
):
    monkeypatch.setattr(module("inference"), "LOADING", 0.01)
    words = ("--models", model, "--data", data, "--out", tmp_path / "out", "--turns", 1)
    run_main("inference", *words, "--systems", "bertsmith, float32")
    [result] = read_json(next((tmp_path / "out").glob("*.json")))["results"]
    assert result["left_out"] == {"bertsmith, float32": "not loaded in 0.01 s"}
