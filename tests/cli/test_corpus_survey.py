"""corpus report, corpus dedup, corpus contamination, and a build that leaves out what they list."""

import json
import sys
from pathlib import Path

import fsspec
import pytest

from bertsmith.corpus.store.store import TokenStore

from ..tiny import bertsmith, cli, contents, piece_tokenizer, refused, write

WORDS = [f"w{number}" for number in range(400)]
BUILD = "corpus a.txt --vocab vocab --held-out 0 --workers 1"
DEDUP = "corpus dedup a.txt --exact --out"
TASKS = "corpus contamination a.txt --tasks dev.tsv --out"
REPORT = "corpus report a.txt --exact"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A folder with a vocabulary, a corpus of 12 documents and a task."""
    monkeypatch.chdir(tmp_path)
    piece_tokenizer(" ".join(WORDS)).save(Path("vocab"))
    documents = [" ".join(WORDS[30 * k : 30 * k + 30]) for k in range(12)]
    documents[7] = documents[2]
    documents[9] = f"w399 {documents[3]}"
    write(Path("a.txt"), "\n\n".join(documents))
    write(Path("b.txt"), "w1\n\nw2")
    write(Path("empty.txt"), "\n")
    write(Path("dev.tsv"), [f"1\t{' '.join(WORDS[40:60])}", "0\ttoo short"])


def done(line):
    return bertsmith(*line.split())


def refusal(line):
    return refused(*line.split())


def read(path):
    head, *entries = map(json.loads, Path(path).read_text().splitlines())
    return head, entries


def test_a_build_leaves_out_what_was_listed():
    pytest.importorskip("rensa", reason="the extra dedup is not installed")
    out = done("corpus dedup a.txt --out dup.jsonl")
    assert "2 of 12 documents repeat another (1 equal, 1 near)" in out
    head, entries = read("dup.jsonl")
    assert head["settings"] == {"similarity": 0.6, "text_column": "text"}
    assert [(one["document"], one["of"]["document"]) for one in entries] == [(7, 2), (9, 3)]
    out = done(f"{TASKS} over.jsonl --words 10 --json over.json")
    assert "1 of 12 documents share 1 or more runs of 10 words" in out
    assert out.splitlines()[2].split() == ["4", "3", "1", "100.00%", "dev.tsv"]
    assert json.loads(Path("over.json").read_text())["listed"] == 1
    less = f"{BUILD} --out less --exclude dup.jsonl over.jsonl"
    done(f"{BUILD} --out whole")
    done(less)
    whole, kept = (TokenStore.open(Path(name)).train for name in ("whole", "less"))
    assert (whole.num_documents, kept.num_documents) == (12, 9)
    for place, number in enumerate(k for k in range(12) if k not in (1, 7, 9)):
        assert (kept.document(place)[0] == whole.document(number)[0]).all()
    assert "finished before" in cli(*less.split()).err
    error = refusal(f"{BUILD} --out less --exclude dup.jsonl")
    assert "finished token store of other inputs or settings" in error
    write(Path("a.txt"), "w1\n\nw2")
    error = refusal(f"{BUILD} --out new --exclude dup.jsonl over.jsonl")
    assert "a.txt has changed since the list was made: make it again" in error


def test_a_list_of_one_column_is_not_taken_for_another():
    rows = [{"a": None, "b": "one"}, {"a": "two", "b": "three"}, {"a": "two", "b": "four"}]
    write(Path("c.jsonl"), map(json.dumps, rows))
    done("corpus dedup c.jsonl --text-column a --exact --out l.jsonl")
    done("corpus contamination c.jsonl --text-column a --tasks dev.tsv --out t.jsonl")
    built = "corpus c.jsonl --text-column b --vocab vocab --out c --exclude"
    for listed in ("l.jsonl", "t.jsonl"):
        told = refusal(f"{built} {listed}")
        assert f"{listed}: numbers the texts of column 'a', not of 'b': make it with" in told


def test_equal_documents_alone(monkeypatch):
    monkeypatch.setitem(sys.modules, "rensa", None)
    assert "(1 equal, 0 near)" in done(f"{DEDUP} new/dup.jsonl")
    assert read("new/dup.jsonl")[0]["settings"] == {"exact": True, "text_column": "text"}
    assert [file.name for file in Path("new").iterdir()] == ["dup.jsonl"]
    error = refusal("corpus dedup a.txt --out dup.jsonl")
    assert "rensa is not installed: pip install 'bertsmith[dedup]'" in error
    assert not Path("dup.jsonl").exists()


def test_a_report_as_text_json_and_page():
    lines = done(f"{REPORT} --json r.json --html r.html").splitlines()
    assert lines[0].startswith("1 file, 1.7 kB stored; 12 documents, 12 lines, ")
    assert lines[2] == "letters by script: Latin 100.00%"
    assert lines[3].startswith("documents equal to an earlier one: 1, ")
    assert lines[4].split() == ["1.000", "a.txt:15", "like", "a.txt:5"]
    out = "\n".join(lines)
    assert "nearly so" not in out and "lines that repeat an earlier one: 1, 8.33%" in out
    assert json.loads(Path("r.json").read_text())["documents"] == 12
    page = Path("r.html").read_text()
    assert "What is in the corpus" in page and "1 file<" in page and "1 document<" in page


def test_new_text_is_compared_with_the_text_of_a_store():
    """Documents that the old text repeats itself are not in the way, see --exclude."""
    old = Path("a.txt").read_text().split("\n\n")  # its documents 2 and 7 are equal
    new = [old[7], " ".join(WORDS[5:35]), "w1 w2", "w1 w2"]
    write(Path("b.txt"), "\n\n".join(new))
    done(f"{BUILD} --out store")
    against = "--against a.txt --exact --out"
    out = done(f"corpus dedup b.txt {against} known.jsonl --workers 2")
    assert "2 of 4 documents repeat another (2 equal, 0 near)" in out
    share = (len(old[7]) + 5) / sum(map(len, new))
    assert f"{share:.1%} of the text" in out
    head, entries = read("known.jsonl")
    assert head["settings"] == {"exact": True, "text_column": "text", "against": ["a.txt"]}
    assert [file["path"] for file in head["inputs"]] == ["b.txt"]
    found = [(one["document"], one["of"]["source"], one["of"]["document"]) for one in entries]
    assert found == [(0, "a.txt", 2), (3, "b.txt", 2)]
    out = done("corpus append b.txt --store store --exclude known.jsonl")
    assert "store: generation 2: 2 documents" in out
    assert "a.txt: given twice" in refusal(f"corpus dedup a.txt {against} o")
    assert "empty.txt: no text in it" in refusal(f"corpus dedup empty.txt {against} o")


def test_the_password_of_a_url_is_in_no_list():
    storage, place = fsspec.filesystem("memory"), "me:secret@host"
    storage.pipe(f"/{place}/old.txt", Path("b.txt").read_bytes())
    done(f"corpus dedup b.txt --against memory://{place}/old.txt --exact --out known.jsonl")
    storage.rm(f"/{place}", recursive=True)
    head, entries = read("known.jsonl")
    assert head["settings"]["against"] == ["memory://me:***@host/old.txt"]
    assert [one["of"]["source"] for one in entries] == 2 * ["memory://me:***@host/old.txt"]


def test_an_older_list_stays_where_a_new_one_fails():
    write(Path("o"), "older")
    refusal("corpus contamination empty.txt --tasks dev.tsv --out o")
    assert Path("o").read_text() == "older"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (f"{DEDUP} a.txt", "--out a.txt is an input"),
        (f"{DEDUP} vocab/../a.txt", "is an input"),
        (f"{DEDUP} b.txt --against b.txt", "an input"),
        (f"{DEDUP} vocab", "--out vocab is a folder"),
        (f"{DEDUP} s3://b/l", "is a URL, and is written on"),
        (f"{TASKS} dev.tsv", "is an input"),
        (f"{TASKS} o --json o", "--json o is written under another flag: name another file"),
        (f"{DEDUP} .", "--out . is a folder: name another"),
        (f"{DEDUP} /", "--out / is a folder: name another"),
        (f"{REPORT} --json .", "--json . is a folder"),
        (f"{REPORT} --html vocab", "--html vocab is a folder"),
        (f"{REPORT} --json a.txt", "a.txt is an input"),
        (f"{REPORT} --json a.txt/r", "--json a.txt/r cannot be wr"),
        (f"{DEDUP} o --similarity 0.7", "no effect"),
        ("corpus dedup a.txt --out o --similarity 0.2", "expected 0.5 to 1"),
        ("corpus dedup a.txt a.txt --exact --out o", "a.txt: given twice"),
        ("corpus dedup empty.txt --exact --out o", "empty.txt: no text in it"),
        ("corpus dedup vocab --exact --out o", "vocab: no text files in this folder"),
        (f"{DEDUP} o --workers -2", "--workers -2: must be at least 1"),
        (f"{TASKS} o --words 0", "words"),
        (f"{TASKS} o --least 0", "least"),
        ("corpus contamination a.txt --tasks no.tsv --out o", "no.tsv: no such file"),
        ("corpus contamination a.txt --tasks vocab --out o", "vocab: a folder: name"),
        ("corpus contamination empty.txt --tasks dev.tsv --out o", "no text in it"),
        ("corpus report empty.txt --exact", "empty.txt: no text in it"),
        ("corpus report a.txt --exact --similarity 0.7", "--similarity has no effect with --exact"),
        ("corpus report memory://me:secret@host/x", "report: memory://me:***@host/x: no such file"),
        (f"{REPORT} --limit-mb 0", "--limit-mb 0.0: must be"),
        ("corpus report a.txt --similarity 2", "--similarity 2.0: expected"),
        (f"{REPORT} --workers 0", "--workers 0: must be at least"),
    ],
)
def test_refusals_touch_no_file(words, message):
    files = contents(Path())
    ran = cli(*words.split())
    *before_it, line = ran.err.splitlines()
    assert (ran.code, ran.out) == (2, "") and message in line
    assert not before_it or message == "empty.txt: no text in it"  # found by reading
    assert files == contents(Path()) and not Path("o").exists()
