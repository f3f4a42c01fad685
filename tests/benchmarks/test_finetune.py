"""The fine-tuning benchmark: its data, the peer's windows and answers, its rules, a toy run."""

import doctest
import json
import lzma
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from bertsmith.checkpoints.model_folder import save_model
from bertsmith.model.config import config_for
from bertsmith.model.heads import PreTrainingModel
from bertsmith.model.initialization import initialize
from bertsmith.tasks.squad.files import read_questions
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.text.tokenizer.wordpiece import SPECIAL, Vocabulary

from ..tiny import write
from .conftest import BENCHMARKS

WORDS = ["who", "sat", "on", "the", "mat", "a", "big", "cat", "##s", "dog", "ran", "good", "bad"]


@pytest.fixture
def model(tmp_path):
    tokenizer = Tokenizer(Vocabulary([*SPECIAL, *WORDS]))
    config = config_for("2x64", len(tokenizer.vocabulary), max_positions=400)
    start = initialize(PreTrainingModel(config), 0.1, torch.Generator().manual_seed(1))
    save_model(start, tokenizer, tmp_path / "model")
    return tmp_path / "model"


def question(identity, context, answer, impossible=False):
    answers = [] if impossible else [{"text": answer, "answer_start": context.index(answer)}]
    return {"id": identity, "question": "who sat", "answers": answers, "is_impossible": impossible}


def article(title, count):
    context = "the dog ran a big cat sat on the mat"
    questions = [question(f"{title}{k}", context, "a big cat") for k in range(count)]
    return {"title": title, "paragraphs": [{"context": context, "qas": questions}]}


@pytest.fixture
def source(tmp_path):
    """A small copy of the data sets' layout."""
    root = tmp_path / "data"
    for name, count in (("train", 40), ("dev", 10)):
        rows = [
            f"the cat{'s' * (k % 2)} sat {('bad', 'good')[k % 2]}\t{k % 2}" for k in range(count)
        ]
        write(root / "glue" / "SST-2" / f"{name}.tsv", ["sentence\tlabel", *rows])
    for version, name, counts in (
        ("v1.1", "train-v1.1.json.xz", [2, 3]),
        ("v1.1", "dev-v1.1.json", [2]),
        ("v2.0", "dev-v2.0.json", [1] * 35),
    ):
        value = {"data": [article(f"{version}-{name}-{k}-", n) for k, n in enumerate(counts)]}
        data = json.dumps(value).encode()
        path = root / "squad" / version / name
        write(path, lzma.compress(data) if path.suffix == ".xz" else data)
    write(root / "multichoice-extra" / "codah.tsv", ["o\tthe\ta\tbig\tcat\tdog\t0"])
    return root


@pytest.mark.parametrize("name", ["finetune", "finetune_data", "finetune_table"])
def test_the_worked_examples(module, name):
    result = doctest.testmod(module(name))
    assert result.attempted and not result.failed


def test_data_is_cut_and_kept(module, source, tmp_path):
    prepare = module("finetune_data").prepare
    folder = prepare("sst2", source, tmp_path / "work", 8, 5)
    train = (folder / "train.tsv").read_text().splitlines()
    whole = (source / "glue/SST-2/train.tsv").read_text().splitlines()
    assert train == [whole[0], *whole[1::5]]
    assert len((folder / "dev.tsv").read_text().splitlines()) == 6
    (folder / "train.tsv").write_text("kept")
    assert (prepare("sst2", source, tmp_path / "work", 8, 5) / "train.tsv").read_text() == "kept"
    codah = prepare("codah", source, tmp_path / "work")
    assert [file.name for file in codah.iterdir()] == ["codah.tsv"]
    with pytest.raises(ValueError, match="unknown data 'x': known are cola"):
        prepare("x", source, tmp_path / "work")


def test_squad_is_cut_by_questions_and_by_articles(module, source, tmp_path):
    prepare = module("finetune_data").prepare
    folder = prepare("squad1", source, tmp_path / "work", 3)
    assert len(read_questions(folder / "train.json")) == 3
    assert len(read_questions(folder / "dev.json")) == 2
    folder = prepare("squad2", source, tmp_path / "work", 3, 4)
    files = [read_questions(folder / f"{name}.json") for name in ("train", "dev", "test")]
    assert [len(questions) for questions in files] == [3 + 20, 5, 4]
    assert not set(files[1].ids) & {*files[0].ids, *files[2].ids}
    assert files[1].ids[0].startswith("v2.0-dev-v2.0.json-20-")
    assert files[2].ids[0].startswith("v2.0-dev-v2.0.json-25-")


def test_the_peer_learns_the_words_of_the_answer(module, model, tmp_path):
    peer = module("finetune_peer")
    pytest.importorskip("accelerate")
    context = " ".join(["the dog ran"] * 60 + ["a big cats sat"] + ["on the mat"] * 60)
    questions = [question("1", context, "big cats"), question("2", context, "", impossible=True)]
    value = {"data": [{"paragraphs": [{"context": context, "qas": questions}]}]}
    found = read_questions(write(tmp_path / "questions.json", json.dumps(value)))
    tokenizer = peer.transformers.AutoTokenizer.from_pretrained(model)
    rows, owners, offsets = peer.windows(found, tokenizer, 300)
    assert owners == [0, 0, 1, 1] and all(len(row["input_ids"]) <= 300 for row in rows)
    spans = [(row["start_positions"], row["end_positions"]) for row in rows]
    assert spans[2:] == [(0, 0), (0, 0)] and any(spans[:2])
    for row, (first, last), places in zip(rows[:2], spans[:2], offsets[:2], strict=True):
        if last:
            pieces = tokenizer.convert_ids_to_tokens(row["input_ids"][first : last + 1])
            assert pieces == ["big", "cat", "##s"]
            assert context[places[first, 0] : places[last, 1]] == "big cats"
    shown = {tuple(place) for places in offsets[:2] for place in places if place[0] >= 0}
    assert len(shown) == 60 * 3 + 5 + 60 * 3  # every token of the context, "cats" being two


def test_the_best_span_is_the_best_of_all(module):
    best_span = module("finetune_peer").best_span
    random = np.random.default_rng(1)
    for size in (3, 12, 18):  # as many starts and ends as are looked at: nothing is passed over
        starts, ends = random.normal(size=(2, size + 2))  # two of padding
        offsets = np.stack([np.arange(size), np.arange(size) + 1], axis=1)
        offsets[:2] = -1
        spans = [(starts[i] + ends[j], i, j + 1) for i in range(2, size) for j in range(i, size)]
        assert best_span(starts, ends, offsets) == pytest.approx(max(spans))
    assert best_span(starts, ends, np.full((18, 2), -1)) is None


def test_an_unfinished_table_goes_on(module):
    table = module("finetune_table")
    rest = list(table.missing({"rows": {}}, ["mrpc"]))
    assert rest == [
        *(("mrpc", "bertsmith", seed) for seed in range(1, 6)),
        *(("mrpc", "trainer, best", seed) for seed in range(1, 4)),
    ]
    found = {"bertsmith": {"1": {}, "3": {}}, "trainer, best": {"2": {}}}
    record = {"rows": {"mrpc": {"setting": table.told(table.ROWS["mrpc"]), **found}}}
    assert [seed for _, _, seed in table.missing(record, ["mrpc"])] == [2, 4, 5, 1, 3]
    record = {"rows": {"mrpc": {"setting": "others", **found}}}
    assert list(table.missing(record, ["mrpc"])) == rest


def test_the_rows_are_those_of_the_bars(module):
    rows = module("finetune_table").ROWS
    seeds = {name: (row.seeds, row.trainer) for name, row in rows.items()}
    assert seeds["mrpc"] == (5, 3)
    assert all(seeds[name] == (5, 1) for name in ("rte", "stsb", "cola"))
    assert seeds["sst2"] == seeds["mnli"] == (3, 1)
    assert seeds["qqp"] == seeds["qnli"] == (3, 3)  # one of the Trainer's did not settle the rule
    sizes = [rows[name].setting.examples for name in ("sst2", "mnli", "qqp", "qnli", "squad1")]
    assert sizes == [20_000, 9_000, 9_000, 10_000, 10_000]
    assert {"squad1", "squad2", "ner", "ner-sentences", "codah"} < rows.keys()
    stable = [name for name, row in rows.items() if not row.setting.epochs]
    assert [seeds[name][0] for name in stable] == [20, 10, 10]
    assert rows["rte-made-to-collapse"].setting.rate == 1e-3


def test_what_another_process_wrote_stays(module, tmp_path, monkeypatch):
    table, path = module("finetune_table"), tmp_path / "finetune_table.json"
    table.add(path, "rte", "bertsmith", 1, run_of(0.8))
    table.add(path, "mrpc", "bertsmith", 2, run_of(0.7))
    table.add(path, "rte", "bertsmith", 2, run_of(0.9))
    found = json.loads(path.read_text())["rows"]
    seeds = {name: list(row["bertsmith"]) for name, row in found.items()}
    assert seeds == {"rte": ["1", "2"], "mrpc": ["2"]}
    page = path.with_suffix(".md").read_text()
    assert page.index("| mrpc |") < page.index("| rte |")  # as in ROWS
    changed = replace(table.ROWS["rte"], flags=("--focal", "2"))
    monkeypatch.setitem(table.ROWS, "rte", changed)
    table.add(path, "rte", "bertsmith", 3, run_of(0.9))
    assert list(json.loads(path.read_text())["rows"]["rte"]["bertsmith"]) == ["3"]


def run_of(score, constant=False):
    figures = {"metrics": {"f1": score, "accuracy": score - 0.1}, "is_constant": constant}
    restarts = ["one answer"] * constant
    return {**figures, "restarts": restarts, "tests": {"test.json": {"f1": 0.5}}}


def test_the_table_says_means_spread_and_the_rule(module):
    table = module("finetune_table")
    ours = {"1": run_of(0.80), "2": run_of(0.82), "3": run_of(0.30, constant=True)}
    rows = {
        "mrpc": {"bertsmith": {"1": run_of(0.88)}, "trainer, best": {"1": run_of(0.90)}},
        "rte": {"bertsmith": ours},
    }
    page = table.page({"rows": rows})
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines()]
    mrpc = next(line for line in lines if line and line[0] == "mrpc")
    assert mrpc[2:6] == ["f1", "88.0 +- 0.0 (1)", "90.0 +- 0.0 (1)", "NO"]
    assert mrpc[6].startswith("88.9")
    assert ["rte", "3", "1", "1", "30.0", "82.0", "one answer"] in lines
    assert "- mrpc, test.json, seed 1: f1 50.0\n" in page


def test_speeds_are_compared_on_one_kind_of_processor(module):
    finetune = module("finetune")

    def run(seconds, cpu):
        figures = {"examples_per_second": 100 / seconds, "command_seconds": seconds}
        return {**figures, "memory_mb": 10, "metrics": {"f1": 0.5}, "cpu": cpu}

    ours = {"1": run(5, "old"), "2": run(5, "new"), "3": run(5, "new")}
    theirs = {"1": run(20, "old"), "2": run(90, "old"), "3": run(10, "new")}
    result = {"systems": {"bertsmith": ours, "trainer": theirs}}
    assert finetune.ratio(result, "trainer", "examples_per_second") == 3  # of 4 and 2
    said = finetune.verdict(result, "trainer", "f1")
    assert "examples/s **3.00x**, whole command 2.67x" in said  # 1 / the median of 1/4 and 1/2
    result["systems"]["trainer"] = {"2": theirs["2"]}
    assert finetune.verdict(result, "trainer", "f1") == (
        "- bertsmith / trainer: not on one kind of processor; "
        "f1 +0.00 points (-0.50 allowed: holds)\n"
    )


@pytest.mark.slow
def test_a_toy_run_of_both_sides(source, model, tmp_path):
    pytest.importorskip("accelerate")
    command = [sys.executable, str(BENCHMARKS / "finetune.py"), "--data", str(source)]
    command += ["--model", str(model), "--out", str(tmp_path), "--threads", "1"]
    # the log has a line every ten steps
    command += ["--examples", "32", "--epochs", "12", "--seeds", "1"]
    systems = ["bertsmith", "trainer", "trainer, best", "trainer, best, kept memory"]
    command += ["--systems", *systems]  # one more compiles for a minute
    for task in ("sst2", "squad1"):
        done = subprocess.run([*command, "--tasks", task], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    (found,) = tmp_path.glob("*.json")  # named after the kind of processor
    results = json.loads(found.read_text())["results"]
    assert [result["task"] for result in results] == ["sst2", "squad1"]  # the first was kept
    for result in results:
        assert list(result["systems"]) == systems
        names = [list(runs["1"]["metrics"]) for runs in result["systems"].values()]
        assert names[0] == names[1] == names[2] == names[3]
        assert all(len(runs["1"]["epochs"]) == 12 for runs in result["systems"].values())
    page = found.with_suffix(".md").read_text()
    assert page.count("bertsmith / trainer, best: examples/s") == 2
    assert page.count("bertsmith / trainer, best, kept memory: examples/s") == 2


@pytest.mark.slow
def test_a_row_is_trained_measured_and_merged(
    module, run_main, source, model, tmp_path, monkeypatch, capsys
):
    table = module("finetune_table")
    setting = table.Setting("squad2", examples=3, epochs=2, batch=2, max_length=64)
    monkeypatch.setattr(table, "ROWS", {"toy": table.Row(setting, 2, tests=("test.json",))})
    command = ["finetune_table", "--data", source, "--work", tmp_path / "work"]
    command += ["--model", model, "--out", tmp_path, "--threads", "1"]
    run_main(*command, "--minutes", "0")
    assert not (tmp_path / "finetune_table.json").exists()
    run_main(*command)
    record = json.loads((tmp_path / "finetune_table.json").read_text())
    runs = record["rows"]["toy"]["bertsmith"]
    assert list(runs) == ["1", "2"] and runs["1"]["examples_per_second"] > 0
    assert runs["1"]["tests"]["test.json"]["answer_f1"] >= 0
    capsys.readouterr()
    run_main(*command, "--list")
    assert capsys.readouterr().out == f"{'toy':22}  0 of 2 to run\n"
