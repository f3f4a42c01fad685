"""The manifest of a checkpoint: its files with sizes and checksums. It is written last.

{"format": 1, "step": 600, "identity": "53a8...",
    "files": {"state.json": {"bytes": 481, "sha256": "9f2c..."}, ...},
    "sha256": "c07b..."}        the last one of all that stands before it
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bertsmith.faults import fault_point
from bertsmith.files import write_text

MANIFEST_FILE = "manifest.json"
MANIFEST_FORMAT = 1


class NotWhole(ValueError):
    """A checkpoint that nothing may be read from, and why, in a few words."""


def write_manifest(folder: Path, facts: Mapping[str, Any]) -> None:
    """Say of every file of the folder what it is; from now on the checkpoint is whole."""
    files = {}
    for file in sorted(folder.iterdir()):
        files[file.name] = {"bytes": file.stat().st_size, "sha256": _sha256(file)}
        fault_point("checkpoint-hashed")
    write_text(folder / MANIFEST_FILE, _text({"format": MANIFEST_FORMAT, **facts, "files": files}))


def read_whole(folder: Path) -> dict[str, Any]:
    """The manifest of a folder whose every byte is as it was written; all files are read.

    Errors: NotWhole that names the file which is absent, truncated or damaged; OSError.
    """
    manifest = _read_manifest(folder / MANIFEST_FILE)
    for name, entry in manifest["files"].items():
        file = folder / name
        if not file.exists():
            raise NotWhole(f"{name} is missing")
        size, expected = file.stat().st_size, entry["bytes"]
        if size != expected:
            what = "truncated" if size < expected else "too long"
            raise NotWhole(f"{name} is {what}: {size:,} bytes, not {expected:,}")
        if _sha256(file) != entry["sha256"]:
            raise NotWhole(f"{name} is damaged: its bytes are not those that were written")
    return manifest


def _read_manifest(file: Path) -> dict[str, Any]:
    if not file.exists():
        raise NotWhole(f"half-written: no {MANIFEST_FILE}")
    stored = file.read_bytes()
    try:
        manifest = json.loads(stored)
    except ValueError:  # neither JSON nor UTF-8
        manifest = None
    if isinstance(manifest, dict):
        manifest.pop("sha256", None)
    # written again it is the same, to the byte, or it is not what was written
    if not isinstance(manifest, dict) or _text(manifest).encode() != stored:
        raise NotWhole(f"{MANIFEST_FILE} is truncated or damaged")
    if manifest.get("format") != MANIFEST_FORMAT:
        raise NotWhole(
            f"{MANIFEST_FILE} has format {manifest.get('format')!r}, not {MANIFEST_FORMAT}"
        )
    return manifest


def _text(manifest: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(manifest).encode()).hexdigest()
    return json.dumps({**manifest, "sha256": digest}, indent=2) + "\n"


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
