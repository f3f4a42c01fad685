"""Which pieces are added: against plain greedy search, hand-made cases, and the tokenizers."""

import random

import numpy as np
import pytest

from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.text.vocabulary.extend import extended_vocabulary, mine_additions, piece_counts

from ..letters import letter_vocabulary, longest_match, vocabulary_of

LETTERS = "abcde"
ALPHABET = letter_vocabulary(LETTERS)


def mined(words, limit, old=ALPHABET, **settings):
    return [(one.piece, one.frequency) for one in mine_additions(words, old, limit, **settings)]


def made_words(seed, count=60):
    """Words of few syllables, so that they share many parts; a few of many occur often."""
    draw = random.Random(seed)
    syllables = ["".join(draw.choices(LETTERS, k=draw.randint(1, 3))) for _ in range(12)]
    words = {"".join(draw.choices(syllables, k=draw.randint(1, 4))) for _ in range(count)}
    return {word: draw.randint(1, 60) for word in sorted(words)}


def length(words, pieces):
    unknown = ["[UNK]"]
    return sum(n * len(longest_match(word, pieces) or unknown) for word, n in words.items())


def plain_greedy(words, pieces, limit):
    """The pieces that leave the shortest text, each found by trying all joined runs."""
    pieces, chosen = set(pieces), []
    for _ in range(limit):
        rows = [longest_match(word, pieces) for word in words]
        runs = {
            row[i] + "".join(part[2:] for part in row[i + 1 : j])
            for row in rows
            for i in range(len(row))
            for j in range(i + 2, len(row) + 1)
        }
        best = min(runs, key=lambda run: (length(words, pieces | {run}), run))
        pieces.add(best)
        chosen.append(best)
    return chosen


@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.slow), 1, 2])
def test_the_text_becomes_as_short_as_plain_greedy_search_makes_it(seed):
    words = made_words(seed)
    chosen, plain = dict(mined(words, 12)), plain_greedy(words, ALPHABET.pieces, 12)
    assert next(iter(chosen)) == plain[0] and len(chosen) == 12
    ours, theirs = (length(words, {*ALPHABET.pieces, *pieces}) for pieces in (chosen, plain))
    assert ours <= 1.01 * theirs < 0.8 * length(words, set(ALPHABET.pieces))


def test_the_counts_are_those_of_the_tokenizer():
    words = made_words(9) | {"axe": 3}  # [UNK]
    additions = dict(mined(words, 20, min_frequency=4))
    new = extended_vocabulary(ALPHABET, list(additions), 15, 40)
    text = " ".join(word for word, count in words.items() for _ in range(count))
    ids = Tokenizer(new).encode_batch([text]).ids
    counts = np.bincount(ids, minlength=len(new))
    assert piece_counts(words, new).tolist() == counts.tolist()
    uses = counts[len(ALPHABET) :][: len(additions)].tolist()
    assert uses == [*additions.values()] and min(uses) >= 4


def test_the_order_of_the_words_does_not_matter():
    words = made_words(5)
    assert mined(words, 20) == mined(dict(reversed(words.items())), 20)


HTTP = vocabulary_of("h", "##t", "##p", "##s")
URLS = {"http": 20, "https": 20}
NO_REST = vocabulary_of("a", "##b", "##bc")  # with "ab" nothing would fit the rest of "abc"
KEEP = ["bed", "abc", "a", "abc", "xyz", "##ad"]


@pytest.mark.parametrize(
    ("words", "old", "limit", "settings", "found"),
    [
        # a piece that later ones replace is dropped
        (URLS, HTTP, 1, {}, ["http 40"]),
        (URLS | {"htt": 3}, HTTP, 9, {}, ["http 20", "https 20", "htt 3"]),
        (URLS | {"htt": 3}, HTTP, 9, {"min_frequency": 4}, ["http 20", "https 20"]),
        ({"abcd": 10, "abce": 9, "abc": 1}, ALPHABET, 3, {"min_frequency": 5},
         ["abcd 10", "abce 9"]),  # "abc" came and went
        # no known word becomes unknown
        ({"ab": 50, "abc": 1}, NO_REST, 5, {}, ["abc 1"]),
        ({"ab": 50, "abc": 4}, NO_REST, 5, {"min_frequency": 5}, []),
        ({"ab": 50, "abb": 4}, NO_REST, 5, {}, ["ab 50", "abb 4"]),
        # unknown and short words teach nothing
        ({"xyz": 90, "a": 50}, ALPHABET, 5, {}, []),
        # kept words come first and besides
        ({"abc": 9, "bad": 2, "add": 30}, ALPHABET, 1, {"min_frequency": 5, "keep": KEEP},
         ["bed 0", "abc 9", "xyz 0", "##ad 2", "add 30"]),
    ],
)  # fmt: skip
def test_what_is_mined_by_hand(words, old, limit, settings, found):
    assert [f"{piece} {count}" for piece, count in mined(words, limit, old, **settings)] == found


def test_tokenizers_reads_the_longer_vocabulary_to_the_same_ids(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = made_words(3)
    pieces = [piece for piece, _ in mined(words, 30)]
    new = Tokenizer(extended_vocabulary(ALPHABET, pieces, 15, 64))
    assert new.vocabulary.pieces[: len(ALPHABET)] == ALPHABET.pieces
    assert {"##" in piece for piece in pieces} == {True, False}
    new.save(tmp_path)
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ids = theirs.encode(" ".join(words), add_special_tokens=False).ids
    assert ids == new.encode_batch([" ".join(words)]).ids.tolist()
    assert theirs.get_vocab_size() == 64
