"""`bertsmith vocab report` from files to table, JSON and picture, and its refusals."""

import json

import pytest

from bertsmith.cli.main import main
from bertsmith.text.tokenizer.normalize import Normalization
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.text.tokenizer.wordpiece import SPECIAL, Vocabulary

TEXT = "The cat sat on the mat.\nThe cat sat on the mat.\n\nA déjà vu, 한국 cat!\n"
ASCII = "acdehjmnostuvx.,!"


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """Runs the command in a folder with text.txt and the vocabularies `uncased` and `kept`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    for name, letters, strips in (("uncased", ASCII, "all"), ("kept", ASCII + "éà한국", "none")):
        pieces = [*SPECIAL, *letters, *("##" + letter for letter in letters), "cat"]
        Tokenizer(Vocabulary(pieces), Normalization(strip_accents=strips)).save(tmp_path / name)

    def run(*words):
        code = main(["vocab", "report", *words])
        return code, *capsys.readouterr()

    return run


def cells(out, label):
    """The figures of a row of the table."""
    [row] = [line for line in out.splitlines() if line.startswith(label)]
    return row.removeprefix(label).split()


def test_a_table_of_one_vocabulary(call):
    code, out, _ = call("text.txt", "--vocab", "kept")
    assert code == 0
    assert out.startswith("2 documents, 3 lines, 64 characters, 0.0 MB\n")
    assert cells(out, "words  ") == ["21"]
    assert cells(out, "words covered") == ["100.00%"]
    assert cells(out, "letters altered") == ["0.00%"]
    assert "difference" not in out and "warning" not in out and "no piece" not in out
    assert "lines that repeat an earlier one: 1, 33.33%" in out
    assert "             2  The cat sat on the mat.\n" in out


def test_two_vocabularies_beside_each_other_and_as_json(call, tmp_path):
    code, out, _ = call("text.txt", "--vocab", "uncased", "--against", "kept", "--json", "f.json")
    assert code == 0
    assert out.splitlines()[2].split() == ["uncased", "kept", "difference"]
    assert cells(out, "words covered") == ["95.24%", "100.00%", "-4.76%"]
    assert cells(out, "pieces in the vocabulary") == ["40", "48", "-8"]
    assert "characters that no piece of uncased holds, the most frequent:" in out
    assert "             1  U+D55C    한  HANGUL SYLLABLE HAN\n" in out
    assert "             2   [UNK]       2  한국\n" in out
    assert "uncased: warning: 8.7% of the letters are altered" in out
    assert "--strip-accents none or --preset multilingual" in out
    figures = json.loads((tmp_path / "f.json").read_text(encoding="utf-8"))
    assert [side["name"] for side in figures["vocabularies"]] == ["uncased", "kept"]
    assert figures["vocabularies"][0]["word_coverage"] == 1 - 1 / 21
    assert figures["text"]["duplicate_lines"]["count"] == 1


def test_a_picture_and_less_of_the_text(call, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"body": "a cat"}\n{"body": "the\\u001b[1m mat"}\n')
    words = ["rows.jsonl", "--text-column", "body", "--vocab", "kept", "--plot", "f.svg"]
    code, out, _ = call(*words)
    assert code == 0 and out.startswith("2 documents, 2 lines")
    assert (tmp_path / "f.svg").read_text().startswith("<?xml")
    code, out, _ = call(*words[:-2], "--limit-mb", "0.000001")
    assert code == 0 and out.startswith("1 documents, 1 lines")


def test_what_a_terminal_cannot_show_is_escaped(call, tmp_path):
    line = "x" * 70 + "\u202e\u001b[1m mat"
    (tmp_path / "text.txt").write_text(f"{line}\n{line}\n\u202e\u001b\n\u202e\u001b\n")
    code, out, _ = call("text.txt", "--vocab", "kept")
    assert code == 0
    assert "x" * 60 + "…\n" in out and "  \\u202e\\x1b\n" in out
    assert not {"\u202e", "\u001b"} & set(out)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["text.txt", "--vocab", "nowhere/x/y"], "nowhere/x/y: no such folder"),
        (["text.txt", "--vocab", "text.txt"], "text.txt: a file, not a model"),
        (["text.txt", "--vocab", "."], ".: neither vocab.txt nor tokenizer.json is there"),
        (["text.txt", "--vocab", "kept", "--against", "kept"], "--against kept is --vocab itself"),
        (["text.txt", "--vocab", "kept", "--plot", "x.pdf"], "x.pdf: a plot is a .png"),
        (["text.txt", "--vocab", "kept", "--json", "text.txt"], "--json text.txt is an input"),
        (["empty.txt", "--vocab", "kept", "--json", "."], "--json . is a folder: name another"),
        (["empty.txt", "--vocab", "kept", "--plot", "/"], "--plot / is a folder: name another"),
        (["text.txt", "--vocab", "kept", "--limit-mb", "0"], "--limit-mb 0.0: must be more than 0"),
        (["empty.txt", "--vocab", "kept"], "empty.txt: no text in it"),
        (["none.txt", "--vocab", "kept"], "none.txt: no such file"),
    ],
)
def test_refusals(call, tmp_path, words, message):
    (tmp_path / "empty.txt").write_text("\n")
    code, out, error = call(*words)
    assert (code, out) == (2, "")
    assert error.splitlines()[-1].startswith(f"bertsmith vocab report: {message}")


@pytest.mark.parametrize("flag", ["--json", "--plot"])
def test_a_file_of_a_vocabulary_is_not_written_over(call, tmp_path, flag):
    target = tmp_path / "kept" / ("vocab.txt" if flag == "--json" else "picture.png")
    target.touch()
    before = target.read_bytes()
    code, _, err = call("text.txt", "--vocab", "uncased", "--against", "kept", flag, str(target))
    assert code == 2 and f"{flag} {target} is a file beside a vocabulary" in err
    assert target.read_bytes() == before
