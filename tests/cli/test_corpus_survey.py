"""corpus report, corpus dedup, corpus contamination, and a build that leaves out what they list."""

import json

import pytest

from bertsmith.cli.main import main
from bertsmith.corpus.store.store import TokenStore
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.text.tokenizer.wordpiece import SPECIAL, Vocabulary

WORDS = [f"w{number}" for number in range(400)]


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """Runs a command in a folder with a vocabulary, a corpus of 12 documents and a task."""
    monkeypatch.chdir(tmp_path)
    Tokenizer(Vocabulary([*SPECIAL, *WORDS])).save(tmp_path / "vocab")
    documents = [" ".join(WORDS[30 * k : 30 * k + 30]) for k in range(12)]
    documents[7] = documents[2]
    documents[9] = f"w399 {documents[3]}"
    (tmp_path / "a.txt").write_text("\n\n".join(documents))
    (tmp_path / "dev.tsv").write_text(f"1\t{' '.join(WORDS[40:60])}\n0\ttoo short\n")

    def run(*words):
        code = main(list(words))
        return code, *capsys.readouterr()

    return run


def read(path):
    head, *entries = map(json.loads, path.read_text().splitlines())
    return head, entries


def test_a_build_leaves_out_what_was_listed(call, tmp_path):
    pytest.importorskip("rensa", reason="the extra dedup is not installed")
    code, out, _ = call("corpus", "dedup", "a.txt", "--out", "dup.jsonl")
    assert code == 0
    assert "2 of 12 documents repeat another (1 equal, 1 near)" in out
    head, entries = read(tmp_path / "dup.jsonl")
    assert head["settings"] == {"similarity": 0.6}
    assert [(one["document"], one["of"]["document"]) for one in entries] == [(7, 2), (9, 3)]
    code, out, _ = call(
        *("corpus", "contamination", "a.txt", "--tasks", "dev.tsv", "--out", "over.jsonl"),
        *("--words", "10", "--json", "over.json"),
    )
    assert code == 0
    assert "1 of 12 documents share 1 or more runs of 10 words" in out
    assert out.splitlines()[2].split() == ["4", "3", "1", "100.00%", "dev.tsv"]
    assert json.loads((tmp_path / "over.json").read_text())["listed"] == 1
    build = ["corpus", "a.txt", "--vocab", "vocab", "--held-out", "0"]
    lists = ["--exclude", "dup.jsonl", "over.jsonl"]
    assert call(*build, "--out", "whole")[0] == call(*build, "--out", "less", *lists)[0] == 0
    whole, less = (TokenStore.open(tmp_path / name).train for name in ("whole", "less"))
    kept = [k for k in range(12) if k not in (1, 7, 9)]
    assert (whole.num_documents, less.num_documents) == (12, 9)
    for place, number in enumerate(kept):
        assert (less.document(place)[0] == whole.document(number)[0]).all()
    assert "finished before" in call(*build, "--out", "less", *lists)[2]
    code, _, err = call(*build, "--out", "less", "--exclude", "dup.jsonl")
    assert code == 2 and "finished token store of other inputs or settings" in err
    (tmp_path / "a.txt").write_text("w1\n\nw2")
    code, _, err = call(*build, "--out", "new", *lists)
    assert code == 2 and "a.txt has changed since the list was made: make it again" in err


def test_equal_documents_alone(call, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "rensa", None)
    code, out, _ = call("corpus", "dedup", "a.txt", "--out", "new/dup.jsonl", "--exact")
    assert code == 0 and "(1 equal, 0 near)" in out
    assert read(tmp_path / "new/dup.jsonl")[0]["settings"] == {"exact": True}
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["dup.jsonl"]
    code, _, err = call("corpus", "dedup", "a.txt", "--out", "dup.jsonl")
    assert code == 2 or code == 1
    assert "rensa is not installed: pip install 'bertsmith[dedup]'" in err
    assert not (tmp_path / "dup.jsonl").exists()


def test_a_report_as_text_json_and_page(call, tmp_path):
    code, out, _ = call(
        "corpus", "report", "a.txt", "--exact", "--json", "r.json", "--html", "r.html"
    )
    assert code == 0
    lines = out.splitlines()
    assert lines[0].startswith("1 file, 0.0 MB stored; 12 documents, 12 lines, ")
    assert lines[2] == "letters by script: Latin 100.00%"
    assert lines[3].startswith("documents equal to an earlier one: 1, ")
    assert lines[4].split() == ["1.000", "a.txt:15", "like", "a.txt:5"]
    assert "nearly so" not in out and "lines that repeat an earlier one: 1, 8.33%" in out
    assert json.loads((tmp_path / "r.json").read_text())["documents"] == 12
    page = (tmp_path / "r.html").read_text()
    assert "What is in the corpus" in page and "1 file<" in page and "1 document<" in page


def test_new_text_is_compared_with_the_text_of_a_store(call, tmp_path):
    """Documents that the old text repeats itself are not in the way, see --exclude."""
    old = (tmp_path / "a.txt").read_text().split("\n\n")  # its documents 2 and 7 are equal
    new = [old[7], " ".join(WORDS[5:35]), "w1 w2", "w1 w2"]
    (tmp_path / "b.txt").write_text("\n\n".join(new))
    build = ["--held-out", "0", "--workers", "1"]
    assert call("corpus", "a.txt", "--vocab", "vocab", "--out", "store", *build)[0] == 0
    words = ["corpus", "dedup", "b.txt", "--against", "a.txt", "--out", "known.jsonl", "--exact"]
    code, out, err = call(*words, "--workers", "2")
    assert code == 0, err
    assert "2 of 4 documents repeat another (2 equal, 0 near)" in out
    share = (len(old[7]) + 5) / sum(map(len, new))
    assert f"{share:.1%} of the text" in out
    head, entries = read(tmp_path / "known.jsonl")
    assert head["settings"] == {"exact": True, "against": ["a.txt"]}
    assert [file["path"] for file in head["inputs"]] == ["b.txt"]
    found = [(one["document"], one["of"]["source"], one["of"]["document"]) for one in entries]
    assert found == [(0, "a.txt", 2), (3, "b.txt", 2)]
    append = ["corpus", "append", "b.txt", "--store", "store", "--exclude", "known.jsonl"]
    code, out, err = call(*append)
    assert code == 0 and "store: generation 2: 2 documents" in out, err
    code, _, err = call("corpus", "dedup", "a.txt", "--against", "a.txt", "--out", "o", "--exact")
    assert code == 2 and "a.txt: given twice" in err
    (tmp_path / "empty.txt").write_text("\n")
    code, _, err = call(
        "corpus", "dedup", "empty.txt", "--against", "a.txt", "--out", "o", "--exact"
    )
    assert code == 2 and "empty.txt: no text in it" in err


def test_an_older_list_stays_where_a_new_one_fails(call, tmp_path):
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "o").write_text("older")
    assert call("corpus", "contamination", "empty.txt", "--tasks", "dev.tsv", "--out", "o")[0] == 2
    assert (tmp_path / "o").read_text() == "older"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["corpus", "dedup", "a.txt", "--exact", "--out", "a.txt"], "--out a.txt is an input"),
        (["corpus", "dedup", "a.txt", "--exact", "--out", "vocab/../a.txt"], "is an input"),
        (
            ["corpus", "dedup", "a.txt", "--exact", "--against", "b.txt", "--out", "b.txt"],
            "an input",
        ),
        (["corpus", "dedup", "a.txt", "--exact", "--out", "vocab"], "--out vocab is a folder"),
        (
            ["corpus", "dedup", "a.txt", "--exact", "--out", "s3://b/l"],
            "is a URL, and is written on",
        ),
        (
            ["corpus", "contamination", "a.txt", "--tasks", "dev.tsv", "--out", "dev.tsv"],
            "is an input",
        ),
        (
            ["corpus", "contamination", "a.txt", "--tasks", "dev.tsv", "--out", "o", "--json", "o"],
            "--json o is written under another flag: name another file",
        ),
        (
            ["corpus", "dedup", "a.txt", "--exact", "--out", "."],
            "--out . is a folder: name another",
        ),
        (
            ["corpus", "dedup", "a.txt", "--exact", "--out", "/"],
            "--out / is a folder: name another",
        ),
        (["corpus", "report", "a.txt", "--exact", "--json", "."], "--json . is a folder"),
        (["corpus", "report", "a.txt", "--exact", "--html", "vocab"], "--html vocab is a folder"),
        (
            ["corpus", "report", "a.txt", "--exact", "--json", "a.txt/r"],
            "--json a.txt/r cannot be wr",
        ),
    ],
)
def test_nothing_is_written_over_what_is_read(call, tmp_path, words, message):
    (tmp_path / "b.txt").write_text("w1\n\nw2")
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    code, out, err = call(*words)
    assert (code, out) == (2, "") and message in err and err.count("\n") == 1
    assert before == {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["corpus", "dedup", "a.txt", "--out", "o", "--exact", "--similarity", "0.7"], "no effect"),
        (["corpus", "dedup", "a.txt", "--out", "o", "--similarity", "0.2"], "expected 0.5 to 1"),
        (["corpus", "dedup", "a.txt", "a.txt", "--out", "o", "--exact"], "a.txt: given twice"),
        (["corpus", "dedup", "empty.txt", "--out", "o", "--exact"], "empty.txt: no text in it"),
        (
            [
                "corpus",
                "contamination",
                "a.txt",
                "--tasks",
                "dev.tsv",
                "--out",
                "o",
                "--words",
                "0",
            ],
            "words",
        ),
        (
            [
                "corpus",
                "contamination",
                "a.txt",
                "--tasks",
                "dev.tsv",
                "--out",
                "o",
                "--least",
                "0",
            ],
            "least",
        ),
        (
            ["corpus", "contamination", "a.txt", "--tasks", "no.tsv", "--out", "o"],
            "no.tsv: no such file",
        ),
        (
            ["corpus", "contamination", "empty.txt", "--tasks", "dev.tsv", "--out", "o"],
            "no text in it",
        ),
        (["corpus", "report", "empty.txt", "--exact"], "empty.txt: no text in it"),
        (["corpus", "report", "a.txt", "--exact", "--limit-mb", "0"], "--limit-mb 0.0: must be"),
        (["corpus", "report", "a.txt", "--exact", "--json", "a.txt"], "a.txt is an input"),
        (["corpus", "report", "a.txt", "--similarity", "2"], "similarity = 2.0: expected"),
        (
            ["corpus", "report", "a.txt", "--exact", "--workers", "0"],
            "--workers 0: expected at least",
        ),
        (
            ["corpus", "dedup", "a.txt", "--out", "o", "--exact", "--workers", "-2"],
            "--workers -2: e",
        ),
        (
            ["corpus", "contamination", "a.txt", "--tasks", "vocab", "--out", "o"],
            "vocab: a folder: name",
        ),
        (
            ["corpus", "dedup", "vocab", "--out", "o", "--exact"],
            "vocab: no text files in this folder",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(call, tmp_path, words, message):
    (tmp_path / "empty.txt").write_text("\n")
    code, _, err = call(*words)
    assert code == 2 and message in err.splitlines()[-1]
    assert not (tmp_path / "o").exists()
