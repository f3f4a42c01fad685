"""The pre-training benchmarks: who takes turns with whom, and their pages; nothing is measured."""

import itertools
from pathlib import Path

import pytest

from bertsmith.base.files import read_json
from bertsmith.cli.flags import read_command
from bertsmith.cli.train import Pretrain

from .conftest import BENCHMARKS

FAST, NO_INT8, RECIPE = (
    "bertsmith, fast",
    "bertsmith, fast, without int8",
    "bertsmith, the recipe fast",
)
MASKED_HEAD = [
    "transformers, masked head, dropout 0",
    "transformers, masked head, kept memory, dropout 0",
    "transformers, masked head, kept memory, compiled, dropout 0",
]


@pytest.fixture
def compare(module, monkeypatch):
    """`compare` of systems that do not run, each turn faster than the last; and what they did."""
    pretrain, rates, done = module("pretrain"), itertools.count(1), []

    class System(pretrain.System):
        def __init__(self, name, *words):
            done.append(f"open {name}")
            self.name, self.steps, self.memory_mb, self.rates = name, 1, 3000, []
            self.facts = {"tokens": 1000.0, "first_step_seconds": 1.0}

        def wait(self):
            pass

        def turn(self):
            done.append(f"turn {self.name}")
            return 1000.0 / next(rates)

        def close(self):
            done.append(f"close {self.name}")

    monkeypatch.setattr(pretrain, "System", System)
    monkeypatch.setattr(pretrain, "measure_peak", lambda *_, **options: 1e9)
    engine = pretrain.choose_engine("cpu", "float32", 1)
    return lambda size: pretrain.compare(Path("store"), size, 128, 2, engine), done


def page(pretrain, *results):
    about = {"threads": 1, "torch": "2"}
    record = {"command": "", "date": "", "machine": about, "transformers": "5"}
    return pretrain.table({**record, "results": results})


def test_at_base_size_two_groups_take_turns_one_after_the_other(module, compare):
    pretrain = module("pretrain")
    run, done = compare
    result = run("base")
    second = [FAST, NO_INT8, RECIPE, *MASKED_HEAD]
    first = [name for name in pretrain.SYSTEMS if name not in second[1:]]
    expected = []
    for group in (first, second):
        expected += [f"open {name}" for name in group]
        expected += [f"turn {name}" for name in group * 2]
        expected += [f"close {name}" for name in group]
    assert done == expected
    assert result["systems"][FAST]["rounds"] == [1, 7]
    assert result["second_group"][FAST]["rounds"] == [13, 19]
    # 13 / 18 and 19 / 24: of the rounds of one group, whose last system is the fastest
    least = (13 / 18 + 19 / 24) / 2
    assert pretrain.ratio(result, FAST, MASKED_HEAD[-1]) == pytest.approx(least)
    # but 1 / 6 and 7 / 12, of the first group, are less
    assert pretrain.fastest_peer(result) == "transformers, compiled, dropout 0"
    text = page(pretrain, result)
    assert f"peer: transformers, compiled, dropout 0. Ratios: {FAST} / trans" in text
    assert f"{FAST} / {NO_INT8} **" in text
    rows = [line.split(" | ")[0].strip("| ") for line in text.splitlines() if " 3,000 " in line]
    assert rows == first + second
    assert f"| {FAST} | 4 |" in text and f"| {FAST} | 16 |" in text  # medians of either group


def test_at_other_sizes_all_take_turns(module, compare):
    run, _ = compare
    result = run("tiny")
    assert list(result["systems"]) == list(module("pretrain").SYSTEMS)
    of_before = {name: value for name, value in result.items() if name != "second_group"}
    assert page(module("pretrain"), of_before) == page(module("pretrain"), result)


def test_the_masked_head_has_the_loss_of_all_positions(module, tmp_path):
    transformers, systems = pytest.importorskip("transformers"), module("pretrain_systems")
    systems.make_store(tmp_path / "store")
    settings = systems.PretrainSettings(max_length=32, steps=1, nsp_sampling="paper")
    batch = systems.their_batch(systems.open_stream(tmp_path / "store", settings), 0, 4)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(vocab_size=systems.PIECES, **shape, intermediate_size=16)
    model = transformers.BertForPreTraining(config).eval()
    whole, part = (
        loss(model, batch).item() for loss in (systems.whole_loss, systems.masked_head_loss)
    )
    assert part == pytest.approx(whole, rel=1e-5)  # sums in another order


@pytest.mark.parametrize("path", sorted((BENCHMARKS / "results/pretrain").glob("*.json")))
def test_the_page_is_that_of_the_results(module, path):
    text = path.with_suffix(".md").read_text(encoding="utf-8")
    assert module("pretrain").table(read_json(path)) == text


def test_first_steps_measured_before_are_kept(module, run_main, monkeypatch, tmp_path):
    script, asked = module("first_step"), []

    def measured(store, size, batch):
        asked.append((store.name, size, batch))
        return float(len(asked))

    monkeypatch.setattr(script, "seconds_to_first_step", measured)
    monkeypatch.setattr(script, "measure_peak", lambda engine: 1e9)

    def run(*words):
        run_main("first_step", tmp_path / "store", "--out", tmp_path, *words)
        return read_json(tmp_path / "first_step.json")

    first = run("--sizes", "tiny", "base", "--batch", "8")
    assert asked == [("store", "tiny", 8)] * 4 + [("store", "base", 8)] * 4
    # the first of each is not counted
    assert [row["rounds"] for row in first["results"]] == [[2, 3, 4], [6, 7, 8]]
    assert str(tmp_path) not in (tmp_path / "first_step.json").read_text()
    again = run("--sizes", "base", "--batch", "8", "--rounds", "1")
    assert again["results"][0] == first["results"][0]
    assert [row["rounds"] for row in again["results"][1:]] == [[10]]
    text = (tmp_path / "first_step.md").read_text()
    assert "| tiny | 8 | 3 | **3.0 s** | 2.0, 3.0, 4.0 |" in text
    assert "| base | 8 | 1 | **10.0 s** | 10.0 |" in text
    run("--sizes", "base", "--rounds", "1")  # other rows
    assert (tmp_path / "first_step.md").read_text().count("| base |") == 2


def test_the_busy_neighbours_command_is_one(module, monkeypatch, tmp_path):
    script, asked = module("busy_neighbour"), []

    def stopped(words, **options):
        asked.extend(words)
        raise InterruptedError

    monkeypatch.setattr(script.subprocess, "run", stopped)
    with pytest.raises(InterruptedError):
        script.run(tmp_path / "store", 4, tmp_path / "kernels")
    *_, name = asked[:4]
    settings = read_command(Pretrain, name, asked[4:])
    assert (settings.size, settings.minutes) == (script.QUICKSTART.size, 4)
    assert settings.learning_rate == script.QUICKSTART.learning_rate
