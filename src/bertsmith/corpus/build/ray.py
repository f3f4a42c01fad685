"""The work of `encode.py` on a Ray cluster: the same batches, encoded by Ray Data, in order.

    pieces -> read_piece, a task each -> texts of batches -> EncodeText, actors -> rows, in order

Each machine reads its pieces itself, so they must lie where all can read them: a shared disk or a
URL. The shards are written by this process alone. What is made is the same as without Ray, since
the batches are cut at the same places and come back in their order.
"""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from bertsmith.base import VERSION
from bertsmith.corpus.build.batches import ExclusionList, batches_of_piece, cut_into_pieces
from bertsmith.corpus.build.encode import Encoded, Encoder, Part, Position
from bertsmith.corpus.store.store import SPLITS, token_type
from bertsmith.text.readers.files import RemoteFile
from bertsmith.text.tokenizer.tokenizer import Tokenizer

BLOCK = 8 << 20  # bytes of texts that go to an actor together
READING_CORES = 0.1  # of an encoder's: reading is a tenth of the work


def encode_on_ray(
    inputs: Sequence[Path | str],
    encoder: Encoder,
    text_column: str,
    excluded: ExclusionList,
    characters: int,
    first: Position = (0, 0),
    workers: int | None = None,
) -> Generator[tuple[Position, Encoded], None, None]:
    """Encode the batches of the inputs from batch `first` on, in their order.

    workers: most actors, by default as many as the cluster has cores. The cluster is the one of
    RAY_ADDRESS, or one on this machine, which is started and ended here.

    Errors: ValueError, at once, for a cluster of another version of Python, ray or bertsmith; then
    those of the inputs, and OSError when the cluster failed.
    """
    pieces = cut_into_pieces(inputs)
    stack = ExitStack()
    cores = stack.enter_context(_cluster())  # here, not in the generator, which starts later
    reader = PieceReader(pieces, text_column, excluded, characters, first)
    return _encode(stack, reader, encoder, workers or cores)


def _encode(
    stack: ExitStack, reader: PieceReader, encoder: Encoder, workers: int
) -> Generator[tuple[Position, Encoded], None, None]:
    import ray.data  # type: ignore[import-not-found]
    from ray.exceptions import RayError  # type: ignore[import-not-found]

    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    context = ray.data.DataContext.get_current().copy()
    context.execution_options.preserve_order = True
    context.target_max_block_size = BLOCK
    context.enable_progress_bars = context.print_on_execution_start = False
    ids = token_type(len(encoder.tokenizer.vocabulary))
    with stack, ray.data.DataContext.current(context):
        rows = (
            ray.data.from_items([{"piece": k} for k in range(reader.first[0], len(reader.pieces))])
            .flat_map(reader, num_cpus=READING_CORES)
            .map(
                TextEncoder,
                fn_constructor_args=(
                    _files(encoder.tokenizer),
                    encoder.sentence_per_line,
                    encoder.held_out,
                ),
                compute=ray.data.ActorPoolStrategy(min_size=1, max_size=workers),
            )
        )
        try:
            for row in rows.iter_rows():
                yield _from_row(row, ids)
        except RayError as error:
            _raise_cause(error)


def _files(tokenizer: Tokenizer) -> dict[str, bytes]:
    with TemporaryDirectory(prefix="bertsmith-") as folder:
        tokenizer.save(folder)
        return {file.name: file.read_bytes() for file in Path(folder).iterdir()}


@dataclass(eq=False)
class PieceReader:
    """{"piece": n} -> the texts of its batches, lines and documents joined."""

    pieces: Sequence[Sequence[Path | RemoteFile]]
    text_column: str
    excluded: ExclusionList
    characters: int
    first: Position

    def __call__(self, row: dict[str, Any]) -> Iterator[dict[str, Any]]:
        piece = int(row["piece"])
        for file in self.pieces[piece]:
            if isinstance(file, Path) and not file.exists():
                # The command has seen it: this is trouble of the cluster, not of the input.
                raise OSError(f"{file}: not on {platform.node()}: put it where all can read it")
        batches = batches_of_piece(
            self.pieces[piece], self.text_column, self.excluded, self.characters
        )
        for number, documents in enumerate(batches):
            if (piece, number) >= self.first:
                # No line is empty or holds a line break, so that this can be taken apart again.
                text = "\n\n".join("\n".join(document.lines) for _, document in documents)
                content = text.encode("utf-8", "surrogatepass")
                yield {"piece": piece, "number": number, "text": content}


class TextEncoder:
    """The texts of a batch -> a row of bytes; an actor, which loads the tokenizer once."""

    def __init__(self, files: dict[str, bytes], sentence_per_line: bool, held_out: float) -> None:
        with TemporaryDirectory(prefix="bertsmith-") as folder:
            for name, content in files.items():
                (Path(folder) / name).write_bytes(content)
            tokenizer = Tokenizer.from_pretrained(folder)
        self.encoder = Encoder(tokenizer, sentence_per_line, held_out)

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        text = row["text"].decode("utf-8", "surrogatepass")
        documents = [document.split("\n") for document in text.split("\n\n")]
        encoded = self.encoder(documents)
        found = {name: row[name] for name in ("piece", "number")}
        found |= {"num_read": encoded.num_read, "num_bytes": encoded.num_bytes}
        for side in SPLITS:
            for name, values in getattr(encoded, side)._asdict().items():
                found[f"{side}_{name}"] = values.tobytes()
        return found


def _from_row(row: dict[str, Any], ids: np.dtype) -> tuple[Position, Encoded]:
    types = (ids, np.dtype(np.int64), np.dtype(np.int64))
    parts = [
        Part(
            *(
                np.frombuffer(row[f"{side}_{name}"], kind)
                for name, kind in zip(Part._fields, types, strict=True)
            )
        )
        for side in SPLITS
    ]
    position = (int(row["piece"]), int(row["number"]))
    return position, Encoded(int(row["num_read"]), int(row["num_bytes"]), *parts)


# --- the cluster ---


@contextmanager
def _cluster() -> Iterator[int]:
    """Connect to a cluster of the right versions; yields its cores."""
    import ray  # type: ignore[import-not-found]

    was_connected = ray.is_initialized()
    if not was_connected:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            ray.init(log_to_driver=False, logging_level="critical")  # errors come as such
        except (RuntimeError, ConnectionError) as error:
            # Ray compares its own version and Python's when it connects.
            text = " ".join(str(error).split())
            raise ValueError(
                f"the Ray cluster at {os.environ.get('RAY_ADDRESS', 'this machine')}: {text}"
            ) from error
    try:
        check_versions(own_versions(), _versions_of_nodes())
        yield max(1, int(ray.cluster_resources().get("CPU", 1)))
    finally:
        if not was_connected:
            ray.shutdown()


def own_versions() -> dict[str, str]:
    """Versions that every node must share: Python decides about characters, bertsmith the rest.

    >>> sorted(own_versions())
    ['Python', 'bertsmith']
    """
    return {"Python": platform.python_version(), "bertsmith": VERSION}


def check_versions(own: dict[str, str], nodes: dict[str, dict[str, str]]) -> None:
    """Refuse a cluster of which a node differs.

    >>> check_versions({"bertsmith": "1.0"}, {"node 10.0.0.2": {"bertsmith": "absent"}})
    Traceback (most recent call last):
    ValueError: node 10.0.0.2 of the Ray cluster: bertsmith absent, here 1.0: install the same ...
    """
    for node, versions in nodes.items():
        for name, version in own.items():
            if versions[name] != version:
                raise ValueError(
                    f"{node} of the Ray cluster: {name} {versions[name]}, here {version}: "
                    "install the same on every machine and start the cluster again"
                )


def _versions_of_nodes() -> dict[str, dict[str, str]]:
    import ray  # type: ignore[import-not-found]
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # type: ignore[import-not-found]

    @ray.remote(num_cpus=0)
    def versions() -> dict[str, str]:  # sent as code: a node may be without bertsmith
        import platform

        try:
            from bertsmith.base import VERSION as version
        except ModuleNotFoundError:
            version = "absent"
        return {"Python": platform.python_version(), "bertsmith": version}

    nodes = [node for node in ray.nodes() if node["Alive"]]
    found = [
        versions.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote()
        for node in nodes
    ]
    names = [f"node {node['NodeManagerAddress']}" for node in nodes]
    return dict(zip(names, ray.get(found), strict=True))


def _raise_cause(error: Exception) -> None:
    """Raise the error of its input or its machine with which a task ended, or else one that says
    that the cluster failed."""
    from ray.exceptions import RayError  # type: ignore[import-not-found]

    cause: BaseException | None = error
    while cause is not None:
        # An error of Ray's is also of the class that it stands for, but has another text.
        if isinstance(cause, ValueError) and not isinstance(cause, RayError):
            raise ValueError(str(cause)) from error
        if isinstance(cause, OSError) and not isinstance(cause, RayError):
            message = f"a machine of the Ray cluster: {cause}; run again, it goes on where it was"
            raise OSError(message) from error
        cause = getattr(cause, "cause", None) or cause.__cause__
    raise OSError(
        f"the Ray cluster failed ({type(error).__name__}): run again, it goes on where it was"
    ) from error
