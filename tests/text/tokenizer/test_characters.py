"""ELMo's bytes by hand-made cases, and its words beside those of the reference."""

import pickle
import random

import numpy as np
import pytest

from bertsmith.text.tokenizer.characters import CharacterTokenizer
from bertsmith.text.tokenizer.normalize import GOOGLE_CASED, split_words

END = 260
TOKENIZER = CharacterTokenizer()


def words_of(encoded):
    """The bytes of each word of one text."""
    cuts = np.flatnonzero(encoded.ids == END) + 1
    parts = np.split(encoded.ids, cuts)[:-1]
    return [bytes((part[:-1] - 1).astype(np.uint8)) for part in parts]


def test_bytes_beyond_ascii_have_the_place_of_their_character():
    encoded = TOKENIZER.encode_batch(["x né 𝔸"])
    assert words_of(encoded[0]) == [b"x", "né".encode(), "𝔸".encode()]
    assert encoded.offsets.tolist()[2:6] == [[2, 3], [3, 4], [3, 4], [4, 4]]
    assert encoded.offsets.tolist()[6:] == [[5, 6]] * 4 + [[6, 6]]
    assert encoded.word_ids.tolist() == [0, 0, 1, 1, 1, 1, *[2] * 5]


def test_a_long_word_keeps_48_bytes_and_its_place():
    encoded = TOKENIZER.encode_batch(["é" * 30 + " b"])
    assert words_of(encoded[0]) == ["é".encode() * 24, b"b"]
    assert encoded.offsets[47].tolist() == [23, 30] and encoded.offsets[48].tolist() == [30, 30]
    assert encoded.offsets[49].tolist() == [31, 32]


@pytest.mark.parametrize("texts", [[], [""], ["", " \u200b\x00", "\ud800"]])
def test_texts_without_a_word(texts):
    encoded = TOKENIZER.encode_batch(texts)
    assert len(encoded.ids) == 0 and encoded.boundaries.tolist() == [0] * (len(texts) + 1)


def test_words_are_those_of_the_cased_reference():
    draw, characters = random.Random(0), "abÉ!你 \u00ad\t.,—𝔸ü\u3000\x07"
    texts = ["".join(draw.choices(characters, k=draw.randrange(30))) for _ in range(500)]
    encoded = TOKENIZER.encode_batch(texts)
    for number, text in enumerate(texts):
        wanted = split_words(text, GOOGLE_CASED)
        assert words_of(encoded[number]) == [w.characters.encode() for w in wanted]
        own = encoded[number]
        begins = own.offsets[np.flatnonzero(np.diff(own.word_ids, prepend=-1)), 0]
        assert begins.tolist() == [word.origins[0] for word in wanted]


def test_many_texts_are_alike_in_groups_and_threads():
    texts = [f"text {k} of é" * (k % 50) for k in range(3000)]
    one, two = (TOKENIZER.encode_batch(texts, threads=threads) for threads in (1, 2))
    for name in ("ids", "offsets", "word_ids", "boundaries"):
        assert np.array_equal(getattr(one, name), getattr(two, name))
    assert np.array_equal(one[1234].ids, TOKENIZER.encode_batch([texts[1234]]).ids)


def test_pieces_are_cut_and_places_left_out():
    encoded = TOKENIZER.encode_batch(["abc", "d", "ef g"], max_pieces=3, offsets=False)
    assert encoded.boundaries.tolist() == [0, 3, 5, 8] and len(encoded.word_ids) == 0
    assert encoded.ids.tolist() == [98, 99, 100, 101, END, 102, 103, END]


def test_given_words_stay_whole():
    encoded = TOKENIZER.encode_words(["U.S.", "a b", "", "\ud800"])
    assert [words_of(encoded[k]) for k in range(4)] == [[b"U.S."], [b"a b"], [], []]


def test_rows_and_back():
    rows = TOKENIZER.rows(["ab"], ["c!"])
    assert rows.ids.tolist() == [257, 98, 99, END, 258, 100, END, 34, END, 258]
    assert rows.token_types.tolist() == [0] * 5 + [1] * 5
    assert TOKENIZER.decode(rows.ids) == "ab c !"
    assert TOKENIZER.tokenize("aé") == ["a", "<0xC3>", "<0xA9>", "[UNK]"]


def test_it_travels_to_processes(tmp_path):
    assert pickle.loads(pickle.dumps(TOKENIZER)).fingerprint == TOKENIZER.fingerprint
    TOKENIZER.save(tmp_path)
    assert "CharacterTokenizer" in (tmp_path / "tokenizer_config.json").read_text()


def test_other_things_than_texts_are_refused():
    with pytest.raises(ValueError, match="text 1 of the batch is int, not str"):
        TOKENIZER.encode_batch(["a", 1])
