"""Held-out figures of a pre-training run: the rows, the figures, their words."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from bertsmith.base.terminal import of_cases
from bertsmith.corpus.examples.mixture import Corpus, Stream, open_stream
from bertsmith.corpus.examples.settings import PAIR_NAMES, ExampleSettings
from bertsmith.corpus.examples.stream import Position
from bertsmith.model.heads import PreTrainingModel
from bertsmith.text.tokenizer.wordpiece import Vocabulary
from bertsmith.training.engine import Engine
from bertsmith.training.pretraining.objectives import (
    micro_arrays,
    named_figures,
    pretraining_sums,
    token_name,
)
from bertsmith.training.pretraining.settings import PretrainSettings
from bertsmith.training.replicas import computed

EVAL_SEED = 0
# In 19 of 20 cases an accuracy of 256 pairs lies within 6 points of that of many, one of 100 within
# 10, which hides all that a short run learns. A short text is read again, with other cuts, partners
# and masks; more than four times would tell nothing new.
FEWEST_PAIRS, MOST_READINGS = 256, 4


def eval_stream(
    store: Corpus, vocabulary: Vocabulary, length: int, settings: PretrainSettings
) -> Stream:
    """Rows on which every run of a store with this length, objective and rule of pairs is measured.

    Always with the paper's masks, so that recipes with others can be compared, and with pairs by
    the rule of training: clean ones would be judged by labels that mislead.
    """
    examples = ExampleSettings(
        length,
        objective=settings.objective,
        nsp_sampling=settings.pair_rule,
        short_seq_prob=settings.short_seq_prob,
        bare=settings.architecture == "gpt",
    )
    return open_stream(store.held_out, vocabulary, examples, EVAL_SEED)


def evaluate_pretraining(
    model: PreTrainingModel, stream: Stream, engine: Engine, rows: int, batch: int = 32
) -> dict[str, float]:
    """Held-out figures of `num_rows` examples of the stream, which all ranks share.

    Those of `named_figures` with the number of cases of each accuracy ("nsp_cases" pairs), without
    an accuracy of fewer than FEWEST_PAIRS pairs. `batch`: rows that a worker computes at once.
    """
    model.eval()
    objective, ranks = stream.settings.objective, engine.ranks
    parts: list[tuple[Position, int]] = []  # begin and number of this rank's rows
    position = Position(0, 0)
    rows = num_rows(stream, rows)
    for start in range(0, rows, batch * ranks.size):
        count = min(batch * ranks.size, rows - start)
        own = range(count * ranks.rank // ranks.size, count * (ranks.rank + 1) // ranks.size)
        parts.append((stream.advance(position, own.start), len(own)))
        position = stream.advance(position, count)

    def sum_losses(part: tuple[Position, int]) -> dict[str, float]:
        # without own rows one is computed in vain: sharded weights need every rank in every pass
        examples, _ = stream.batch(part[0], max(1, part[1]))
        micro = micro_arrays(examples, objective, 0, len(examples.lengths))
        sums = pretraining_sums(model, micro, engine)
        return {name: float(value) if part[1] else 0.0 for name, value in sums.items()}

    totals: dict[str, float] = {}
    for sums in computed(engine, sum_losses, parts):
        for name, value in sums.items():
            totals[name] = totals.get(name, 0.0) + value
    sums = ranks.all_reduce(totals)
    figures = named_figures(objective, sums)
    figures[f"{token_name(objective)}_cases"] = int(sums["masked"])
    if pair := PAIR_NAMES.get(objective):
        figures[f"{pair}_cases"] = int(sums["rows"])
        if sums["rows"] < FEWEST_PAIRS:
            del figures[f"{pair}_accuracy"], figures[f"{pair}_cases"]
    return figures


def num_rows(stream: Stream, wanted: int) -> int:
    """Number of rows to measure: at most those of the text, or FEWEST_PAIRS of a short one."""
    rows = stream.examples_in_epoch(0)
    return min(wanted, max(rows, min(FEWEST_PAIRS, MOST_READINGS * rows)))


def describe_evaluation(figures: Mapping[str, float]) -> str:
    """Held-out figures in one line, with the number of cases where they are few.

    >>> pairs = {"nsp_accuracy": 0.75, "nsp_cases": 256}
    >>> describe_evaluation({"mlm_loss": 5.6291, "mlm_accuracy": 0.103, "mlm_cases": 9000} | pairs)
    'held-out MLM loss 5.629, 10.3% right, NSP 75.0% of 256'
    """
    name = "ltr" if "ltr_loss" in figures else "mlm"
    entropy = figures.get("unigram_entropy")
    unigrams = "" if entropy is None else f" nats (unigram entropy {entropy:.3f})"
    accuracy = {
        kind: f"{figures[f'{kind}_accuracy']:.1%}{of_cases(figures[f'{kind}_cases'])}"
        for kind in (name, *PAIR_NAMES.values())
        if f"{kind}_accuracy" in figures
    }
    shown = [
        f"held-out {name.upper()} loss {figures[f'{name}_loss']:.3f}{unigrams}",
        f"{accuracy.pop(name)} right",
    ]
    if "rtl_loss" in figures:
        correct = f"{figures['rtl_accuracy']:.1%} right"
        shown += [f"RTL loss {figures['rtl_loss']:.3f}", correct]
    return ", ".join([*shown, *(f"{kind.upper()} {x}" for kind, x in accuracy.items())])


def unigram_entropy(store: Corpus, stream: Stream, rows: int) -> float:
    """Cross-entropy (nats) of held-out labels under the training text's counts of pieces.

    Counts are raised by one, or a piece that the text lacks would be impossible.
    """
    counts = store.unigram_counts.astype(np.float64) + 1.0
    log_share = np.log(counts) - math.log(counts.sum())
    examples, _ = stream.batch(Position(0, 0), num_rows(stream, rows))
    return float(-log_share[examples.masked_labels[examples.masked_weights > 0]].mean())
