"""Copy a token store to a URL of an object storage, from where runs can read it.

Examples:
    bertsmith corpus-publish store s3://bucket/store
    bertsmith pretrain --corpus s3://bucket/store --out run --minutes 60

Every block is verified on its way and the manifest comes last. A copy that was interrupted, or one
of a store that has grown, goes on with the same command.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro


@dataclass
class CorpusPublish:
    store: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="STORE")]
    """Folder of a store made by `bertsmith corpus`."""
    url: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="URL")]
    """Where to: s3://bucket/name, gs://..., or what else fsspec knows."""


def run(settings: CorpusPublish) -> None:
    from bertsmith.corpus.publish import publish
    from bertsmith.corpus.store import TokenStore
    from bertsmith.corpus.verify import store_bytes
    from bertsmith.progress import Progress
    from bertsmith.text.remote import is_url

    if not is_url(settings.url):
        raise ValueError(f"{settings.url}: no URL: expected something like s3://bucket/store")
    size = store_bytes(TokenStore.open(settings.store))
    with Progress("publish", size, "MB", 1e6) as progress:
        manifest = publish(settings.store, settings.url, progress.update)
    print(f"{settings.url}: {manifest['documents']:,} documents, {manifest['tokens']:,} tokens")
