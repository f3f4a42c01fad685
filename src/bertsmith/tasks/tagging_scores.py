"""Precision, recall and F1 of entities, as `conlleval` and seqeval count them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from bertsmith.tasks.tagging_schemes import OUTSIDE, Scheme, find_entities


def entity_scores(
    gold: Sequence[str], predicted: Sequence[str], boundaries: np.ndarray
) -> dict[str, dict[str, float]]:
    """{"overall" or a type: {"precision", "recall", "f1", "gold", "predicted", "correct"}}.

    An entity is right when its words and its type are. Any scheme is read, and any sequence, see
    `find_entities`; a share of nothing is 0. The last three are counts.

    >>> gold, predicted = ["B-X", "I-X", "O", "B-Y"], ["B-X", "I-X", "B-X", "B-Y"]
    >>> entity_scores(gold, predicted, np.array([0, 4]))["overall"]["recall"]
    1.0
    """
    assert len(gold) == len(predicted) == boundaries[-1]
    wanted = find_entities(gold, boundaries).keys()
    given = find_entities(predicted, boundaries).keys()
    counts = [Counter(name for *_, name in keys) for keys in (wanted, given, wanted & given)]
    scores = {"overall": _scores(*(part.total() for part in counts))}
    for name in sorted(counts[0] | counts[1]):
        scores[name] = _scores(*(part[name] for part in counts))
    return scores


def tag_scores(
    gold: Sequence[str], predicted: Sequence[str], boundaries: np.ndarray, scheme: Scheme
) -> dict[str, float]:
    """The metrics of kind "tag". Of plain tags each word that is not O is an entity by itself.

    >>> scores = tag_scores(["NN", "VB"], ["NN", "NN"], np.array([0, 2]), "plain")
    >>> scores["entity_f1"], scores["tag_accuracy"]
    (0.5, 0.5)
    """
    accuracy = tag_accuracy(gold, predicted)
    if scheme == "plain":
        gold, predicted = (
            [tag if tag == OUTSIDE else f"B-{tag}" for tag in tags] for tags in (gold, predicted)
        )
    overall = entity_scores(gold, predicted, boundaries)["overall"]
    entities = {f"entity_{name}": overall[name] for name in ("f1", "precision", "recall")}
    return {**entities, "tag_accuracy": accuracy}


def tag_accuracy(gold: Sequence[str], predicted: Sequence[str]) -> float:
    """The share of words with the right tag."""
    return float(np.mean([a == b for a, b in zip(gold, predicted, strict=True)]))


def _scores(gold: int, predicted: int, correct: int) -> dict[str, float]:
    return {
        "precision": correct / predicted if predicted else 0.0,
        "recall": correct / gold if gold else 0.0,
        "f1": 2 * correct / (gold + predicted) if gold + predicted else 0.0,
        "gold": gold,
        "predicted": predicted,
        "correct": correct,
    }
