"""Signs that say early whether a pre-training run is healthy: its line, its loss, its corpus."""

from __future__ import annotations

import math
import sys

import numpy as np

from bertsmith.corpus.health import corpus_health
from bertsmith.corpus.mixture import Corpus
from bertsmith.corpus.stream import PretrainingStream
from bertsmith.training.run_log import RunLog

NEAR_ENTROPY = 0.3  # nats: a model this close to the unigram entropy has learned counts only
LOOK_AFTER = 0.25  # share of the budget: before it a run of a minute sits there, and ends well
MANY_DUPLICATES = 0.1  # of the tokens; short sentences repeat in any text
MANY_WRONG_LABELS = 0.05  # of the random Bs: a model cannot get them right


def warn(text: str, log: RunLog) -> None:
    """Say it in the log and on stderr."""
    log.message(text)
    print(f"warning: {text}", file=sys.stderr)


def explain_losses(counts: np.ndarray) -> None:
    """Say on stderr, before the first loss is seen, what a loss is measured in and with.

    `counts` of the pieces in the training text.
    """
    blind, entropy = math.log(len(counts)), count_entropy(counts)
    print(
        f"losses are in nats a token, less is better; a guess among {len(counts):,} pieces has "
        f"{blind:.2f}\nknowing only their counts has {entropy:.2f}, the unigram entropy of the "
        "training text",
        file=sys.stderr,
    )


class EntropyWatch:
    """Warns once when the training loss sits at the corpus' unigram entropy after warm-up.

    Looked at from a quarter of the budget on, or from the end of a longer warm-up.
    """

    def __init__(self, store: Corpus, name: str, warmup: float, log: RunLog) -> None:
        self._entropy, self._log = count_entropy(store.unigram_counts), log
        self._name, self._from = name, max(warmup, LOOK_AFTER)
        self._said = False

    def __call__(self, done: float, figures: dict[str, float]) -> None:
        loss = figures[f"{self._name}_loss"]
        near = abs(loss - self._entropy) <= NEAR_ENTROPY
        if self._said or done < self._from or not near:
            return
        self._said = True
        warn(
            f"after {done:.0%} of the budget the training {self._name.upper()} loss {loss:.2f} "
            f"still sits at the corpus' unigram entropy {self._entropy:.2f}: so far only "
            "frequencies were learned; a longer budget or another --rate may be needed",
            self._log,
        )


def judge_result(figures: dict[str, float], name: str, log: RunLog) -> None:
    """Warn of a held-out loss that is no better than the unigram entropy."""
    loss, entropy = figures[f"{name}_loss"], figures["unigram_entropy"]
    if loss < entropy - NEAR_ENTROPY:
        return
    if loss <= entropy + NEAR_ENTROPY:
        where, meaning = "at", "so far only frequencies were learned; train longer"
    else:
        where = "above"
        meaning = "worse than guessing by frequencies; train longer, or with another --rate"
    warn(
        f"held-out {name.upper()} loss {loss:.2f} is {where} the unigram entropy {entropy:.2f}: "
        f"{meaning}",
        log,
    )


def judge_corpus(stream: PretrainingStream, log: RunLog) -> dict[str, float]:
    """Put the shares of `corpus_health` into the log, and warn of high ones.

    High are: more than 10% of the tokens in sentences that stood before; more than 5% of the random
    Bs from A's own document or beginning with the sentence that truly follows.
    """
    health = corpus_health(stream)
    shares = ", ".join(f"{name.replace('_', ' ')} {share:.1%}" for name, share in health.items())
    log.message(f"corpus: {shares}")
    if (duplicates := health["duplicate_tokens"]) > MANY_DUPLICATES:
        warn(
            f"{duplicates:.0%} of the tokens are in sentences that stood before: a model learns "
            "them by heart; remove copies and boilerplate from the text",
            log,
        )
    wrong = health.get("nsp_own_document", 0.0) + health.get("nsp_true_next", 0.0)
    if wrong > MANY_WRONG_LABELS:
        remedy = "give --pairs clean" if stream.settings.pairs == "paper" else "add documents"
        warn(f"{wrong:.0%} of the random next sentences are no random ones: {remedy}", log)
    return health


def count_entropy(counts: np.ndarray) -> float:
    """Nats of a token drawn by these counts.

    >>> round(count_entropy(np.array([2, 1, 1, 0])), 3)
    1.04
    """
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())
