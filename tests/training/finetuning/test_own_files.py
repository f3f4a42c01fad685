"""Files that the code was not written against: two commands from a CSV to answers, no code.

Three of 200 labelled lines each, from templates: support tickets, product pairs, films with several
genres.
"""

import csv
import json
import random
from collections import Counter
from pathlib import Path

from ...tiny import bertsmith, write_model

LINES, NEW_LINES = 200, 40
FLAGS = ("--epochs", 16, "--batch-size", 8, "--learning-rate", 1e-3)
FLAGS += ("--precision", "float32", "--threads", 1)


def write_rows(path: Path, rows: list[list[str]]) -> Path:
    """Quoting is left to the csv module."""
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(rows)
    return path


def two_commands(
    task: str, folder: Path, header: list[str], rows: list[list[str]], *columns: str
) -> tuple[list[str], list[str]]:
    """The answers to new lines, and the truth about them; checks what holds of every such file.

    `rows` end in their label; the last are the new ones, which are written without it.
    """
    assert len(rows) == LINES + NEW_LINES
    known, new = [header, *rows[:LINES]], [row[:-1] for row in rows[LINES:]]
    train = write_rows(folder / "mine.csv", known)
    unlabelled = write_rows(folder / "new.csv", [header[:-1], *new])
    model = write_model(folder / "model", [cell for row in known for cell in row], "1x128")
    run, out = folder / "run", folder / "answers.csv"
    words = ("--model", model, "--data", train, "--out", run)
    bertsmith("finetune", task, *words, *columns, "--label", header[-1], *FLAGS)
    bertsmith("predict", run, unlabelled, "--out", out)

    result = json.loads((run / "result.json").read_text())
    assert result["train_examples"] + result["dev_examples"] == LINES
    assert LINES / 20 <= result["dev_examples"] <= LINES / 5  # split off by itself, about a tenth
    assert json.loads((run / "run.json").read_text())["settings"]["dev"] == "10% of train"
    with out.open(encoding="utf-8", newline="") as file:
        answers = list(csv.DictReader(file))
    assert [[row[name] for name in header[:-1]] for row in answers] == new
    if task == "classify":
        share = 1 / len({row[-1] for row in rows})
        assert all(share <= float(row["probability"]) <= 1 for row in answers)
    return [row[header[-1]] for row in answers], [row[-1] for row in rows[LINES:]]


def shares(answers, truth):
    """Of the right answers, and of those that are right when all are the most frequent one."""
    right = sum(given == true for given, true in zip(answers, truth, strict=True))
    return right / NEW_LINES, max(Counter(truth).values()) / NEW_LINES


# --- support tickets ---------------------------------------------------------------------------


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


def tickets(draw: random.Random) -> list[str]:
    queue = draw.choices([*TICKETS], weights=[5, 3, 2])[0]
    body = draw.choice(TICKETS[queue]).format(number=draw.randint(1, 99))
    return [draw.choice(GREETINGS) + body + draw.choice(GOODBYES), queue]


def test_support_tickets(tmp_path):
    draw = random.Random(13)
    rows = [[f"T-{k}", *tickets(draw)] for k in range(LINES + NEW_LINES)]
    assert sum("\n" in row[1] and '"' in row[1] and "," in row[1] for row in rows[:LINES]) > 20
    header = ["number", "body", "queue"]
    answers, truth = two_commands("classify", tmp_path, header, rows, "--text", "body")
    assert {*answers} <= {*TICKETS}
    right, majority = shares(answers, truth)
    assert right > 0.9 > majority + 0.2


# --- product pairs -----------------------------------------------------------------------------


PRODUCTS = ("phone", "kettle", "lamp", "chair")
DETAILS = ("black", '27"', "2 pack", "new", "A-class", "with cable")
SHOPS = ("{product}, {detail}", '"{product}" ({detail})', "{detail} {product}")
PARTS = ("case for", "spare part,", "box of a")  # what tells another product of the same name


def title(draw: random.Random, product: str) -> str:
    return draw.choice(SHOPS).format(product=product, detail=draw.choice(DETAILS))


def pairs(draw: random.Random) -> list[str]:
    product, is_same = draw.choice(PRODUCTS), draw.random() < 0.6
    theirs = title(draw, product)
    if not is_same:
        theirs = f"{draw.choice(PARTS)} {theirs}"
    return [title(draw, product), theirs, "yes" if is_same else "no"]


def test_product_pairs(tmp_path):
    draw = random.Random(14)
    rows, header = [pairs(draw) for _ in range(LINES + NEW_LINES)], ["ours", "theirs", "same"]
    columns = ("--text", "ours", "--text-pair", "theirs")
    answers, truth = two_commands("classify", tmp_path, header, rows, *columns)
    assert {*answers} <= {"yes", "no"}
    right, majority = shares(answers, truth)
    assert right > 0.9 > majority + 0.1


# --- films of several genres -------------------------------------------------------------------


GENRES = {
    "comedy": ("a clown laughs", "the clown, twice"),
    "crime": ('the "detective" waits', "a detective, at last"),
    "romance": ("a kiss in Paris", "the first kiss"),
    "space": ("the rocket starts", "a rocket lands"),
}
CITIES = ("Oslo", "Rome", "Lima", '"Old" York')


def films(draw: random.Random) -> list[str]:
    genres = draw.sample([*GENRES], draw.choices([0, 1, 2], weights=[1, 4, 4])[0])
    begins = f"{draw.choice(CITIES)}, {draw.randint(1950, 1980)}."
    scenes = [begins, *(draw.choice(GENRES[genre]) for genre in genres)]
    return ["\n".join(scenes), ", ".join(sorted(genres))]


def test_films_of_several_genres(tmp_path):
    draw = random.Random(15)
    rows, header = [films(draw) for _ in range(LINES + NEW_LINES)], ["plot", "genres"]
    answers, truth = two_commands("multilabel", tmp_path, header, rows, "--text", "plot")
    given = [frozenset(cell.split(",")) - {""} for cell in answers]
    true = [frozenset(cell.split(", ")) - {""} for cell in truth]
    assert frozenset().union(*given) <= {*GENRES} and frozenset() in true
    right, majority = shares(given, true)
    assert right > 0.8 > majority + 0.3
