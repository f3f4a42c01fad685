import numpy as np
import pytest

from bertsmith.text.tokenizer.wordpiece import SPECIAL, Vocabulary


def test_read_strips_lines_and_the_later_duplicate_wins(tmp_path):
    path = tmp_path / "vocab.txt"
    path.write_bytes("[PAD]\r\n[UNK]\n [CLS]\t\n[SEP]\n[MASK]\nthe\n##s\n\nthe\n한국".encode())
    vocabulary = Vocabulary.read(path)
    assert vocabulary.pieces == (*SPECIAL, "the", "##s", "", "the", "한국")
    assert vocabulary.ids["the"] == 8 and vocabulary.ids["한국"] == 9
    assert np.flatnonzero(vocabulary.continuation).tolist() == [6]
    ids = [vocabulary.pad_id, vocabulary.unk_id, vocabulary.cls_id]
    assert [*ids, vocabulary.sep_id, vocabulary.mask_id] == [0, 1, 2, 3, 4]


def test_written_and_read_again_is_the_same(tmp_path):
    vocabulary = Vocabulary(["[unused0]", *SPECIAL, "a\u2028b", "a\rb", "", "##e\u0301"])
    vocabulary.write(tmp_path / "vocab.txt")
    again = Vocabulary.read(tmp_path / "vocab.txt")
    assert again.pieces == vocabulary.pieces
    assert again.fingerprint == vocabulary.fingerprint
    assert again.fingerprint != Vocabulary([*SPECIAL]).fingerprint


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[PAD]\n[UNK]\n[CLS]\n[MASK]\nthe\n", r"vocab.txt: .*5 pieces lacks \[SEP\]"),
        (b"", r"vocab.txt: .*0 pieces lacks \[PAD\]"),
        (b"[PAD]\n[UNK]\ncaf\xe9\n", r"vocab.txt:3: not UTF-8"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, content, message):
    path = tmp_path / "vocab.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        Vocabulary.read(path)


@pytest.mark.parametrize("piece", ["a ", "\u2028", "a\nb", "\ud800"])
def test_a_piece_that_no_line_can_hold_is_refused(piece):
    with pytest.raises(ValueError, match="piece 5, '.*', cannot be a line of vocab.txt"):
        Vocabulary([*SPECIAL, piece])
