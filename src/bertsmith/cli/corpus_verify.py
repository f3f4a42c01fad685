"""Read every block of a token store and compare it with its checksum.

Examples:
    bertsmith corpus-verify store
    bertsmith corpus-verify s3://bucket/store --json

A line for every file or block that is not as it was written; the exit code is 1 when there is one
(2 without a manifest that can be read: then nothing else can be told).
A run verifies each block when it first reads it; this command reads all of them beforehand.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated

import tyro


@dataclass
class CorpusVerify:
    store: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="STORE")]
    """Token store made by `bertsmith corpus`: a folder or a URL."""
    json: bool = False
    """Print one JSON object."""


def run_corpus_verify(settings: CorpusVerify) -> int:
    from bertsmith.corpus.store import TokenStore
    from bertsmith.corpus.verify import store_bytes, verify_store
    from bertsmith.progress import Progress

    store = TokenStore.open(settings.store)
    size, faults = store_bytes(store), []
    with Progress("verify", size, "MB", 1e6) as progress:
        for fault in verify_store(settings.store, progress.update):
            faults.append(fault)
            if not settings.json:
                print(fault, flush=True)
    if settings.json:
        print(json.dumps({"store": settings.store, "bytes": size, "faults": faults}))
    elif not faults:
        print(f"{settings.store}: sound ({size / 1e6:,.1f} MB, generation {store.generation})")
    return 1 if faults else 0
