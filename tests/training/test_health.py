"""Signs of health: warnings once and only where they are true, and what is said at the start."""

import numpy as np
import pytest

from bertsmith.training.pretraining import diagnostics as health
from bertsmith.training.pretraining.diagnostics import (
    EntropyWatch,
    check_corpus,
    check_result,
    count_entropy,
)


class Notes:
    """A log that keeps its messages."""

    def __init__(self):
        self.texts = []

    def message(self, text):
        self.texts.append(text)


class Counts:
    unigram_counts = np.array([4, 4, 4, 4])  # entropy: log 4 = 1.386


@pytest.fixture
def notes():
    return Notes()


def test_the_entropy_of_equal_counts_is_their_logarithm():
    assert count_entropy(np.array([3, 0, 3, 3])) == pytest.approx(np.log(3))


def test_the_watch_warns_once_after_warmup_and_only_near_the_entropy(notes, capsys):
    watch = EntropyWatch(Counts(), "mlm", 0.2, notes)
    watch(0.15, {"mlm_loss": 1.4})  # warming up
    watch(0.25, {"mlm_loss": 1.0})  # well below
    watch(0.25, {"mlm_loss": 3.0})  # far above: another trouble
    watch(0.25, {"mlm_loss": float("nan")})
    assert notes.texts == []
    watch(0.30, {"mlm_loss": 1.3})
    watch(0.35, {"mlm_loss": 1.3})
    assert len(notes.texts) == 1
    assert "30% of the budget the training MLM loss 1.30 still sits at" in notes.texts[0]
    assert capsys.readouterr().err.count("warning: ") == 1


def test_a_short_warmup_does_not_make_the_watch_look_early(notes):
    watch = EntropyWatch(Counts(), "ltr", 0.01, notes)
    watch(0.2, {"ltr_loss": 1.4})  # a good run of a minute is here
    assert notes.texts == []
    watch(0.25, {"ltr_loss": 1.4})
    assert "LTR loss" in notes.texts[0]


@pytest.mark.parametrize(
    ("loss", "says"), [(2.0, None), (3.0, "is at the unigram"), (9.0, "is above the unigram")]
)
def test_the_result_is_judged_by_what_is_true(notes, loss, says):
    check_result({"mlm_loss": loss, "unigram_entropy": 3.1}, "mlm", notes)
    assert (says is None and not notes.texts) or says in notes.texts[0]


class Stream:
    class settings:
        nsp_sampling = "paper"


@pytest.mark.parametrize(
    ("shares", "warnings"),
    [
        ({"duplicate_sentences": 0.3, "duplicate_tokens": 0.09}, []),
        ({"duplicate_sentences": 0.3, "duplicate_tokens": 0.25}, ["25% of the tokens"]),
        (
            {"duplicate_tokens": 0.0, "nsp_own_document": 0.04, "nsp_true_next": 0.02},
            ["6% of the random next sentences are no random ones: give --nsp-sampling clean"],
        ),
    ],
)
def test_the_corpus_is_told_and_high_shares_are_warned_of(notes, monkeypatch, shares, warnings):
    monkeypatch.setattr(health, "corpus_health", lambda stream: shares)
    check_corpus(Stream(), notes)
    assert notes.texts[0].startswith("corpus: duplicate ")
    assert len(notes.texts) == 1 + len(warnings)
    for text, start in zip(notes.texts[1:], warnings, strict=True):
        assert text.startswith(start)
