"""Add new text to a token store; nothing in it is written again.

Examples:
    bertsmith corpus-append news-may.txt --store store
    bertsmith corpus-append more.jsonl.gz --text-column body --store store --workers 8

The text is tokenised, split and held out as when the store was built, and becomes the store's next
generation. New runs read all of it; a run that began before goes on, with --resume, on the
generation on which it began. An append that was interrupted goes on with the same command.

Documents that the store holds already are appended all the same. To leave them out, compare with
the texts the store was built of:
    bertsmith corpus-dedup news-may.txt --against news-april.txt --out known.jsonl
    bertsmith corpus-append news-may.txt --leave-out known.jsonl --store store
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro


@dataclass
class CorpusAppend:
    inputs: Annotated[list[str], tyro.conf.Positional, tyro.conf.arg(metavar="INPUT...")]
    """Files (.txt, .jsonl, .csv, .tsv, also with .gz, .xz or .zst; .parquet), folders, or URLs."""
    store: str
    """Folder of a store made by `bertsmith corpus`."""
    workers: int | None = None
    """Processes that split and tokenise; by default one a core, and one for files below 64 MiB."""
    engine: Literal["local", "ray"] = "local"
    """Where the work is done, as for `bertsmith corpus`."""
    memory_mb: float | None = None
    """Most memory of all processes together, in 10^6 bytes: fewer workers where it is short."""
    leave_out: tuple[Path, ...] = ()
    """Lists of documents not to take, from corpus-dedup and corpus-overlap."""
    text_column: str | None = None
    """Column of jsonl, csv, tsv and parquet files that holds the text; by default the store's."""


def run_corpus_append(settings: CorpusAppend) -> None:
    from bertsmith.cli.corpus import chosen_workers
    from bertsmith.corpus.append import append_text
    from bertsmith.progress import counted
    from bertsmith.text.remote import is_url

    if is_url(settings.store):
        raise ValueError(
            f"{settings.store}: a URL: append to the folder that was published, then send what is "
            "new with `bertsmith corpus-publish`"
        )
    workers = settings.workers
    if workers is None and settings.engine == "local":
        workers = chosen_workers(None, settings.inputs)
    whole, added = append_text(
        settings.inputs,
        Path(settings.store),
        text_column=settings.text_column,
        workers=workers,
        engine=settings.engine,
        memory_mb=settings.memory_mb,
        leave_out=settings.leave_out,
    )
    print(
        f"{settings.store}: generation {whole['generation']}: "
        f"{counted(added['documents'], 'document')}, "
        f"{added['tokens']:,} tokens more"
    )
    print(f"now {whole['documents']:,} documents, {whole['tokens']:,} tokens")
