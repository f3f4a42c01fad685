"""Documents that hold text of evaluation sets: a model that read the answers cannot be measured.

The texts of an evaluation set are all strings in its files: cells of a table, strings of JSON,
lines of a text, sentences of a CoNLL file. A document overlaps when it shares an n-gram with one of
them (13 words by default, as in Brown et al., Language Models are Few-Shot Learners, 2020, appendix
C). A text with fewer words cannot be checked; the report counts those.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bertsmith.base.files import nearby, parse_json
from bertsmith.base.processes import map_in_order
from bertsmith.base.terminal import counted
from bertsmith.corpus.build.batches import Batch
from bertsmith.corpus.dedup import ngram_hashes, word_hashes
from bertsmith.text.readers.files import MAX_ROW, file_kind, raw_lines, read_lines, unpacked_name
from bertsmith.text.readers.tables import (
    DOCUMENT_MARK,
    conll_cells,
    json_values,
    returned_lines,
    split_rows,
)

MAX_JSON = 1 << 30  # characters of a line of a .json file, which often is the whole file
NGRAMS, TEXTS = "ngrams.npy", "texts.npy"  # of an index, in a folder


class Overlap(NamedTuple):
    """Overlap of a batch of documents with the evaluation sets."""

    shared: np.ndarray  # int64 [D], n-grams that stand in an evaluation text
    ngrams: np.ndarray  # int64 [D], all n-grams
    text: np.ndarray  # int64 [D], the first such evaluation text, -1 without one
    texts: np.ndarray  # int64, all such evaluation texts, sorted


class OverlapFinder:
    """Texts -> `Overlap`, by the index in a folder, which processes share."""

    def __init__(self, folder: Path, words: int) -> None:
        self.words = words
        self._ngrams = np.load(folder / NGRAMS, mmap_mode="r")
        self._texts = np.load(folder / TEXTS, mmap_mode="r")

    def __call__(self, texts: list[str]) -> Overlap:
        ngrams, starts = ngram_hashes(*word_hashes(texts), self.words)
        indices = np.searchsorted(self._ngrams, ngrams)
        indices[indices == len(self._ngrams)] = 0
        hits = self._ngrams[indices] == ngrams if len(self._ngrams) else np.zeros(len(ngrams), bool)
        hits_before = np.concatenate([np.zeros(1, np.int64), np.cumsum(hits)])
        shared = hits_before[starts[1:]] - hits_before[starts[:-1]]
        found = self._texts[indices[hits]]
        first = np.full(len(texts), -1, np.int64)
        first[shared > 0] = found[hits_before[starts[:-1]][shared > 0]]
        return Overlap(shared, np.diff(starts), first, np.unique(found))


class EvaluationIndex:
    """The texts of evaluation files by number; their n-grams are in `folder`, sorted hashes.

    Memory while it is made: 40 bytes a word. Errors: ValueError for a file without text, and those
    of the readers.
    """

    def __init__(self, files: Sequence[Path], words: int, folder: Path) -> None:
        self.files, self.words, self.folder = [str(path) for path in files], words, folder
        ngrams, texts, first, self._too_short = [], [], [0], []
        for path in files:
            found = list(evaluation_texts(path))
            if not found:
                raise ValueError(f"{path}: no text in it: name a file of an evaluation set")
            hashes, starts = word_hashes(found)
            is_long = np.diff(starts) >= words
            file_ngrams, ngram_starts = ngram_hashes(hashes, starts, words)
            counts = np.diff(ngram_starts)
            ngrams.append(file_ngrams[np.repeat(is_long, counts)])
            texts.append(np.repeat(np.arange(len(found)) + first[-1], counts * is_long))
            first.append(first[-1] + len(found))
            self._too_short.append(int(np.count_nonzero(~is_long)))
        unique, indices = np.unique(np.concatenate(ngrams), return_index=True)
        np.save(folder / NGRAMS, unique)
        np.save(folder / TEXTS, np.concatenate(texts)[indices])
        self._first = np.array(first)  # number of the first text of each file
        self._in_corpus = np.zeros(first[-1], bool)
        self.documents = self.listed = 0

    def entries(
        self, batches: Iterable[Batch], least: int, workers: int
    ) -> Iterator[dict[str, Any]]:
        """Yield the list of documents that share at least `least` n-grams, and count on the way."""
        labelled = ((batch.documents, batch.texts()) for batch in batches)
        start = OverlapFinder, (self.folder, self.words)
        with closing(map_in_order(*start, labelled, workers)) as results:
            for documents, overlap in results:
                self.documents += len(documents)
                self._in_corpus[overlap.texts] = True
                for k in np.flatnonzero(overlap.shared >= least).tolist():
                    number, document = documents[k]
                    text = int(overlap.text[k])
                    file = int(np.searchsorted(self._first, text, side="right")) - 1
                    self.listed += 1
                    yield {
                        "source": document.source,
                        "document": number,
                        "line": document.line,
                        "reason": "overlap",
                        "runs": int(overlap.shared[k]),
                        "share": round(float(overlap.shared[k] / overlap.ngrams[k]), 4),
                        "with": {"task": self.files[file], "text": text - int(self._first[file])},
                    }

    def result(self) -> dict[str, Any]:
        """Counts: documents of the corpus, and texts of each evaluation file that stand in it."""
        tasks = []
        for number, file in enumerate(self.files):
            first, end = self._first[number : number + 2].tolist()
            too_short, in_corpus = self._too_short[number], int(self._in_corpus[first:end].sum())
            tasks.append(
                {
                    "file": file,
                    "texts": end - first,
                    "too_short": too_short,
                    "in_corpus": in_corpus,
                    "share": in_corpus / max(1, end - first - too_short),
                }
            )
        return {"documents": self.documents, "listed": self.listed, "tasks": tasks}


def evaluation_texts(path: Path) -> Iterator[str]:
    """Yield every string in a file of an evaluation set.

    json (SQuAD) and jsonl: all values that are strings; csv and tsv: all cells; txt: lines; any
    other name: CoNLL columns, the first of each line, up to a blank line.
    """
    kind = file_kind(path)
    if path.is_dir():
        raise ValueError(f"{path}: a folder: name the files of the evaluation set")
    if not path.is_file():
        raise ValueError(f"{path}: no such file{nearby(path)}")
    if kind == ".parquet":
        raise ValueError(f"{path}: give evaluation sets as json, jsonl, csv, tsv or txt")
    if unpacked_name(path).endswith(".json"):
        text = "\n".join(line for _, line in read_lines(path, MAX_JSON))
        yield from _strings(parse_json(text, path))
    elif kind == ".tsv":
        yield from (cell for _, line in read_lines(path, MAX_ROW) for cell in line.split("\t"))
    elif kind == ".csv":
        rows = split_rows(path, returned_lines(path), quoted=True)
        yield from (cell for _, row in rows for cell in row)
    elif kind == ".jsonl":
        for _, value in json_values(path, read_lines(path, MAX_ROW)):
            yield from _strings(value)
    elif kind == ".txt":
        yield from (line for _, line in read_lines(path) if line)
    else:
        yield from _sentences(path)


def _strings(value: Any) -> Iterator[str]:
    """
    >>> list(_strings({"data": [{"context": "A b.", "id": 3}, ["c"]]}))
    ['A b.', 'c']
    """
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings(inner)


def _sentences(path: Path) -> Iterator[str]:
    """Yield the first columns of lines up to a blank one.

    Running text, whose lines differ in columns, is refused: only first words would be compared.
    """
    columns, words = 0, list[str]()
    for number, line in chain(raw_lines(path, MAX_ROW), [(0, "")]):
        if not line.strip():
            if words:
                yield " ".join(words)
            words = []
            continue
        cells = conll_cells(line)
        if line.startswith(DOCUMENT_MARK) or (line.startswith("#") and len(cells) != columns):
            continue  # no word of the text
        columns = columns or max(len(cells), 2)
        if len(cells) != columns:
            raise ValueError(
                f"{path}:{number}: unknown type: {counted(len(cells), 'column')}, where CoNLL "
                f"columns would be {columns}: rename it .txt or .json"
            )
        words.append(cells[0])
