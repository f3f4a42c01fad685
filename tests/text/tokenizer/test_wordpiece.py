"""The list of pieces, and the algorithm as the paper has it."""

import numpy as np
import pytest

from bertsmith.text.tokenizer.normalize import GOOGLE_CASED, GOOGLE_UNCASED
from bertsmith.text.tokenizer.wordpiece import SPECIAL, Vocabulary, encode_text, match_pieces

from ...tiny import write
from ..letters import vocabulary_of


def test_read_strips_lines_and_the_later_duplicate_wins(tmp_path):
    content = "[PAD]\r\n[UNK]\n [CLS]\t\n[SEP]\n[MASK]\nthe\n##s\n\nthe\n한국"
    vocabulary = Vocabulary.read(write(tmp_path / "vocab.txt", content))
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
    with pytest.raises(ValueError, match=message):
        Vocabulary.read(write(tmp_path / "vocab.txt", content))


@pytest.mark.parametrize("piece", ["a ", "\u2028", "a\nb", "\ud800"])
def test_a_piece_that_no_line_can_hold_is_refused(piece):
    with pytest.raises(ValueError, match="piece 5, '.*', cannot be a line of vocab.txt"):
        Vocabulary([*SPECIAL, piece])


VOCABULARY = vocabulary_of("un", "##aff", "##able", "a", "##a", "##aab", "é", "!")
UN, AFF, ABLE, A, AA, AAB, ACCENT, MARK = range(5, 13)


@pytest.mark.parametrize(
    ("word", "pieces"),
    [
        ("unaffable", [(UN, 2), (AFF, 5), (ABLE, 9)]),
        ("aaab", [(A, 1), (AAB, 4)]),
        ("aaaab", [(A, 1), (AA, 2), (AAB, 5)]),
        ("aab", [(VOCABULARY.unk_id, 3)]),
        ("a" * 200, [(A, 1), *((AA, end) for end in range(2, 201))]),
        ("a" * 201, [(VOCABULARY.unk_id, 201)]),  # beyond 200 characters
    ],
)
def test_the_longest_piece_is_taken_first_and_never_taken_back(word, pieces):
    assert match_pieces(word, VOCABULARY) == pieces


def test_pieces_say_where_they_come_from():
    text = "Una\u00adffable É!x"
    uncased = encode_text(text, VOCABULARY, GOOGLE_UNCASED)
    assert [(piece.id, text[piece.start : piece.end], piece.word) for piece in uncased] == [
        (UN, "Un", 0),
        (AFF, "a\u00adff", 0),
        (ABLE, "able", 0),
        (VOCABULARY.unk_id, "É", 1),
        (MARK, "!", 2),
        (VOCABULARY.unk_id, "x", 3),
    ]
    assert [piece.id for piece in encode_text("é !", VOCABULARY, GOOGLE_CASED)] == [ACCENT, MARK]
    assert encode_text(" \u200b ", VOCABULARY, GOOGLE_CASED) == []
