"""Settings of building a token store; light, so that the CLI may read them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from bertsmith.base.settings import Advanced, Bounds, Count, Fraction, check_bounds

# MB of memory for this process, and for each further worker: measured with the largest documents,
# of four bytes a character. A worker for dumps has a second process beside it, for the markup.
ALONE_MB, WORKER_MB, PARSER_MB = 300, 330, 200
EnoughMemory = Bounds(f"a build needs at least {ALONE_MB}", minimum=ALONE_MB)
SHARD_TOKENS = 16 << 20  # train tokens after which a shard is closed: 32 MiB, seconds of work


@dataclass(frozen=True)
class WorkSettings:
    """Settings of the work, the same for a new store and for more text."""

    workers: Annotated[int | None, Count] = 1
    """Processes that split and tokenize, this one among them; None takes one a core. A script that
    asks for more than 1 keeps its own work under `if __name__ == "__main__":`, since the others
    import it."""
    backend: Literal["local", "ray"] = "local"
    """Where the work is done: processes of this machine, or Ray Data on the cluster of RAY_ADDRESS
    (without one, Ray on this machine). The store is the same."""
    memory_mb: Annotated[float | None, EnoughMemory] = None
    """Most memory of all processes together, in 10^6 bytes: fewer workers where it is short."""
    exclude: tuple[Path, ...] = ()
    """Lists of documents not to take, from corpus dedup and corpus contamination."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.backend == "ray" and self.memory_mb is not None:
            raise ValueError(
                "`memory_mb` has no effect with `backend='ray'`: start its nodes with a bound "
                "(ray start --memory ... --object-store-memory ...)"
            )


@dataclass(frozen=True)
class BuildSettings(WorkSettings):
    """Settings of a store, and of the work."""

    sentence_per_line: bool = False
    """A line is a sentence, not a paragraph to split."""
    held_out: Annotated[float, Fraction] = 0.02
    """Share of the documents kept out of training, to measure on."""
    text_column: str = "text"
    """Column of jsonl, csv, tsv and parquet files that holds the text."""
    shard_tokens: Annotated[int, Count, Advanced] = SHARD_TOKENS
    """Train tokens after which a shard is closed."""


def workers_within(memory_mb: float, workers: int, has_dumps: bool = False) -> int:
    """The number of workers for so many MB (10^6 bytes), at most `workers`.

    >>> workers_within(2000, 16), workers_within(10_000, 4), workers_within(300, 8)
    (6, 4, 1)
    >>> workers_within(2000, 16, has_dumps=True)
    4
    """
    each = WORKER_MB + PARSER_MB * has_dumps
    return min(workers, 1 + int((memory_mb - ALONE_MB) // each))
