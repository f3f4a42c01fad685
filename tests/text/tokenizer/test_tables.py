"""The trie against trial from the front, the table of short words against a dictionary."""

import random

import numpy as np
import pytest

from bertsmith.text.tokenizer import tables
from bertsmith.text.tokenizer.tables import (
    LETTERS,
    LONGEST,
    WORD_INSIDE,
    WORD_START,
    build_trie,
    find_child,
    find_word,
)
from bertsmith.text.tokenizer.wordpiece import SPECIAL, match_pieces

from ..letters import vocabulary_of


def coded(vocabulary, first=2):
    """Codes of all letters of the pieces, from `first`."""
    return {c: code for code, c in enumerate(sorted(set("".join(vocabulary.pieces))), first)}


def built_of(*pieces):
    """(vocabulary, codes of letters, tables)."""
    vocabulary = vocabulary_of(*pieces)
    codes = coded(vocabulary)
    return vocabulary, codes, build_trie(vocabulary, codes)


def random_pieces(generator, letters, longest, count, prefixes=("", "##")):
    def piece():
        length = generator.randrange(1, longest)
        return generator.choice(prefixes) + "".join(generator.choices(letters, k=length))

    return sorted({piece() for _ in range(count)})


def walk(built, word, codes):
    """Ids of a word's pieces by trie and failure links; None where the word cannot be matched."""
    node, ids = WORD_START, []
    for letter in [*word, None]:
        while True:
            child = -1 if letter is None else find_child(built.edges, node, codes[letter])
            if child >= 0:
                node = child
                break
            if letter is None and node == WORD_INSIDE:
                return ids
            failure, begin, end = built.nodes[node]
            if failure < 0:
                return None
            ids += built.pops[begin:end].tolist()
            node = int(failure)
    raise AssertionError


def test_the_walk_finds_what_trial_from_the_front_finds():
    generator = random.Random(0)
    for _ in range(60):
        letters = "ab" if generator.random() < 0.5 else "abc"
        pieces = random_pieces(generator, letters, 6, generator.randrange(1, 14))
        vocabulary = vocabulary_of(*pieces)
        codes = {letter: code for code, letter in enumerate("abc", 1)}
        codes |= {c: code for code, c in enumerate(sorted(set("".join(SPECIAL)) | {"#"}), 4)}
        built = build_trie(vocabulary, codes)
        for _ in range(60):
            word = "".join(generator.choices(letters, k=generator.randrange(1, 12)))
            expected = [number for number, _ in match_pieces(word, vocabulary)]
            found = walk(built, word, codes)
            assert (found or [vocabulary.unk_id]) == expected, (pieces, word)


def test_the_example_of_the_paper():
    # Song et al., section 3: "abcdz" with a, abcdx, ##b, ##c, ##cdy, ##dz.
    vocabulary, codes, built = built_of("a", "abcdx", "##b", "##c", "##cdy", "##dz")
    found = walk(built, "abcdz", codes)
    assert [vocabulary.pieces[number] for number in found] == ["a", "##b", "##c", "##dz"]
    assert walk(built, "abcd", codes) is None


def test_a_piece_listed_twice_has_its_later_id_and_empty_lines_match_nothing():
    _, codes, built = built_of("a", "", "##", "a")
    assert walk(built, "a", codes) == [8]


@pytest.mark.parametrize("name", ["CHILD_BITS", "PIECE_BITS", "CODE_BITS"])
def test_a_vocabulary_too_large_for_the_layout_is_refused(monkeypatch, name):
    monkeypatch.setattr(tables, name, 3)
    with pytest.raises(ValueError, match="characters is too large: |pieces is too large: "):
        built_of(*"abcd", "abcdefg")


def test_a_piece_that_no_word_can_reach_takes_no_room():
    _, _, built = built_of("a", "##a", "a" * 201, "##" + "a" * 100_000)
    assert len(built.nodes) < 50


@pytest.mark.slow
def test_half_a_million_pieces():
    # As many nodes as need more than 20 bits.
    generator = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = {"".join(generator.choices(letters, k=6)) for _ in range(400_000)}
    vocabulary, codes, built = built_of(*sorted(words), *(f"##{c}" for c in letters))
    assert len(built.nodes) > 1 << 20
    for word in generator.sample(sorted(words), 2000):
        word += generator.choice(letters)
        assert walk(built, word, codes) == [number for number, _ in match_pieces(word, vocabulary)]


END = -5  # any symbol that is no letter


def found(built, letters):
    """The piece of a word (codes of its letters), which the search must read to its end."""
    symbols = np.array([END, *letters, END], np.int32)
    piece, end = find_word(symbols, 1, built.numbers, built.pieces)
    assert end == 1 + len(letters)
    return piece


def test_every_short_piece_that_starts_a_word_is_found_and_nothing_else():
    generator = random.Random(0)
    alphabet = "abcdefgh\u00e9"
    vocabulary = vocabulary_of(*random_pieces(generator, alphabet, 20, 3000, ("", "", "##")))
    codes = coded(vocabulary)
    codes["\u00e9"] = LETTERS  # one byte cannot say it
    built = build_trie(vocabulary, codes)
    tried = [piece.removeprefix("##") for piece in vocabulary.pieces[len(SPECIAL) :]]
    tried += [word + letter for word in tried[::7] for letter in alphabet]  # also 17 letters
    tried += [word[1:] for word in tried if len(word) > 1]
    assert any(len(word) == LONGEST for word in tried)
    for word in tried:
        fits = len(word) <= LONGEST and "\u00e9" not in word
        expected = vocabulary.ids.get(word, -1) if fits else -1
        assert found(built, [codes[c] for c in word]) == expected, word


def test_words_alike_in_their_last_or_their_first_eight_letters_are_told_apart():
    pieces = ["nationality", "rationality", "rationalise", "tionality", "rational"]
    vocabulary, codes, built = built_of(*pieces, "##ity")
    for word in pieces:
        assert found(built, [codes[c] for c in word]) == vocabulary.ids[word]
    for word in ("ationality", "lationality", "rationali", "r"):
        assert found(built, [codes[c] for c in word]) == -1
