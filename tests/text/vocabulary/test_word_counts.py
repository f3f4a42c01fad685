"""Counts against the plain reference, word by word; the same for any number of workers."""

import multiprocessing
import os
import random
import signal
from collections import Counter

import pytest

from bertsmith.text.tokenizer.normalize import GOOGLE_CASED, PRESETS, Normalization, split_words
from bertsmith.text.vocabulary import word_counts
from bertsmith.text.vocabulary.word_counts import count_words

MIXED = (
    "aAzZ09,.'-_~\x00\x7f\t\v\f\x1c\x1f\x85 \u00a0\u2003\u2028é\u0301=\u0338ßİΣσςÅ\u212b漢字\uf900"
    "\U0002f800が\u3099ｶﾞ한각\u1100\u1161\u11a8กา\u200d😀\ud83d—“”…\ufb01①㌀"
)


def reference(texts, normalization):
    words = [word.characters for text in texts for word in split_words(text, normalization)]
    return Counter(word for word in words if len(word) <= 200)


def assert_is_reference(texts, normalization):
    assert count_words(texts, normalization) == reference(texts, normalization)


LATIN_NFKC = Normalization(strip_accents="latin", unicode="nfkc")
WHOLE_NFC = Normalization(split_cjk=False, unicode="nfc")


@pytest.mark.parametrize("normalization", [*PRESETS.values(), LATIN_NFKC, WHOLE_NFC])
def test_words_are_those_of_the_reference(normalization):
    source = random.Random(1)
    texts = ["".join(source.choices(MIXED, k=60)) for _ in range(400)]
    assert_is_reference(texts, normalization)


UNICODE, STRIP_ACCENTS = ("none", "nfc", "nfkc"), ("none", "latin", "all")


@pytest.mark.parametrize("shares", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("unicode", UNICODE)
@pytest.mark.parametrize("strip_accents", STRIP_ACCENTS)
def test_every_character_beside_others(unicode, strip_accents, shares):
    """Alone, between letters, before and after marks, capital sigma and other characters.

    In three shares, of which each pair of settings has one, so that every text is met by every
    setting; or each pair has all texts.
    """
    normalization = Normalization(unicode=unicode, strip_accents=strip_accents)
    source = random.Random(3)
    codes = [c for c in range(0x2200) if chr(c) != "\n"]
    texts = [f"{chr(c)} x{chr(c)}y {chr(c)}\u0301 {chr(c)}\u03a3" for c in codes]
    texts += ["".join(map(chr, source.choices(codes, k=3))) for _ in range(4000)]
    share = (UNICODE.index(unicode) + STRIP_ACCENTS.index(strip_accents)) % shares
    assert_is_reference(texts[share::shares], normalization)


def test_many_distinct_words_are_counted():
    source = random.Random(2)
    texts = [" ".join(str(source.randrange(9000)) for _ in range(20_000))]
    assert count_words(texts, Normalization()) == Counter(texts[0].split())


def test_long_words_are_left_out():
    words = count_words(["Café, CAFE\u0301! 漢字x " + "y" * 201], Normalization())
    assert words == {"cafe": 2, ",": 1, "!": 1, "漢": 1, "字": 1, "x": 1}
    assert count_words(["Café cafe"], GOOGLE_CASED) == {"Café": 1, "cafe": 1}


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(word_counts, "MAX_REMEMBERED", 10)
    texts = ["één två tré vier, één två tré vier"] * 3
    counter = word_counts._BlockCounter(Normalization())
    assert counter("\n".join(texts))[1] == reference(texts, Normalization())
    assert sum(map(len, counter._known)) < 20


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(word_counts, "BLOCK", 40)
    monkeypatch.setattr(word_counts, "MAX_LETTERS", 40)


@pytest.mark.usefixtures("small_blocks")
def test_rare_words_are_forgotten_alike_for_any_number_of_workers():
    texts = ["common often common"] * 5 + [f"rare{i} often" for i in range(20)]
    alone = count_words(texts, Normalization())
    assert sum(map(len, alone)) <= 40 + 40
    assert (alone["common"], alone["often"]) == (10, 25)
    assert "rare3" not in alone and "rare19" in alone
    assert count_words(texts, Normalization(), workers=2) == alone


@pytest.mark.usefixtures("small_blocks")
def test_a_text_of_words_that_never_come_again_leaves_some():
    assert count_words((f"word{i}" for i in range(100)), Normalization())


def kill_workers():
    for child in multiprocessing.active_children():
        os.kill(child.pid, signal.SIGKILL)


def fail():
    raise ValueError("text.txt:5: not UTF-8")


@pytest.mark.parametrize(
    ("happens", "kind", "message"),
    [(kill_workers, OSError, "a worker process died"), (fail, ValueError, "text.txt:5")],
)
def test_an_error_of_a_worker_or_of_the_text_ends_the_work(monkeypatch, happens, kind, message):
    monkeypatch.setattr(word_counts, "BLOCK", 10)

    def texts():
        yield from ["some words to count"] * 8
        happens()
        yield from ["some words to count"] * 8

    with pytest.raises(kind, match=message):
        count_words(texts(), Normalization(), workers=2)
