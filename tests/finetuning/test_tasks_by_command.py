"""Every kind of file that `finetune TASK` documents, by the command: trained, measured, measured
again by `evaluate`. Nothing is learned here; the other files of this folder see to that."""

import csv
import json

import pytest

from bertsmith.reports.finetuning import metric as shown_metric

from .tiny import bertsmith, write_model

WORDS = ["ann", "bob", "sees", "rome", "oslo", "in", "the", "rain"]
FLAGS = ("--epochs", 1, "--batch", 4, "--restarts", 0, "--precision", "float32", "--threads", 1)
TRAIN, DEV = 12, 7


def sentence(number: int) -> str:
    """Another one for each number."""
    return " ".join(WORDS[number // 8**k % 8] for k in range(3)) + f" {WORDS[number % 7]}"


def table(path, header, rows):
    """A .csv or .tsv; no header where that is ()."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, delimiter="," if path.suffix == ".csv" else "\t")
        writer.writerows([header, *rows] if header else rows)


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def squad(path, numbers):
    """SQuAD's JSON; in a file of version 2 every third question has no answer."""
    paragraphs = []
    for k in numbers:
        context, answer = f"{sentence(k)} oslo", [{"text": WORDS[k % 8], "answer_start": 0}]
        question = {"id": f"q{k}", "question": "where", "answers": answer}
        if "v2" in path.name and k % 3 == 0:
            question |= {"answers": [], "is_impossible": True}
        paragraphs.append({"context": context, "qas": [question]})
    path.write_text(json.dumps({"version": "x", "data": [{"paragraphs": paragraphs}]}))


def swag(path, numbers):
    header = ["", "sent1", "sent2", *(f"ending{j}" for j in range(4)), "label"]
    rows = [
        [k, sentence(k), "Ann", *(sentence(4 * k + j) for j in range(4)), k % 4] for k in numbers
    ]
    table(path, header, rows)


def hellaswag(path, numbers):
    options = {k: [sentence(4 * k + j) for j in range(4)] for k in numbers}
    lines(path, [{"ctx": sentence(k), "endings": options[k], "label": k % 4} for k in numbers])


def codah(path, numbers):
    table(path, (), [["i", sentence(k), *WORDS[:4], k % 4] for k in numbers])


def stsb(path, numbers):
    rows = [[k, sentence(k), sentence(k + 1), k % 6 / 1.2] for k in numbers]
    table(path, ["index", "sentence1", "sentence2", "score"], rows)


def mnli(path, numbers):
    labels = ("neutral", "entailment", "contradiction")
    rows = [[k, sentence(k), sentence(k + 1), labels[k % 3]] for k in numbers]
    table(path, ["index", "sentence1", "sentence2", "gold_label"], rows)


def prices(path, numbers):
    table(path, ["thing", "price"], [[sentence(k), 0.5 * k] for k in numbers])


def films(path, numbers):
    genres = ["comedy;crime", "crime", "", "comedy"]
    table(path, ["plot", "genres"], [[sentence(k), genres[k % 4]] for k in numbers])


def quiz(path, numbers):
    rows = [[sentence(k), "ann", "bob", "ab"[k % 2]] for k in numbers]
    table(path, ["ask", "a", "b", "right"], rows)


def manual(path, numbers):
    rows = [["where", f"{sentence(k)} oslo", WORDS[k % 8]] for k in numbers]
    table(path, ["question", "passage", "found"], rows)


def entities(path, numbers):
    rows = [{"words": sentence(k).split(), "kinds": ["B-PER", "O", "O", "O"]} for k in numbers]
    lines(path, rows)


PRICES = ("--text", "thing", "--label", "price")
PLOTS = ("--text", "plot", "--label", "genres", "--separator", ";")
QUIZ = ("--text", "ask", "--label", "right", "--options", "a", "b")
MANUAL = ("--text-pair", "passage", "--label", "found", "--text", "question")
ENTITIES = ("--text", "words", "--label", "kinds")
# task, its main metric, what writes a file of it, names of the training and dev files, flags
ROWS = [
    ("squad1", "answer_f1", squad, ("train-v1.1.json", "dev-v1.1.json"), ("--max-question", 8)),
    ("squad2", "answer_f1", squad, ("train-v2.0.json", "dev-v2.0.json"), ("--max-question", 8)),
    ("swag", "accuracy", swag, ("train.csv", "val.csv"), ()),
    ("hellaswag", "accuracy", hellaswag, ("hellaswag_train.jsonl", "hellaswag_val.jsonl"), ()),
    ("codah", "accuracy", codah, ("codah.tsv", "dev.tsv"), ()),
    ("stsb", "pearson", stsb, ("train.tsv", "dev.tsv"), ()),
    ("mnli", "accuracy", mnli, ("train.tsv", "dev_matched.tsv", "dev_mismatched.tsv"), ()),
    ("regress", "pearson", prices, ("train.csv", "dev.csv"), PRICES),
    ("multilabel", "micro_f1", films, ("train.csv", "dev.csv"), PLOTS),
    ("choice", "accuracy", quiz, ("train.csv", "dev.csv"), QUIZ),
    ("answer", "answer_f1", manual, ("train.csv", "dev.csv"), MANUAL),
    ("tag", "entity_f1", entities, ("train.jsonl", "dev.jsonl"), ENTITIES),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"), [" ".join(WORDS), "where"])


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_task_by_the_command(model, tmp_path, capsys, row):
    task, metric, write, names, flags = row
    data, run = tmp_path / "data", tmp_path / "run"
    data.mkdir()
    for number, name in enumerate(names):
        first = number * TRAIN
        write(data / name, range(first, first + (DEV if number else TRAIN)))
    bertsmith("finetune", task, "--model", model, "--data", data, "--out", run, *flags, *FLAGS)
    result = json.loads((run / "result.json").read_text())
    assert result["main_metric"] == metric == next(iter(result["metrics"]))
    assert (result["train_examples"], result["dev_examples"]) == (TRAIN, DEV)
    capsys.readouterr()

    bertsmith("evaluate", run, "--data", data, "--json")
    again = json.loads(capsys.readouterr().out)
    assert again["examples"] == DEV
    figures = {}
    for split, metrics in again.get("splits", {"dev": again["metrics"]}).items():
        figures |= {("" if split == "dev" else f"{split}_") + k: v for k, v in metrics.items()}
    assert figures == pytest.approx(result["metrics"], rel=1e-5)

    bertsmith("report", run)
    page = (run / "report.html").read_text(encoding="utf-8")
    assert shown_metric(metric, result["metrics"][metric]) in page
    assert "SHA-256 of the data" in page
    capsys.readouterr()
    bertsmith("compare", run, run, "--resamples", 100, "--json")
    compared = json.loads(capsys.readouterr().out)
    assert compared["examples"] == compared["equal"] > 0
    # of the scores that dev_scores.json keeps, which have five decimals
    again = compared["metrics"][metric]["first"]
    assert again == pytest.approx(result["metrics"][metric], abs=1e-4)
    assert all(figure["difference"] == 0 for figure in compared["metrics"].values())
