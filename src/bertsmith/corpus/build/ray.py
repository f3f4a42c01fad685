"""The work of `encode.py` on a Ray cluster: the same batches, encoded by Ray Data, in order.

    pieces -> PieceReader, a task each -> texts of batches -> TextEncoder, actors -> rows, in order

Each machine reads its pieces itself, so they must lie where all can read them: a shared disk or a
URL. This process alone writes the shards. The store is the same as without Ray, since the batches
are cut at the same places and come back in their order.
"""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from bertsmith.base import VERSION
from bertsmith.corpus.build.batches import BatchReader, Position
from bertsmith.corpus.build.encode import Encoded, Encoder, Part
from bertsmith.corpus.store.store import INDEX, SPLITS, token_type
from bertsmith.text.tokenizer.tokenizer import Tokenizer

BLOCK = 8 << 20  # bytes of texts that go to an actor together
READING_CORES = 0.1  # of an encoder's: reading is a tenth of the work
# Every node must share them: Python decides about characters, bertsmith about the rest.
VERSIONS = {"Python": platform.python_version(), "bertsmith": VERSION}


def encode_on_ray(
    reader: BatchReader, encoder: Encoder, workers: int | None = None
) -> Generator[tuple[Position, Encoded], None, None]:
    """Encode the batches of a reader in their order.

    workers: most actors, by default as many as the cluster has cores. The cluster is the one of
    RAY_ADDRESS, or one on this machine, which is started and ended here.

    Errors: ValueError, at once, for a cluster of other versions; OSError when the cluster failed.
    """
    pieces = [{"piece": k} for k in range(reader.first[0], len(reader.pieces))]
    stack = ExitStack()
    cores = stack.enter_context(_cluster())  # here, not in the generator, which starts later

    def encode() -> Generator[tuple[Position, Encoded], None, None]:
        import ray.data  # type: ignore[import-not-found]
        from ray.exceptions import RayError  # type: ignore[import-not-found]

        logging.getLogger("ray.data").setLevel(logging.CRITICAL)
        context = ray.data.DataContext.get_current().copy()
        context.execution_options.preserve_order = True
        context.target_max_block_size = BLOCK
        context.enable_progress_bars = context.print_on_execution_start = False
        settings = _files(encoder.tokenizer), encoder.sentence_per_line, encoder.held_out
        actors = ray.data.ActorPoolStrategy(min_size=1, max_size=workers or cores)
        ids = token_type(len(encoder.tokenizer.vocabulary))
        with stack, ray.data.DataContext.current(context):
            texts = ray.data.from_items(pieces).flat_map(
                PieceReader(reader), num_cpus=READING_CORES
            )
            rows = texts.map(TextEncoder, fn_constructor_args=settings, compute=actors)
            try:
                for row in rows.iter_rows():
                    yield _from_row(row, ids)
            except RayError as error:
                _raise_cause(error)

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
            address, text = os.environ.get("RAY_ADDRESS", "this machine"), str(error).split()
            raise ValueError(f"the Ray cluster at {address}: {' '.join(text)}") from error
    try:
        check_versions(_versions_of_nodes())
        yield max(1, int(ray.cluster_resources().get("CPU", 1)))
    finally:
        if not was_connected:
            ray.shutdown()


def check_versions(nodes: dict[str, dict[str, str]]) -> None:
    """Refuse a cluster of which a node has other `VERSIONS`.

    >>> check_versions({"node 10.0.0.2": VERSIONS | {"bertsmith": "absent"}})
    Traceback (most recent call last):
    ValueError: node 10.0.0.2 of the Ray cluster: bertsmith absent, here ...: install the same ...
    """
    for node, versions in nodes.items():
        for name, version in VERSIONS.items():
            if versions[name] != version:
                raise ValueError(
                    f"{node} of the Ray cluster: {name} {versions[name]}, here {version}: "
                    "install the same on every machine and start the cluster again"
                )


def _versions_of_nodes() -> dict[str, dict[str, str]]:
    import ray  # type: ignore[import-not-found]
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # type: ignore[import-not-found]

    def versions() -> dict[str, str]:  # sent as code: a node may be without bertsmith
        import platform

        try:
            from bertsmith.base import VERSION as version
        except ModuleNotFoundError:
            version = "absent"
        return {"Python": platform.python_version(), "bertsmith": version}

    remote: Any = ray.remote(num_cpus=0)(versions)
    found = {}
    for node in ray.nodes():
        if node["Alive"]:
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            task = remote.options(scheduling_strategy=there).remote()
            found[f"node {node['NodeManagerAddress']}"] = task
    return dict(zip(found, ray.get(list(found.values())), strict=True))


def _raise_cause(error: Exception) -> None:
    """Raise the error of the input or the machine that ended a task, or that the cluster failed."""
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
