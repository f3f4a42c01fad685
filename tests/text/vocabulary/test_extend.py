"""Which pieces are added: against plain greedy search, hand-made cases, and the tokenizers."""

import random

import numpy as np
import pytest

from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.text.tokenizer.wordpiece import SPECIAL, Vocabulary
from bertsmith.text.vocabulary.extend import extended_vocabulary, mine_additions, piece_counts

LETTERS = "abcde"
ALPHABET = [*SPECIAL, *LETTERS, *(f"##{letter}" for letter in LETTERS)]


def vocabulary(*pieces):
    return Vocabulary([*SPECIAL, *pieces])


def made_words(seed, count=60):
    """Words of few syllables, so that they share many parts; a few of many occur often."""
    draw = random.Random(seed)
    syllables = ["".join(draw.choices(LETTERS, k=draw.randint(1, 3))) for _ in range(12)]
    words = {"".join(draw.choices(syllables, k=draw.randint(1, 4))) for _ in range(count)}
    return {word: draw.randint(1, 60) for word in sorted(words)}


def cut(word, pieces):
    """Longest match, plainly: "ab" as ["a", "##b"]; None when it fails."""
    row, rest, prefix = [], word, ""
    while rest:
        ends = [end for end in range(len(rest), 0, -1) if prefix + rest[:end] in pieces]
        if not ends:
            return None
        row.append(prefix + rest[: ends[0]])
        rest, prefix = rest[ends[0] :], "##"
    return row


def length(words, pieces):
    return sum(count * len(cut(word, pieces) or ["[UNK]"]) for word, count in words.items())


def plain_greedy(words, pieces, limit):
    """The pieces that leave the shortest text, each found by trying all joined runs."""
    pieces, chosen = set(pieces), []
    for _ in range(limit):
        rows = [cut(word, pieces) for word in words]
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


@pytest.mark.parametrize("seed", range(3))
def test_the_text_becomes_as_short_as_plain_greedy_search_makes_it(seed):
    words = made_words(seed)
    chosen = [addition.piece for addition in mine_additions(words, Vocabulary(ALPHABET), 12)]
    plain = plain_greedy(words, ALPHABET, 12)
    assert chosen[0] == plain[0] and len(chosen) == 12
    ours, theirs = (length(words, {*ALPHABET, *pieces}) for pieces in (chosen, plain))
    assert ours <= 1.01 * theirs < 0.8 * length(words, set(ALPHABET))


def test_the_counts_are_those_of_the_tokenizer():
    words = made_words(9) | {"axe": 3}  # [UNK]
    additions = mine_additions(words, Vocabulary(ALPHABET), 20, min_frequency=4)
    new = extended_vocabulary(Vocabulary(ALPHABET), [one.piece for one in additions], 15, 40)
    text = " ".join(word for word, count in words.items() for _ in range(count))
    ids = Tokenizer(new).encode_batch([text]).ids
    counts = np.bincount(ids, minlength=len(new))
    assert piece_counts(words, new).tolist() == counts.tolist()
    uses = counts[len(ALPHABET) :].tolist()
    assert uses[: len(additions)] == [one.frequency for one in additions]
    assert min(uses[: len(additions)]) >= 4


def test_the_order_of_the_words_does_not_matter():
    words = made_words(5)
    other = dict(reversed(words.items()))
    assert mine_additions(words, Vocabulary(ALPHABET), 20) == mine_additions(
        other, Vocabulary(ALPHABET), 20
    )


def test_a_piece_that_later_ones_replace_is_dropped():
    old = vocabulary("h", "##t", "##p", "##s")
    words = {"http": 20, "https": 20}
    assert [one.piece for one in mine_additions(words, old, 1)] == ["http"]
    words["htt"] = 3
    for least, expected in ((1, ["http", "https", "htt"]), (4, ["http", "https"])):
        found = mine_additions(words, old, 9, min_frequency=least)
        assert [one.piece for one in found] == expected
    start = {"abcd": 10, "abce": 9, "abc": 1}
    found = mine_additions(start, Vocabulary(ALPHABET), 3, min_frequency=5)
    assert [tuple(one) for one in found] == [("abcd", 10), ("abce", 9)]  # "abc" came and went


def test_no_known_word_becomes_unknown():
    old = vocabulary("a", "##b", "##bc")  # with "ab" nothing would fit the rest of "abc"
    assert mine_additions({"ab": 50, "abc": 1}, old, 5) == [("abc", 1)]
    assert mine_additions({"ab": 50, "abc": 4}, old, 5, min_frequency=5) == []
    assert mine_additions({"ab": 50, "abb": 4}, old, 5) == [("ab", 50), ("abb", 4)]


def test_unknown_and_short_words_teach_nothing():
    assert mine_additions({"xyz": 90, "a": 50}, Vocabulary(ALPHABET), 5) == []


def test_kept_words_come_first_and_besides():
    words = {"abc": 9, "bad": 2, "add": 30}
    keep = ["bed", "abc", "a", "abc", "xyz", "##ad"]
    found = mine_additions(words, Vocabulary(ALPHABET), 1, min_frequency=5, keep=keep)
    shown = ["bed 0", "abc 9", "xyz 0", "##ad 2", "add 30"]
    assert [f"{one.piece} {one.frequency}" for one in found] == shown


def test_tokenizers_reads_the_longer_vocabulary_to_the_same_ids(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = made_words(3)
    old = Vocabulary(ALPHABET)
    additions = mine_additions(words, old, 30)
    new = Tokenizer(extended_vocabulary(old, [one.piece for one in additions], 15, 64))
    assert new.vocabulary.pieces[: len(old)] == old.pieces
    assert {"##" in one.piece for one in additions} == {True, False}
    new.save(tmp_path)
    text = " ".join(words)
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert (
        theirs.encode(text, add_special_tokens=False).ids == new.encode_batch([text]).ids.tolist()
    )
    assert theirs.get_vocab_size() == 64
