"""BLEU against sacrebleu's, its intervals and paired test included; its groups against cases."""

import sys

import numpy as np
import pytest

from bertsmith.experiments.lineage.bleu import (
    bleu,
    by_length,
    by_rarest_word,
    ceiling,
    check_language,
    joined,
    paired_bootstrap,
    scores,
    statistics,
)
from bertsmith.experiments.lineage.pairs import Language, Pairs
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.text.tokenizer.wordpiece import SPECIAL, Vocabulary

pytest.importorskip("sacrebleu", reason="the extra lineage is not installed")

WORDS = ["the", "a", "man", "woman", "dog", "runs", "on", "in", "grass", ",", ".", "red", "Big"]


def sentences(count, seed):
    random = np.random.default_rng(seed)
    return [" ".join(random.choice(WORDS, random.integers(1, 16))) for _ in range(count)]


def changed(texts, fraction, seed):
    """The texts, of which some words are others."""
    random = np.random.default_rng(seed)
    return [
        " ".join(w if random.random() > fraction else random.choice(WORDS) for w in text.split())
        for text in texts
    ]


REFERENCES = sentences(300, 0)
GOOD, WORSE = changed(REFERENCES, 0.2, 1), changed(REFERENCES, 0.3, 2)


@pytest.mark.parametrize("lowercase", [False, True])
@pytest.mark.parametrize(
    ("hypotheses", "references"),
    [
        (GOOD, REFERENCES),
        (sentences(20, 5), sentences(20, 6)),  # few matches: smoothed
        (["a b c", "x"], ["a b d", "x y"]),  # no n-gram of four words at all
        (["x y z u v"], ["a b c d e"]),  # none right
        (["", "a dog runs on grass"], ["the", "A dog runs on grass ."]),
        ([text + " and more" for text in GOOD], REFERENCES),  # longer than the reference
    ],
)
def test_bleu_is_sacrebleus(hypotheses, references, lowercase):
    from sacrebleu.metrics import BLEU

    expected = BLEU(lowercase=lowercase).corpus_score(hypotheses, [references]).score
    counts = statistics(hypotheses, references, "en", lowercase)
    assert bleu(counts.sum(0)) == pytest.approx(expected)
    weights = np.stack([np.ones(len(counts)), np.full(len(counts), 2)])
    assert bleu(weights @ counts)[0] == pytest.approx(expected)


def test_scores_have_signatures_and_intervals():
    from sacrebleu.metrics import BLEU, CHRF

    lower = [text.lower() for text in GOOD]
    found = scores(lower, REFERENCES, "de")
    assert found["chrf"]["score"] == CHRF().corpus_score(lower, [REFERENCES]).score
    assert found["bleu_lower"]["score"] > found["bleu"]["score"]
    assert "case:mixed|eff:no|tok:13a" in found["bleu"]["signature"]
    assert "case:lc|eff:no|tok:13a" in found["bleu_lower"]["signature"]
    theirs = BLEU().corpus_score(lower, [REFERENCES], n_bootstrap=1000)
    low, high = found["bleu"]["interval"]
    # ends of intervals of 1,000 draws scatter by some 3% of the width
    half = theirs._ci
    assert (low, high) == pytest.approx((theirs._mean - half, theirs._mean + half), abs=0.15 * half)


def test_chinese_is_cut_into_characters():
    found = scores(["我 爱你"], ["我爱你"], "zh")
    assert "tok:zh" in found["bleu"]["signature"] and found["bleu"]["score"] == 0  # of 3 characters
    assert statistics(["我爱你们"], ["我爱你们"], "zh")[0, :2].tolist() == [4, 4]


@pytest.mark.parametrize(
    ("code", "hint"),
    [("german", "'de'"), ("English", "'en'"), ("czech", "'cs'"), ("nnn", "'nn'"), ("", "known: ")],
)
def test_an_unknown_language_is_refused(code, hint):
    for known in ("de", "en", "fr", "cs", "nl", "zh"):
        check_language(known)
    with pytest.raises(ValueError, match=f"unknown language code '{code}': .*{hint}"):
        scores(GOOD, REFERENCES, code)


def test_what_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr("sacrebleu.tokenizers.tokenizer_ja_mecab.MeCab", None)
    with pytest.raises(ValueError, match=r"BLEU of 'ja': .* pip install sacrebleu\[ja\]$"):
        scores(GOOD, REFERENCES, "ja")
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics.bleu", None)
    with pytest.raises(ValueError, match="BLEU needs sacrebleu: pip install"):
        scores(GOOD, REFERENCES, "en")


def test_other_numbers_of_translations_and_references_are_refused():
    with pytest.raises(ValueError, match="299 translations, 300 references: BLEU needs one"):
        scores(GOOD[1:], REFERENCES, "en")
    with pytest.raises(ValueError, match="0 translations, 0 references"):
        scores([], [], "en")


def test_a_paired_bootstrap_tells_the_better_system():
    found = paired_bootstrap(WORSE, GOOD, REFERENCES, "en")
    assert found["difference"] == pytest.approx(found["second"] - found["first"])
    assert 0 < found["interval"][0] < found["difference"] < found["interval"][1]
    assert found["p"] < 0.01
    same = paired_bootstrap(GOOD, GOOD, REFERENCES, "en")
    assert same["difference"] == 0 and same["p"] == 1 and same["interval"] == [0, 0]
    assert paired_bootstrap(["A dog"], ["a dog"], ["a dog"], "en", lowercase=True)["first"] == 0


def test_groups_by_length_hold_each_sentence_once():
    sources = ["w " * n for n in (1, 2, 3, 4, 4, 4, 4, 8, 9)]
    hypotheses = ["a dog runs on grass"] * 9
    references = [*hypotheses[:7], "a dog runs on snow", "a man"]
    groups = by_length(statistics(hypotheses, references, "en"), sources)
    assert [(g["from"], g["to"], g["sentences"]) for g in groups] == [
        (1, 3, 3),
        (4, 4, 4),
        (8, 9, 2),
    ]
    expected = bleu(statistics(hypotheses[7:], references[7:], "en").sum(0))
    assert [g["score"] for g in groups] == pytest.approx([100, 100, expected])
    assert groups[0]["interval"] == pytest.approx([100, 100])


def test_sentences_of_one_length_are_one_group():
    counts = statistics(GOOD[:6], REFERENCES[:6], "en")
    assert [group["sentences"] for group in by_length(counts, ["a b"] * 6)] == [6]


def test_groups_by_the_rarest_word():
    training = ["rare"] * 9 + ["some thing"] * 10 + ["often."] * 100
    sources = ["often some", "often.", "new often", "rare often", "unseen", "often rare thing"]
    groups = by_rarest_word(statistics(GOOD[:6], REFERENCES[:6], "en"), sources, training)
    found = [(group["from"], group["to"], group["sentences"]) for group in groups]
    assert found == [(0, 0, 2), (9, 9, 2), (10, 10, 1), (100, 100, 1)]


def test_neighbours_are_joined():
    pairs = Pairs(list("abcdefg"), list("ABCDEFG"), "x")
    assert joined(pairs, 3).source == ["a b c", "d e f"]
    assert joined(pairs, 4).target == ["A B C D"]
    assert joined(pairs, 8).source == []


def test_the_ceiling_is_what_the_vocabulary_can_write():
    texts = [text.replace(" .", ".").replace(" ,", ",") for text in REFERENCES]
    assert ceiling(texts, Language.train(texts, 57), "en")["bleu"]["score"] == pytest.approx(100)
    small = Language(Tokenizer(Vocabulary([*SPECIAL, "the", "a", "man"])))
    assert ceiling(texts, small, "en")["bleu"]["score"] < 20
