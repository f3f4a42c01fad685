"""`bertsmith vocab`, `vocab extend` and `vocab report`: what they write and show, and refusals."""

import json
import shutil
import string
from pathlib import Path

import pytest

from bertsmith.checkpoints.config_json import config_entries
from bertsmith.model.config import ModelConfig, elmo_config
from bertsmith.text.tokenizer.normalize import Normalization
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.text.tokenizer.wordpiece import SPECIAL, Vocabulary

from ..tiny import bertsmith, cli, piece_tokenizer, random_model, refused, write

ENGLISH = "The cat sat on the mat. A cat is not a hat.\n" * 4
KOREAN = "나는 학교에 갑니다. 친구는 학교를 좋아합니다.\n" * 4
WORKERS = ("--workers", 1)
TEXT, KEEP, NEW = Path("text.txt"), Path("keep.txt"), Path("new")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def vocab(text, *flags, out=NEW):
    """The words of `bertsmith vocab` on a text."""
    return "vocab", write(TEXT, text), "--out", out, *flags, *WORKERS


def test_a_vocabulary_is_written_and_described():
    out = bertsmith(*vocab(ENGLISH, "--size", 30))
    assert "30 pieces, alphabet of 11 characters" in out
    assert "pieces a word, 0.00% of the words unknown" in out
    tokenizer = Tokenizer.from_pretrained(NEW)
    assert (len(tokenizer.vocabulary), tokenizer.normalization.lowercase) == (30, True)
    bertsmith(*vocab(ENGLISH, "--size", 33, "--cased", out="cased"))
    assert not Tokenizer.from_pretrained(Path("cased")).normalization.lowercase


def test_hangul_stays_whole_on_request():
    out = bertsmith(*vocab(KOREAN, "--size", 36, out="plain"))
    assert "warning: 100.0% of the letters are altered" in out
    assert "warning" not in bertsmith(*vocab(KOREAN, "--size", 26, "--strip-accents", "none"))
    tokenizer = Tokenizer.from_pretrained(NEW)
    assert any(piece.startswith("학") for piece in tokenizer.vocabulary.pieces)
    assert tokenizer.decode(tokenizer.encode_batch([KOREAN]).ids[:9]).startswith("나는 학교에")


def test_kept_words_and_coverage():
    write(KEEP, "Dog\n##Log\n")
    bertsmith(*vocab(ENGLISH + "q\n", "--size", 30, "--coverage", 0.99, "--keep", KEEP))
    pieces = Tokenizer.from_pretrained(NEW).vocabulary.pieces
    assert len(pieces) == 30 and {"dog", "##log"} < {*pieces} and "q" not in pieces


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (b"", "keep.txt: no words in it"),
        (b"dog\nhot dog\n", "keep.txt:2: 'hot dog' becomes 2 words"),
        (b"caf\xe9\n", "keep.txt:1: not UTF-8"),
        ([f"word{n}" for n in range(40)], "a vocabulary of 30 is too small: special"),
        ([f"word{n}" for n in range(20)], "20 pieces to keep and the text's"),
        (None, "keep.txt: no such file"),
    ],
    ids=["empty", "two words", "latin-1", "more than fit", "more than fit with the text", "absent"],
)
def test_words_that_cannot_be_kept(lines, message):
    if lines is not None:
        write(KEEP, lines)
    assert message in refused(*vocab(ENGLISH, "--size", 30, "--keep", KEEP))
    assert not NEW.exists()


MEGABYTES = b"Short.\n\n" + b"word " * 2_000_000
UNREADABLE = {
    "empty": (b"", ("bad.txt: no text in it", "give files")),
    "blank": (b"\n \n\n", ("bad.txt: no text in it", "give files")),
    "latin-1": (b"caf\xe9\n", "1: not UTF-8 (byte 0xe9 at offset 3): convert it with iconv"),
    "utf-16": ("The cat sleeps.\n".encode("utf-16"), ("bad.txt:1: NUL byte", "iconv")),
    "binary": (b"\x7fELF\2\1\0\0\0\n\0", ("1: NUL byte, looks like a binary file", "leave it out")),
    "10 MB": (MEGABYTES, "bad.txt:3: line of more than 1,000,000 characters: put line breaks"),
}


@pytest.mark.parametrize("command", ["vocab", "corpus"])
@pytest.mark.parametrize(("text", "says"), UNREADABLE.values(), ids=UNREADABLE)
def test_a_text_that_cannot_be_used(command, text, says, made, refuse, tmp_path):
    bad = write(tmp_path / "bad.txt", text)
    refuse(*made.words(command, NEW, bad), says=says)
    assert not NEW.exists()


@pytest.mark.parametrize(
    ("text", "flags", "message"),
    [
        (ENGLISH, ["--size", 9], "a vocabulary of 9 is too small"),
        (ENGLISH, ["--size", 900], "pieces: use --size"),
        (ENGLISH, ["--coverage", 99], "--coverage 99.0: must be above 0 and at most 1"),
        (
            " ".join(map(chr, range(0x4E00, 0x4E00 + 200))),
            ["--size", 50],
            "50 is too small: special tokens and the text's 200 characters need --size 205 or more",
        ),
    ],
    ids=["below the alphabet", "above the text", "coverage", "below the signs"],
)
def test_a_size_or_coverage_that_cannot_be(text, flags, message):
    assert message in refused(*vocab(text, *flags))
    assert not NEW.exists()


@pytest.mark.parametrize("name", ["vocab.txt", "config.json"])
def test_a_vocabulary_or_model_is_not_written_over(name):
    write(NEW / name, "mine")
    error = refused(*vocab(ENGLISH, "--size", 30))
    assert "holds a vocabulary or a model already" in error and "name another --out" in error
    assert [file.name for file in NEW.iterdir()] == [name]


LETTERS = string.ascii_lowercase
KNOWN = piece_tokenizer(" ".join([*LETTERS, *(f"##{letter}" for letter in LETTERS), "the sat ."]))
PIECES = KNOWN.vocabulary.pieces
OPERATORS = "The iterator sat. Tensor operators iterate.\n\n" * 20


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """An untrained model of 60 pieces that knows only letters and three words."""
    return random_model(tmp_path_factory.mktemp("made") / "model", KNOWN, std=0.1)


def extend(model, *flags, text=OPERATORS, out=NEW):
    """The words of `bertsmith vocab extend`."""
    return "vocab", "extend", write(TEXT, text), "--model", model, "--out", out, *WORKERS, *flags


def test_a_model_grows_and_the_other_commands_open_it(model):
    out = bertsmith(*extend(model, "--add", 3))
    assert "new: 3 pieces added to 60\nfirst: ##erator iterate tensor\n" in out
    # two of the documents, each of 34 pieces: 1 + 8 + 1 + 1 and 6 + 9 + 7 + 1
    assert "held-out documents, every tenth: 68 pieces before, 26 after (61.8% fewer)" in out
    assert Tokenizer.from_pretrained(NEW).vocabulary.pieces[:60] == PIECES
    assert json.loads(bertsmith("fill", "The [MASK] sat.", "--model", NEW, "--json"))
    bertsmith("convert", NEW, "copy")


def test_by_default_as_much_is_added_as_the_text_gives(model):
    out = bertsmith(*extend(model, text=OPERATORS.replace("\n\n", "\n")))
    assert "the text (too few to hold any out)" in out
    tokenizer = Tokenizer.from_pretrained(NEW)
    assert len(tokenizer.encode_batch(["The iterator sat. Tensor operators iterate."]).ids) == 8


def test_a_model_with_a_multiple_of_64_rows_keeps_one(tmp_path):
    config = ModelConfig(64, 16, 1, 2, 32, 64)
    wider = random_model(tmp_path / "wider", KNOWN, config=config, std=0.1)
    out = bertsmith(*extend(wider, "--add", 2))
    assert "2 pieces added to 60, and 66 [unused] ones that hold places" in out


def test_words_to_keep_are_added_besides(model):
    write(KEEP, "Quux\nsat\n##ator\n")
    bertsmith(*extend(model, "--add", 0, "--keep", KEEP))
    assert Tokenizer.from_pretrained(NEW).vocabulary.pieces[60:] == ("quux", "##ator")
    write(KEEP, "quux\nnumpy.array\n")
    error = refused(*extend(model, "--keep", KEEP, out="other"))
    assert "keep.txt:2: 'numpy.array' becomes 3 words when it is normal" in error


@pytest.mark.parametrize(
    ("flags", "text", "message"),
    [
        (["--add", 900], OPERATORS, "--add 900: the text has only"),
        (["--add", 0], OPERATORS, "nothing to add: the text has no piece that would shorten it"),
        ([], "the sat. " * 50, "nothing to add"),
        (["--min-frequency", 10_000], OPERATORS, "nothing to add"),
        ([], "\n \n", "text.txt: no text in it"),
        (["--add", -1], OPERATORS, "--add -1: must be at least 0"),
        (["--min-frequency", 0], OPERATORS, "--min-frequency 0: must be at least 1"),
        (["--keep", "nowhere.txt"], OPERATORS, "nowhere.txt: no such file: --keep names a file"),
    ],
)
def test_a_model_that_cannot_grow(flags, text, message, model):
    assert message in refused(*extend(model, *flags, text=text))
    assert not NEW.exists()


def test_a_folder_in_use_and_a_model_without_tokenizer_are_refused(model):
    error = refused(*extend(model, out=model))
    assert "not empty: name a folder that is not there yet" in error
    write(Path("bare/config.json"), (model / "config.json").read_bytes())
    assert "neither vocab.txt nor tokenizer.json is there" in refused(*extend("bare"))


def test_a_model_that_cannot_be_extended_is_refused_before_the_text_is_read(model, monkeypatch):
    monkeypatch.setattr("bertsmith.cli.vocab._counted", None)
    changed = shutil.copytree(model, Path("changed"))
    write(changed / "added_tokens.json", '{"[E1]": 60}')
    *_, line = cli(*extend(changed)).err.splitlines()  # behind the warning of their reading
    assert "extend: changed: tokens were added to its tokenizer ([E1]), which would be lost" in line
    write(changed / "config.json", json.dumps(config_entries(elmo_config("8x12"), own=True)))
    assert "changed: an ELMo reads words by their letters" in refused(*extend(changed))


@pytest.fixture
def report():
    """Runs `bertsmith vocab report`; there are text.txt and the vocabularies `uncased`, `kept`."""
    text = "The cat sat on the mat.\nThe cat sat on the mat.\n\nA déjà vu, 한국 cat!\n"
    TEXT.write_text(text, encoding="utf-8")
    ascii = "acdehjmnostuvx.,!"
    for name, letters, strips in (("uncased", ascii, "all"), ("kept", ascii + "éà한국", "none")):
        pieces = [*SPECIAL, *letters, *("##" + letter for letter in letters), "cat"]
        Tokenizer(Vocabulary(pieces), Normalization(strip_accents=strips)).save(Path(name))
    return lambda *words, run=bertsmith: run("vocab", "report", *words)


def cells(out, label):
    """The figures of a row of the table."""
    [row] = [line for line in out.splitlines() if line.startswith(label)]
    return row.removeprefix(label).split()


def test_a_table_of_one_vocabulary(report):
    out = report(TEXT, "--vocab", "kept")
    assert out.startswith("2 documents, 3 lines, 64 characters, 0.1 kB\n")
    assert cells(out, "words  ") == ["21"]
    assert cells(out, "words covered") == ["100.00%"]
    assert cells(out, "letters altered") == ["0.00%"]
    assert "difference" not in out and "warning" not in out and "no piece" not in out
    assert "lines that repeat an earlier one: 1, 33.33%" in out
    assert "             2  The cat sat on the mat.\n" in out


def test_two_vocabularies_beside_each_other_and_as_json(report):
    out = report(TEXT, "--vocab", "uncased", "--against", "kept", "--json", "f.json")
    assert out.splitlines()[2].split() == ["uncased", "kept", "difference"]
    assert cells(out, "words covered") == ["95.24%", "100.00%", "-4.76%"]
    assert cells(out, "pieces in the vocabulary") == ["40", "48", "-8"]
    assert "characters that no piece of uncased holds, the most frequent:" in out
    assert "             1  U+D55C    한  HANGUL SYLLABLE HAN\n" in out
    assert "             2   [UNK]       2  한국\n" in out
    assert "uncased: warning: 8.7% of the letters are altered" in out
    assert "--strip-accents none keeps" in out
    figures = json.loads(Path("f.json").read_text(encoding="utf-8"))
    assert [side["name"] for side in figures["vocabularies"]] == ["uncased", "kept"]
    assert figures["vocabularies"][0]["word_coverage"] == 1 - 1 / 21
    assert figures["text"]["duplicate_lines"]["count"] == 1


def test_a_picture_and_less_of_the_text(report):
    write(Path("rows.jsonl"), ['{"body": "a cat"}', '{"body": "the\\u001b[1m mat"}'])
    words = ["rows.jsonl", "--text-column", "body", "--vocab", "kept"]
    assert report(*words, "--plot", "f.svg").startswith("2 documents, 2 lines")
    assert Path("f.svg").read_text().startswith("<?xml")
    assert report(*words, "--limit-mb", "0.000001").startswith("1 documents, 1 lines")


def test_what_a_terminal_cannot_show_is_escaped(report):
    line = "x" * 70 + "\u202e\u001b[1m mat"
    write(TEXT, [line, line, "\u202e\u001b", "\u202e\u001b"])
    out = report(TEXT, "--vocab", "kept")
    assert "x" * 60 + "…\n" in out and "  \\u202e\\x1b\n" in out
    assert not {"\u202e", "\u001b"} & set(out)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("text.txt --vocab nowhere/x/y", "nowhere/x/y: no such folder"),
        ("text.txt --vocab text.txt", "text.txt: a file, not a model"),
        ("text.txt --vocab .", ".: neither vocab.txt nor tokenizer.json is there"),
        ("text.txt --vocab kept --against kept", "--against kept is --vocab itself"),
        ("text.txt --vocab kept --plot x.pdf", "x.pdf: a plot is a .png"),
        ("text.txt --vocab kept --json text.txt", "--json text.txt is an input"),
        ("empty.txt --vocab kept --json .", "--json . is a folder: name another"),
        ("empty.txt --vocab kept --plot /", "--plot / is a folder: name another"),
        ("text.txt --vocab kept --limit-mb 0", "--limit-mb 0.0: must be above 0"),
        ("empty.txt --vocab kept", "empty.txt: no text in it"),
        ("none.txt --vocab kept", "none.txt: no such file"),
    ],
)
def test_refusals(report, words, message):
    write(Path("empty.txt"), "\n")
    error = report(*words.split(), run=refused)
    assert error.startswith(f"bertsmith vocab report: {message}")


@pytest.mark.parametrize(("flag", "name"), [("--json", "vocab.txt"), ("--plot", "picture.png")])
def test_a_file_of_a_vocabulary_is_not_written_over(report, flag, name):
    target = Path("kept", name).resolve()
    target.touch()
    before = target.read_bytes()
    words = (TEXT, "--vocab", "uncased", "--against", "kept", flag, target)
    error = report(*words, run=refused)
    assert f"{flag} {target} is a file beside a vocabulary" in error
    assert target.read_bytes() == before
