"""The vectors of whole files of texts, kept while they are made, so that no stop loses them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from bertsmith.base.terminal import Progress
from bertsmith.inference.embeddings.pooling import PoolingSettings
from bertsmith.inference.embeddings.texts import embed, resolve_precision
from bertsmith.inference.kept_blocks import (
    BLOCK_CHARACTERS,
    kept_blocks,
    request_digest,
    sorted_blocks,
)
from bertsmith.inference.predictor import Predictor


@contextmanager
def vectors_of_files(
    predictor: Predictor,
    files: Mapping[str, list[str]],
    pooling: PoolingSettings,
    out: Path,
    *settings: object,
) -> Iterator[list[np.ndarray]]:
    """The vectors of each file's texts, kept beside `out` until the block has used them.

    `settings` are what else decides the numbers. Lines on stderr say how many texts were cut.
    """
    work = [
        (name, block)
        for name, texts in files.items()
        for block in sorted_blocks([len(text) + 1 for text in texts], BLOCK_CHARACTERS)
    ]
    sizes = [len(block) for _, block in work]
    every = [text for texts in files.values() for text in texts]
    content = (text.encode("utf-8", "surrogatepass") for text in every)
    request = request_digest(
        [predictor.folder, *pooling.dense],
        content,
        sizes,
        predictor.tokenizer.fingerprint,
        pooling,
        *settings,
    )
    with kept_blocks(out, request, sizes, "texts") as kept:
        kept.set_precision([predictor], lambda model: resolve_precision(model, every, pooling))
        with Progress("embed", sum(sizes), "texts", start=kept.rows) as progress:

            def compute(number: int) -> tuple[np.ndarray, np.ndarray]:
                name, block = work[number]
                texts = [files[name][k] for k in block]
                vectors, cut = embed(predictor, texts, pooling, progress.update)
                return vectors, np.array(cut)

            found = kept.arrays(compute)
        size = found[0][0].shape[1]
        vectors = {name: np.empty((len(texts), size), np.float32) for name, texts in files.items()}
        cut = dict.fromkeys(files, 0)
        for (name, block), (part, cut_in_part) in zip(work, found, strict=True):
            vectors[name][block] = part
            cut[name] += int(cut_in_part)
        for name, count in cut.items():
            if count:
                said = f"{name}: {count:,} of {len(files[name]):,} texts were cut"
                print(f"{said}: windows read all of them", file=sys.stderr)
        yield list(vectors.values())
