"""How often a run reads its text: reckoned before it starts, and said when a store begins again."""

from __future__ import annotations

import sys

from bertsmith.corpus.mixture import Corpus, Mixture
from bertsmith.corpus.stream import Position
from bertsmith.training.pretrain_settings import PretrainSettings
from bertsmith.training.run_log import RunLog


def mixture_line(corpus: Mixture, settings: PretrainSettings) -> str:
    """What is mixed, and how often each store will be read where the budget tells."""
    tokens = budget_tokens(settings)
    parts = []
    for store, share in zip(corpus.stores, corpus.shares, strict=True):
        size = store.train.num_tokens
        times = f", read {tokens * share / size:.2g} times" if tokens else ""
        parts.append(f"{store.folder} {share:.1%} of the rows ({size:,} tokens{times})")
    return "mixture: " + "; ".join(parts)


def budget_tokens(settings: PretrainSettings) -> float | None:
    """Tokens of full rows in the budget; None for a budget in minutes.

    >>> budget_tokens(PretrainSettings(steps=100, batch=32, length=128))
    409600.0
    """
    if settings.tokens is not None:
        return float(settings.tokens)
    if settings.steps is None:
        return None
    tokens, started = 0.0, 0.0
    for phase in settings.phases():
        tokens += (phase.until - started) * settings.steps * phase.batch * phase.length
        started = phase.until
    return tokens


class RepeatWatch:
    """Says that a store has been read whole and begins again: the first time, and whenever the
    number of times has doubled.

    `position` is where the run stands; what was said before that is not said again.
    """

    def __init__(self, corpus: Corpus, position: Position, log: RunLog) -> None:
        self._names = [str(store.folder) for store in corpus.stores]
        self._log = log
        self._mixed = isinstance(corpus, Mixture)
        self._said = self._epochs(position)

    def __call__(self, position: Position) -> None:
        for number, (name, epoch) in enumerate(
            zip(self._names, self._epochs(position), strict=True)
        ):
            if epoch < self._said[number]:  # another phase, which reads the text in its own order
                self._said[number] = 0
            if epoch > 0 and epoch.bit_length() > self._said[number].bit_length():
                times = "once" if epoch == 1 else f"{epoch} times"
                text = f"{name}: read {times}, its rows begin again in another order"
                self._log.message(text)
                if self._mixed:
                    print(text, file=sys.stderr)
            self._said[number] = epoch

    def _epochs(self, position: Position) -> list[int]:
        if self._mixed:
            return [part.epoch for part in position.parts] or [0] * len(self._names)
        return [position.epoch]
