"""Files that the code was not written against: two commands from a CSV to answers, no code.

Three of 200 labelled lines each, from templates: support tickets, product pairs, films with several
genres.
"""

import csv
import json
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from ..tiny import bertsmith, write_model

LINES, NEW_LINES = 200, 40
FLAGS = (
    "--epochs",
    16,
    "--batch-size",
    8,
    "--learning-rate",
    1e-3,
    "--precision",
    "float32",
    "--threads",
    1,
)


@dataclass(frozen=True)
class Made:
    """A file to learn from, and new lines without their labels."""

    train: Path
    new: Path
    header: list[str]
    new_rows: list[list[str]]
    truth: list[str]


def make(folder, header, rows) -> Made:
    """`rows` end in their label; the last are the new ones. Quoting is left to the csv module."""
    assert len(rows) == LINES + NEW_LINES
    known, new = rows[:LINES], rows[LINES:]
    made = Made(
        train=folder / "mine.csv",
        new=folder / "new.csv",
        header=header[:-1],
        new_rows=[row[:-1] for row in new],
        truth=[row[-1] for row in new],
    )
    for path, lines in ((made.train, [header, *known]), (made.new, [made.header, *made.new_rows])):
        with path.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows(lines)
    return made


def cells_of(made: Made) -> list[str]:
    with made.train.open(encoding="utf-8", newline="") as file:
        return [cell for row in csv.reader(file) for cell in row]


def two_commands(task, made: Made, folder: Path, *columns) -> list[dict[str, str]]:
    """The rows of the predictions; checks what holds of every such file."""
    model = write_model(folder / "model", cells_of(made), "1x128")
    run, out = folder / "run", folder / "answers.csv"
    words = ("--model", model, "--data", made.train, "--out", run)
    bertsmith("finetune", task, *words, *columns, *FLAGS)
    bertsmith("predict", run, made.new, "--out", out)

    result = json.loads((run / "result.json").read_text())
    assert result["train_examples"] + result["dev_examples"] == LINES
    assert LINES / 20 <= result["dev_examples"] <= LINES / 5  # split off by itself, about a tenth
    assert json.loads((run / "run.json").read_text())["settings"]["dev"] == "10% of train"
    with out.open(encoding="utf-8", newline="") as file:
        answers = list(csv.DictReader(file))
    assert [[row[name] for name in made.header] for row in answers] == made.new_rows
    return answers


def share_right(answers, truth):
    return sum(given == true for given, true in zip(answers, truth, strict=True)) / len(truth)


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
    made = make(tmp_path, ["number", "body", "queue"], rows)
    assert sum("\n" in row[1] and '"' in row[1] and "," in row[1] for row in rows[:LINES]) > 20
    columns = ("--text", "body", "--label", "queue")
    answers = two_commands("classify", made, tmp_path, *columns)
    assert {row["queue"] for row in answers} <= {*TICKETS}
    assert all(1 / 3 <= float(row["probability"]) <= 1 for row in answers)
    majority = max(Counter(made.truth).values()) / NEW_LINES
    right = share_right([row["queue"] for row in answers], made.truth)
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
    made = make(
        tmp_path, ["ours", "theirs", "same"], [pairs(draw) for _ in range(LINES + NEW_LINES)]
    )
    columns = ("--text", "ours", "--text-pair", "theirs", "--label", "same")
    answers = two_commands("classify", made, tmp_path, *columns)
    assert {row["same"] for row in answers} <= {"yes", "no"}
    majority = max(Counter(made.truth).values()) / NEW_LINES
    right = share_right([row["same"] for row in answers], made.truth)
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
    made = make(tmp_path, ["plot", "genres"], [films(draw) for _ in range(LINES + NEW_LINES)])
    columns = ("--text", "plot", "--label", "genres")
    answers = two_commands("multilabel", made, tmp_path, *columns)
    given = [{*row["genres"].split(",")} - {""} for row in answers]
    truth = [{*cell.split(", ")} - {""} for cell in made.truth]
    assert set().union(*given) <= {*GENRES} and set() in truth
    majority = max(Counter(map(frozenset, truth)).values()) / NEW_LINES
    assert share_right(given, truth) > 0.8 > majority + 0.3
