"""Statistics of a corpus, before time and money go into it: sizes, scripts, repeated documents.

One pass over the text, in bounded memory but for the 60 bytes a document of dedup.py; of more than
a million distinct lines a part is counted, see text/vocabulary/report.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from bertsmith.base.terminal import Progress
from bertsmith.corpus.build.batches import Batch, BatchReader
from bertsmith.corpus.dedup import SIMILARITY, DuplicateFinder, sign
from bertsmith.text.readers.documents import MAX_DOCUMENT, input_files, input_size
from bertsmith.text.vocabulary.report import DuplicateLines
from bertsmith.text.vocabulary.scripts import LetterCounts, letter_script

EXAMPLES = 5  # repeated documents that are listed
LEAST_SCRIPT = 0.0005  # of all letters: rarer scripts are counted together
BINS = np.rint(2 ** np.arange(0, 23.5, 0.5)).astype(np.int64)  # characters of a document, from


def corpus_statistics(
    inputs: Sequence[Path | str],
    *,
    near: bool = True,
    similarity: float = SIMILARITY,
    workers: int = 1,
    text_column: str = "text",
    limit: float | None = None,
) -> dict[str, Any]:
    """The statistics of a corpus, all of it JSON; docs/reference/formats.md explains the keys.

    near: look for near duplicates too, which needs the package rensa. limit: bytes of text after
    which the reading ends.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="bertsmith-")))
        finder = DuplicateFinder(stack, folder, near)
        reader = BatchReader(inputs, text_column, workers=workers)
        batches = reader if limit is None else _until(reader, limit)
        text = Counter(lines=0, characters=0)
        lengths = np.zeros(MAX_DOCUMENT + 1, np.int64)  # documents of each length
        repeated, letters = DuplicateLines(), LetterCounts()
        with Progress("reading", unit="MB", scale=1e6) as progress:
            for documents, signed in sign(batches, finder, workers):
                lines = [line for _, document in documents for line in document.lines]
                sizes = np.array([sum(map(len, document.lines)) for _, document in documents])
                text.update(lines=len(lines), characters=int(sizes.sum()))
                np.add.at(lengths, np.minimum(sizes, MAX_DOCUMENT), 1)
                repeated.add(lines)
                letters.add(lines)
                progress.update(int(signed.sizes.sum()))
        files, repetitions = input_files(inputs), finder.repetitions(similarity)
        duplicates: dict[str, Any] = {"similarity": similarity if near else None}
        for kind, is_exact in (("exact", True), ("near", False)):
            found = [one for one in repetitions if (one.similarity == 1.0) == is_exact]
            duplicates[kind] = {
                "documents": len(found),
                "bytes": finder.repeated_bytes(found),
                "examples": list(finder.entries(found[:EXAMPLES])),
            }
        return {
            "files": len(files),
            "bytes_stored": sum(map(input_size, files)),
            "bytes": finder.num_bytes,
            "documents": finder.num_documents,
            **text,
            "document_characters": _lengths(lengths),
            "scripts": scripts(letters.counts),
            "duplicate_lines": repeated.result(),
            "duplicate_documents": duplicates,
        }


def _until(batches: Iterable[Batch], limit: float) -> Iterator[Batch]:
    """The batches up to the one in which `limit` bytes of text are reached."""
    size = 0
    for batch in batches:
        yield batch
        lines = (line for _, document in batch.documents for line in document.lines)
        size += sum(len(line.encode("utf-8", "surrogatepass")) for line in lines)
        if size >= limit:
            return


def scripts(letters: Counter[str]) -> list[dict[str, Any]]:
    """Count letters by script, the most frequent first.

    >>> scripts(Counter({"a": 9000, "e\u0301": 500, "\u0439": 500}))[1]
    {'script': 'Cyrillic', 'letters': 500, 'share': 0.05}
    """
    counts: Counter[str] = Counter()
    for letter, count in letters.items():
        counts[letter_script(letter)] += count
    total = counts.total()
    found = [item for item in counts.items() if item[1] >= LEAST_SCRIPT * total]
    found.sort(key=lambda item: (-item[1], item[0]))
    if rest := total - sum(count for _, count in found):
        found.append(("other", rest))
    return [{"script": name, "letters": count, "share": count / total} for name, count in found]


def _lengths(counts: np.ndarray) -> dict[str, Any]:
    """Describe the lengths of documents, `counts[length]` of each.

    >>> found = _lengths(np.bincount([10, 10, 40, 700]))
    >>> found["median"], found["longest"], found["histogram"][0]
    (10, 700, {'from': 8, 'to': 10, 'documents': 2})
    """
    reached = np.cumsum(counts)
    total = int(reached[-1])
    lengths = np.flatnonzero(counts)
    bins = np.searchsorted(BINS, lengths, side="right") - 1
    documents = np.bincount(bins, counts[lengths], len(BINS)).astype(np.int64)
    ends = [*(BINS[1:] - 1).tolist(), MAX_DOCUMENT]

    def quantile(fraction: float) -> int:
        return int(np.searchsorted(reached, max(1, np.ceil(fraction * total)))) if total else 0

    return {
        "shortest": int(lengths[0]) if total else 0,
        "tenth": quantile(0.1),
        "median": quantile(0.5),
        "nine_tenths": quantile(0.9),
        "longest": int(lengths[-1]) if total else 0,
        "histogram": [
            {"from": int(BINS[k]), "to": ends[k], "documents": int(documents[k])}
            for k in np.flatnonzero(documents).tolist()
        ],
    }
