"""Commands: corpus, corpus append, corpus verify, corpus publish."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from bertsmith.base.settings import Count, Metavar, Positional
from bertsmith.cli.flags import Inputs
from bertsmith.corpus.build.settings import BuildSettings, WorkSettings

SMALL = 64 << 20  # bytes on disk
Build = TypeVar("Build", "Corpus", "CorpusAppend")


@dataclass(frozen=True, kw_only=True)
class Corpus(Inputs, BuildSettings):
    """Turn text into a token store: sentences and documents as ids, ready for pre-training.

    Examples:
      bertsmith corpus books/*.txt --vocab vocab --out store
      bertsmith corpus news.jsonl.gz --text-column body --vocab vocab --out store --workers 8
      bertsmith corpus sample_text.txt --sentence-per-line --vocab vocab --out store
      bertsmith corpus enwiki-20251101-pages-articles*.bz2 books/ --vocab vocab --out store
      bertsmith corpus s3://bucket/crawl --exclude duplicates.jsonl --vocab vocab --out store
      RAY_ADDRESS=head:6379 bertsmith corpus /nfs/crawl --backend ray --vocab vocab --out /nfs/store

    A line is a paragraph and a blank line ends a document; with --sentence-per-line a line is a
    sentence, as in Google's files. In jsonl, csv, tsv and parquet a row is a document, in a dump of
    Wikipedia an article: its text passages, without lists, tables and headers. A build that was
    interrupted goes on where it was when the same command is given again.
    """

    vocab: str
    """Folder with a vocabulary, run directory, or folder or hub name of a model."""
    out: str
    """Folder to write the store to, or the URL of one: it is built whole on this machine, in
    BERTSMITH_CACHE, and sent when it is finished."""
    workers: Annotated[int | None, Count] = None
    """Processes that split and tokenize; by default one a core, and one for files below 64 MiB."""


def run_corpus(settings: Corpus) -> None:
    import time

    import numpy as np

    from bertsmith.base.terminal import counted, scaled
    from bertsmith.cli.flags import as_flags
    from bertsmith.cli.vocab import Vocab, open_tokenizer
    from bertsmith.corpus.build.build import build_store
    from bertsmith.corpus.store.store import TokenStore
    from bertsmith.corpus.store.verify import built_for
    from bertsmith.text.readers.documents import sample_lines
    from bertsmith.text.readers.files import without_password
    from bertsmith.text.vocabulary.scripts import lost_letters_warning

    started = time.monotonic()
    tokenizer = open_tokenizer(settings.vocab)
    lines = sample_lines(settings.inputs, text_column=settings.text_column)
    if warning := lost_letters_warning(lines, tokenizer.normalization):
        # before the long work, which the user may not want now
        print(as_flags(warning, Vocab), flush=True)
    with built_for(settings.out) as folder:
        manifest = build_store(settings.inputs, tokenizer, folder, _with_workers(settings))
        shards = TokenStore.open(folder).shards
        single = sum(int((np.diff(shard.documents) == 1).sum()) for shard in shards)
    seconds = time.monotonic() - started
    num_bytes, held_out = manifest["text_bytes"], manifest["splits"]["held_out"]
    print(
        f"{without_password(settings.out)}: {manifest['documents']:,} documents, "
        f"{manifest['sentences']:,} sentences, {manifest['tokens']:,} tokens"
    )
    documents = counted(held_out["documents"], "document")
    print(f"held out: {documents}, {held_out['tokens']:,} tokens")
    print(f"{scaled(num_bytes)} in {seconds:,.1f} s ({scaled(num_bytes / seconds)}/s)")
    if held_out["documents"] < 2:
        print("warning: too few documents held out to measure on: raise --held-out")
    mean = manifest["sentences"] / manifest["documents"]
    if mean < 2 or single > manifest["documents"] / 2:
        print(
            f"warning: documents have {mean:.1f} sentences on average, and {single:,} have one: a "
            "blank line ends a document, so take those between paragraphs out; in a table put a "
            "whole document into a row"
        )


def chosen_workers(given: int | None, inputs: Sequence[Path | str]) -> int:
    """The given number, or by default one a core, and one alone for files below 64 MiB."""
    from bertsmith.base.processes import usable_cores
    from bertsmith.text.readers.documents import input_files, input_size

    if given is not None:
        return given
    size = sum(map(input_size, input_files(inputs)))
    return usable_cores() if size > SMALL else 1


@dataclass(frozen=True, kw_only=True)
class CorpusAppend(Inputs, WorkSettings):
    """Add new text to a token store; nothing in it is written again.

    Examples:
      bertsmith corpus append news-may.txt --store store
      bertsmith corpus append more.jsonl.gz --text-column body --store store --workers 8

    The text is tokenized, split and held out as when the store was built, and becomes the store's
    next generation. New runs read all of it; a run that began before goes on, with --resume, on the
    generation on which it began. An append that was interrupted goes on with the same command.

    Documents that the store holds already are appended all the same. To leave them out, compare
    with the texts the store was built of:
      bertsmith corpus dedup news-may.txt --against news-april.txt --out known.jsonl
      bertsmith corpus append news-may.txt --exclude known.jsonl --store store
    """

    store: str
    """Folder of a store made by `bertsmith corpus`."""
    workers: Annotated[int | None, Count] = None
    """Processes that split and tokenize; by default one a core, and one for files below 64 MiB."""
    backend: Literal["local", "ray"] = "local"
    """Where the work is done, as for `bertsmith corpus`."""
    text_column: str | None = None
    """Column of jsonl, csv, tsv and parquet files that holds the text; by default the store's."""


def run_corpus_append(settings: CorpusAppend) -> None:
    from bertsmith.base.terminal import counted
    from bertsmith.corpus.build.build import append_text

    work, column = _with_workers(settings), settings.text_column
    whole, added = append_text(settings.inputs, settings.store, work, text_column=column)
    print(
        f"{settings.store}: generation {whole['generation']}: "
        f"{counted(added['documents'], 'document')}, {added['tokens']:,} tokens more"
    )
    print(f"now {whole['documents']:,} documents, {whole['tokens']:,} tokens")


def _with_workers(settings: Build) -> Build:
    """The settings with the default number of workers filled in; Ray takes all its cores."""
    if settings.backend == "ray":
        return settings
    return replace(settings, workers=chosen_workers(settings.workers, settings.inputs))


@dataclass
class CorpusVerify:
    """Read every block of a token store and compare it with its checksum.

    Examples:
      bertsmith corpus verify store
      bertsmith corpus verify s3://bucket/store --json

    A line for every file or block that is not as it was written; the exit code is 1 when there is
    one (2 without a manifest that can be read: then nothing else can be told). A run verifies each
    block when it first reads it; this command reads all of them beforehand.
    """

    store: Annotated[str, Positional, Metavar("STORE")]
    """Token store made by `bertsmith corpus`: a folder or a URL."""
    json: bool = False
    """Print one JSON object."""


def run_corpus_verify(settings: CorpusVerify) -> int:
    from bertsmith.base.terminal import Progress, scaled
    from bertsmith.corpus.store.store import TokenStore
    from bertsmith.corpus.store.verify import verify_store

    store = TokenStore.open(settings.store)
    place, faults = str(store.folder), []
    with Progress("verify", store.num_bytes, "MB", 1e6) as progress:
        for fault in verify_store(settings.store, progress.update):
            faults.append(fault)
            if not settings.json:
                print(fault, flush=True)
    if settings.json:
        print(json.dumps({"store": place, "bytes": store.num_bytes, "faults": faults}))
    elif not faults:
        print(f"{place}: sound ({scaled(store.num_bytes)}, generation {store.generation})")
    return 1 if faults else 0


@dataclass
class CorpusPublish:
    """Copy a token store to a URL of an object storage, from where runs can read it.

    Examples:
      bertsmith corpus publish store s3://bucket/store
      bertsmith pretrain --corpus s3://bucket/store --out run --minutes 60

    Every block is verified on its way and the manifest comes last. The same command goes on with a
    copy that was interrupted, sends what is new of a store that has grown, and mends a damaged
    copy.
    """

    store: Annotated[str, Positional, Metavar("STORE")]
    """Folder of a store made by `bertsmith corpus`."""
    url: Annotated[str, Positional, Metavar("URL")]
    """Where to: s3://bucket/name, gs://..., or what else fsspec knows."""


def run_corpus_publish(settings: CorpusPublish) -> None:
    from bertsmith.corpus.store.verify import publish
    from bertsmith.text.readers.files import is_url, without_password

    if not is_url(settings.url):
        raise ValueError(f"{settings.url}: no URL: expected something like s3://bucket/store")
    if is_url(settings.store):
        raise ValueError(f"{settings.store}: a URL: name the folder of a store on this machine")
    manifest = publish(Path(settings.store), settings.url)
    place = without_password(settings.url)
    print(f"{place}: {manifest['documents']:,} documents, {manifest['tokens']:,} tokens")
