"""Copy a token store to a URL of an object storage, from where runs can read it.

Examples:
    bertsmith corpus-publish store s3://bucket/store
    bertsmith pretrain --corpus s3://bucket/store --out run --minutes 60

Every block is verified on its way and the manifest comes last. The same command goes on with a copy
that was interrupted, sends what is new of a store that has grown, and mends a damaged copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro


@dataclass
class CorpusPublish:
    store: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="STORE")]
    """Folder of a store made by `bertsmith corpus`."""
    url: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="URL")]
    """Where to: s3://bucket/name, gs://..., or what else fsspec knows."""


def run_corpus_publish(settings: CorpusPublish) -> None:
    from pathlib import Path

    from bertsmith.corpus.publish import publish
    from bertsmith.text.remote import is_url

    if not is_url(settings.url):
        raise ValueError(f"{settings.url}: no URL: expected something like s3://bucket/store")
    if is_url(settings.store):
        raise ValueError(f"{settings.store}: a URL: name the folder of a store on this machine")
    manifest = publish(Path(settings.store), settings.url)
    print(f"{settings.url}: {manifest['documents']:,} documents, {manifest['tokens']:,} tokens")
