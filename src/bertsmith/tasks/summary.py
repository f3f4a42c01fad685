"""What a person should know of a training and a dev set before training."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from bertsmith.tasks.reading import LabelledExamples


def summarise(train: LabelledExamples, dev: LabelledExamples) -> str:
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


def label_conflicts(examples: LabelledExamples) -> list[list[int]]:
    """The texts that stand there with different labels: for each, the first example of a label."""
    assert examples.labels is not None
    firsts: dict[tuple[str, ...], dict[bytes, int]] = defaultdict(dict)
    for number, key in enumerate(examples.identities()):
        firsts[key].setdefault(examples.labels[number].tobytes(), number)
    return [list(labels.values()) for labels in firsts.values() if len(labels) > 1]


def _describe(examples: LabelledExamples) -> str:
    words = [
        len(f"{first} {second}".split())
        for first, *others in examples.identities()
        for second in others
    ]
    middle, long, longest = np.percentile(words, [50, 95, 100])
    return (
        f"{len(examples):,} examples; {examples.describe_labels()};"
        f" words: median {middle:.0f}, 95% up to {long:.0f}, longest {longest:.0f}"
    )
