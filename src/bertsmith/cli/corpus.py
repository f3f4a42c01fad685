"""Turn text into a token store: sentences and documents as ids, ready for pre-training.

Examples:
    bertsmith corpus books/*.txt --vocab vocab --out store
    bertsmith corpus news.jsonl.gz --text-column body --vocab vocab --out store --workers 8
    bertsmith corpus sample_text.txt --sentence-per-line --vocab vocab --out store
    bertsmith corpus s3://bucket/crawl --leave-out duplicates.jsonl --vocab vocab --out store
    RAY_ADDRESS=head:6379 bertsmith corpus /nfs/crawl --engine ray --vocab vocab --out /nfs/store

A line is a paragraph and a blank line ends a document; with --sentence-per-line a line is a
sentence, as in Google's files. In jsonl, csv, tsv and parquet a row is a document. A build that
was interrupted goes on where it was when the same command is given again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

SMALL = 64 << 20  # bytes on disk


@dataclass
class Corpus:
    inputs: Annotated[list[str], tyro.conf.Positional, tyro.conf.arg(metavar="INPUT...")]
    """Files (.txt, .jsonl, .csv, .tsv, also with .gz, .xz or .zst; .parquet), folders, or URLs."""
    vocab: Path
    """Folder with the vocabulary, from `bertsmith vocab` or of a model."""
    out: str
    """Folder to write the store to, or the URL of one: it is built whole on this machine, in
    BERTSMITH_CACHE, and sent when it is finished."""
    workers: int | None = None
    """Processes that split and tokenise; by default one a core, and one for files below 64 MiB."""
    engine: Literal["local", "ray"] = "local"
    """Where the work is done: processes of this machine, or Ray Data on the cluster of RAY_ADDRESS
    (without one, Ray on this machine). The store is the same."""
    memory_mb: float | None = None
    """Most memory of all processes together, in 10^6 bytes: fewer workers where it is short."""
    leave_out: tuple[Path, ...] = ()
    """Lists of documents not to take, from corpus-dedup and corpus-overlap."""
    sentence_per_line: bool = False
    """A line is a sentence, not a paragraph to split."""
    held_out: float = 0.02
    """Share of the documents kept out of training, to measure on."""
    text_column: str = "text"
    """Column of jsonl, csv, tsv and parquet files that holds the text."""


def run_corpus(settings: Corpus) -> None:
    import time

    from bertsmith.corpus.build import build_store
    from bertsmith.corpus.publish import built_for
    from bertsmith.progress import counted
    from bertsmith.text.alteration import alteration_warning
    from bertsmith.text.sample import sample_lines
    from bertsmith.text.wordpiece import Tokenizer

    started = time.monotonic()
    tokenizer = Tokenizer.from_pretrained(settings.vocab)
    lines = sample_lines(settings.inputs, text_column=settings.text_column)
    if warning := alteration_warning(lines, tokenizer.normalization):
        print(warning, flush=True)  # before the long work, which the user may not want now
    workers = settings.workers
    if workers is None and settings.engine == "local":
        workers = chosen_workers(None, settings.inputs)
    with built_for(settings.out) as folder:
        manifest = build_store(
            settings.inputs,
            tokenizer,
            folder,
            workers=workers,
            engine=settings.engine,
            memory_mb=settings.memory_mb,
            leave_out=settings.leave_out,
            sentence_per_line=settings.sentence_per_line,
            held_out=settings.held_out,
            text_column=settings.text_column,
        )
    seconds = time.monotonic() - started
    megabytes, held_out = manifest["text_bytes"] / 1e6, manifest["splits"]["held_out"]
    print(
        f"{settings.out}: {manifest['documents']:,} documents, "
        f"{manifest['sentences']:,} sentences, {manifest['tokens']:,} tokens"
    )
    documents = counted(held_out["documents"], "document")
    print(f"held out: {documents}, {held_out['tokens']:,} tokens")
    print(f"{megabytes:,.1f} MB in {seconds:,.1f} s ({megabytes / seconds:,.1f} MB/s)")
    if held_out["documents"] < 2:
        print("warning: too few documents held out to measure on: raise --held-out")


def chosen_workers(given: int | None, inputs: Sequence[Path | str]) -> int:
    """Those that were asked for, or by default one a core, and one alone for files so small that
    starting others would be a large part of the work.

    Errors: ValueError for fewer than one.
    """
    from bertsmith.text.readers import input_files, input_size
    from bertsmith.text.workers import usable_cores

    if given is not None:
        if given < 1:
            raise ValueError(f"--workers {given}: expected at least 1")
        return given
    size = sum(map(input_size, input_files(inputs)))
    return usable_cores() if size > SMALL else 1
