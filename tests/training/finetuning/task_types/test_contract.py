"""The contract of every task type, and every kind of file that `finetune TASK` reads.

A toy of each type is learned, saved, loaded, evaluated and answered; stopped and taken up again.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file
from scipy.stats import rankdata

from bertsmith.inference.evaluation.labelled import evaluate_on
from bertsmith.inference.predictor import load
from bertsmith.reports.finetuning import metric as shown_metric
from bertsmith.tasks.tagging.schemes import Scheme, convert_tags

from ....tiny import bertsmith, cli, refused, write, write_model
from ..tagged import OTHERS, PEOPLE, PLACES, columns
from .files import lines, read_rows, squad, table

# --- toys that a toy model learns in a second or two -------------------------------------------

WEATHER, FOOD = ("rain", "snow", "wind"), ("bread", "soup", "fish")
WORTH = dict(zip(WEATHER + FOOD, np.linspace(0, 1, 6).round(1).tolist(), strict=True))
FILLERS, CITIES = [f"w{letter}" for letter in "abcdefgh"], ["rome", "oslo", "bonn"]
SPOKEN = ("today there was again tomorrow is some where", *WEATHER, *FOOD, *FILLERS, *CITIES)


def words_of_worth(path: Path, draw: np.random.Generator, count: int, label: Callable) -> None:
    """The label is told by one word."""
    found = draw.choice([*WORTH], count)
    rows = [(f"today there was {word} again", label(word)) for word in found]
    table(path, ("text", "label"), rows)


def weather_or_food(path: Path, draw: np.random.Generator, count: int) -> None:
    words_of_worth(path, draw, count, lambda word: "weather" if word in WEATHER else "food")


def worth(path: Path, draw: np.random.Generator, count: int) -> None:
    words_of_worth(path, draw, count, WORTH.__getitem__)


def sets_of_labels(path: Path, draw: np.random.Generator, count: int) -> None:
    """Snow is weather, soup food, rain and bread both; wind and fish are none."""
    names = {"snow": "weather", "soup": "food"} | dict.fromkeys(("rain", "bread"), "weather;food")
    words_of_worth(path, draw, count, lambda word: names.get(word, ""))


def forecasts(path: Path, draw: np.random.Generator, count: int) -> None:
    """The one of three options that is about the weather is right."""
    rows = []
    for right in draw.integers(3, size=count).tolist():
        words = [draw.choice(WEATHER if k == right else FOOD) for k in range(3)]
        options = [f"some {word} again" for word in words]
        rows.append({"text": "tomorrow there is", "options": options, "label": right})
    lines(path, rows)


def cities(path: Path, draw: np.random.Generator, count: int) -> None:
    """The answer is the one city of the context; three of ten contexts have none."""
    rows = []
    for _ in range(count):
        words, city = draw.choice(FILLERS, draw.integers(3, 30)).tolist(), None
        if draw.random() >= 0.3:
            city = str(draw.choice(CITIES))
            words.insert(draw.integers(len(words)), city)
        rows.append(("where", " ".join(words), city))
    squad(path, rows, version=2)


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
    scores = np.array([float(row["predicted_label"]) for row in read_rows(data / "out.csv")])
    rows = read_rows(data / "dev.csv")
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
    two = lines(data / "two.jsonl", [{"text": "tomorrow there is", "options": o} for o in new])
    bertsmith("predict", run, two, "--out", data / "two.out.jsonl")
    rows = read_rows(data / "two.out.jsonl")
    found = [(row["label"], row["option"]) for row in rows]
    assert found == [(1, "some wind again"), (0, "some rain again")]
    assert all(0.5 < row["probability"] < 1 for row in rows)


def tags_of_running_text(run: Path, result: dict[str, Any], data: Path) -> None:
    stored = json.loads((run / "config.json").read_text())["bertsmith"]
    assert stored["max_length"] == 64  # all that this model can read
    text = write(data / "new.txt", "today ann rossi sees rome\n")
    bertsmith("predict", run, text, "--out", data / "new.conll")
    wanted = "today O\nann B-PER\nrossi I-PER\nsees O\nrome B-LOC\n\n"
    assert (data / "new.conll").read_text() == wanted
    line = "  today ann rossi sees 'rome'"
    text.write_text(f"{line}\n\n")
    bertsmith("predict", run, text, "--out", data / "new.jsonl")
    first, last = read_rows(data / "new.jsonl")
    assert next(iter(first.items())) == ("text", line)  # which start and end count in
    assert first["tokens"] == ["today", "ann", "rossi", "sees", "'", "rome", "'"]
    found = {(e["text"], e["start"], e["end"], e["label"]) for e in first["entities"]}
    assert found >= {("ann rossi", 8, 17, "PER"), ("rome", 24, 28, "LOC")}
    assert line[24:28] == "rome" and (last["text"], last["entities"]) == ("", [])
    # words that the file parts stay as they are
    tokens = lines(data / "rows.jsonl", [{"tokens": ["rome,", "ann"]}])
    bertsmith("predict", run, tokens, "--out", data / "rows.out.jsonl")
    (row,) = read_rows(data / "rows.out.jsonl")
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
        TAGS, CONLL, tags_of_running_text,
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
    names = ("predicted_label", "tags")
    cells = [next(row[name] for name in names if name in row) for row in read_rows(path)]
    first = records[0]["predicted"]
    if isinstance(first, float):
        return [pytest.approx(float(cell), abs=1e-4) for cell in cells]
    if isinstance(first, list) and path.suffix != ".jsonl":
        return [[part for part in cell.split(";") if part] for cell in cells]
    return [str(cell) for cell in cells] if isinstance(first, str) else cells


@pytest.mark.parametrize("toy_name", TOYS)
def test_a_task_type_keeps_its_contract(toy_model, tmp_path, stop_at_evaluation, toy_name):
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
    assert (result["restarts"], result["notes"]) == ([], {})
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
    assert evaluate_on(predictor, data)["metrics"] == pytest.approx(
        metrics, rel=1e-4
    )  # our engine sums in another order
    printed = bertsmith("evaluate", run, "--data", dev, "--json")
    assert json.loads(printed)["metrics"] == pytest.approx(metrics, rel=1e-4)

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
    upload = refused("predict", run, dev, "--out", tmp_path / "up", "--submission")
    assert f"no submission for task {toy.task}" in upload

    # stopped and resumed, as if it had not been
    stop_at_evaluation(2)
    stopped = cli(*words, "--out", tmp_path / "again")
    assert stopped.code == 130 and "the same command goes on" in stopped.err
    assert not (tmp_path / "again" / "result.json").exists()
    again = cli(*words, "--out", tmp_path / "again")
    assert again.code == 0 and "going on with the run that was stopped" in again.err
    assert json.loads((tmp_path / "again" / "result.json").read_text()) == result
    weights = [load_file(folder / "model.safetensors") for folder in (run, tmp_path / "again")]
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])


# --- every kind of file that `finetune TASK` documents: trained, measured, measured again ------

WORDS = ["ann", "bob", "sees", "rome", "oslo", "in", "the", "rain"]
FLAGS = ("--epochs", 1, "--batch-size", 4, "--max-retries", 0)
FLAGS += ("--precision", "float32", "--threads", 1)
TRAIN, DEV = 12, 7


def sentence(number: int) -> str:
    """Another one for each number."""
    return " ".join(WORDS[number // 8**k % 8] for k in range(3)) + f" {WORDS[number % 7]}"


def of_squad(path, numbers):
    """In a file of version 2 every third question has no answer."""
    version = 2 if "v2" in path.name else 1
    answers = [None if version == 2 and k % 3 == 0 else WORDS[k % 8] for k in numbers]
    asked = zip(numbers, answers, strict=True)
    squad(path, [("where", f"{sentence(k)} oslo", answer) for k, answer in asked], version)


def options_of(number):
    return [sentence(4 * number + j) for j in range(4)]


def swag(path, numbers):
    header = ["", "sent1", "sent2", *(f"ending{j}" for j in range(4)), "label"]
    table(path, header, [[k, sentence(k), "Ann", *options_of(k), k % 4] for k in numbers])


def hellaswag(path, numbers):
    lines(path, [{"ctx": sentence(k), "endings": options_of(k), "label": k % 4} for k in numbers])


def mnli(path, numbers):
    labels = ("neutral", "entailment", "contradiction")
    rows = [[k, sentence(k), sentence(k + 1), labels[k % 3]] for k in numbers]
    table(path, ["index", "sentence1", "sentence2", "gold_label"], rows)


def entities(path, numbers):
    kinds = ["B-PER", "O", "O", "O"]
    lines(path, [{"words": sentence(k).split(), "kinds": kinds} for k in numbers])


def of_rows(header, row):
    """What writes a table of a row for each number."""
    return lambda path, numbers: table(path, header.split(), [row(k) for k in numbers])


codah = of_rows("", lambda k: ["i", sentence(k), *WORDS[:4], k % 4])
stsb = of_rows(
    "index sentence1 sentence2 score", lambda k: [k, sentence(k), sentence(k + 1), k % 6 / 1.2]
)
prices = of_rows("thing price", lambda k: [sentence(k), 0.5 * k])
films = of_rows(
    "plot genres", lambda k: [sentence(k), ["comedy;crime", "crime", "", "comedy"][k % 4]]
)
quiz = of_rows("ask a b right", lambda k: [sentence(k), "ann", "bob", "ab"[k % 2]])
manual = of_rows("question passage found", lambda k: ["where", f"{sentence(k)} oslo", WORDS[k % 8]])
PRICES = ("--text", "thing", "--label", "price")
PLOTS = ("--text", "plot", "--label", "genres", "--separator", ";")
QUIZ = ("--text", "ask", "--label", "right", "--options", "a", "b")
MANUAL = ("--text-pair", "passage", "--label", "found", "--text", "question")
ENTITIES = ("--text", "words", "--label", "kinds")
SQUAD1, SQUAD2 = ("train-v1.1.json", "dev-v1.1.json"), ("train-v2.0.json", "dev-v2.0.json")
LENGTH = ("--max-question-length", 8)
# task, its main metric, what writes a file of it, names of the training and dev files, flags
ROWS = [
    ("squad1", "answer_f1", of_squad, SQUAD1, LENGTH),
    ("squad2", "answer_f1", of_squad, SQUAD2, LENGTH),
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
def test_a_task_by_the_command(model, tmp_path, row):
    task, metric, write, names, flags = row
    data, run = tmp_path / "data", tmp_path / "run"
    for number, name in enumerate(names):
        first = number * TRAIN
        write(data / name, range(first, first + (DEV if number else TRAIN)))
    bertsmith("finetune", task, "--model", model, "--data", data, "--out", run, *flags, *FLAGS)
    result = json.loads((run / "result.json").read_text())
    assert result["main_metric"] == metric == next(iter(result["metrics"]))
    assert (result["train_examples"], result["dev_examples"]) == (TRAIN, DEV)

    again = json.loads(bertsmith("evaluate", run, "--data", data, "--json"))
    assert again["examples"] == DEV
    figures = {}
    for split, metrics in again.get("splits", {"dev": again["metrics"]}).items():
        figures |= {("" if split == "dev" else f"{split}_") + k: v for k, v in metrics.items()}
    assert figures == pytest.approx(result["metrics"], rel=1e-4)  # our engine sums in another order

    bertsmith("report", run)
    page = (run / "report.html").read_text(encoding="utf-8")
    assert shown_metric(metric, result["metrics"][metric]) in page
    assert "SHA-256 of the data" in page
    compared = json.loads(bertsmith("compare", run, run, "--resamples", 100, "--json"))
    assert compared["examples"] == compared["equal"] > 0
    # of the scores that dev_scores.json keeps, which have five decimals
    again = compared["metrics"][metric]["first"]
    assert again == pytest.approx(result["metrics"][metric], abs=1e-4)
    assert all(figure["difference"] == 0 for figure in compared["metrics"].values())
