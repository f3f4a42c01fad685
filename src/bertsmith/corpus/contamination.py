"""Documents that hold text of evaluation sets: a model that read the answers cannot be measured.

The texts of an evaluation set are all strings in its files: cells of a table, strings of JSON,
lines of a text, sentences of a CoNLL file. A document overlaps when it shares a run of `words`
words (13 by default, as in Brown et al., Language Models are Few-Shot Learners, 2020, appendix C)
with one of them. A text with fewer words cannot be checked; the report counts those.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bertsmith.base.processes import map_in_order
from bertsmith.corpus.build.batches import Batch, Numbered
from bertsmith.corpus.dedup import run_hashes, word_hashes
from bertsmith.text.readers.files import MAX_ROW, file_kind, raw_lines, read_lines, unpacked_name
from bertsmith.text.readers.tables import DOCUMENT_MARK, conll_cells, json_values, split_rows

WORDS = 13
MAX_JSON = 1 << 30  # characters of a line of a .json file, which often is the whole file
RUNS, TEXTS = "runs.npy", "texts.npy"  # of an index, in a folder


class EvaluationTexts(NamedTuple):
    """The texts of an index, by number."""

    files: list[str]
    first: np.ndarray  # int64 [files + 1], number of the first text of each file
    too_short: list[int]  # texts of each file that have fewer words than a run


def write_index(files: Sequence[Path], words: int, folder: Path) -> EvaluationTexts:
    """Write the runs of evaluation files to `folder`: sorted hashes, and a text with each.

    Memory: 40 bytes a word of the evaluation sets.

    Errors: ValueError for a file without text, and those of the readers.
    """
    runs, texts, first, too_short = [], [], [0], []
    for path in files:
        found = list(evaluation_texts(path))
        if not found:
            raise ValueError(f"{path}: no text in it: name a file of an evaluation set")
        hashes, starts = word_hashes(found)
        is_long = np.diff(starts) >= words
        file_runs, run_starts = run_hashes(hashes, starts, words)
        counts = np.diff(run_starts)
        runs.append(file_runs[np.repeat(is_long, counts)])
        texts.append(np.repeat(np.arange(len(found)) + first[-1], counts * is_long))
        first.append(first[-1] + len(found))
        too_short.append(int(np.count_nonzero(~is_long)))
    unique, places = np.unique(np.concatenate(runs), return_index=True)
    np.save(folder / RUNS, unique)
    np.save(folder / TEXTS, np.concatenate(texts)[places])
    return EvaluationTexts([str(path) for path in files], np.array(first), too_short)


class Overlap(NamedTuple):
    """Overlap of a batch of documents with the evaluation sets."""

    shared: np.ndarray  # int64 [D], runs that stand in an evaluation text
    runs: np.ndarray  # int64 [D], all runs
    text: np.ndarray  # int64 [D], the first such evaluation text, -1 without one
    texts: np.ndarray  # int64, all such evaluation texts, sorted


class OverlapFinder:
    """Texts -> `Overlap`, by the index in a folder, which processes share."""

    def __init__(self, folder: Path, words: int) -> None:
        self.words = words
        self._runs = np.load(folder / RUNS, mmap_mode="r")
        self._texts = np.load(folder / TEXTS, mmap_mode="r")

    def __call__(self, texts: list[str]) -> Overlap:
        runs, starts = run_hashes(*word_hashes(texts), self.words)
        places = np.searchsorted(self._runs, runs)
        places[places == len(self._runs)] = 0
        hits = self._runs[places] == runs if len(self._runs) else np.zeros(len(runs), bool)
        before = np.concatenate([np.zeros(1, np.int64), np.cumsum(hits)])
        shared = before[starts[1:]] - before[starts[:-1]]
        found = self._texts[places[hits]]
        first = np.full(len(texts), -1, np.int64)
        first[shared > 0] = found[before[starts[:-1]][shared > 0]]
        return Overlap(shared, np.diff(starts), first, np.unique(found))


def find_overlaps(
    batches: Iterable[Batch], folder: Path, words: int, workers: int
) -> Iterator[tuple[list[Numbered], Overlap]]:
    """Yield each batch of documents with its overlap with the index in `folder`."""
    labelled = (
        (batch.documents, ["\n".join(document.lines) for _, document in batch.documents])
        for batch in batches
    )
    with closing(map_in_order(OverlapFinder, (folder, words), labelled, workers)) as results:
        yield from results


class OverlapCounts:
    """Lists the documents that overlap, and counts on the way."""

    def __init__(self, texts: EvaluationTexts, least: int) -> None:
        self.texts, self.least = texts, least
        self.documents = self.listed = 0
        self._in_corpus = np.zeros(texts.first[-1], bool)

    def entries(self, found: Iterable[tuple[list[Numbered], Overlap]]) -> Iterator[dict[str, Any]]:
        """Yield the lines of a list of documents to leave out, see corpus/build/batches.py."""
        for documents, overlap in found:
            self.documents += len(documents)
            self._in_corpus[overlap.texts] = True
            for place in np.flatnonzero(overlap.shared >= self.least).tolist():
                number, document = documents[place]
                text = int(overlap.text[place])
                task = int(np.searchsorted(self.texts.first, text, side="right")) - 1
                self.listed += 1
                yield {
                    "source": document.source,
                    "document": number,
                    "line": document.line,
                    "reason": "overlap",
                    "runs": int(overlap.shared[place]),
                    "share": round(float(overlap.shared[place] / overlap.runs[place]), 4),
                    "with": {
                        "task": self.texts.files[task],
                        "text": text - int(self.texts.first[task]),
                    },
                }

    def result(self) -> dict[str, Any]:
        """Counts: documents of the corpus, and texts of each evaluation file that stand in it."""
        tasks = []
        for number, file in enumerate(self.texts.files):
            first, end = self.texts.first[number : number + 2].tolist()
            long_enough = end - first - self.texts.too_short[number]
            in_corpus = int(self._in_corpus[first:end].sum())
            tasks.append(
                {
                    "file": file,
                    "texts": end - first,
                    "too_short": self.texts.too_short[number],
                    "in_corpus": in_corpus,
                    "share": in_corpus / max(1, long_enough),
                }
            )
        return {"documents": self.documents, "listed": self.listed, "tasks": tasks}


def evaluation_texts(path: Path) -> Iterator[str]:
    """Every string in a file of an evaluation set.

    json (SQuAD) and jsonl: all values that are strings; csv and tsv: all cells; txt: lines; any
    other name: CoNLL columns, the first of each line, up to a blank line.

    Errors: ValueError that names file and line for what cannot be read, and for a file of another
    name that is not of columns.
    """
    kind = file_kind(path)
    if path.is_dir():
        raise ValueError(f"{path}: a folder: name the files of the evaluation set")
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    if kind == ".parquet":
        raise ValueError(f"{path}: give evaluation sets as json, jsonl, csv, tsv or txt")
    if unpacked_name(path).endswith(".json"):
        text = "\n".join(line for _, line in read_lines(path, MAX_JSON))
        try:
            yield from _strings(json.loads(text))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{error.lineno}: not valid JSON ({error.msg})") from error
        except RecursionError:
            raise ValueError(f"{path}: JSON nested too deeply") from None
    elif kind == ".tsv":
        yield from (cell for _, line in read_lines(path, MAX_ROW) for cell in line.split("\t"))
    elif kind == ".csv":
        lines = (line + "\n" for _, line in read_lines(path, MAX_ROW))
        yield from (cell for _, row in split_rows(path, lines, quoted=True) for cell in row)
    elif kind == ".jsonl":
        for _, value in json_values(path, read_lines(path, MAX_ROW)):
            yield from _strings(value)
    elif kind == ".txt":
        yield from (line for _, line in read_lines(path) if line)
    else:
        yield from _sentences(path)


def _strings(value: Any) -> Iterator[str]:
    """All strings in a JSON value, keys apart.

    >>> list(_strings({"data": [{"context": "A b.", "id": 3}, ["c"]]}))
    ['A b.', 'c']
    """
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings(inner)


def _sentences(path: Path) -> Iterator[str]:
    """The first columns of lines up to a blank one; every line has as many columns as the first.

    Of running text, which has another number of words in each line, only the first words would be
    compared, and it would seem to stand nowhere. Comments and document marks are not counted.
    """
    columns, words = 0, list[str]()
    for number, line in raw_lines(path, MAX_ROW):
        if not line.strip():
            if words:
                yield " ".join(words)
            words = []
            continue
        cells = conll_cells(line)
        if not line.startswith((DOCUMENT_MARK, "#")):
            columns = columns or max(len(cells), 2)
            if len(cells) != columns:
                raise ValueError(
                    f"{path}:{number}: unknown type: {len(cells)} columns, where CoNLL columns "
                    f"would be {columns}: rename it .txt or .json"
                )
        words.append(cells[0])
    if words:
        yield " ".join(words)
