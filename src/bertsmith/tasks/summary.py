"""What a person should know of a training and a dev set before training."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from bertsmith.tasks.choice import ChoiceExamples
from bertsmith.tasks.labels import listed
from bertsmith.tasks.reading import Examples


def summarise(train: Examples | ChoiceExamples, dev: Examples | ChoiceExamples) -> str:
    """Sizes, balance or distribution of the labels, lengths, duplicates, label conflicts."""
    train_keys, dev_keys = train.identities(), dev.identities()
    seen = set(train_keys)
    inside = len(train_keys) - len(seen)
    shared = sum(key in seen for key in dev_keys)
    lines = [
        f"train: {_describe(train)}",
        f"dev:   {_describe(dev)}",
        f"exact duplicates: {inside:,} rows of train repeat an earlier one,"
        f" {shared:,} of dev are also in train",
    ]
    if conflicts := label_conflicts(train):
        first = " and ".join(str(train.lines[number]) for number in conflicts[0][:2])
        lines.append(
            f"label conflicts: {len(conflicts):,} texts of train have two labels or more,"
            f" the first in lines {first}"
        )
    return "\n".join(lines)


def label_conflicts(examples: Examples | ChoiceExamples) -> list[list[int]]:
    """The texts that stand there with different labels: for each, the first example of a label."""
    assert examples.labels is not None
    firsts: dict[tuple[str, ...], dict[bytes, int]] = defaultdict(dict)
    for number, key in enumerate(examples.identities()):
        firsts[key].setdefault(examples.labels[number].tobytes(), number)
    return [list(labels.values()) for labels in firsts.values() if len(labels) > 1]


def _describe(examples: Examples | ChoiceExamples) -> str:
    words = [
        len(f"{first} {second}".split())
        for first, *others in examples.identities()
        for second in others
    ]
    middle, long, longest = np.percentile(words, [50, 95, 100])
    return (
        f"{len(examples):,} examples; {_describe_labels(examples)};"
        f" words: median {middle:.0f}, 95% up to {long:.0f}, longest {longest:.0f}"
    )


def _describe_labels(examples: Examples | ChoiceExamples) -> str:
    labels = examples.labels
    assert labels is not None
    if isinstance(examples, ChoiceExamples):
        names = [str(number) for number in range(examples.num_options)]
        shares = _shares(names, np.bincount(labels, minlength=len(names)), len(labels))
        return f"{len(names)} options, the right one is {shares}"
    if labels.dtype.kind == "f":
        low, quarter, middle, three, high = np.percentile(labels, [0, 25, 50, 75, 100])
        return (
            f"scores {low:g} to {high:g}, mean {labels.mean():.3g},"
            f" quartiles {quarter:.3g}, {middle:.3g}, {three:.3g}"
        )
    names = examples.label_names
    if labels.ndim == 1:
        return _shares(names, np.bincount(labels, minlength=len(names)), len(labels))
    each = labels.sum(axis=1)
    return (
        f"{each.mean():.2f} labels a text, {(each == 0).sum():,} without;"
        f" {_shares(names, labels.sum(axis=0), len(labels))}"
    )


def _shares(names: Sequence[str], counts: np.ndarray, total: int) -> str:
    order = np.argsort(-counts, kind="stable")
    return listed([f"{names[k]} {counts[k] / total:.1%}" for k in order])
