"""`bertsmith vocab` from files to a folder that the tokenizer opens, and its refusals."""

import pytest

from bertsmith.cli.main import main
from bertsmith.text.tokenizer.tokenizer import Tokenizer

ENGLISH = "The cat sat on the mat. A cat is not a hat.\n" * 4
KOREAN = "나는 학교에 갑니다. 친구는 학교를 좋아합니다.\n" * 4


@pytest.fixture
def run(tmp_path, capsys):
    def command(text, *flags, out="vocab"):
        (tmp_path / "text.txt").write_bytes(text if isinstance(text, bytes) else text.encode())
        words = ["vocab", str(tmp_path / "text.txt"), "--out", str(tmp_path / out), *flags]
        code = main([*words, "--workers", "1"])
        shown = capsys.readouterr()
        return code, shown.out, shown.err.splitlines()[-1]

    return command


def test_a_vocabulary_is_written_and_described(run, tmp_path):
    code, out, _ = run(ENGLISH, "--size", "30")
    assert code == 0
    assert "30 pieces, alphabet of 11 characters" in out
    assert "pieces a word, 0.00% of the words unknown" in out
    tokenizer = Tokenizer.from_pretrained(tmp_path / "vocab")
    assert (len(tokenizer.vocabulary), tokenizer.normalization.lowercase) == (30, True)
    assert run(ENGLISH, "--size", "33", "--cased", out="cased")[0] == 0
    assert not Tokenizer.from_pretrained(tmp_path / "cased").normalization.lowercase


def test_hangul_stays_whole_on_request(run, tmp_path):
    assert (
        "warning: 100.0% of the letters are altered" in run(KOREAN, "--size", "36", out="plain")[1]
    )
    code, out, _ = run(KOREAN, "--size", "26", "--strip-accents", "none")
    assert (code, "warning" in out) == (0, False)
    tokenizer = Tokenizer.from_pretrained(tmp_path / "vocab")
    assert any(piece.startswith("학") for piece in tokenizer.vocabulary.pieces)
    assert tokenizer.decode(tokenizer.encode_batch([KOREAN]).ids[:9]).startswith("나는 학교에")


def test_kept_words_and_coverage(run, tmp_path):
    (tmp_path / "keep.txt").write_text("Dog\n##Log\n")
    keep = ["--keep", str(tmp_path / "keep.txt")]
    assert run(ENGLISH + "q\n", "--size", "30", "--coverage", "0.99", *keep)[0] == 0
    pieces = Tokenizer.from_pretrained(tmp_path / "vocab").vocabulary.pieces
    assert len(pieces) == 30 and {"dog", "##log"} < {*pieces} and "q" not in pieces


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (b"", "keep.txt: no words in it"),
        (b"dog\nhot dog\n", "keep.txt:2: 'hot dog' becomes 2 words"),
        (b"caf\xe9\n", "keep.txt:1: not UTF-8"),
        (b"\n".join(b"word%d" % n for n in range(40)), "a vocabulary of 30 is too small: special"),
        (b"\n".join(b"word%d" % n for n in range(20)), "20 pieces to keep and the text's"),
        (None, "keep.txt: no such file"),
    ],
)
def test_a_file_of_kept_words_that_cannot_be(run, tmp_path, lines, message):
    if lines is not None:
        (tmp_path / "keep.txt").write_bytes(lines)
    code, out, error = run(ENGLISH, "--size", "30", "--keep", str(tmp_path / "keep.txt"))
    assert (code, out) == (2, "")
    assert message in error
    assert not (tmp_path / "vocab").exists()


@pytest.mark.parametrize(
    ("text", "flags", "message"),
    [
        ("\n \n", [], "text.txt: no text in it"),
        (b"caf\xe9\n", [], "text.txt:1: not UTF-8 (byte 0xe9 at offset 3): convert it with iconv"),
        (b"\x7fELF\0\1", [], "text.txt:1: NUL byte, looks like a binary file"),
        ("x" * 10_000_000, [], "text.txt:1: line of more than 1,000,000 characters: put line"),
        (ENGLISH, ["--size", "9"], "a vocabulary of 9 is too small"),
        (ENGLISH, ["--size", "900"], "pieces: use --size"),
        (ENGLISH, ["--coverage", "99"], "coverage = 99.0: must be above 0 and at most 1"),
    ],
)
def test_bad_input_leaves_nothing_behind(run, tmp_path, text, flags, message):
    code, out, error = run(text, *flags)
    assert (code, out) == (2, "")
    assert message in error
    assert not (tmp_path / "vocab").exists()


@pytest.mark.parametrize("name", ["vocab.txt", "config.json"])
def test_a_vocabulary_or_model_is_not_written_over(run, tmp_path, name):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / name).write_text("mine")
    code, _, err = run(ENGLISH, "--size", "30", out="model")
    assert code == 2 and "holds a vocabulary or a model already" in err
    assert [file.name for file in (tmp_path / "model").iterdir()] == [name]
