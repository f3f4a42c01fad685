"""Raw text -> token store: many processes tokenise, one writes, in the order of the input.

    inputs -> batches of 1 M characters -> workers: sentences, ids -> shards -> manifest

Memory is bounded by the batches under way, whatever the size of the input. The bytes written do
not depend on the number of workers, nor on whether they are processes here or on a Ray cluster.
After every finished shard `corpus-build.json` records how far the build is, so that a killed one
goes on from there, with the same result.

New text for a finished store: the next generation, with nothing of the earlier ones rewritten.

    store/manifest.json            shards of all generations; replaced last, in one rename
    store/manifest-0001.json       the manifest as it was, for runs that began on it
    store/generation-0002/...      the new text: a whole store, built like any other

A kill at any moment leaves the store as it was; the same command then goes on.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from bertsmith.base.files import locked_folder, read_json, remove_leftovers, write_json
from bertsmith.base.processes import usable_cores
from bertsmith.base.terminal import Progress
from bertsmith.corpus.build.batches import (
    BATCH,
    Batch,
    all_batches,
    in_batches,
    read_lists,
    unique_inputs,
)
from bertsmith.corpus.build.encode import (
    Encoded,
    Encoder,
    Position,
    ShardWriter,
    encode_in_order,
    finish_store,
    totals,
)
from bertsmith.corpus.build.ray import encode_on_ray
from bertsmith.corpus.store.blocks import (
    DIGEST,
    MANIFEST,
    REBUILD,
    earlier_manifest,
    sealed,
    write_manifest,
)
from bertsmith.corpus.store.store import KINDS, SPLITS, UNIGRAM_COUNTS, TokenStore
from bertsmith.text.readers.documents import (
    Document,
    input_files,
    input_fingerprint,
    input_size,
    no_text,
)
from bertsmith.text.readers.files import is_url
from bertsmith.text.tokenizer.files import VOCABULARY_FILE
from bertsmith.text.tokenizer.tokenizer import Tokenizer

BUILD = "corpus-build.json"
CONFIG_FILE = "config.json"  # of a model
# MB of memory that suffice for this process, and for each worker beside it: measured with the
# largest documents, of four bytes a character.
ALONE_MB, WORKER_MB = 300, 330
SHARD_TOKENS = 16 << 20  # train tokens after which a shard is closed: 32 MiB, seconds of work


def build_store(
    inputs: Sequence[Path | str],
    tokenizer: Tokenizer,
    out: Path,
    *,
    workers: int | None = 1,
    engine: Literal["local", "ray"] = "local",
    memory_mb: float | None = None,
    leave_out: Sequence[Path] = (),
    sentence_per_line: bool = False,
    held_out: float = 0.02,
    text_column: str = "text",
    documents: Iterable[Document] | None = None,
    shard_tokens: int = SHARD_TOKENS,
) -> dict[str, Any]:
    """Write the token store of `inputs` (paths, URLs) to the folder `out`; returns its manifest.

    workers: processes that split and tokenise, this one among them; None takes one a core. A
    script that asks for more than 1 keeps its own work under `if __name__ == "__main__":`, since
    the others import it.
    engine: where the workers are; "ray" is a Ray cluster, see ray_encoding.py.
    memory_mb: most memory of all processes on this machine together; fewer workers where it is
    short, see `workers_within`.
    leave_out: lists of documents that are not taken, from `corpus-dedup` or `corpus-overlap`.
    held_out: share of the documents kept out of training, chosen by a hash of their text.
    documents: given instead of `inputs`; such a build always starts anew.
    Called again after a kill it goes on after the last finished shard; after a finished build of
    the same inputs and settings it returns at once.

    Errors: ValueError for no text, for fewer than two documents (no next-sentence pair can be
    made), for a folder that holds another finished store, for a file given twice, and those of
    `read_documents`; in these cases nothing of the build is left. ValueError while another process
    writes the folder. OSError (a full disk, a storage that fails): what is finished is kept.
    """
    _check_settings(workers, held_out, engine, memory_mb, documents is not None)
    if memory_mb is not None:
        workers = workers_within(memory_mb, workers or usable_cores())
    job = None
    left_out = read_lists(leave_out, inputs)
    if documents is None:
        job = {
            "inputs": unique_inputs(inputs),
            "left_out": left_out.fingerprints,
            "tokenizer": tokenizer.fingerprint,
            "sentence_per_line": sentence_per_line,
            "held_out": held_out,
            "text_column": text_column,
            "shard_tokens": shard_tokens,
        }
    if manifest := _finished(out, job):  # on a disk that cannot be written, too
        return manifest
    with locked_folder(out):
        if manifest := _finished(out, job):  # meanwhile, by another process
            return manifest
        state = _begin(out, job)
        encoder = Encoder(tokenizer, sentence_per_line, held_out)
        first = (state["next"][0], state["next"][1])
        if documents is not None:
            numbered = enumerate(in_batches(enumerate(documents), BATCH))
            encoded = encode_in_order((Batch(0, *one) for one in numbered), encoder, workers or 1)
        elif engine == "ray":
            encoded = encode_on_ray(inputs, encoder, text_column, left_out, BATCH, first, workers)
        else:
            batches = all_batches(inputs, text_column, left_out, BATCH, first)
            encoded = encode_in_order(batches, encoder, workers or usable_cores())
        done = state["text_bytes"]
        try:
            with (
                closing(encoded) as results,
                Progress("corpus", _total_bytes(inputs), "MB", 1e6, start=done) as progress,
            ):
                _write_shards(results, out, state, shard_tokens, progress)
                return _finish(out, state, tokenizer, inputs)
        except ValueError:
            _clear(out)
            raise


def workers_within(memory_mb: float, workers: int) -> int:
    """As many of the workers as have room in so many MB (10^6 bytes); the bytes stay the same.

    >>> workers_within(2000, 16), workers_within(10_000, 4), workers_within(300, 8)
    (6, 4, 1)

    Errors: ValueError when there is no room for a build at all.
    """
    if not ALONE_MB <= memory_mb < math.inf:
        raise ValueError(
            f"memory_mb = {memory_mb:g}: a build needs {ALONE_MB} at least: raise the bound"
        )
    return min(workers, 1 + int((memory_mb - ALONE_MB) // WORKER_MB))


def _check_settings(
    workers: int | None, held_out: float, engine: str, memory_mb: float | None, has_documents: bool
) -> None:
    if not 0 <= held_out < 1:
        raise ValueError(f"held_out = {held_out}: expected at least 0 and below 1")
    if workers is not None and workers < 1:
        raise ValueError(f"workers = {workers}: expected at least 1")
    if engine not in ("local", "ray"):
        raise ValueError(f"engine = {engine!r}: expected local or ray")
    if engine == "ray":
        if memory_mb is not None:
            raise ValueError(
                "memory_mb has no effect with the engine ray: give its nodes a bound when they "
                "are started (ray start --memory ... --object-store-memory ...)"
            )
        if has_documents:
            raise ValueError("documents are of this process: leave engine out, or give inputs")
        return
    script = sys.modules.get("__mp_main__")
    if workers != 1 and script is not None and script.__name__ == "__mp_main__":
        # A worker, which imports its parent's script, comes here when the call is unguarded.
        raise ValueError(
            f"workers = {workers} within a worker process: put the script's call of build_store "
            "under `if __name__ == '__main__':`, or use workers=1"
        )


def read_record(out: Path) -> dict[str, Any] | None:
    """How far the build in a folder is or was, with its inputs and settings; None without a record.

    Errors: ValueError for a damaged one.
    """
    path = out / BUILD
    if not path.is_file():
        return None
    try:
        found = read_json(path)
    except ValueError as error:
        raise ValueError(f"{error}; {REBUILD}") from error
    if not isinstance(found, dict) or not found.keys() >= {"job", "next", "text_bytes", "shards"}:
        raise ValueError(f"{path}: damaged, or not the record of a build; {REBUILD}")
    return found


def _finished(out: Path, job: dict[str, Any] | None) -> dict[str, Any] | None:
    """The manifest of a store that this job has built to its end."""
    found = read_record(out) if job is not None else None
    if found is None or found["job"] != job or not (out / MANIFEST).is_file():
        return None
    print(f"{out}: finished before", file=sys.stderr)
    return TokenStore.open(out).manifest


def _begin(out: Path, job: dict[str, Any] | None) -> dict[str, Any]:
    """How far an earlier build of the same job came, or the state of a new one."""
    found = read_record(out)
    if job is not None and found is not None and found["job"] == job:
        remove_leftovers(out)
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
        "next": [0, 0],
        "text_bytes": 0,
        "shards": {split: [] for split in SPLITS},
    }


def _clear(out: Path) -> None:
    """Remove what a build writes, the manifest first."""
    number = "[0-9]" * 5
    shards = [f"{split}-{number}.{kind}" for split in SPLITS for kind in (*KINDS, "checksums")]
    remove_leftovers(out)
    for pattern in (MANIFEST, BUILD, UNIGRAM_COUNTS, *shards):
        for file in out.glob(pattern):
            file.unlink()


def _total_bytes(inputs: Sequence[Path | str]) -> int | None:
    """The text to come, where file sizes tell."""
    files = input_files(inputs)
    if any(file.suffix != ".txt" for file in files):
        return None
    return sum(map(input_size, files))


def _write_shards(
    results: Iterator[tuple[Position, Encoded]],
    out: Path,
    state: dict[str, Any],
    shard_tokens: int,
    progress: Progress,
) -> None:
    """Write all results, shard after shard, and record each finished one."""
    for first in results:
        number = len(state["shards"]["train"])
        with ExitStack() as stack:
            train, held_out = (ShardWriter(stack, out, f"{split}-{number:05d}") for split in SPLITS)
            for (piece, batch), encoded in chain([first], results):
                train.append(encoded.train)
                held_out.append(encoded.held_out)
                state["next"] = [piece, batch + 1]
                state["text_bytes"] += encoded.num_bytes
                progress.update(encoded.num_bytes)
                if train.num_tokens >= shard_tokens:
                    break
            entries = train.finish(), held_out.finish()
        for split, entry in zip(SPLITS, entries, strict=True):
            state["shards"][split].append(entry)
        write_json(out / BUILD, state)


def _finish(
    out: Path, state: dict[str, Any], tokenizer: Tokenizer, inputs: Sequence[Path | str]
) -> dict[str, Any]:
    """Make the finished shards a store."""
    splits = {split: totals(entries) for split, entries in state["shards"].items()}
    whole = totals(list(splits.values()))
    if whole["tokens"] == 0:
        raise no_text(inputs)
    if splits["train"]["documents"] < 2:
        raise ValueError(
            f"{', '.join(map(str, inputs))}: {whole['documents']} document(s), of which "
            f"{splits['held_out']['documents']} held out: next-sentence pairs need two to train "
            "on: put a blank line between documents, or lower --held-out"
        )
    return finish_store(out, tokenizer, state["shards"], state["text_bytes"])


AS_BUILT = ("sentence_per_line", "held_out", "text_column")


def append_text(
    inputs: Sequence[Path | str], folder: Path, *, text_column: str | None = None, **how: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Add the text of `inputs` to the store of a folder, with its tokenizer and as it was built.

    `how` are workers, engine, memory_mb and leave_out as for `build_store`.

    Returns the manifests of the whole store and of the new text. Text that was appended before by
    the same command is not appended again.

    Errors: ValueError when there is no finished store, when another process writes it, or a file is
    in the store already (by path, size and time of change); those of `build_store`, which leave the
    store as it was.
    """
    found = input_fingerprint(inputs)
    if manifests := _appended(found, folder):  # to a store that is in use or cannot be written, too
        return manifests
    with locked_folder(folder):
        return _appended(found, folder) or _append(inputs, found, folder, text_column, how)


def _appended(
    found: list[dict[str, Any]], folder: Path
) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """What `append_text` returns of text that is the newest generation."""
    store = TokenStore.open(folder)
    newest = folder / generation_folders(store.generation)[-1]
    if store.generation == 1 or read_build(newest).get("inputs") != found:
        return None
    print(f"{folder}: appended before", file=sys.stderr)
    return store.manifest, TokenStore.open(newest).manifest


def _append(
    inputs: Sequence[Path | str],
    found: list[dict[str, Any]],
    folder: Path,
    text_column: str | None,
    how: dict[str, Any],
) -> tuple[dict[str, Any], dict[str, Any]]:
    store = TokenStore.open(folder)
    builds = [read_build(folder / name) for name in generation_folders(store.generation)]
    number = store.generation + 1
    _check_new(found, builds, folder)
    if not builds[0]:
        print(
            f"{folder}: no record of how it was built ({BUILD}), as in a copy that was published: "
            "paragraphs are split into sentences and 2% of the documents held out",
            file=sys.stderr,
        )
    options = {name: builds[0][name] for name in AS_BUILT if name in builds[0]}
    if text_column is not None:
        options["text_column"] = text_column
    name = generation_folders(number)[-1]
    _take_up(folder / name)
    added = build_store(inputs, store.tokenizer, folder / name, **options, **how)
    whole = joined(store.manifest, added, name)
    remove_leftovers(folder)
    write_manifest(folder / earlier_manifest(store.generation), store.manifest)
    write_manifest(folder / MANIFEST, whole)
    return whole, added


def _take_up(unfinished: Path) -> None:
    """Make what a killed append left a build to go on with, whatever was finished of it.

    Without a record nothing of it can be used; a manifest would make it another store's.
    """
    if read_record(unfinished) is None:
        shutil.rmtree(unfinished, ignore_errors=True)
    (unfinished / MANIFEST).unlink(missing_ok=True)


def _check_new(
    found: Sequence[dict[str, Any]], builds: Sequence[dict[str, Any]], folder: Path
) -> None:
    """Errors: ValueError for a file that is in a generation of the store."""
    for generation, job in enumerate(builds, 1):
        there = defaultdict(list)
        for file in job.get("inputs", []):
            there[file["bytes"], file["changed"]].append(file["path"])
        for file in found:
            path, earlier = file["path"], there.get((file["bytes"], file["changed"]), [])
            if any(_is_same_file(then, path) for then in earlier):
                raise ValueError(
                    f"{path}: is in {folder} already, since its generation {generation}: "
                    "leave it out"
                )


def _is_same_file(then: str, now: str) -> bool:
    """Whether a path that was recorded, perhaps in another working folder, is that of a file.

    >>> _is_same_file("books/a.txt", "./books/a.txt"), _is_same_file("books/a.txt", "news/a.txt")
    (True, False)
    >>> _is_same_file("books/a.txt", "/elsewhere/books/a.txt")
    True
    """
    if then == now or is_url(then) or is_url(now):
        return then == now
    parts = Path(then).parts
    real = os.path.realpath(now)
    return os.path.realpath(then) == real or Path(real).parts[-len(parts) :] == parts


def generation_folders(count: int) -> list[str]:
    """Where the text of each generation lies within the store.

    >>> generation_folders(3)
    ['.', 'generation-0002', 'generation-0003']
    """
    return [".", *(f"generation-{number:04d}" for number in range(2, count + 1))]


def read_build(folder: Path) -> dict[str, Any]:
    """Inputs and settings of a finished build; nothing where they were not files."""
    record = read_record(folder)
    return (record and record["job"]) or {}


def joined(manifest: dict[str, Any], added: dict[str, Any], name: str) -> dict[str, Any]:
    """The manifest of a store and one more, which lies in its folder `name`."""
    splits = {}
    for split in SPLITS:
        new = [entry | {"name": f"{name}/{entry['name']}"} for entry in shards_of(added, split)]
        shards = [*shards_of(manifest, split), *new]
        splits[split] = {**totals(shards), "shards": shards}
    (counts,) = (entry for entry in added["files"] if entry["name"] == UNIGRAM_COUNTS)
    counts = counts | {"name": f"{name}/{UNIGRAM_COUNTS}"}
    return sealed(
        manifest
        | {
            "generation": manifest["generation"] + 1,
            "earlier": [*manifest["earlier"], manifest[DIGEST]],
            "text_bytes": manifest["text_bytes"] + added["text_bytes"],
            **totals(list(splits.values())),
            "unigram_counts": [*manifest["unigram_counts"], counts["name"]],
            "files": [*manifest["files"], counts],
            "splits": splits,
        }
    )


def shards_of(manifest: dict[str, Any], split: str) -> list[dict[str, Any]]:
    return manifest["splits"][split]["shards"]
