"""Raw text -> token store: many processes tokenize, one writes, in the order of the input.

    inputs -> batches of 1 M characters -> workers: sentences, ids -> shards -> manifest

Memory is bounded by the batches under way. The bytes written do not depend on the number of
workers, nor on whether they are processes here or on a Ray cluster. After every finished shard
`corpus-build.json` records how far the build is, and a killed one resumes there.

New text for a finished store is its next generation; nothing of the earlier ones is rewritten:

    store/manifest.json            shards of all generations; replaced last, in one rename
    store/manifest-0001.json       the manifest as it was, for runs that began on it
    store/generation-0002/...      the new text: a whole store, built like any other

A kill at any moment leaves the store as it was, and the same command resumes.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from itertools import chain
from pathlib import Path
from typing import Any

from bertsmith.base.files import locked_folder, read_json, remove_leftovers, write_json
from bertsmith.base.processes import usable_cores
from bertsmith.base.settings import checked, group_values
from bertsmith.base.terminal import Progress
from bertsmith.corpus.build.batches import (
    BATCH,
    Batch,
    BatchReader,
    Position,
    in_batches,
    read_lists,
    unique_inputs,
)
from bertsmith.corpus.build.encode import (
    Encoded,
    Encoder,
    ShardWriter,
    encode_in_order,
    finish_store,
    totals,
)
from bertsmith.corpus.build.ray import encode_on_ray
from bertsmith.corpus.build.settings import BuildSettings, WorkSettings, workers_within
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
from bertsmith.text.readers.files import file_kind, is_url
from bertsmith.text.readers.tables import digest
from bertsmith.text.tokenizer.files import VOCABULARY_FILE
from bertsmith.text.tokenizer.tokenizer import Tokenizer

BUILD = "corpus-build.json"
CONFIG_FILE = "config.json"  # of a model
AS_BUILT = ("sentence_per_line", "held_out", "text_column")  # of appended text as of the first
DEFAULTS = BuildSettings()
Manifest = dict[str, Any]


@checked()
def build_store(
    inputs: Path | str | Sequence[Path | str],
    tokenizer: Tokenizer,
    out: Path | str,
    settings: BuildSettings = DEFAULTS,
    *,
    documents: Iterable[Document] | None = None,
    fewest: int = 2,
) -> Manifest:
    """Write the token store of `inputs` (one or more paths, URLs) to the folder `out`; returns its
    manifest.

    Called again it resumes after the last finished shard, or returns at once when all was done.
    documents: given instead of `inputs`; such a build always starts anew. fewest: documents to
    train on, which next-sentence pairs need two of.

    Errors: ValueError, with nothing of the build left, for no text, too few documents, a file
    given twice and those of `read_documents`; ValueError for a folder that another process
    writes or that holds another store; OSError, with the finished shards kept.
    """
    inputs, out = [inputs] if isinstance(inputs, str | Path) else inputs, Path(out)
    workers, uses_ray = settings.workers, settings.backend == "ray"
    if uses_ray and documents is not None:
        raise ValueError("documents are of this process: leave backend out, or give inputs")
    script = sys.modules.get("__mp_main__")
    if not uses_ray and workers != 1 and script and script.__name__ == "__mp_main__":
        # A worker, which imports its parent's script, comes here when the call is unguarded.
        raise ValueError(
            f"`workers={workers}` within a worker process: put the script's call of build_store "
            "under `if __name__ == '__main__':`, or use `workers=1`"
        )
    if settings.memory_mb is not None:
        has_dumps = any(file_kind(file) == ".xml" for file in input_files(inputs))
        workers = workers_within(settings.memory_mb, workers or usable_cores(), has_dumps)
    spec = None
    excluded = read_lists(settings.exclude, inputs, settings.text_column)
    if documents is None:
        spec = {
            "inputs": unique_inputs(inputs),
            "exclude": [digest(path) for path in settings.exclude],
            "tokenizer": tokenizer.fingerprint,
            **{name: getattr(settings, name) for name in (*AS_BUILT, "shard_tokens")},
        }
    if manifest := _finished(out, spec):  # on a disk that cannot be written, too
        return manifest
    with locked_folder(out):
        if manifest := _finished(out, spec):  # meanwhile, by another process
            return manifest
        record = _begin(out, spec)
        files = input_files(inputs)
        is_text = all(file.suffix == ".txt" for file in files)  # others' sizes tell nothing
        size = sum(map(input_size, files)) if is_text else None
        encoder = Encoder(tokenizer, settings.sentence_per_line, settings.held_out)
        piece, number = record["next"]
        reader = BatchReader(
            inputs,
            settings.text_column,
            excluded,
            BATCH,
            (piece, number),
            workers=1 if uses_ray else workers or usable_cores(),
        )
        if documents is not None:
            numbered = enumerate(in_batches(enumerate(documents), BATCH))
            encoded = encode_in_order((Batch(0, *one) for one in numbered), encoder, workers or 1)
        elif uses_ray:
            encoded = encode_on_ray(reader, encoder, workers)
        else:
            encoded = encode_in_order(reader, encoder, workers or usable_cores())
        progress = Progress("corpus", size, "MB", 1e6, start=record["text_bytes"])
        try:
            with closing(encoded) as results, progress:
                _write_shards(results, out, record, settings.shard_tokens, progress)
                _check_enough(record, inputs, fewest)
                return finish_store(out, tokenizer, record["shards"], record["text_bytes"])
        except ValueError:
            _clear(out)
            raise


@checked()
def append_text(
    inputs: Path | str | Sequence[Path | str],
    store: Path | str,
    settings: WorkSettings = DEFAULTS,
    *,
    text_column: str | None = None,
) -> tuple[Manifest, Manifest]:
    """Add the text of `inputs` (one or more paths, URLs) to the folder of a store, with its
    tokenizer and as it was built; `bertsmith corpus append` does this.

        whole, added = bertsmith.append_text("news-may.txt", "store")
        whole["generation"], added["documents"], added["tokens"]

    Returns the manifests of the whole store and of the new text. Of `BuildSettings` it reads those
    of the work (workers, backend, memory_mb, exclude). The same text again, asked for alike,
    changes nothing.

    Errors: ValueError when there is no finished store, another process writes it, or a file is in
    the store already (by path, size and time of change); those of `build_store`.
    """
    if is_url(store):
        raise ValueError(
            f"{store}: a URL: append to the folder that was published, then send what is new with "
            "`bertsmith corpus publish`"
        )
    inputs, folder = [inputs] if isinstance(inputs, str | Path) else inputs, Path(store)
    asked: dict[str, Any] = {
        "inputs": input_fingerprint(inputs),
        "exclude": [digest(path) if path.is_file() else None for path in settings.exclude],
    }
    if text_column is not None:
        asked["text_column"] = text_column
    if manifests := _appended(asked, folder):  # to a store that is in use or cannot be written, too
        return manifests
    with locked_folder(folder):
        if manifests := _appended(asked, folder):
            return manifests
        old = TokenStore.open(folder)
        folders = generation_folders(old.generation + 1)
        specs = [_read_record(folder / name).get("spec") or {} for name in folders[:-1]]
        _check_new(asked["inputs"], specs, folder)
        if not specs[0]:
            print(
                f"{folder}: no record of how it was built ({BUILD}), as in a copy that was "
                "published: paragraphs are split into sentences and 2% of the documents held out",
                file=sys.stderr,
            )
        as_built = {name: specs[0][name] for name in AS_BUILT if name in specs[0]}
        if text_column is not None:
            as_built["text_column"] = text_column
        new = folder / folders[-1]
        # What a killed append left is resumed, but without a record nothing of it can be used, and
        # a manifest would make it another store's.
        if not _read_record(new):
            shutil.rmtree(new, ignore_errors=True)
        (new / MANIFEST).unlink(missing_ok=True)
        own = BuildSettings(**vars(group_values(settings, WorkSettings)), **as_built)
        added = build_store(inputs, old.tokenizer, new, own, fewest=0)  # the store has others
        whole = _joined(old.manifest, added, folders[-1])
        remove_leftovers(folder)
        write_manifest(folder / earlier_manifest(old.generation), old.manifest)
        write_manifest(folder / MANIFEST, whole)
        return whole, added


# --- the build ---


def _read_record(out: Path) -> dict[str, Any]:
    """The record of the build in a folder, {} without one. Errors: ValueError for damage."""
    path = out / BUILD
    if not path.is_file():
        return {}
    try:
        found = read_json(path)
    except ValueError as error:
        raise ValueError(f"{error}; {REBUILD}") from error
    if not isinstance(found, dict) or not found.keys() >= {"spec", "next", "text_bytes", "shards"}:
        raise ValueError(f"{path}: damaged, or not the record of a build; {REBUILD}")
    return found


def _finished(out: Path, spec: dict[str, Any] | None) -> Manifest | None:
    """The manifest of a store built to its end."""
    if spec is None or _read_record(out).get("spec") != spec or not (out / MANIFEST).is_file():
        return None
    print(f"{out}: finished before", file=sys.stderr)
    return TokenStore.open(out).manifest


def _begin(out: Path, spec: dict[str, Any] | None) -> dict[str, Any]:
    """The record of an earlier, killed build of the same `spec`, or that of a new one."""
    found, is_store = _read_record(out), (out / MANIFEST).is_file()
    if spec is not None and found.get("spec") == spec:
        remove_leftovers(out)
        return found
    if spec is not None and is_store:
        raise ValueError(
            f"{out}: holds a finished token store of other inputs or settings: "
            "remove the folder or choose another `out`"
        )
    if found and not is_store:
        print(f"{out}: unfinished build of other inputs or settings: starts anew", file=sys.stderr)
    elif not is_store:
        for name in (VOCABULARY_FILE, CONFIG_FILE):
            if (out / name).exists():
                raise ValueError(
                    f"{out}: holds the {name} of a vocabulary or model, which the store's own "
                    "would replace: name another `out`"
                )
    _clear(out)
    shards: dict[str, list[Any]] = {split: [] for split in SPLITS}
    return {"spec": spec, "next": [0, 0], "text_bytes": 0, "shards": shards}


def _clear(out: Path) -> None:
    """Remove what a build writes, the manifest first."""
    number = "[0-9]" * 5
    shards = [f"{split}-{number}.{kind}" for split in SPLITS for kind in (*KINDS, "checksums")]
    remove_leftovers(out)
    for pattern in (MANIFEST, BUILD, UNIGRAM_COUNTS, *shards):
        for file in out.glob(pattern):
            file.unlink()


def _write_shards(
    results: Iterator[tuple[Position, Encoded]],
    out: Path,
    record: dict[str, Any],
    shard_tokens: int,
    progress: Progress,
) -> None:
    for first in results:
        number = len(record["shards"]["train"])
        with ExitStack() as stack:
            train, held_out = (ShardWriter(stack, out, f"{split}-{number:05d}") for split in SPLITS)
            for (piece, batch), encoded in chain([first], results):
                train.append(encoded.train)
                held_out.append(encoded.held_out)
                record["next"] = [piece, batch + 1]
                record["text_bytes"] += encoded.num_bytes
                progress.update(encoded.num_bytes)
                if train.num_tokens >= shard_tokens:
                    break
            entries = train.finish(), held_out.finish()
        for split, entry in zip(SPLITS, entries, strict=True):
            record["shards"][split].append(entry)
        write_json(out / BUILD, record)


def _check_enough(record: dict[str, Any], inputs: Sequence[Path | str], fewest: int) -> None:
    train, held_out = (totals(record["shards"][split]) for split in SPLITS)
    if train["tokens"] + held_out["tokens"] == 0:
        raise no_text(inputs)
    if train["documents"] < fewest:
        lower = ", or lower `held_out`" * (held_out["documents"] > 0)
        raise ValueError(
            f"{', '.join(map(str, inputs))}: {train['documents'] + held_out['documents']} "
            f"document(s), of which {held_out['documents']} held out: next-sentence pairs need two "
            f"to train on: put a blank line between documents{lower}"
        )


# --- generations ---


def generation_folders(count: int) -> list[str]:
    """
    >>> generation_folders(3)
    ['.', 'generation-0002', 'generation-0003']
    """
    return [".", *(f"generation-{number:04d}" for number in range(2, count + 1))]


def _appended(asked: dict[str, Any], folder: Path) -> tuple[Manifest, Manifest] | None:
    """The result of `append_text` for text that, so asked for, is the newest generation."""
    store = TokenStore.open(folder)
    newest = folder / generation_folders(store.generation)[-1]
    spec = _read_record(newest).get("spec") or {}
    if store.generation == 1 or not asked.items() <= spec.items():
        return None
    print(f"{folder}: appended before", file=sys.stderr)
    return store.manifest, TokenStore.open(newest).manifest


def _check_new(
    found: Sequence[dict[str, Any]], specs: Sequence[dict[str, Any]], folder: Path
) -> None:
    """Errors: ValueError for a file that is in a generation of the store."""
    added = defaultdict(list)
    for generation, spec in enumerate(specs, 1):
        for file in spec.get("inputs", []):
            added[file["bytes"], file["changed"]].append((generation, file["path"]))
    for file in found:
        for generation, path in added.get((file["bytes"], file["changed"]), []):
            if _is_same_file(path, file["path"]):
                raise ValueError(
                    f"{file['path']}: is in {folder} already, since its generation {generation}: "
                    "leave it out"
                )


def _is_same_file(then: str, now: str) -> bool:
    """True if a path that was recorded, perhaps in another working folder, is that of a file.

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


def _joined(manifest: Manifest, added: Manifest, name: str) -> Manifest:
    """The manifest of a store and one more, which lies in its folder `name`."""
    splits = {}
    for split in SPLITS:
        new = added["splits"][split]["shards"]
        new = [entry | {"name": f"{name}/{entry['name']}"} for entry in new]
        shards = [*manifest["splits"][split]["shards"], *new]
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
