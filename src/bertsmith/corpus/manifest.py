"""The manifest of a token store: its shards and the checksums of everything, sealed by a digest.

A manifest is written last and never changed: text that is appended comes with a manifest of its
own, the next *generation*, and the one before stays beside it under its number.

    manifest.json          the newest generation
    manifest-0001.json     the first one, where there is a second
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from bertsmith.files import write_text

FORMAT = 2
MANIFEST = "manifest.json"
DIGEST = "sha256"
REBUILD = "remove the folder and build it again with `bertsmith corpus`"


def earlier_manifest(generation: int) -> str:
    """The name under which the manifest of a generation is kept when it is not the newest.

    >>> earlier_manifest(1)
    'manifest-0001.json'
    """
    return f"manifest-{generation:04d}.json"


def sealed(content: dict[str, Any]) -> dict[str, Any]:
    """The content with the format and the digest of both; the digest is the store's fingerprint.

    >>> manifest = sealed({"generation": 1})
    >>> manifest["format"], manifest == sealed(manifest), len(manifest["sha256"])
    (2, True, 64)
    """
    body = {"format": FORMAT, **{key: content[key] for key in content if key != DIGEST}}
    text = json.dumps(body, sort_keys=True)
    return {"format": FORMAT, DIGEST: hashlib.sha256(text.encode()).hexdigest()} | body


def manifest_text(manifest: dict[str, Any]) -> str:
    """The one way in which a manifest is written, so that no byte of it can change unseen."""
    return json.dumps(manifest, indent=1, allow_nan=False) + "\n"


def write_manifest(path: Path, manifest: dict[str, Any]) -> None:
    """Write a sealed manifest, whole or not at all."""
    assert manifest == sealed(manifest)
    write_text(path, manifest_text(manifest))


def read_manifest(content: bytes, name: str, remedy: str = REBUILD) -> dict[str, Any]:
    """The manifest of a file's content; `name` and `remedy` stand in the errors.

    Errors: ValueError for another format, and where a byte of it is not as it was written.
    """
    try:
        manifest = json.loads(content)
    except ValueError as error:  # also what is not UTF-8
        raise ValueError(f"{name}: damaged, not valid JSON ({error}); {remedy}") from error
    if not isinstance(manifest, dict) or "splits" not in manifest:
        # A checkpoint has a file of this name too: nobody shall be told to remove that.
        raise ValueError(
            f"{name}: damaged, or not of a token store: name one made by `bertsmith corpus`"
        )
    if manifest.get("format") != FORMAT:
        raise ValueError(
            f"{name}: a token store of format {manifest.get('format')!r}, not {FORMAT}; {remedy}"
        )
    if sealed(manifest) != manifest or manifest_text(manifest).encode() != content:
        raise ValueError(f"{name}: damaged: it is not what its {DIGEST} was made of; {remedy}")
    return manifest
