"""Tags and their entities by hand and by seqeval, in every scheme."""

from itertools import pairwise

import numpy as np
import pytest
from seqeval import metrics

from bertsmith.tasks.tagging.schemes import (
    convert_tags,
    detect_scheme,
    entity_scores,
    find_entities,
    find_impossible,
    label_names,
    tag_scores,
)

# One text of two sentences, in all schemes: X X | X(one word) Y, then X at the very start
SCHEMES = {
    "IOB1": ["I-X", "I-X", "B-X", "I-Y", "O", "I-X", "I-X"],
    "IOB2": ["B-X", "I-X", "B-X", "B-Y", "O", "B-X", "I-X"],
    "BIOES": ["B-X", "E-X", "S-X", "S-Y", "O", "B-X", "E-X"],
}
BOUNDARIES = np.array([0, 5, 7])
KEYS = {(0, 2, "X"), (2, 3, "X"), (3, 4, "Y"), (5, 7, "X")}


@pytest.mark.parametrize("given", SCHEMES)
def test_the_example(given):
    tags = SCHEMES[given]
    assert find_entities(tags, BOUNDARIES).keys() == KEYS
    assert detect_scheme(tags, BOUNDARIES) == given
    assert find_impossible(tags, BOUNDARIES, given) is None
    for wanted, expected in SCHEMES.items():
        assert convert_tags(tags, BOUNDARIES, wanted) == expected


def test_a_sentence_ends_every_entity():
    tags = ["I-X", "I-X", "I-X"]
    boundaries = np.array([0, 1, 3])
    assert find_entities(tags, boundaries).keys() == {(0, 1, "X"), (1, 3, "X")}
    assert convert_tags(tags, boundaries, "IOB1") == tags
    assert convert_tags(tags, boundaries, "IOB2") == ["B-X", "B-X", "I-X"]


def random_tags(random, count, prefixes="BIES"):
    """Any tags after each other, most of them impossible there."""
    tags = [f"{prefix}-{name}" for prefix in prefixes for name in "XY"] + ["O", "O"]
    return [tags[k] for k in random.integers(0, len(tags), count)]


def random_boundaries(random, count):
    inner = random.choice(np.arange(1, count), int(random.integers(0, min(count, 4))), False)
    return np.concatenate([[0], np.sort(inner), [count]])


@pytest.mark.parametrize("seed", range(20))
def test_converting_keeps_the_entities(seed):
    random = np.random.default_rng(seed)
    for _ in range(50):
        count = int(random.integers(1, 12))
        tags, boundaries = random_tags(random, count), random_boundaries(random, count)
        keys = find_entities(tags, boundaries).keys()
        for scheme in SCHEMES:
            converted = convert_tags(tags, boundaries, scheme)
            assert find_entities(converted, boundaries).keys() == keys
            assert find_impossible(converted, boundaries, scheme) is None
            assert convert_tags(converted, boundaries, scheme) == converted


def possible(tags, boundaries, scheme):
    """The grammar of a scheme, word by word, as a table of what may follow what."""
    starts = set(boundaries.tolist())
    for k, tag in enumerate(tags):
        before = "O" if k in starts else tags[k - 1]
        after = "O" if k + 1 in starts or k + 1 == len(tags) else tags[k + 1]
        same_before = before[1:] == tag[1:]
        if scheme == "IOB1" and tag[0] == "B" and not (before != "O" and same_before):
            return False
        if scheme == "IOB2" and tag[0] == "I" and not (before != "O" and same_before):
            return False
        if scheme == "BIOES":
            goes_on = after[0] in "IE" and after[1:] == tag[1:]
            came_on = before[0] in "BI" and same_before
            if tag[0] in "BI" and not goes_on or tag[0] in "IE" and not came_on:
                return False
    return True


@pytest.mark.parametrize("scheme", SCHEMES)
def test_impossible_tags_are_seen_and_no_others(scheme):
    random = np.random.default_rng(5)
    prefixes = "BIES" if scheme == "BIOES" else "BI"
    outcomes = []
    for _ in range(1500):
        count = int(random.integers(1, 5))
        tags, boundaries = random_tags(random, count, prefixes), random_boundaries(random, count)
        outcomes.append(possible(tags, boundaries, scheme))
        assert (find_impossible(tags, boundaries, scheme) is None) == outcomes[-1]
    assert 0.1 < np.mean(outcomes) < 0.9


def test_what_is_said_of_impossible_tags():
    line = np.array([0, 3])
    assert find_impossible(["O", "I-X", "O"], line, "IOB2") == (
        1,
        "tag 'I-X' after 'O' is impossible in IOB2: 'B-X' fits",
    )
    assert find_impossible(["B-X", "O", "O"], line, "IOB1") == (
        0,
        "tag 'B-X' after the start of the sentence is impossible in IOB1: 'I-X' fits",
    )
    assert find_impossible(["O", "S-X", "O"], line, "IOB2") == (
        1,
        "unknown tag 'S-X': in IOB2 a tag is O, B-TYPE, I-TYPE",
    )
    assert find_impossible(["O", "PER", "O"], line, "BIOES")[1].startswith("unknown tag 'PER'")


@pytest.mark.parametrize(
    ("tags", "scheme"),
    [
        ("O O", "IOB2"),
        ("B-X I-X O I-X B-Y", "IOB2"),  # the majority: the third is a mistake
        ("I-X I-X O I-X B-Y", "IOB1"),
        ("NN VB O B-X", "plain"),
        ("B I O", "IOB2"),  # entities of one kind need no name
        ("S O B E", "BIOES"),
        ("LOC O", "plain"),
        ("B-NN L-VB U-JJ", "plain"),  # letters that say something else
    ],
)
def test_detection(tags, scheme):
    assert detect_scheme(tags.split(), np.array([0, len(tags.split())])) == scheme


@pytest.mark.parametrize(
    ("tags", "unknown"),
    [
        (["B-PER", "L-PER", "O", "U-PER"], "L-PER"),
        (["U-LOC", "O", "B-PER", "L-PER"], "U-LOC"),
        (["U-LOC", "O", "B-PER", "I-PER", "L-PER"], "U-LOC"),
    ],
)
def test_bilou_is_not_taken_for_plain_tags(tags, unknown):
    line = np.array([0, len(tags)])
    _, what = find_impossible(tags, line, detect_scheme(tags, line))
    assert what == f"unknown tag '{unknown}': in IOB2 a tag is O, B-TYPE, I-TYPE"


def test_entities_without_a_name():
    line = np.array([0, 4])
    assert convert_tags(["B", "I", "O", "B"], line, "BIOES") == ["B", "E", "O", "S"]
    assert label_names(["O", "B"], "IOB2") == ("O", "B", "I")


def test_plain_tags_are_left_alone():
    assert find_impossible(["NN", "VB", "O"], np.array([0, 3]), "plain") is None
    assert convert_tags(["NN", "I-X"], np.array([0, 2]), "plain") == ["NN", "I-X"]
    assert label_names(["VB", "NN", "VB"], "plain") == ("NN", "VB")


def chunks(tags):
    """Chunks of one sentence by the script's two lists: where one ends, where one starts."""
    ends = set("BB BS BO IB IS IO EB EI EE ES EO SB SI SE SS SO".split())  # noqa: SIM905
    starts = set("BB IB EB SB OB BS IS ES SS OS EI EE SI SE OI OE".split())  # noqa: SIM905
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
    for begin, end in pairwise(boundaries):
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
        predicted = [b if c else a for a, b, c in zip(gold, other, changed, strict=True)]
        yield gold, predicted, boundaries


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
        edges = list(pairwise(boundaries))
        sentences = [[part[b:e] for b, e in edges] for part in (gold, predicted)]
        row = entity_scores(gold, predicted, boundaries)["overall"]
        for name in ("precision", "recall", "f1"):
            score = getattr(metrics, f"{name}_score")(*sentences)
            assert row[name] == pytest.approx(score, rel=1e-12), (gold, predicted)


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


NAMES = "entity_f1", "entity_precision", "entity_recall", "tag_accuracy"


@pytest.mark.parametrize(
    ("gold", "predicted", "scheme", "scores"),
    [
        ("I-X I-X O I-Y", "I-X O O I-Y", "IOB1", (0.5, 0.5, 0.5, 0.75)),
        # plain tags that touch are not one entity; what is O counts in the accuracy only
        ("A A O B", "A O O A", "plain", (2 / 5, 0.5, 1 / 3, 0.5)),
        ("A B", "A A", "plain", (0.5, 0.5, 0.5, 0.5)),
    ],
)
def test_the_metrics_of_a_task(gold, predicted, scheme, scores):
    gold, predicted = gold.split(), predicted.split()
    found = tag_scores(gold, predicted, np.array([0, len(gold)]), scheme)
    assert found == pytest.approx(dict(zip(NAMES, scores, strict=True)), rel=1e-12)
