"""Commands and Python of the how-to pages run one after the other, on the text they begin with.

Left out are commands on data that the pages do not make (`ELSEWHERE`); budgets are made small.
"""

import json
import lzma
import re
import shlex
from pathlib import Path

import pytest

from bertsmith.cli.main import main

from .experiments.lineage.test_translation import texts as numbers
from .tiny import bertsmith, write, write_model

DOCS = Path(__file__).parents[1] / "docs"
BLOCK = re.compile(
    r"^```python\n(?P<code>.*?)^```\n(?:\n```\n(?P<output>.*?)^```$)?"
    r"|^ {4,}(?:\$ )?bertsmith (?P<command>(?:[^\\\n]|\\\n)+)$",
    re.DOTALL | re.MULTILINE,
)
ELSEWHERE = re.compile(
    r"s3://|\bMODEL\b|docs\.txt|models/|wikipedia|books=|glue/|--data (sst|squad|mixed|pairs)\b"
    r"|--model (large|longer)|--model pairs|--vectors faq|pairs\.csv|--candidates"
)
LITTLE = {"--minutes": "--steps 2", "--steps": "--steps 2", "--epochs": "--epochs 1"}
LITTLE |= {"--trials": "--trials 2", "--seeds": "--seeds 1,2"}
SHAPE = "2x128", "4x64"  # page, test: a page reads four layers
PAIRS = {"--vocab-size": "60", "--num-evals": "1", "--threads": "1", "--hidden-size": "32"}
FLAGS = {  # of a command, in place of the page's or besides
    "finetune": {"--epochs": "1", "--max-retries": "0"},
    "lineage rnn": PAIRS | {"--embedding-size": "32"},
    "lineage attention": PAIRS | {"--embedding-size": "32"},
    "lineage transformer": PAIRS,
    "lineage elmo": {"--size": "16x32", "--threads": "1"},
}


def small(line):
    """The words of a command, with a budget of seconds.

    >>> small("pretrain --corpus store --minutes 60 && ls  # an hour")
    ['pretrain', '--corpus', 'store', '--steps', '2']
    """
    words = shlex.split(line.replace("\\\n", " ").replace(*SHAPE), comments=True)
    words = words[: words.index("&&")] if "&&" in words else words
    for flag in [word for word in words if word in LITTLE]:
        at = words.index(flag)
        words[at : at + 2] = LITTLE[flag].split()
    command = " ".join(words[:2]) if words[0] == "lineage" else words[0]
    for flag, value in FLAGS.get(command, {}).items():
        at = words.index(flag) if flag in words else len(words)
        words[at : at + 2] = [flag, value]
    return words


def run_page(name, capsys):
    """Run what a page shows; what Python prints is compared in the reference. Returns how many
    commands were run."""
    count = 0
    for block in BLOCK.finditer((DOCS / name).read_text(encoding="utf-8")):
        if block["code"]:
            capsys.readouterr()
            exec(compile(block["code"], name, "exec"), NAMES.setdefault(name, {}))
            if block["output"] and name.startswith("reference/"):  # else by Python's version
                assert capsys.readouterr().out == block["output"]
        elif not ELSEWHERE.search(block["command"]) and ": " not in block["command"][:20]:
            words = small(block["command"])
            assert main(words) == 0, words
            count += 1
    return count


NAMES = {}  # of the Python of a page


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    NAMES.clear()
    monkeypatch.chdir(tmp_path)


def split_text():
    documents = Path("topics.txt").read_text(encoding="utf-8").split("\n\n")
    for name, part in (("april", documents[:40]), ("may", documents[35:])):
        Path(f"{name}.txt").write_text("\n\n".join(part), encoding="utf-8")


def test_vocabulary_and_corpus(capsys):
    assert run_page("how-to/vocabulary.md", capsys) == 3
    split_text()
    assert run_page("how-to/corpus.md", capsys) == 7
    run_page("design/data-order.md", capsys)


def test_wordpiece(capsys):
    run_page("reference/wordpiece.md", capsys)


@pytest.mark.slow
def test_finetuning(capsys):
    run_page("how-to/vocabulary.md", capsys)
    split_text()
    run_page("how-to/corpus.md", capsys)
    Path("new.csv").write_text("text\nThe try statement\n", encoding="utf-8")
    Path("test.csv").write_text("text,topic\nThe try statement,compound\n", encoding="utf-8")
    Path("news.conll").write_text("West I-ORG\n\nlost O\n\nRome I-LOC\nwon O\n", encoding="utf-8")
    Path("titles.txt").write_text("One title\nAnother\n", encoding="utf-8")
    assert run_page("how-to/finetune.md", capsys) == 4
    assert run_page("how-to/gpt.md", capsys) == 2
    assert run_page("how-to/search.md", capsys) == 1
    assert run_page("how-to/reports.md", capsys) == 3
    assert run_page("how-to/explain.md", capsys) == 2
    assert run_page("how-to/embeddings.md", capsys) == 3
    run_page("reference/formats.md", capsys)


def test_measuring(capsys):
    texts = [f"the {a} and the {b} sat ." for a in ("cat", "dog") for b in ("owl", "fox")]
    write_model(Path("run"), texts)
    for name in ("novel", "textbook"):
        write(Path(f"{name}.txt"), " ".join(texts * 20))
    pair = {"sentence_good": texts[0], "sentence_bad": texts[1], "UID": "a", "field": "b"}
    write(Path("blimp.jsonl.xz"), lzma.compress(json.dumps(pair).encode()))
    for name in ("train", "testa", "testb"):
        write(Path(f"conll2003/eng.{name}"), ["cat NN I-NP O", "sat VBD I-VP O", ""] * 6)
    rows = [f"{k % 2}\t1\t2\t{texts[k % 4]}\t{texts[k % 2]}" for k in range(20)]
    for name in ("train", "test"):
        header = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"
        write(Path(f"MRPC/msr_paraphrase_{name}.txt"), [header, *rows])
    assert run_page("how-to/measure.md", capsys) == 6


@pytest.fixture
def lineage_data(in_a_folder_of_its_own):
    """Small data under the names of the lineage's pages."""
    for split, count in (("train", 300), ("val", 12), ("test_2016_flickr", 12)):
        for language, lines in numbers(count, split).items():
            write(Path(f"multi30k/{split}.{language}"), lines)
    write(Path("new.txt"), numbers(3, "new")["en"])
    books = [line for seed in range(40) for line in (*numbers(5, seed)["en"], "")]
    write(Path("books/a.txt"), books)
    topics = ["odd,a", "even,b", "strange,a", "flat,b"] * 10
    write(Path("topics.csv"), ["text,topic", *topics])


@pytest.mark.parametrize(
    ("name", "count"),
    [("word-for-word", 2), ("rnn", 2), ("attention", 1), ("transformer", 3), ("elmo", 3)],
)
def test_a_system_of_the_lineage(name, count, lineage_data, capsys):
    assert run_page(f"lineage/{name}.md", capsys) == count


@pytest.mark.slow
@pytest.mark.parametrize(("page", "count"), [("how-to/lineage", 11), ("lineage/bert", 5)])
def test_lineage_with_a_store(page, count, lineage_data, capsys):
    bertsmith("vocab", "books", "--out", "vocab", "--size", 45)
    bertsmith("corpus", "books", "--vocab", "vocab", "--out", "store")
    assert run_page(f"{page}.md", capsys) == count
