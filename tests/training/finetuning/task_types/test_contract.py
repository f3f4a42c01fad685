"""The contract of every task type, and every kind of file that `finetune TASK` reads.

A toy of each type is learned, saved, loaded, evaluated and answered; stopped and taken up again.
"""

import csv
import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file
from scipy.stats import rankdata

from bertsmith.cli.main import main
from bertsmith.inference.ensemble import evaluate_on
from bertsmith.inference.predictor import load
from bertsmith.reports.finetuning import metric as shown_metric
from bertsmith.tasks.tagging.schemes import Scheme, convert_tags
from bertsmith.training.finetuning.task import BestOnDev

from ....tiny import bertsmith, write_model
from ..tagged import OTHERS, PEOPLE, PLACES, columns

# --- toys that a toy model learns in a second or two -------------------------------------------

WEATHER, FOOD = ("rain", "snow", "wind"), ("bread", "soup", "fish")
WORTH = dict(zip(WEATHER + FOOD, np.linspace(0, 1, 6).round(1).tolist(), strict=True))
FILLERS, CITIES = [f"w{letter}" for letter in "abcdefgh"], ["rome", "oslo", "bonn"]
SPOKEN = ("today there was again tomorrow is some where", *WEATHER, *FOOD, *FILLERS, *CITIES)


def write_table(path: Path, header: tuple[str, ...], rows: list) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])


def write_lines(path: Path, rows: list) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def weather_or_food(path: Path, draw: np.random.Generator, count: int) -> None:
    found = draw.choice([*WORTH], count)
    rows = [(f"today there was {w} again", "weather" if w in WEATHER else "food") for w in found]
    write_table(path, ("text", "label"), rows)


def worth(path: Path, draw: np.random.Generator, count: int) -> None:
    """The score is what one word is worth."""
    found = draw.choice([*WORTH], count)
    write_table(path, ("text", "label"), [(f"today there was {w} again", WORTH[w]) for w in found])


def sets_of_labels(path: Path, draw: np.random.Generator, count: int) -> None:
    """Snow is weather, soup food, rain and bread both; wind and fish are none."""
    names = {"snow": "weather", "soup": "food"} | dict.fromkeys(("rain", "bread"), "weather;food")
    found = draw.choice([*WORTH], count)
    rows = [(f"today there was {word} again", names.get(word, "")) for word in found]
    write_table(path, ("text", "label"), rows)


def forecasts(path: Path, draw: np.random.Generator, count: int) -> None:
    """The one of three options that is about the weather is right."""
    rows = []
    for right in draw.integers(3, size=count).tolist():
        words = [draw.choice(WEATHER if k == right else FOOD) for k in range(3)]
        options = [f"some {word} again" for word in words]
        rows.append({"text": "tomorrow there is", "options": options, "label": right})
    write_lines(path, rows)


def cities(path: Path, draw: np.random.Generator, count: int) -> None:
    """The answer is the one city of the context; three of ten contexts have none."""
    paragraphs = []
    for k in range(count):
        words = draw.choice(FILLERS, draw.integers(3, 30)).tolist()
        question: dict[str, Any] = {"id": f"q{k}", "question": "where", "answers": []}
        if draw.random() >= 0.3:
            city = str(draw.choice(CITIES))
            words.insert(draw.integers(len(words)), city)
            question["answers"] = [{"text": city, "answer_start": " ".join(words).index(city)}]
        question["is_impossible"] = not question["answers"]
        paragraphs.append({"context": " ".join(words), "qas": [question]})
    path.write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))


def names_in(scheme: Scheme) -> Callable[[Path, np.random.Generator, int], None]:
    def names(path: Path, draw: np.random.Generator, count: int) -> None:
        path.write_text(columns(count, int(draw.integers(1000)), scheme))

    return names


@dataclass(frozen=True)
class Toy:
    """A task type with files that a toy model learns."""

    task: str
    write: Callable[[Path, np.random.Generator, int], None]
    suffix: str
    sizes: tuple[int, int]  # of train and dev
    flags: tuple[object, ...]
    bars: dict[str, float]  # least values of metrics, the main one first
    outputs: tuple[str, ...]  # endings that `predict` writes
    more: Callable[[Path, dict[str, Any], Path], None] = lambda *_: None
    problem: str | None = None
    right: str = ""  # the metric that is the share of equal records
    thresholds: tuple[str, ...] = ()


def regress_by_hand(run: Path, result: dict[str, Any], data: Path) -> None:
    """The figures again, out of the written file."""
    with (data / "out.csv").open(newline="") as file:
        scores = np.array([float(row["predicted_label"]) for row in csv.DictReader(file)])
    with (data / "dev.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    truth, metrics = np.array([float(row["label"]) for row in rows]), result["metrics"]
    assert np.corrcoef(scores, truth)[0, 1] == pytest.approx(metrics["pearson"], rel=1e-5)
    ranks = np.corrcoef(rankdata(scores), rankdata(truth))[0, 1]
    assert ranks == pytest.approx(metrics["spearman"], rel=1e-5)
    assert np.mean((scores - truth) ** 2) == pytest.approx(metrics["mse"], rel=1e-4)
    assert metrics["mse"] < 0.1 * truth.var()
    answers = load(run).score([row["text"] for row in rows[:2]])
    assert answers == pytest.approx(scores[:2], abs=1e-5)


def other_numbers_of_options(run: Path, result: dict[str, Any], data: Path) -> None:
    assert "confusion" not in result  # the options of two rows have nothing in common
    new = [["some fish again", "some wind again"], ["some rain again", "some soup again"]]
    rows = [{"text": "tomorrow there is", "options": options} for options in new]
    write_lines(data / "two.jsonl", rows)
    bertsmith("predict", run, data / "two.jsonl", "--out", data / "two.out.jsonl")
    lines = [json.loads(line) for line in (data / "two.out.jsonl").read_text().splitlines()]
    found = [(line["label"], line["option"]) for line in lines]
    assert found == [(1, "some wind again"), (0, "some rain again")]
    assert all(0.5 < line["probability"] < 1 for line in lines)


def tags_of_running_text(run: Path, result: dict[str, Any], data: Path) -> None:
    stored = json.loads((run / "config.json").read_text())["bertsmith"]
    assert stored["max_length"] == 64  # all that this model can read
    text = data / "new.txt"
    text.write_text("today ann rossi sees rome\n")
    bertsmith("predict", run, text, "--out", data / "new.conll")
    wanted = "today O\nann B-PER\nrossi I-PER\nsees O\nrome B-LOC\n\n"
    assert (data / "new.conll").read_text() == wanted
    line = "  today ann rossi sees 'rome'"
    text.write_text(f"{line}\n\n")
    bertsmith("predict", run, text, "--out", data / "new.jsonl")
    first, last = map(json.loads, (data / "new.jsonl").read_text().splitlines())
    assert next(iter(first.items())) == ("text", line)  # which start and end count in
    assert first["tokens"] == ["today", "ann", "rossi", "sees", "'", "rome", "'"]
    found = {(e["text"], e["start"], e["end"], e["label"]) for e in first["entities"]}
    assert found >= {("ann rossi", 8, 17, "PER"), ("rome", 24, 28, "LOC")}
    assert line[24:28] == "rome" and (last["text"], last["entities"]) == ("", [])
    # words that the file parts stay as they are
    write_lines(data / "rows.jsonl", [{"tokens": ["rome,", "ann"]}])
    bertsmith("predict", run, data / "rows.jsonl", "--out", data / "rows.out.jsonl")
    row = json.loads((data / "rows.out.jsonl").read_text())
    assert row["tokens"] == ["rome,", "ann"] and not {"entities", "text"} & row.keys()


STILL = ("--dropout", 0, "--attention-dropout", 0)
TEXTS = ("--batch-size", 16, "--max-length", 16)
SETS = ("--separator", ";")
TABLES, CONLL = (".csv", ".tsv", ".jsonl"), (".conll", ".jsonl")
TAGS = {"entity_f1": 0.95}
SOLVED = {"answer_f1": 0.9, "no_answer_exact_match": 0.8}
TOYS = {
    "classify": Toy(
        "classify", weather_or_food, ".csv", (96, 40), ("--epochs", 6, *TEXTS), {"accuracy": 0.95},
        TABLES, problem="single_label_classification", right="accuracy",
    ),
    "regress": Toy(
        "regress", worth, ".csv", (128, 40), ("--epochs", 12, *TEXTS, *STILL),
        {"pearson": 0.95, "spearman": 0.9}, TABLES, regress_by_hand, "regression",
    ),
    "multilabel": Toy(
        "multilabel", sets_of_labels, ".csv", (128, 40), ("--epochs", 12, *TEXTS, *SETS, *STILL),
        {"micro_f1": 0.95}, TABLES, problem="multi_label_classification",
    ),
    "choice": Toy(
        "choice", forecasts, ".jsonl", (96, 40),
        ("--epochs", 6, "--batch-size", 8, "--options", "options"),
        {"accuracy": 0.95}, TABLES, other_numbers_of_options, right="accuracy",
    ),
    "answer": Toy(
        "squad2", cities, ".json", (160, 40),
        ("--epochs", 3, "--batch-size", 16, "--max-length", 24, "--doc-stride", 8),
        SOLVED, (".json",), right="exact_match", thresholds=("null_threshold",),
    ),
    "tag-IOB1": Toy(
        "ner", names_in("IOB1"), ".conll", (60, 15), ("--epochs", 6, "--batch-size", 2),
        TAGS, CONLL,
        tags_of_running_text,
    ),
    "tag-BIOES": Toy(
        "ner", names_in("BIOES"), ".conll", (60, 15), ("--epochs", 6, "--batch-size", 2),
        TAGS, CONLL,
    ),
}  # fmt: skip
SAME = ("--learning-rate", 3e-3, "--precision", "float32", "--threads", 1, "--checkpoint-every", 5)


@pytest.fixture(scope="module")
def toy_model(tmp_path_factory):
    texts = [*SPOKEN, *PEOPLE, *PLACES, *OTHERS, "rossi ' ,"]
    return write_model(tmp_path_factory.mktemp("toys"), texts)


def read_answers(path: Path, records: list[dict[str, Any]]) -> list[Any]:
    """The answers that `predict` wrote, in the form of the records."""
    if path.suffix == ".json":
        return list(json.loads(path.read_text()).values())
    if path.suffix == ".conll":
        sentences = path.read_text().removesuffix("\n\n").split("\n\n")
        rows = [part for part in sentences if not part.startswith("-DOCSTART-")]
        return [[line.split()[-1] for line in part.split("\n")] for part in rows]
    if path.suffix == ".jsonl":
        rows = [json.loads(line) for line in path.read_text().splitlines()]
    else:
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file, delimiter="," if path.suffix == ".csv" else "\t"))
    names = ("predicted_label", "tags")
    cells = [next(row[name] for name in names if name in row) for row in rows]
    first = records[0]["predicted"]
    if isinstance(first, float):
        return [pytest.approx(float(cell), abs=1e-4) for cell in cells]
    if isinstance(first, list) and path.suffix != ".jsonl":
        return [[part for part in cell.split(";") if part] for cell in cells]
    return [str(cell) for cell in cells] if isinstance(first, str) else cells


@pytest.mark.parametrize("toy_name", TOYS)
def test_a_task_type_keeps_its_contract(toy_model, tmp_path, capsys, monkeypatch, toy_name):
    toy, kind = TOYS[toy_name], toy_name.partition("-")[0]
    for seed, (split, count) in enumerate(zip(("train", "dev"), toy.sizes, strict=True), start=1):
        toy.write(tmp_path / f"{split}{toy.suffix}", np.random.default_rng(seed), count)
    run, dev = tmp_path / "run", tmp_path / f"dev{toy.suffix}"
    words = ("finetune", toy.task, "--model", toy_model, "--data", tmp_path, *toy.flags, *SAME)

    # trained
    bertsmith(*words, "--out", run)
    result = json.loads((run / "result.json").read_text())
    metrics = result["metrics"]
    assert result["main_metric"] == next(iter(metrics)) == next(iter(toy.bars))
    assert all(metrics[name] > bar for name, bar in toy.bars.items()), metrics
    assert (result["restarts"], result["undefined"]) == ([], {})
    assert (result["train_examples"], result["dev_examples"]) == toy.sizes

    # saved
    config = json.loads((run / "config.json").read_text())
    assert config.get("problem_type") == toy.problem and config["bertsmith"]["kind"] == kind
    assert tuple(config["bertsmith"]["thresholds"]) == toy.thresholds
    scores = json.loads((run / "dev_scores.json").read_text())
    records = scores["examples"]
    assert scores["kind"] == kind and len(records) == toy.sizes[1]
    if toy.right:
        truths = [record.get("label") or record["answers"] or [""] for record in records]
        lists = [[truth] if isinstance(truth, str) else truth for truth in truths]
        right = [r["predicted"] in truth for r, truth in zip(records, lists, strict=True)]
        assert np.mean(right) == pytest.approx(metrics[toy.right])

    # loaded, evaluated
    predictor = load(run)
    model_task, of = predictor.model_task, predictor.task_type
    assert of.name == kind and list(model_task.label_names) == result["labels"]
    data = of.read(dev, model_task.task, model_task.label_names)
    assert evaluate_on(predictor, data)["metrics"] == pytest.approx(metrics, rel=1e-5)
    capsys.readouterr()
    bertsmith("evaluate", run, "--data", dev, "--json")
    assert json.loads(capsys.readouterr().out)["metrics"] == pytest.approx(metrics, rel=1e-5)

    # answered: the same as in training, in every format
    answers = [record["predicted"] for record in records]
    if kind == "tag":  # in the scheme of the dev set; words without tags get IOB2
        scheme = {tag for record in records for tag in record["label"]}
        assert {tag for row in answers for tag in row} <= scheme
        answers = [convert_tags(row, np.array([0, len(row)]), "IOB2") for row in answers]
    for suffix in toy.outputs:
        bertsmith("predict", run, dev, "--out", tmp_path / f"out{suffix}")
        found = read_answers(tmp_path / f"out{suffix}", records)
        assert found == answers, suffix
    toy.more(run, result, tmp_path)

    # submitted: to GLUE's server, which knows none of these
    capsys.readouterr()
    upload = [str(word) for word in ("predict", run, dev, "--out", tmp_path / "up", "--submission")]
    assert main(upload) == 2 and f"no submission for task {toy.task}" in capsys.readouterr().err

    # stopped and resumed, as if it had not been
    with monkeypatch.context() as patched:
        stop_at_evaluation(patched, 2)
        assert main([str(word) for word in (*words, "--out", tmp_path / "again")]) == 130
    assert "the same command goes on" in capsys.readouterr().err
    assert not (tmp_path / "again" / "result.json").exists()
    bertsmith(*words, "--out", tmp_path / "again")
    assert "going on with the run that was stopped" in capsys.readouterr().err
    assert json.loads((tmp_path / "again" / "result.json").read_text()) == result
    weights = [load_file(folder / "model.safetensors") for folder in (run, tmp_path / "again")]
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])


def stop_at_evaluation(monkeypatch, evaluation):
    """SIGTERM at that evaluation."""
    measure, left = BestOnDev.__call__, [evaluation]

    def call(self):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return measure(self)

    monkeypatch.setattr(BestOnDev, "__call__", call)


# --- every kind of file that `finetune TASK` documents: trained, measured, measured again ------

WORDS = ["ann", "bob", "sees", "rome", "oslo", "in", "the", "rain"]
FLAGS = (
    "--epochs",
    1,
    "--batch-size",
    4,
    "--max-retries",
    0,
    "--precision",
    "float32",
    "--threads",
    1,
)
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
    (
        "squad1",
        "answer_f1",
        squad,
        ("train-v1.1.json", "dev-v1.1.json"),
        ("--max-question-length", 8),
    ),
    (
        "squad2",
        "answer_f1",
        squad,
        ("train-v2.0.json", "dev-v2.0.json"),
        ("--max-question-length", 8),
    ),
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
