"""Training against a plain count, merging against a recount after each merge."""

import random
from collections import Counter
from pathlib import Path
from pydoc_data.topics import topics

import pytest
from tokenizers import Tokenizer as PeerTokenizer
from tokenizers import models, pre_tokenizers, trainers

from bertsmith.text.readers.documents import Document, read_documents
from bertsmith.text.tokenizer.normalize import PRESETS, Normalization
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.text.tokenizer.wordpiece import SPECIAL, Vocabulary, match_pieces
from bertsmith.text.vocabulary import train, word_counts
from bertsmith.text.vocabulary.train import (
    PairMerger,
    VocabularySettings,
    read_kept,
    special_pieces,
    train_vocabulary,
)
from bertsmith.text.vocabulary.word_counts import count_words

from ...tiny import write


def random_words(seed: int, letters: str, number: int = 60, rarest: int = 2) -> dict[str, int]:
    source = random.Random(seed)
    words = ("".join(source.choices(letters, k=source.randint(1, 9))) for _ in range(number))
    return {word: source.randint(rarest, 9) for word in words}


def trained(texts, size: int, **settings) -> Vocabulary:
    return train_vocabulary(texts, size, settings=VocabularySettings(**settings))


def as_texts(words: dict[str, int]) -> list[str]:
    return [" ".join([word] * count) for word, count in words.items()]


@pytest.mark.parametrize("letters", ["abc", "abcdefgh"])
@pytest.mark.parametrize("keep", [(), ("abab", "##ca", "z", "a")])
def test_the_most_used_pieces_are_kept(letters, keep):
    """Written plainly: merge a fifth too many, match every word longest piece first, count."""
    words = random_words(1, letters)
    merger = PairMerger(words, 2)
    fixed = list(dict.fromkeys([*SPECIAL, *merger.pieces, *keep]))
    size = len(fixed) + 40
    pieces = list(fixed)
    while len(pieces) < len(fixed) + 48:
        pieces = list(dict.fromkeys([*pieces, merger.merge()]))
    vocabulary, uses = Vocabulary(pieces), Counter()
    for word, count in words.items():
        for number, _ in match_pieces(word, vocabulary):
            uses[number] += count
    learned = sorted(range(len(fixed), len(pieces)), key=lambda n: (-uses[n], n))[:40]
    expected = fixed + [pieces[number] for number in sorted(learned)]
    assert list(trained(as_texts(words), size, keep=keep).pieces) == expected


def test_order_of_texts_and_number_of_workers_do_not_matter(monkeypatch):
    texts = as_texts(random_words(3, "abcdefgh"))
    documents = [Document("a.txt", i, [text, text]) for i, text in enumerate(texts)]
    first = train_vocabulary(documents, 70)
    assert train_vocabulary(reversed(texts * 2), 70).fingerprint == first.fingerprint
    monkeypatch.setattr(word_counts, "BLOCK", 200)
    assert train_vocabulary(documents, 70, workers=2).fingerprint == first.fingerprint


def test_special_tokens_stand_as_in_googles_files():
    vocabulary = trained(["ab ab"], 5 + 101 + 3, reserve_unused=101)
    pieces = vocabulary.pieces
    assert (vocabulary.pad_id, vocabulary.unk_id, vocabulary.mask_id) == (0, 100, 103)
    unused = [number for number in range(109) if pieces[number].startswith("[unused")]
    assert unused == [*range(1, 100), 104, 105]
    assert [pieces[number] for number in unused] == [f"[unused{n}]" for n in range(101)]
    assert special_pieces(98)[:6] == [*SPECIAL, "[unused0]"]


def test_rare_characters_give_way_to_a_limited_alphabet():
    texts = ["aa bb ab"] * 3 + ["xyz"]
    vocabulary = trained(texts, 5 + 4 + 2, max_alphabet=2)
    assert set(vocabulary.pieces[5:9]) == {"a", "b", "##a", "##b"}
    assert Tokenizer(vocabulary).encode_batch(["xyz"]).ids.tolist() == [vocabulary.unk_id]


HUNDRED = ["a " * 60, "b " * 25, "c " * 13, "d " * 2]


@pytest.mark.parametrize(
    ("texts", "coverage", "known"),
    [
        (HUNDRED, 1.0, "abcd"),
        (HUNDRED, 0.99, "abcd"),
        (HUNDRED, 0.98, "abc"),
        (HUNDRED, 0.9, "abc"),
        (HUNDRED, 0.8, "ab"),
        (HUNDRED, 0.5, "a"),
        (["d c b a " * 5 + "e " * 20], 0.7, "abe"),  # of as frequent ones the first code points
    ],
)
def test_coverage_leaves_the_rarest_characters_out(texts, coverage, known):
    assert "".join(trained(texts, 5 + len(known), coverage=coverage).pieces[5:]) == known


def test_kept_pieces_stand_behind_the_alphabet_once_each():
    keep = ["zebra", "##abb", "ab", "zebra", "a", "[MASK]"]
    vocabulary = trained(["ab abb abb bb"] * 2, 5 + 3 + 3 + 1, keep=keep)
    assert vocabulary.pieces[5:] == ("a", "b", "##b", "zebra", "##abb", "ab", "abb")
    everything = ["abb", "bb", "ab"]  # all that can be joined
    assert len(trained(["ab abb abb bb"] * 2, 11, keep=everything)) == 11


def test_a_file_of_pieces_to_keep(tmp_path):
    content = "\ufeffCafé\r\n\r\n##Ing\r\ncafe\r\n[CLS]\r\n  ##  \u200bx\r\n#\r\n"
    file = write(tmp_path / "keep.txt", content)
    assert read_kept(file, Normalization()) == ["cafe", "##ing", "cafe", "##x", "#"]
    assert read_kept(file, PRESETS["google-cased"])[:2] == ["Café", "##Ing"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("fine\nNew York\n", r":2: 'New York' becomes 2 words"),
        ("don't", r":1: \"don't\" becomes 3 words"),
        ("##,x", r":1: '##,x' becomes 2 words"),
        ("\u0301", r":1: .* becomes no word"),
        ("##\n", r":1: '##' becomes 2 words"),
        ("", r"keep.txt: no words in it: `keep` wants one"),
        ("\n \n", r"keep.txt: no words in it"),
        (b"caf\xe9\n", r"keep.txt:1: not UTF-8"),
        (None, r"keep.txt: no such file"),
    ],
)
def test_a_file_that_holds_other_than_pieces_is_named(tmp_path, content, message):
    if content is not None:
        write(tmp_path / "keep.txt", content)
    with pytest.raises(ValueError, match=message):
        read_kept(tmp_path / "keep.txt", Normalization())


TEN_WORDS = tuple(f"word{i}" for i in range(10))


@pytest.mark.parametrize(
    ("text", "size", "keep", "message"),
    [
        ("abc", 7, (), "vocabulary of 7 .* 3 characters .* `size=8`"),
        ("abc abc", 11, (), "only 10 of 11 pieces: use `size=10` or less"),
        ("abc", 9, (), r"lower `min_frequency` \(2\)"),
        ("abc", 15, TEN_WORDS, "vocabulary of 15 .* pieces to keep are 15, without"),
        ("abc", 17, TEN_WORDS, "10 pieces to keep and .* 3 characters need `size=18`"),
    ],
)
def test_sizes_that_cannot_be_met_say_what_can(text, size, keep, message):
    with pytest.raises(ValueError, match=message):
        trained([text], size, keep=keep)


def test_sizes_that_messages_say_can_be_met():
    assert len(train_vocabulary(["abc"], 8)) == 8
    # "abc" twice gives "##bc" and "abc" and no more.
    assert train_vocabulary(["abc abc"], 10).pieces[8:] == ("##bc", "abc")
    assert len(trained(["abc"], 9, min_frequency=1)) == 9
    assert len(trained(["abc"], 18, keep=TEN_WORDS)) == 18


@pytest.mark.parametrize("documents", ["books.txt", [Path("books.txt")], [["a", "list"]]])
def test_what_is_neither_texts_nor_documents_is_refused(documents):
    with pytest.raises(ValueError, match=r"^documents: .*`read_documents` gives of files$"):
        train_vocabulary(documents, 100)
    with pytest.raises(ValueError, match=r"train_vocabulary\(\): size = '9': expected a whole"):
        train_vocabulary(["low lower"], "9")


def test_documents_of_one_file_are_those_of_a_list(tmp_path):
    file = write(tmp_path / "a.txt", "low lower lowest\n\nlow slow\n")
    one, listed = read_documents(str(file)), read_documents([file])
    assert train_vocabulary(one, 15).pieces == train_vocabulary(listed, 15).pieces


@pytest.mark.parametrize("texts", [[], [" \n"], ["\u200b"]])
def test_no_words(texts):
    with pytest.raises(ValueError, match="no words in the text"):
        train_vocabulary(texts, 100)


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("min_frequency", -1, "`min_frequency=-1`: must be"),
        ("max_alphabet", -1, "`max_alphabet=-1`: must be"),
        ("reserve_unused", -1, "`reserve_unused=-1`: must be"),
        ("coverage", 0.0, "`coverage=.*`: must be above 0 and at most 1"),
        ("coverage", 1.01, "`coverage=.*`: must be above 0 and at most 1"),
        ("coverage", -1.0, "`coverage=.*`: must be above 0 and at most 1"),
    ],
)
def test_settings_out_of_range_are_named(setting, value, message):
    with pytest.raises(ValueError, match=message):
        VocabularySettings(**{setting: value})


def test_lone_surrogates_are_left_out():
    assert "\ud83d" not in "".join(train_vocabulary(["ab \ud83d"], 7).pieces)


def recounted(words, min_frequency=1):
    """Pieces in the order they are made: alphabet, then merges, all pairs counted each time."""
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
        piece = left + right.removeprefix("##")
        for row in rows.values():
            i = 0
            while i < len(row) - 1:
                if (row[i], row[i + 1]) == (left, right):
                    row[i : i + 2] = [piece]
                i += 1
        pieces.append(piece)


def merged(words, min_frequency=1):
    merger = PairMerger(words, min_frequency)
    made = list(merger.pieces)
    while piece := merger.merge():
        made.append(piece)
    assert list(dict.fromkeys(made)) == merger.pieces
    return made


@pytest.mark.parametrize("letters", ["a", "ab", "abcd", "#a漢\U0001f600"])
@pytest.mark.parametrize("seed", range(4))
def test_merges_are_those_of_recounting_every_time(seed, letters):
    words = random_words(seed, letters, 40, rarest=1)
    assert merged(words) == recounted(words)
    assert merged(words, 12) == recounted(words, 12)


def test_the_table_of_pairs_grows(monkeypatch):
    words = random_words(5, "abcdefghij", 40, rarest=1)
    monkeypatch.setattr(train, "BATCH", 2)
    assert len(PairMerger(words, 1)._pairs) > 2
    assert merged(words) == recounted(words)


@pytest.mark.parametrize(
    ("words", "pieces"),
    [
        ({"xaaa": 5, "xaa": 4}, ["x", "##a", "##aa", "xaa", "xaaa"]),  # the first two of three
        ({"a": 3, "b": 1}, ["a", "b"]),
        ({}, []),
    ],
)
def test_merges_by_hand(words, pieces):
    assert merged(words) == pieces


def test_the_tokenizers_library_learns_the_same():
    lines = [line for text in topics.values() for line in text.lower().split("\n")]
    peer = PeerTokenizer(models.WordPiece(unk_token="[UNK]"))
    peer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=300, min_frequency=2, show_progress=False)
    peer.train_from_iterator(lines, trainer)
    merger = PairMerger(count_words(lines, Normalization()), 2)
    while len(merger.pieces) < 300:
        merger.merge()
    # Pairs that tie may differ, and so what is made of them.
    assert len(set(merger.pieces) & set(peer.get_vocab())) >= 290
