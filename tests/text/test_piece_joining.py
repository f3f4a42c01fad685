"""Joining pairs against a slow implementation that recounts everything after each join, and the
trainer of the `tokenizers` library."""

import random
from collections import Counter
from pydoc_data.topics import topics

import pytest
from tokenizers import Tokenizer as PeerTokenizer
from tokenizers import models, pre_tokenizers, trainers

from bertsmith.text.tokenizer.normalize import Normalization
from bertsmith.text.vocabulary import train as piece_joining
from bertsmith.text.vocabulary.train import Joining
from bertsmith.text.vocabulary.word_counts import count_words


def recounted(words, min_frequency=1):
    """Pieces in the order they are made: alphabet, then joins, all pairs counted each time."""
    rows = {word: [word[0], *("##" + c for c in word[1:])] for word in words}
    pieces = list(dict.fromkeys(piece for row in rows.values() for piece in row))
    pieces.sort(key=lambda piece: (piece.startswith("##"), piece))
    while True:
        pairs = Counter()
        for word, row in rows.items():
            for pair in zip(row, row[1:], strict=False):
                pairs[pair] += words[word]
        if not pairs or max(pairs.values()) < min_frequency:
            return pieces
        left, right = min(pairs, key=lambda pair: (-pairs[pair], pair))
        joined = left + right.removeprefix("##")
        for row in rows.values():
            i = 0
            while i < len(row) - 1:
                if (row[i], row[i + 1]) == (left, right):
                    row[i : i + 2] = [joined]
                i += 1
        pieces.append(joined)


def joined(words, min_frequency=1):
    joining = Joining(words, min_frequency)
    made = list(joining.pieces)
    while piece := joining.join():
        made.append(piece)
    assert list(dict.fromkeys(made)) == joining.pieces
    return made


def random_words(seed, letters):
    source = random.Random(seed)
    words = ("".join(source.choices(letters, k=source.randint(1, 9))) for _ in range(40))
    return {word: source.randint(1, 9) for word in words}


@pytest.mark.parametrize("letters", ["a", "ab", "abcd", "#a漢\U0001f600"])
@pytest.mark.parametrize("seed", range(4))
def test_joins_are_those_of_recounting_every_time(seed, letters):
    words = random_words(seed, letters)
    assert joined(words) == recounted(words)
    assert joined(words, 12) == recounted(words, 12)


def test_the_table_of_pairs_grows(monkeypatch):
    words = random_words(5, "abcdefghij")
    monkeypatch.setattr(piece_joining, "BATCH", 1 << 16)
    assert joined(words) == recounted(words)
    joining = Joining({"ab": 1}, 1)
    room = len(joining._pairs)
    joining._make_room(room + 1)
    assert len(joining._pairs) > room
    assert (joining.join(), joining.join()) == ("ab", None)


def test_of_three_in_a_row_the_first_two_are_joined():
    assert joined({"xaaa": 5, "xaa": 4}) == ["x", "##a", "##aa", "xaa", "xaaa"]


def test_no_pair_at_all():
    assert joined({"a": 3, "b": 1}) == ["a", "b"]
    assert joined({}) == []


def test_the_tokenizers_library_learns_the_same():
    lines = [line for text in topics.values() for line in text.lower().split("\n")]
    peer = PeerTokenizer(models.WordPiece(unk_token="[UNK]"))
    peer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=300, min_frequency=2, show_progress=False)
    peer.train_from_iterator(lines, trainer)
    joining = Joining(count_words(lines, Normalization()), 2)
    while len(joining.pieces) < 300:
        joining.join()
    # Pairs that tie may differ, and so what is made of them.
    assert len(set(joining.pieces) & set(peer.get_vocab())) >= 290
