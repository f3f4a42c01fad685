"""The scores against the CoNLL script's rules, written here as it has them, and against seqeval."""

import numpy as np
import pytest
from seqeval import metrics

from bertsmith.tasks.tagging.schemes import entity_scores, tag_scores

from .test_tagging_schemes import random_boundaries, random_tags


def chunks(tags):
    """Chunks of one sentence by the script's two lists: where one ends, where one starts."""
    ends = set(
        [
            "BB",
            "BS",
            "BO",
            "IB",
            "IS",
            "IO",
            "EB",
            "EI",
            "EE",
            "ES",
            "EO",
            "SB",
            "SI",
            "SE",
            "SS",
            "SO",
        ]
    )
    starts = set(
        [
            "BB",
            "IB",
            "EB",
            "SB",
            "OB",
            "BS",
            "IS",
            "ES",
            "SS",
            "OS",
            "EI",
            "EE",
            "SI",
            "SE",
            "OI",
            "OE",
        ]
    )
    found, begin = set(), None
    before, type_before = "O", ""
    for place, tag in enumerate([*tags, "O"]):
        letter, _, name = tag.partition("-")
        changed = name != type_before
        if begin is not None and (before + letter in ends or (before != "O" and changed)):
            found.add((begin, place, type_before))
            begin = None
        if before + letter in starts or (letter != "O" and changed):
            begin = place
        before, type_before = letter, name
    return found


def reference(gold, predicted, boundaries):
    """Counts of correct, predicted and gold chunks, all and by type."""
    correct, given, wanted = {}, {}, {}
    for begin, end in zip(boundaries[:-1], boundaries[1:], strict=True):
        a, b = chunks(gold[begin:end]), chunks(predicted[begin:end])
        for counts, part in ((correct, a & b), (given, b), (wanted, a)):
            for _, _, name in part:
                for key in ("overall", name):
                    counts[key] = counts.get(key, 0) + 1
    return correct, given, wanted


def cases(seed, count):
    random = np.random.default_rng(seed)
    for _ in range(count):
        size = int(random.integers(1, 25))
        boundaries = random_boundaries(random, size)
        prefixes = ["BI", "BIES", "I"][random.integers(0, 3)]
        gold, other = (random_tags(random, size, prefixes) for _ in range(2))
        changed = random.random(size) < random.choice([0, 0.2, 1])
        yield (
            gold,
            [b if c else a for a, b, c in zip(gold, other, changed, strict=True)],
            boundaries,
        )


def test_as_the_conll_script_on_1500_cases():
    for gold, predicted, boundaries in cases(1, 1500):
        scores = entity_scores(gold, predicted, boundaries)
        correct, given, wanted = reference(gold, predicted, boundaries)
        assert set(scores) == {"overall", *given, *wanted}
        for name, row in scores.items():
            counts = [counts.get(name, 0) for counts in (correct, given, wanted)]
            assert [row["correct"], row["predicted"], row["gold"]] == counts
            precision = counts[0] / counts[1] if counts[1] else 0
            recall = counts[0] / counts[2] if counts[2] else 0
            total = precision + recall
            f1 = 2 * precision * recall / total if total else 0
            assert (row["precision"], row["recall"]) == (precision, recall)
            assert row["f1"] == pytest.approx(f1, rel=1e-12)


@pytest.mark.filterwarnings("ignore")
def test_as_seqeval_on_1000_cases():
    for gold, predicted, boundaries in cases(2, 1000):
        sentences = [
            [part[b:e] for b, e in zip(boundaries[:-1], boundaries[1:], strict=True)]
            for part in (gold, predicted)
        ]
        row = entity_scores(gold, predicted, boundaries)["overall"]
        for name, score in (
            ("precision", metrics.precision_score),
            ("recall", metrics.recall_score),
            ("f1", metrics.f1_score),
        ):
            assert row[name] == pytest.approx(score(*sentences), rel=1e-12), (gold, predicted)


def test_by_hand():
    gold = ["B-PER", "I-PER", "O", "B-LOC", "O", "O", "B-ORG"]
    predicted = ["B-PER", "I-PER", "O", "B-ORG", "O", "I-LOC", "I-ORG"]  # I- without B- begins one
    scores = entity_scores(gold, predicted, np.array([0, 7]))
    overall = {"precision": 0.5, "recall": 2 / 3, "f1": 4 / 7}
    assert scores["overall"] == overall | {"gold": 3, "predicted": 4, "correct": 2}
    assert scores["LOC"]["f1"] == 0 and scores["LOC"]["predicted"] == 1
    assert scores["ORG"]["precision"] == 0.5 and scores["PER"]["f1"] == 1
    assert tag_scores(gold, predicted, np.array([0, 7]), "IOB2")["tag_accuracy"] == 4 / 7


def test_nothing_to_find():
    scores = entity_scores(["O", "O"], ["O", "O"], np.array([0, 2]))
    assert list(scores) == ["overall"] and scores["overall"]["f1"] == 0.0


def test_the_metrics_of_a_task():
    boundaries = np.array([0, 4])
    gold, predicted = ["I-X", "I-X", "O", "I-Y"], ["I-X", "O", "O", "I-Y"]
    assert tag_scores(gold, predicted, boundaries, "IOB1") == {
        "entity_f1": 0.5,
        "entity_precision": 0.5,
        "entity_recall": 0.5,
        "tag_accuracy": 0.75,
    }
    # plain tags that touch are not one entity; what is O counts in the accuracy only
    gold, predicted = ["A", "A", "O", "B"], ["A", "O", "O", "A"]
    assert tag_scores(gold, predicted, boundaries, "plain") == {
        "entity_f1": pytest.approx(2 / 5),
        "entity_precision": 0.5,
        "entity_recall": pytest.approx(1 / 3),
        "tag_accuracy": 0.5,
    }
    assert tag_scores(["A", "B"], ["A", "A"], np.array([0, 2]), "plain")["entity_f1"] == 0.5
