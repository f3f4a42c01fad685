"""Tagged sentences: a dev set split off, and a summary before training."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np

from bertsmith.tasks.examples import dev_size, first_copies
from bertsmith.tasks.labels import describe_balance
from bertsmith.tasks.tagging.schemes import find_entities
from bertsmith.tasks.tagging.sentences import Sentences
from bertsmith.text.tokenizer.normalize import Normalization


def split_sentences(sentences: Sentences, share: float, seed: int) -> tuple[Sentences, Sentences]:
    """Cut a dev set of about `share` of the documents out of a training set that came without one.

    Without documents, of the sentences. Equal ones go together, and one with a tag, or a type of
    entities, that train would not have without it stays there. A pure function of its arguments.

    Errors: ValueError when there is only one document, or each has a tag of its own.
    """
    starts = np.flatnonzero(np.diff(sentences.documents, prepend=-1))  # first sentence of each
    edges = np.append(starts, len(sentences))
    boundaries = sentences.boundaries[edges]
    original = first_copies(_texts(sentences.words, boundaries))
    distinct = np.unique(original)
    if len(distinct) < 2:
        raise ValueError(
            f"{sentences.source}: a single document cannot be split: name a dev set with `dev`"
        )
    labels, names = sentences.labels()
    # every entity has a B- in the classes, which are IOB2
    is_needed = [sentences.scheme == "plain" or name.startswith("B") for name in names]
    needed = np.array(is_needed)[labels]
    owners = np.repeat(original, np.diff(boundaries))  # of each word
    drawn = np.random.default_rng(seed).permutation(distinct)
    count = dev_size(share, len(distinct))
    chosen = _without_last_ones(drawn, owners[needed], labels[needed], count)
    if not chosen:
        raise ValueError(
            f"{sentences.source}: every document has a tag that no other has: name a dev set with"
            " `dev`"
        )
    in_dev = np.repeat(np.isin(original, chosen), np.diff(edges))
    return sentences.select(np.flatnonzero(~in_dev)), sentences.select(np.flatnonzero(in_dev))


def _without_last_ones(
    drawn: np.ndarray, owners: np.ndarray, classes: np.ndarray, count: int
) -> list[int]:
    """The first `count` documents of `drawn` that leave others with each of their classes.

    `owners` and `classes` int64 [W] are the document and the class of each word that counts.
    """
    pairs = np.unique(np.stack([owners, classes]), axis=1)  # sorted by document
    left = np.bincount(pairs[1])  # documents of each class that are not chosen
    chosen: list[int] = []
    for document in drawn.tolist():
        begin, end = np.searchsorted(pairs[0], [document, document + 1])
        own = pairs[1, begin:end]
        if len(chosen) < count and (left[own] > 1).all():
            left[own] -= 1
            chosen.append(document)
    return chosen


def case_warning(train: Sentences, normalization: Normalization) -> str:
    """A line where a model loses the capitals that tell names (the paper's tagger keeps them,
    section 5.3); empty where it keeps them, where no word has any, and for plain tags."""
    capitals = any(word != word.lower() for word in train.words)
    if train.scheme == "plain" or not normalization.lowercase or not capitals:
        return ""
    return (
        "warning: the model's vocabulary is uncased, capitals do not reach it: names are found"
        " better from a cased model"
    )


def summarize_sentences(train: Sentences, dev: Sentences) -> str:
    """Lines to read before training: counts, lengths, types, sentences that both sets share."""
    seen = set(_texts(train.words, train.boundaries))
    shared = sum(text in seen for text in _texts(dev.words, dev.boundaries))
    return (
        f"train: {_describe(train)}\ndev:   {_describe(dev)}\n"
        f"exact duplicates: {shared:,} sentences of dev are also in train"
    )


def _texts(words: list[str], boundaries: np.ndarray) -> list[tuple[str, ...]]:
    return [tuple(words[begin:end]) for begin, end in itertools.pairwise(boundaries.tolist())]


def _describe(sentences: Sentences) -> str:
    assert sentences.tags is not None
    lengths = np.diff(sentences.boundaries)
    noun, names = "tags", sentences.tags
    if sentences.scheme != "plain":
        noun, names = "entities", find_entities(sentences.tags, sentences.boundaries).types
    counts = Counter(name or "unnamed" for name in names)
    balance = describe_balance(list(counts), np.array(list(counts.values())), len(names))
    documents = f" in {len(np.unique(sentences.documents)):,} documents"
    return (
        f"{len(sentences):,} sentences{documents if sentences.has_documents else ''},"
        f" {len(sentences.words):,} words; {sentences.scheme}, {len(names):,} {noun}"
        f"{': ' + balance if balance else ''};"
        f" words in a sentence: median {np.median(lengths):.0f}, longest {lengths.max()}"
    )
