"""Every command and every line of Python in the README and the tutorials runs, on small data.

Budgets, sizes and seeds of the pages are made small (`small`); all else runs as it stands.
"""

import bz2
import json
import random
import re
import shlex
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from bertsmith.cli.main import main

from .experiments.lineage.test_translation import texts as numbers
from .text.readers.test_wikipedia import HEAD, TAIL, page
from .tiny import write

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
INDENTED = re.compile(r"^ {4,}(?:\$ )?bertsmith \w", re.MULTILINE)
NOT_OURS = ("make", "pip", "curl", "unzip", "mkdir")  # installing and downloads
THINGS = ("cat", "dog", "crow", "owl", "fish", "mouse", "horse", "goat", "sheep", "duck")
PLACES = ("garden", "house", "field", "forest", "river", "barn", "street", "school")


def blocks(page):
    """(kind, text) of the page's blocks to run: sh or python."""
    return BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))


def commands(block):
    """The words of each command of a block."""
    lines = block.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def small(words):
    """The command with a budget of seconds.

    >>> " ".join(small(["pretrain", "--corpus", "store", "--minutes", "60"])[:5])
    'pretrain --corpus store --steps 8'
    """
    words = list(words)

    def give(flag, value, old=None):
        old = old or flag
        if old in words:
            at = words.index(old)
            words[at : at + 2] = [flag, value]
        else:
            words.extend([flag, value])

    if words[0] == "vocab" and words[1] != "report":
        give("--size", "300")
    if words[0] == "pretrain":
        if "--minutes" in words:  # a larger budget stays larger
            minutes = float(words[words.index("--minutes") + 1])
            give("--steps", str(min(8, 4 * int(minutes))), old="--minutes")
        else:
            give("--steps", "4")
        for flag, value in {"--size": "1x64", "--batch-size": "4", "--eval-rows": "8"}.items():
            give(flag, value)
        if "--phase2-batch-size" in words:
            give("--phase2-batch-size", "2")
        give("--threads", "1")
        give("--num-evals", "1")
    if words[0] == "lineage":
        give("--steps", "2", old="--minutes")
        give("--threads", "1")
        if words[1] == "elmo":
            give("--size", "16x32")
        else:
            give("--vocab-size", "60")
            give("--hidden-size", "32")
    if words[0] == "finetune":
        give("--epochs", "1")
        give("--max-retries", "0")
        give("--threads", "1")
        if "--seeds" in words:
            give("--seeds", "1,2")
    return words


def sentences(draw, count):
    return " ".join(
        f"The {draw.choice(THINGS)} sat in the {draw.choice(PLACES)} with a {draw.choice(THINGS)}."
        for _ in range(count)
    )


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with small data under the names of the README and of the paper's tutorial."""
    monkeypatch.chdir(tmp_path)
    draw = random.Random(1)
    Path("texts").mkdir()
    texts = [sentences(draw, 12) for _ in range(60)]
    syllables = [a + b for a in "bdfgklmnprstvw" for b in "aeiou"]
    names = ["".join(draw.choices(syllables, k=3)) for _ in range(200)]
    texts.append(" ".join(names + names))  # enough for a vocabulary of 300 pieces
    Path("texts/a.txt").write_text("\n\n".join(texts), encoding="utf-8")

    rows = [(sentences(draw, 2), place) for place in PLACES[:2] for _ in range(30)]
    draw.shuffle(rows)
    for name, part in (("train.csv", rows[:40]), ("test.csv", rows[40:])):
        lines = [f'"{text}",{label}' for text, label in part]
        Path(name).write_text("\n".join(["body,topic", *lines]), encoding="utf-8")
    lines = [f'"{text}"' for text, _ in rows[:5]]
    Path("new.csv").write_text("\n".join(["body", *lines]), encoding="utf-8")
    Path("new.txt").write_text("\n".join(text for text, _ in rows[:5]), encoding="utf-8")

    for split, count in (("train", 200), ("val", 12)):
        for language, lines in numbers(count, split).items():
            write(Path(f"multi30k/{split}.{language}"), lines)

    Path("SST-2").mkdir()
    lines = [f"{text}\t{number % 2}" for number, (text, _) in enumerate(rows)]
    for name, part in (("train", lines[:40]), ("dev", lines[40:])):
        content = "\n".join(["sentence\tlabel", *part])
        Path(f"SST-2/{name}.tsv").write_text(content, encoding="utf-8")
    lines = [f"{number}\tThe cat sat." for number in range(1821)]  # the official number
    Path("SST-2/test.tsv").write_text("\n".join(["index\tsentence", *lines]), encoding="utf-8")

    Path("squad").mkdir()
    paragraphs = []
    for number in range(10):
        context = sentences(draw, 4)
        answer = {"text": context.split()[1], "answer_start": 4}
        question = {"id": str(number), "question": "Who sat?", "answers": [answer]}
        paragraphs.append({"context": context, "qas": [question]})
    data = {"version": "1.1", "data": [{"title": "animals", "paragraphs": paragraphs}]}
    for name in ("train", "dev"):
        Path(f"squad/{name}-v1.1.json").write_text(json.dumps(data), encoding="utf-8")
    return tmp_path


def run_page(page):
    """Run the page's blocks in their order, in the current folder."""
    for kind, block in blocks(page):
        if kind == "python":
            exec(compile(block, page, "exec"), {})
            continue
        for words in commands(block):
            if words[0] in NOT_OURS:
                continue
            assert words[0] == "bertsmith", words
            words = small(words[1:])
            assert main(words) == 0, words
            if "--out" in words and "--dry-run" not in words:
                assert Path(words[words.index("--out") + 1]).exists(), words


TUTORIALS = [f"docs/tutorials/{path.name}" for path in (ROOT / "docs/tutorials").glob("*.md")]


CORPUS = "docs/how-to/paper-corpus.md"
PAPER = pytest.param("docs/tutorials/the-paper.md", marks=pytest.mark.slow)


@pytest.mark.parametrize("page", ["README.md", PAPER])
def test_a_page_runs_on_small_data(page, folder):
    run_page(page)


def test_the_tutorials_of_own_text_and_own_labels_run_one_after_the_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = ("specialnames", "compound", "types", *sorted(topics)[:12])
    few = {name: topics[name][:6000] for name in names}
    monkeypatch.setattr("pydoc_data.topics.topics", few)
    run_page("docs/tutorials/own-text.md")
    run_page("docs/tutorials/own-labels.md")
    assert len(Path("answers.csv").read_text(encoding="utf-8").splitlines()) == 5


@pytest.mark.slow
def test_the_corpus_of_the_paper(folder):
    articles = Path("texts/a.txt").read_text(encoding="utf-8").split("\n\n")
    dump = HEAD + "".join(map(page, articles[20:])) + TAIL
    write(Path("enwiki/enwiki-20251101-pages-articles1.xml-p1p40.bz2"), bz2.compress(dump.encode()))
    marks = [f"*** {word} OF THE PROJECT GUTENBERG EBOOK A ***" for word in ("START", "END")]
    for number, book in enumerate(articles[:20]):
        write(Path(f"books/{number}.txt"), [marks[0], *book.split(". "), marks[1]])
    run_page(CORPUS)
    store = json.loads(Path("store/manifest.json").read_text(encoding="utf-8"))
    assert store["documents"] == 61


@pytest.mark.parametrize("page", ["README.md", CORPUS, *sorted(TUTORIALS)])
def test_all_commands_of_a_page_stand_in_blocks_that_are_run(page):
    assert blocks(page)
    assert not INDENTED.findall((ROOT / page).read_text(encoding="utf-8"))
