import random

import pytest

from bertsmith.text.tokenizer import tables as trie
from bertsmith.text.tokenizer.tables import WORD_INSIDE, WORD_START, build_trie, find_child
from bertsmith.text.tokenizer.wordpiece import SPECIAL, Vocabulary, match_pieces


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
        pieces = {
            generator.choice(["", "##"])
            + "".join(generator.choices(letters, k=generator.randrange(1, 6)))
            for _ in range(generator.randrange(1, 14))
        }
        vocabulary = Vocabulary([*SPECIAL, *sorted(pieces)])
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
    pieces = ["a", "abcdx", "##b", "##c", "##cdy", "##dz"]
    vocabulary = Vocabulary([*SPECIAL, *pieces])
    codes = {c: code for code, c in enumerate(sorted(set("".join(vocabulary.pieces))), 1)}
    built = build_trie(vocabulary, codes)
    found = walk(built, "abcdz", codes)
    assert [vocabulary.pieces[number] for number in found] == ["a", "##b", "##c", "##dz"]
    assert walk(built, "abcd", codes) is None


def test_a_piece_listed_twice_has_its_later_id_and_empty_lines_match_nothing():
    vocabulary = Vocabulary([*SPECIAL, "a", "", "##", "a"])
    codes = {c: code for code, c in enumerate(sorted(set("".join(vocabulary.pieces))), 1)}
    assert walk(build_trie(vocabulary, codes), "a", codes) == [8]


@pytest.mark.parametrize("name", ["CHILD_BITS", "PIECE_BITS", "CODE_BITS"])
def test_a_vocabulary_too_large_for_the_layout_is_refused(monkeypatch, name):
    vocabulary = Vocabulary([*SPECIAL, *"abcd", "abcdefg"])
    codes = {c: code for code, c in enumerate(sorted(set("".join(vocabulary.pieces))), 2)}
    monkeypatch.setattr(trie, name, 3)
    with pytest.raises(ValueError, match="characters is too large: |pieces is too large: "):
        build_trie(vocabulary, codes)


def test_a_piece_that_no_word_can_reach_takes_no_room():
    vocabulary = Vocabulary([*SPECIAL, "a", "##a", "a" * 201, "##" + "a" * 100_000])
    codes = {c: code for code, c in enumerate(sorted(set("".join(vocabulary.pieces))), 2)}
    assert len(build_trie(vocabulary, codes).nodes) < 50


@pytest.mark.slow
def test_half_a_million_pieces():
    # As many nodes as need more than 20 bits.
    generator = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = {"".join(generator.choices(letters, k=6)) for _ in range(400_000)}
    vocabulary = Vocabulary([*SPECIAL, *sorted(words), *(f"##{c}" for c in letters)])
    codes = {c: code for code, c in enumerate(sorted(set("".join(vocabulary.pieces))), 2)}
    built = build_trie(vocabulary, codes)
    assert len(built.nodes) > 1 << 20
    for word in generator.sample(sorted(words), 2000):
        word += generator.choice(letters)
        assert walk(built, word, codes) == [number for number, _ in match_pieces(word, vocabulary)]
