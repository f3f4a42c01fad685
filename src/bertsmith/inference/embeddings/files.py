"""The vectors of whole files of texts, kept while they are made, so that no stop loses them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path

import numpy as np

from bertsmith.base.terminal import Progress
from bertsmith.inference.bulk import (
    Backend,
    KeptParts,
    Made,
    Window,
    array_bytes,
    array_of,
    kept_parts,
    windows,
)
from bertsmith.inference.embeddings.pooling import PoolingSettings
from bertsmith.inference.embeddings.texts import cut_note, embed, resolve
from bertsmith.inference.engines.choice import request_digest
from bertsmith.inference.predictor import Predictor
from bertsmith.tasks.answer_files import read_texts
from bertsmith.text.readers.tables import count_rows


class TextFile:
    """The texts of a file in windows. Errors: as `read_texts`."""

    def __init__(self, source: str, column: str | None) -> None:
        self.name = source
        stream = windows(read_texts(source, column))
        begin = list(islice(stream, 2))
        self.first = begin[0].rows
        """The texts of the first window."""
        self.count = len(self.first) if len(begin) < 2 else None
        """The number of texts, if they are so few; None: more than a window of them."""
        self.windows: Iterable[Window] = chain(begin, stream)

    def about(self) -> int | None:
        """About the number of texts; None: unknown."""
        is_known = self.count is not None or self.name == "-"
        return self.count if is_known else count_rows(Path(self.name))


@dataclass(frozen=True)
class Vectors:
    """The vectors of a file, a part of them at a time, float32 [n, D]; can be iterated again."""

    kept: KeptParts
    parts: slice

    def __len__(self) -> int:
        return self.kept.counts(self.parts)["rows"]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (vectors for _, vectors in self.with_texts())

    def with_texts(self) -> Iterator[tuple[Sequence[str], np.ndarray]]:
        """(Texts, their vectors); no texts where they were not kept."""
        for data in self.kept.of(self.parts):
            vectors, texts = array_of(data)
            yield texts, vectors


@contextmanager
def vectors_of_files(
    predictor: Predictor,
    files: Sequence[TextFile],
    pooling: PoolingSettings,
    out: Path,
    flags: object,
    backend: Backend = "local",
) -> Iterator[list[Vectors]]:
    """The vectors of each file's texts, kept beside `out` until the block has used them.

    Texts are kept with them for a .jsonl; `flags` are what else decides the numbers. Lines on
    stderr say how many texts were cut.
    """
    folders = [predictor.folder, *(layer.folder for layer in pooling.dense)]
    print_of = predictor.tokenizer.fingerprint
    request = request_digest(folders, print_of, pooling, out.suffix, flags)
    totals, found, start = [file.about() for file in files], [], 0
    total = None if None in totals else sum(count or 0 for count in totals)
    dense = tuple(layer.in_memory() for layer in pooling.dense)  # for processes elsewhere
    make = functools.partial(_embed_window, replace(pooling, dense=dense), out.suffix == ".jsonl")
    with kept_parts(out, request, "texts", backend) as kept:
        first = files[0].first
        kept.set_engines([predictor], lambda model: resolve(model, first, pooling))
        with Progress("embed", total, "texts", start=kept.rows) as progress:
            for file in files:
                items = (((digest, len(texts)), texts) for _, texts, digest in file.windows)
                kept.add(items, [predictor], make, progress)
                found.append(Vectors(kept, slice(start, kept.done)))
                start = kept.done
            progress.total = progress.done
        for file, vectors in zip(files, found, strict=True):
            counts = kept.counts(vectors.parts)
            if counts["cut"]:
                note = cut_note(counts["cut"], counts["rows"])
                print(f"{file.name}: {note}", file=sys.stderr)
        yield found


def _embed_window(
    pooling: PoolingSettings,
    keeps_texts: bool,
    models: Sequence[Predictor],
    texts: list[str],
    on_texts: Callable[[float], None],
) -> Made:
    vectors, cut, _ = embed(models[0], texts, pooling, on_texts)
    return array_bytes(vectors, *(texts if keeps_texts else [])), {"cut": cut}
