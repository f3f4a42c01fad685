"""Raw text -> token store: many processes tokenise, one writes, in the order of the input.

    read_documents -> batches of 1 M characters -> workers: sentences, ids -> shards -> manifest

Memory is bounded by the batches under way, whatever the size of the input. The bytes written do
not depend on the number of workers. After every finished shard `corpus-build.json` records how far
the build is, so that a killed one goes on from there, with the same result.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from bertsmith.corpus.encoding import Encoded, Encoder, encode_in_order
from bertsmith.corpus.shards import BlockWriter, ShardWriter
from bertsmith.corpus.store import (
    FORMAT,
    KINDS,
    MANIFEST,
    SPLITS,
    UNIGRAM_COUNTS,
    Shard,
    token_type,
)
from bertsmith.files import TEMPORARY_PREFIX, read_json, write_json
from bertsmith.progress import Progress
from bertsmith.text.readers import Document, input_fingerprint, no_text, read_documents
from bertsmith.text.tokenizer_files import VOCABULARY_FILE
from bertsmith.text.wordpiece import Tokenizer

BUILD = "corpus-build.json"
CONFIG_FILE = "config.json"  # of a model
BATCH = 1 << 20  # characters given to a worker at a time
SHARD_TOKENS = 16 << 20  # train tokens after which a shard is closed: 32 MiB, seconds of work


def build_store(
    inputs: Sequence[Path],
    tokenizer: Tokenizer,
    out: Path,
    *,
    workers: int = 1,
    sentence_per_line: bool = False,
    held_out: float = 0.02,
    text_column: str = "text",
    documents: Iterable[Document] | None = None,
    shard_tokens: int = SHARD_TOKENS,
) -> dict[str, Any]:
    """Write the token store of `inputs` to the folder `out` and return its manifest.

    workers: processes that split and tokenise; 1 works in this process. A script that asks for
    more keeps its own work under `if __name__ == "__main__":`, since each of them imports it.
    held_out: share of the documents kept out of training, chosen by a hash of their text.
    documents: given instead of `inputs`; such a build always starts anew.
    Called again after a kill it goes on after the last finished shard; after a finished build of
    the same inputs and settings it returns at once.

    Errors: ValueError for no text, for fewer than two documents (no next-sentence pair can be
    made), for a folder that holds another finished store, and those of `read_documents`; in these
    cases nothing of the build is left. OSError (a full disk): what is finished is kept.
    """
    _check_settings(workers, held_out)
    job = None
    if documents is None:
        documents = read_documents(inputs, text_column=text_column)
        job = {
            "inputs": input_fingerprint(inputs),
            "tokenizer": tokenizer.fingerprint,
            "sentence_per_line": sentence_per_line,
            "held_out": held_out,
            "text_column": text_column,
            "shard_tokens": shard_tokens,
        }
    state = _begin(out, job)
    if (out / MANIFEST).is_file():
        print(f"{out}: finished before", file=sys.stderr)
        return read_json(out / MANIFEST)
    encoder = Encoder(tokenizer, sentence_per_line, held_out)
    batches = in_batches(islice(documents, state["documents_read"], None))
    try:
        with (
            closing(encode_in_order(batches, encoder, workers)) as results,
            Progress("corpus", _total_bytes(inputs), "MB", 1e6) as progress,
        ):
            _write_shards(results, out, state, shard_tokens, progress)
            return _finish(out, state, tokenizer, inputs)
    except ValueError:
        _clear(out)
        raise


def _check_settings(workers: int, held_out: float) -> None:
    if not 0 <= held_out < 1:
        raise ValueError(f"held_out = {held_out}: expected at least 0 and below 1")
    if workers < 1:
        raise ValueError(f"workers = {workers}: expected at least 1")
    script = sys.modules.get("__mp_main__")
    if workers > 1 and script is not None and script.__name__ == "__mp_main__":
        # A worker, which imports its parent's script, comes here when the call is unguarded.
        raise ValueError(
            f"workers = {workers} within a worker process: put the script's call of build_store "
            "under `if __name__ == '__main__':`, or use workers=1"
        )


def _begin(out: Path, job: dict[str, Any] | None) -> dict[str, Any]:
    """How far an earlier build of the same job came, or the state of a new one."""
    found = read_json(out / BUILD) if (out / BUILD).is_file() else None
    if job is not None and found is not None and found["job"] == job:
        for leftover in out.glob(f"{TEMPORARY_PREFIX}*"):
            leftover.unlink()
        return found
    if job is not None and (out / MANIFEST).is_file():
        raise ValueError(
            f"{out}: holds a finished token store of other inputs or settings: "
            "remove the folder or choose another --out"
        )
    if found is None and not (out / MANIFEST).is_file():
        held = [name for name in (VOCABULARY_FILE, CONFIG_FILE) if (out / name).exists()]
        if held:
            raise ValueError(
                f"{out}: holds the {held[0]} of a vocabulary or model, which the store's own would "
                "replace: name another --out"
            )
    if found is not None and not (out / MANIFEST).is_file():
        print(f"{out}: unfinished build of other inputs or settings: starts anew", file=sys.stderr)
    _clear(out)
    return {
        "job": job,
        "documents_read": 0,
        "text_bytes": 0,
        "shards": {split: [] for split in SPLITS},
    }


def _clear(out: Path) -> None:
    """Remove what a build writes, the manifest first; the folder too when nothing is left."""
    number = "[0-9]" * 5
    shards = [f"{split}-{number}.{kind}" for split in SPLITS for kind in (*KINDS, "checksums")]
    for pattern in (MANIFEST, BUILD, UNIGRAM_COUNTS, *shards, f"{TEMPORARY_PREFIX}*"):
        for file in out.glob(pattern):
            file.unlink()
    if out.is_dir() and not any(out.iterdir()):
        out.rmdir()


def in_batches(documents: Iterable[Document]) -> Iterator[list[list[str]]]:
    """The lines of consecutive documents, about `BATCH` characters together."""
    batch, size = [], 0
    for document in documents:
        batch.append(document.lines)
        size += sum(map(len, document.lines))
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _total_bytes(inputs: Sequence[Path]) -> int | None:
    """The text to come, where file sizes tell."""
    files = list(inputs)
    if any(file.suffix != ".txt" or not file.is_file() for file in files):
        return None
    return sum(file.stat().st_size for file in files)


def _write_shards(
    results: Iterator[Encoded],
    out: Path,
    state: dict[str, Any],
    shard_tokens: int,
    progress: Progress,
) -> None:
    """Write all results, shard after shard, and record each finished one."""
    progress.update(done=state["text_bytes"])
    for first in results:
        number = len(state["shards"]["train"])
        with ExitStack() as stack:
            train, held_out = (ShardWriter(stack, out, f"{split}-{number:05d}") for split in SPLITS)
            for encoded in chain([first], results):
                train.append(encoded.train)
                held_out.append(encoded.held_out)
                state["documents_read"] += encoded.num_read
                state["text_bytes"] += encoded.num_bytes
                progress.update(encoded.num_bytes)
                if train.num_tokens >= shard_tokens:
                    break
            entries = train.finish(), held_out.finish()
        for split, entry in zip(SPLITS, entries, strict=True):
            state["shards"][split].append(entry)
        write_json(out / BUILD, state)


def _finish(
    out: Path, state: dict[str, Any], tokenizer: Tokenizer, inputs: Sequence[Path]
) -> dict[str, Any]:
    """Count the pieces, save the tokenizer and, last of all, write the manifest."""
    counts = ("documents", "sentences", "tokens")
    splits: dict[str, Any] = {
        split: {name: sum(shard[name] for shard in shards) for name in counts} | {"shards": shards}
        for split, shards in state["shards"].items()
    }
    totals = {name: sum(splits[split][name] for split in SPLITS) for name in counts}
    if totals["tokens"] == 0:
        raise no_text(inputs)
    if splits["train"]["documents"] < 2:
        raise ValueError(
            f"{', '.join(map(str, inputs))}: {totals['documents']} document(s), of which "
            f"{splits['held_out']['documents']} held out: next-sentence pairs need two to train "
            "on: put a blank line between documents, or lower --held-out"
        )
    size = len(tokenizer.vocabulary)
    manifest = {
        "format": FORMAT,
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "vocabulary_fingerprint": tokenizer.vocabulary.fingerprint,
        "vocabulary_size": size,
        "token_type": token_type(size).str,
        "text_bytes": state["text_bytes"],
        **totals,
        "splits": splits,
    }
    with ExitStack() as stack:
        writer = BlockWriter(stack, out / UNIGRAM_COUNTS)
        writer.write(_unigram_counts(out, manifest))
        manifest["unigram_checksums"] = writer.checksums()
    tokenizer.save(out)
    write_json(out / MANIFEST, manifest)
    return manifest


def _unigram_counts(out: Path, manifest: dict[str, Any]) -> np.ndarray:
    """int64 [V]: the pieces of the train split; reads back, and so verifies, every block written.

    One shard is mapped at a time: what was read of a mapped file counts as memory of the process.
    """
    size, dtype = manifest["vocabulary_size"], np.dtype(manifest["token_type"])
    counts = np.zeros(size, np.int64)
    for entry in manifest["splits"]["train"]["shards"]:
        tokens = Shard(out, entry, dtype).tokens
        for start in range(0, len(tokens), BATCH):
            piece = tokens.read(start, min(start + BATCH, len(tokens)))
            counts += np.bincount(piece, minlength=size)
    return counts
