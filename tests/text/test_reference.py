from bertsmith.text.tokenizer.normalize import GOOGLE_CASED, GOOGLE_UNCASED
from bertsmith.text.tokenizer.wordpiece import SPECIAL, Vocabulary, encode_text, match_pieces

VOCABULARY = Vocabulary([*SPECIAL, "un", "##aff", "##able", "a", "##a", "##aab", "é", "!"])
UN, AFF, ABLE, A, AA, AAB, ACCENT, MARK = range(5, 13)


def test_the_longest_piece_is_taken_first_and_never_taken_back():
    assert match_pieces("unaffable", VOCABULARY) == [(UN, 2), (AFF, 5), (ABLE, 9)]
    assert match_pieces("aaab", VOCABULARY) == [(A, 1), (AAB, 4)]
    assert match_pieces("aaaab", VOCABULARY) == [(A, 1), (AA, 2), (AAB, 5)]
    assert match_pieces("aab", VOCABULARY) == [(VOCABULARY.unk_id, 3)]


def test_words_beyond_200_characters_are_unknown():
    assert match_pieces("a" * 200, VOCABULARY)[-1] == (AA, 200)
    assert match_pieces("a" * 201, VOCABULARY) == [(VOCABULARY.unk_id, 201)]


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
