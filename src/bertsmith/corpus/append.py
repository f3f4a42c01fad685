"""New text for a finished store: the next generation, with nothing of the earlier ones rewritten.

    store/manifest.json            shards of all generations; replaced last, in one rename
    store/manifest-0001.json       the manifest as it was, for runs that began on it
    store/generation-0002/...      the new text: a whole store, built like any other

A kill at any moment leaves the store as it was; the same command then goes on.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bertsmith.corpus.build import BUILD, build_store, read_record
from bertsmith.corpus.manifest import (
    DIGEST,
    MANIFEST,
    earlier_manifest,
    sealed,
    write_manifest,
)
from bertsmith.corpus.shards import totals
from bertsmith.corpus.store import SPLITS, UNIGRAM_COUNTS, TokenStore
from bertsmith.files import locked_folder, remove_leftovers
from bertsmith.text.readers import input_fingerprint
from bertsmith.text.remote import is_url

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
