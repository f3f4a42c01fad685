"""Files that the code was not written against: two commands from a CSV to answers, no code.

Three of 200 labelled lines each, from templates: support tickets, product pairs, films with several
genres.
"""

import csv
import json
import random
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from ...tiny import bertsmith, write_model

LINES, NEW_LINES = 200, 40
FLAGS = ("--batch-size", 8, "--precision", "float32", "--threads", 1)
EASY = ("1x64", ("--epochs", 8, "--learning-rate", 3e-3))  # size of the model, and its training
HARD = ("1x128", ("--epochs", 16, "--learning-rate", 1e-3))


def write_rows(path: Path, rows: list[list[str]]) -> Path:
    """Quoting is left to the csv module."""
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(rows)
    return path


TICKETS = {
    "billing": (
        "I was charged twice, see invoice {number}",
        'the invoice {number} says "paid", yet I get reminders',
        "please refund invoice {number}, as agreed",
    ),
    "delivery": (
        "the parcel {number} has not arrived",
        'the parcel is "delivered", but nothing came to number {number}',
        "the courier left parcel {number}, broken, in the rain",
    ),
    "account": (
        "my password is refused since version {number}",
        'the page says "wrong password", {number} times now',
        "no mail with a new password, user {number}",
    ),
}
GREETINGS = ("Hello,\n", "Dear team,\r\n\r\n", "", 'Hi "support",\n')
GOODBYES = ("\nThanks, Ann", "", "\n\n-- \nBob, Oslo", " Regards.")


def ticket(draw: random.Random) -> list[str]:
    queue = draw.choices([*TICKETS], weights=[5, 3, 2])[0]
    body = draw.choice(TICKETS[queue]).format(number=draw.randint(1, 99))
    text = draw.choice(GREETINGS) + body + draw.choice(GOODBYES)
    return [f"T-{draw.randint(1, 999)}", text, queue]


PRODUCTS = ("phone", "kettle", "lamp", "chair")
DETAILS = ("black", '27"', "2 pack", "new", "A-class", "with cable")
SHOPS = ("{product}, {detail}", '"{product}" ({detail})', "{detail} {product}")
PARTS = ("case for", "spare part,", "box of a")  # what tells another product of the same name


def title(draw: random.Random, product: str) -> str:
    return draw.choice(SHOPS).format(product=product, detail=draw.choice(DETAILS))


def pair(draw: random.Random) -> list[str]:
    product, is_same = draw.choice(PRODUCTS), draw.random() < 0.6
    theirs = title(draw, product)
    if not is_same:
        theirs = f"{draw.choice(PARTS)} {theirs}"
    return [title(draw, product), theirs, "yes" if is_same else "no"]


GENRES = {
    "comedy": ("a clown laughs", "the clown, twice"),
    "crime": ('the "detective" waits', "a detective, at last"),
    "romance": ("a kiss in Paris", "the first kiss"),
    "space": ("the rocket starts", "a rocket lands"),
}
CITIES = ("Oslo", "Rome", "Lima", '"Old" York')


def film(draw: random.Random) -> list[str]:
    genres = draw.sample([*GENRES], draw.choices([0, 1, 2], weights=[1, 4, 4])[0])
    begins = f"{draw.choice(CITIES)}, {draw.randint(1950, 1980)}."
    scenes = [begins, *(draw.choice(GENRES[genre]) for genre in genres)]
    return ["\n".join(scenes), ", ".join(sorted(genres))]


# task, header, what makes a row, flags, how it is trained; least share of right answers, and above
# the majority's
FILES = {
    "tickets": ("classify", "number body queue", ticket, ("--text", "body"), EASY, 0.9, 0.2),
    "pairs": (
        "classify", "ours theirs same", pair, ("--text", "ours", "--text-pair", "theirs"), EASY,
        0.9, 0.1,
    ),
    "films": ("multilabel", "plot genres", film, ("--text", "plot"), HARD, 0.8, 0.3),
}  # fmt: skip


def labels_of(cells: Iterable[str]) -> list[frozenset[str]]:
    return [frozenset(label.strip() for label in cell.split(",")) - {""} for cell in cells]


@pytest.mark.parametrize("name", FILES)
def test_two_commands_from_a_file_to_answers(tmp_path, name):
    """The last lines are new: they are written without their label."""
    task, columns, row, flags, (size, training), least, gain = FILES[name]
    draw, header = random.Random(name), columns.split()
    rows = [row(draw) for _ in range(LINES + NEW_LINES)]
    known, new = [header, *rows[:LINES]], [row[:-1] for row in rows[LINES:]]
    if name == "tickets":
        assert sum("\n" in row[1] and '"' in row[1] and "," in row[1] for row in known) > 20
    train = write_rows(tmp_path / "mine.csv", known)
    unlabelled = write_rows(tmp_path / "new.csv", [header[:-1], *new])
    model = write_model(tmp_path / "model", [cell for row in known for cell in row], size)
    run, out = tmp_path / "run", tmp_path / "answers.csv"
    words = ("--model", model, "--data", train, "--label", header[-1], "--out", run)
    bertsmith("finetune", task, *words, *flags, *training, *FLAGS)
    bertsmith("predict", run, unlabelled, "--out", out)

    result = json.loads((run / "result.json").read_text())
    assert result["train_examples"] + result["dev_examples"] == LINES
    assert LINES / 20 <= result["dev_examples"] <= LINES / 5  # split off by itself, about a tenth
    assert json.loads((run / "run.json").read_text())["settings"]["dev"] == "10% of train"
    with out.open(encoding="utf-8", newline="") as file:
        answers = list(csv.DictReader(file))
    assert [[row[name] for name in header[:-1]] for row in answers] == new
    truth = labels_of(row[-1] for row in rows[LINES:])
    given = labels_of(row[header[-1]] for row in answers)
    every = frozenset().union(*labels_of(row[-1] for row in rows))
    assert frozenset().union(*given) <= every
    if task == "classify":
        assert all(1 / len(every) <= float(row["probability"]) <= 1 for row in answers)
    else:
        assert frozenset() in truth
    right = sum(a == b for a, b in zip(given, truth, strict=True)) / NEW_LINES
    majority = max(Counter(truth).values()) / NEW_LINES
    assert right > least > majority + gain
