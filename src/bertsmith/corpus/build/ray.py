"""The work of `encode.py` on a Ray cluster: the same batches, encoded by Ray Data, in order.

    pieces -> PieceReader, a task each -> texts of batches -> TextEncoder, actors -> rows, in order

Each machine reads its pieces itself, so they must lie where all can read them: a shared disk or a
URL. This process alone writes the shards. The store is the same as without Ray, since the batches
are cut at the same places and come back in their order.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from bertsmith.base.cluster import capacity, cluster, raise_cause
from bertsmith.corpus.build.batches import BatchReader, Position
from bertsmith.corpus.build.encode import Encoded, Encoder, Part
from bertsmith.corpus.store.store import INDEX, SPLITS, token_type
from bertsmith.text.readers.files import file_kind
from bertsmith.text.tokenizer.tokenizer import Tokenizer

BLOCK = 8 << 20  # bytes of texts that go to an actor together
READING_CORES = 0.1  # of an encoder's: reading is a tenth of the work, but for markup


def encode_on_ray(
    reader: BatchReader, encoder: Encoder, workers: int | None = None
) -> Generator[tuple[Position, Encoded], None, None]:
    """Encode the batches of a reader in their order.

    workers: most actors, by default as many as the cluster has cores.

    Errors: as `cluster`, at once; ValueError as `capacity`; OSError when the cluster failed.
    """
    pieces = [{"piece": k} for k in range(reader.first[0], len(reader.pieces))]
    stack = ExitStack()
    stack.enter_context(cluster())  # here, not in the generator, which starts later

    def encode() -> Generator[tuple[Position, Encoded], None, None]:
        import ray.data  # type: ignore[import-not-found]
        from ray.exceptions import RayError  # type: ignore[import-not-found]

        logging.getLogger("ray.data").setLevel(logging.CRITICAL)
        context = ray.data.DataContext.get_current().copy()
        context.execution_options.preserve_order = True
        context.target_max_block_size = BLOCK
        context.enable_progress_bars = context.print_on_execution_start = False
        settings = _files(encoder.tokenizer), encoder.sentence_per_line, encoder.held_out
        actors = ray.data.ActorPoolStrategy(min_size=1, max_size=workers or capacity("CPU"))
        ids = token_type(len(encoder.tokenizer.vocabulary))
        has_dumps = any(file_kind(file) == ".xml" for piece in reader.pieces for file in piece)
        with stack, ray.data.DataContext.current(context):
            texts = ray.data.from_items(pieces).flat_map(
                PieceReader(reader), num_cpus=1 if has_dumps else READING_CORES
            )
            rows = texts.map(TextEncoder, fn_constructor_args=settings, compute=actors)
            try:
                for row in rows.iter_rows():
                    yield _from_row(row, ids)
            except RayError as error:
                raise_cause(error)

    return encode()


def _files(tokenizer: Tokenizer) -> dict[str, bytes]:
    with TemporaryDirectory(prefix="bertsmith-") as folder:
        tokenizer.save(folder)
        return {file.name: file.read_bytes() for file in Path(folder).iterdir()}


@dataclass(eq=False)
class PieceReader:
    """{"piece": n} -> the texts of its batches, lines and documents joined."""

    reader: BatchReader

    def __call__(self, row: dict[str, Any]) -> Iterator[dict[str, Any]]:
        piece = int(row["piece"])
        for file in self.reader.pieces[piece]:
            if isinstance(file, Path) and not file.exists():
                # The command has seen it: this is trouble of the cluster, not of the input.
                raise OSError(f"{file}: not on {platform.node()}: put it where all can read it")
        for batch in self.reader.read_piece(piece):
            # No line is empty or holds a line break, so that this can be taken apart again.
            text = "\n\n".join(batch.texts()).encode("utf-8", "surrogatepass")
            yield {"piece": piece, "number": batch.number, "text": text}


class TextEncoder:
    """The texts of a batch -> a row of bytes; an actor, which loads the tokenizer once."""

    def __init__(self, files: dict[str, bytes], sentence_per_line: bool, held_out: float) -> None:
        with TemporaryDirectory(prefix="bertsmith-") as folder:
            for name, content in files.items():
                (Path(folder) / name).write_bytes(content)
            self.encoder = Encoder.load(folder, sentence_per_line, held_out)

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        text = row["text"].decode("utf-8", "surrogatepass")
        encoded = self.encoder([document.split("\n") for document in text.split("\n\n")])
        parts = {
            f"{side}_{name}": values.tobytes()
            for side in SPLITS
            for name, values in getattr(encoded, side)._asdict().items()
        }
        head = {"piece": row["piece"], "number": row["number"], "num_bytes": encoded.num_bytes}
        return head | parts


def _from_row(row: dict[str, Any], ids: np.dtype) -> tuple[Position, Encoded]:
    types = dict(zip(Part._fields, (ids, INDEX, INDEX), strict=True))
    parts = [
        Part(*(np.frombuffer(row[f"{side}_{name}"], kind) for name, kind in types.items()))
        for side in SPLITS
    ]
    return (int(row["piece"]), int(row["number"])), Encoded(int(row["num_bytes"]), *parts)
