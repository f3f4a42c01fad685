"""The table of short words against a plain dictionary of the vocabulary."""

import random

import numpy as np

from bertsmith.text.tokenizer.tables import LETTERS, LONGEST, build_trie, find_word
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.text.tokenizer.wordpiece import SPECIAL, Vocabulary

END = -5  # any symbol that is no letter


def found(words, letters):
    """The piece of a word (codes of its letters) and where the search says that it ends."""
    symbols = np.array([END, *letters, END], np.int32)
    piece, end = find_word(symbols, 1, words.numbers, words.pieces)
    assert end == 1 + len(letters)
    return piece


def test_every_short_piece_that_starts_a_word_is_found_and_nothing_else():
    generator = random.Random(0)
    alphabet = "abcdefgh\u00e9"
    pieces = {
        generator.choice(["", "", "##"])
        + "".join(generator.choices(alphabet, k=generator.randrange(1, 20)))
        for _ in range(3000)
    }
    vocabulary = Vocabulary([*SPECIAL, *sorted(pieces)])
    codes = {c: code for code, c in enumerate(sorted(set("".join(vocabulary.pieces))), 2)}
    codes["\u00e9"] = LETTERS  # one byte cannot say it
    words = build_trie(vocabulary, codes).words
    tried = [piece.removeprefix("##") for piece in vocabulary.pieces[len(SPECIAL) :]]
    tried += [word + letter for word in tried[::7] for letter in alphabet]  # also 17 letters
    tried += [word[1:] for word in tried if len(word) > 1]
    assert any(len(word) == LONGEST for word in tried)
    for word in tried:
        fits = len(word) <= LONGEST and "\u00e9" not in word
        expected = vocabulary.ids.get(word, -1) if fits else -1
        assert found(words, [codes[c] for c in word]) == expected, word


def test_words_alike_in_their_last_or_their_first_eight_letters_are_told_apart():
    pieces = ["nationality", "rationality", "rationalise", "tionality", "rational"]
    vocabulary = Vocabulary([*SPECIAL, *pieces, "##ity"])
    codes = {c: code for code, c in enumerate(sorted(set("".join(vocabulary.pieces))), 2)}
    words = build_trie(vocabulary, codes).words
    for word in pieces:
        assert found(words, [codes[c] for c in word]) == vocabulary.ids[word]
    for word in ("ationality", "lationality", "rationali", "r"):
        assert found(words, [codes[c] for c in word]) == -1


def test_places_of_whole_words_and_of_words_of_several_pieces():
    vocabulary = Vocabulary([*SPECIAL, "play", "##er", "players", "."])
    encoded = Tokenizer(vocabulary).encode_batch([" Players player.", "play"])
    assert encoded.ids.tolist() == [7, 5, 6, 8, 5]
    assert encoded.offsets.tolist() == [[1, 8], [9, 13], [13, 15], [15, 16], [0, 4]]
    assert encoded.word_ids.tolist() == [0, 1, 1, 2, 0]
