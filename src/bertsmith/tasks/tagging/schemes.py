"""Tags of words, the entities they spell in IOB1, IOB2 and BIOES, and the scores of both.

    words     a    New    York   Times  writer  Ann    ,      Bob    Roe
    IOB1      O    I-ORG  I-ORG  I-ORG  O       I-PER  O      I-PER  I-PER     B- only between two
    IOB2      O    B-ORG  I-ORG  I-ORG  O       B-PER  O      B-PER  I-PER     entities of one type
    BIOES     O    B-ORG  I-ORG  E-ORG  O       S-PER  O      B-PER  E-PER

Tags without such prefixes (parts of speech) are "plain": each word is by itself. Precision, recall
and F1 of entities are those of `conlleval` and seqeval.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from bertsmith.tasks.answer_tables import rounded

Scheme = Literal["IOB1", "IOB2", "BIOES", "plain"]

OUTSIDE = "O"
Entity = tuple[int, int, str]  # first word, word after the last one, type


class Entities(NamedTuple):
    """E entities in the order of the text: words begins[e]:ends[e], end exclusive."""

    begins: np.ndarray  # int64 [E]
    ends: np.ndarray  # int64 [E]
    types: list[str]

    def keys(self) -> set[Entity]:
        """Each entity by itself."""
        return set(zip(self.begins.tolist(), self.ends.tolist(), self.types, strict=True))


def find_entities(tags: Sequence[str], boundaries: np.ndarray) -> Entities:
    """The entities of tagged sentences; sentence k is the words boundaries[k]:boundaries[k + 1].

    Any sequence is read, also an impossible one, by the rule of the CoNLL script (`conlleval`): a
    word that is I or E goes on with the entity before it, when that word is B or I and the types
    are equal; every other word that is not O begins an entity.

    >>> sorted(find_entities(["B-X", "I-X", "O", "I-Y", "E-X"], np.array([0, 5])).keys())
    [(0, 2, 'X'), (3, 4, 'Y'), (4, 5, 'X')]
    """
    distinct = sorted(set(tags))
    indices = {tag: index for index, tag in enumerate(distinct)}
    tag_indices = np.fromiter(map(indices.__getitem__, tags), np.int64, len(tags))
    split = [tag.partition("-")[::2] for tag in distinct]  # prefix and type
    type_names = sorted({name for _, name in split})
    prefixes = np.array([prefix for prefix, _ in split] or [OUTSIDE])[tag_indices]
    types = np.array([type_names.index(name) for _, name in split], np.int64)[tag_indices]

    is_inside = prefixes != OUTSIDE
    goes_on = np.zeros(len(tags), bool)
    goes_on[1:] = (
        np.isin(prefixes[1:], ["I", "E"])
        & np.isin(prefixes[:-1], ["B", "I"])
        & (types[1:] == types[:-1])
    )
    goes_on[boundaries[:-1][boundaries[:-1] < len(tags)]] = False
    begins = np.flatnonzero(is_inside & ~goes_on)
    ends = np.flatnonzero(is_inside & ~np.append(goes_on[1:], False)) + 1
    return Entities(begins, ends, [type_names[index] for index in types[begins]])


def is_plain(dev: Mapping[str, Any]) -> bool:
    """True if the tags of a dev_scores.json spell no entities.

    All tags decide together: among parts of speech may be one that is called S.

    >>> is_plain({"labels": ["NN", "S"]}), is_plain({"labels": ["O", "S-PER"]})
    (True, False)
    """
    return classes_scheme(dev.get("labels") or []) == "plain"


def entities(tags: Sequence[str], plain: bool) -> set[Entity]:
    """The entities that the tags of one sentence spell, see `find_entities`.

    Each plain tag that is not O is a type by itself, of one word.

    >>> sorted(entities(["B-PER", "I-PER", "O", "I-LOC", "E-PER"], plain=False))
    [(0, 2, 'PER'), (3, 4, 'LOC'), (4, 5, 'PER')]
    >>> sorted(entities(["B", "I", "O"], plain=True))
    [(0, 1, 'B'), (1, 2, 'I')]
    """
    if plain:
        tags = _single_words(tags)
    return find_entities(tags, np.array([0, len(tags)])).keys()


def located_entities(
    text: str, spans: np.ndarray, tags: Sequence[str], probabilities: np.ndarray, scheme: Scheme
) -> list[dict[str, Any]]:
    """The entities of a sentence, of plain tags each word that is not O, in its order.

    spans: int64 [W, 2], begin and end of each word in the text. "score" is the mean of the
    probabilities [W] of the tags.

    >>> spans, tags = np.array([[0, 3], [4, 8], [9, 13]]), ["B-X", "I-X", "O"]
    >>> located_entities("New York sings", spans, tags, np.array([0.5, 1.0, 1.0]), "IOB2")
    [{'text': 'New York', 'start': 0, 'end': 8, 'label': 'X', 'score': 0.75}]
    """
    if scheme == "plain":
        tags = _single_words(tags)
    entities = find_entities(tags, np.array([0, len(tags)]))
    located = []
    for begin, end, label in zip(*entities, strict=True):
        start, stop = int(spans[begin, 0]), int(spans[end - 1, 1])
        score = rounded(float(probabilities[begin:end].mean()))
        values = text[start:stop], start, stop, label, score
        located.append(dict(zip(("text", "start", "end", "label", "score"), values, strict=True)))
    return located


def convert_tags(tags: Sequence[str], boundaries: np.ndarray, scheme: Scheme) -> list[str]:
    """The same entities in another scheme; impossible sequences become possible ones.

    >>> convert_tags(["I-X", "I-X", "B-X", "O"], np.array([0, 4]), "BIOES")
    ['B-X', 'E-X', 'S-X', 'O']
    """
    if scheme == "plain":
        return list(tags)
    converted = [OUTSIDE] * len(tags)
    sentence_begins = set(boundaries.tolist())
    before = -1, ""
    for begin, end, name in sorted(find_entities(tags, boundaries).keys()):
        touches = (begin, name) == before and begin not in sentence_begins
        first = "I" if scheme == "IOB1" and not touches else "B"
        ending = f"-{name}" if name else ""
        converted[begin:end] = [first + ending] + ["I" + ending] * (end - begin - 1)
        if scheme == "BIOES":
            converted[end - 1] = ("S" if end - begin == 1 else "E") + ending
        before = end, name
    return converted


def is_prefixed(tag: str) -> bool:
    """True for a letter of the schemes, alone or with a hyphen and a type.

    >>> is_prefixed("B-PER"), is_prefixed("I"), is_prefixed("NN")
    (True, True, False)
    """
    return tag[:1] in set("BIES") and (len(tag) == 1 or (tag[1] == "-" and len(tag) > 2))


def detect_scheme(tags: Sequence[str], boundaries: np.ndarray) -> Scheme:
    """The scheme most tags speak for.

    Tags of which fewer than half have a prefix of the schemes are plain, unless they are BILOU,
    which is none of ours. E- or S- means BIOES. Otherwise the majority of entities that follow no
    other of their type decides: I- in IOB1, B- in IOB2; IOB2 when there is none.
    """
    distinct = {tag for tag in tags if tag != OUTSIDE}
    types = [tag[1:] for tag in distinct if tag.startswith("B-")]
    are_bilou = any(letter + name in distinct for name in types for letter in "LU")
    if sum(map(is_prefixed, distinct)) * 2 < len(distinct) and not are_bilou:
        return "plain"
    if any(is_prefixed(tag) and tag[0] in "ES" for tag in distinct):
        return "BIOES"
    entities = find_entities(tags, boundaries)
    alone = np.ones(len(entities.begins), bool)
    names = np.array(entities.types)
    alone[1:] = (entities.begins[1:] != entities.ends[:-1]) | (names[1:] != names[:-1])
    alone |= np.isin(entities.begins, boundaries)
    first = [tags[begin][0] for begin in entities.begins[alone].tolist()]
    return "IOB1" if first.count("I") > first.count("B") else "IOB2"


def classes_scheme(names: Sequence[str]) -> Scheme:
    """The scheme of a tagger's classes as `label_names` gives them.

    >>> classes_scheme(["O", "B-LOC", "I-LOC"]), classes_scheme(["NN", "VB"])
    ('IOB2', 'plain')
    """
    return "IOB2" if all(name == OUTSIDE or is_prefixed(name) for name in names) else "plain"


def find_impossible(
    tags: Sequence[str], boundaries: np.ndarray, scheme: Scheme
) -> tuple[int, str] | None:
    """The first word whose tag cannot stand where it does, and the problem with it."""
    allowed = {"IOB1": "BI", "IOB2": "BI", "BIOES": "BIES", "plain": ""}[scheme]
    for word, tag in enumerate(tags):
        if tag != OUTSIDE and scheme != "plain" and not (is_prefixed(tag) and tag[0] in allowed):
            known = ", ".join(f"{letter}-TYPE" for letter in allowed)
            return word, f"unknown tag '{tag}': in {scheme} a tag is O, {known}"
    possible = convert_tags(tags, boundaries, scheme)
    for word, (tag, fitting) in enumerate(zip(tags, possible, strict=True)):
        if tag != fitting:
            is_first = word in boundaries
            before = "the start of the sentence" if is_first else f"'{tags[word - 1]}'"
            problem = f"tag '{tag}' after {before} is impossible in {scheme}: '{fitting}' fits"
            return word, problem
    return None


def label_names(tags: Sequence[str], scheme: Scheme) -> tuple[str, ...]:
    """The classes of a tagger: for entities those of IOB2, O first, both tags of every type.

    >>> label_names(["I-PER", "O", "B-LOC"], "IOB1")
    ('O', 'B-LOC', 'I-LOC', 'B-PER', 'I-PER')
    """
    if scheme == "plain":
        return tuple(sorted(set(tags)))
    types = sorted({tag.partition("-")[2] for tag in set(tags) if tag != OUTSIDE})
    endings = [f"-{name}" if name else "" for name in types]
    return (OUTSIDE, *(prefix + ending for ending in endings for prefix in "BI"))


def entity_scores(
    gold: Sequence[str], predicted: Sequence[str], boundaries: np.ndarray
) -> dict[str, dict[str, float]]:
    """{"overall" or a type: {"precision", "recall", "f1", "gold", "predicted", "correct"}}.

    An entity is correct when its words and its type are. Any sequence of any scheme is read, see
    `find_entities`; a fraction of nothing is 0. The last three are counts.

    >>> gold, predicted = ["B-X", "I-X", "O", "B-Y"], ["B-X", "I-X", "B-X", "B-Y"]
    >>> entity_scores(gold, predicted, np.array([0, 4]))["overall"]["recall"]
    1.0
    """
    assert len(gold) == len(predicted) == boundaries[-1]
    wanted = find_entities(gold, boundaries).keys()
    given = find_entities(predicted, boundaries).keys()
    counts = [Counter(name for *_, name in keys) for keys in (wanted, given, wanted & given)]
    scores = {"overall": _entity_scores(*(part.total() for part in counts))}
    for name in sorted(counts[0] | counts[1]):
        scores[name] = _entity_scores(*(part[name] for part in counts))
    return scores


def _single_words(tags: Sequence[str]) -> list[str]:
    """Plain tags as those of entities of one word."""
    return [tag if tag == OUTSIDE else f"B-{tag}" for tag in tags]


def tag_scores(
    gold: Sequence[str], predicted: Sequence[str], boundaries: np.ndarray, scheme: Scheme
) -> dict[str, float]:
    """The metrics of tags. Each word with a plain tag other than O is an entity by itself.

    >>> tag_scores(["NN", "VB"], ["NN", "NN"], np.array([0, 2]), "plain")["entity_f1"]
    0.5
    """
    accuracy = float(np.mean([a == b for a, b in zip(gold, predicted, strict=True)]))
    if scheme == "plain":
        gold, predicted = _single_words(gold), _single_words(predicted)
    overall = entity_scores(gold, predicted, boundaries)["overall"]
    entities = {f"entity_{name}": overall[name] for name in ("f1", "precision", "recall")}
    return {**entities, "tag_accuracy": accuracy}


def _entity_scores(gold: int, predicted: int, correct: int) -> dict[str, float]:
    return {
        "precision": correct / predicted if predicted else 0.0,
        "recall": correct / gold if gold else 0.0,
        "f1": 2 * correct / (gold + predicted) if gold + predicted else 0.0,
        "gold": gold,
        "predicted": predicted,
        "correct": correct,
    }
