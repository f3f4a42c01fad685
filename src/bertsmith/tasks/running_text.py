"""Running text, and lists of words that people hand over -> sentences for a tagger."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bertsmith.tasks.tagging_files import Sentences
from bertsmith.tasks.tagging_schemes import Scheme
from bertsmith.text.given_texts import items_of, texts_of
from bertsmith.text.word_spans import word_spans

Spans = list[tuple[int, int]]


def running_text(texts: Sequence[str], scheme: Scheme, source: str) -> Sentences:
    """Sentences without tags: one a text, whose words are found by `word_spans`.

    Errors: ValueError when there is no word in them.
    """
    sentences = _sentences(texts, list(map(word_spans, texts)), scheme, source)
    if not sentences.words:
        raise ValueError(f"{source}: no words in this file")
    return sentences


def given_sentences(given: Any, scheme: Scheme) -> Sentences:
    """The sentences of a text, of texts, or of lists of words, which are joined by blanks.

    Errors: ValueError for anything else.
    """
    items = [given] if isinstance(given, str) else items_of(given, "texts")
    if not items or isinstance(items[0], str):
        texts = texts_of(items)
        return _sentences(texts, list(map(word_spans, texts)), scheme, "texts")
    for k, item in enumerate(items):
        if isinstance(item, str):
            raise ValueError(f"texts[{k}] is a text, but texts[0] is not: give texts, or lists")
    rows = [texts_of(item, f"texts[{k}]") for k, item in enumerate(items)]
    return _sentences([" ".join(row) for row in rows], list(map(_joined, rows)), scheme, "texts")


def _joined(words: Sequence[str]) -> Spans:
    """Where words stand that are joined by blanks."""
    ends = np.cumsum([len(word) + 1 for word in words]) - 1
    return [(int(end) - len(word), int(end)) for word, end in zip(words, ends, strict=True)]


def _sentences(
    texts: Sequence[str], spans: Sequence[Spans], scheme: Scheme, source: str
) -> Sentences:
    counts = np.array([len(places) for places in spans], np.int64)
    rows = np.flatnonzero(counts)
    return Sentences(
        words=[
            text[begin:end]
            for text, places in zip(texts, spans, strict=True)
            for begin, end in places
        ],
        tags=None,
        boundaries=np.concatenate([[0], np.cumsum(counts[rows])]),
        documents=np.arange(len(rows)),
        has_documents=False,
        scheme=scheme,
        lines=np.repeat(np.arange(1, len(texts) + 1), counts),
        rows=rows,
        num_rows=len(texts),
        source=source,
        texts=list(texts),
        spans=np.array([place for places in spans for place in places], np.int64).reshape(-1, 2),
    )
