"""Files behind a URL, in any storage that fsspec knows: s3://, gs://, az://, hf://, https://, ...

What is named without "://" is a local path and is opened without this module.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, BinaryIO

# What the libraries behind fsspec raise besides OSError: module -> names of the classes.
LIBRARY_ERRORS = {
    "aiohttp": ("ClientError",),
    "botocore.exceptions": ("BotoCoreError", "ClientError"),
    "gcsfs.retry": ("HttpError",),
    "google.auth.exceptions": ("GoogleAuthError",),
    "httpx": ("HTTPError",),  # of huggingface_hub, under one name or the other
    "httpx2": ("HTTPError",),
    "azure.core.exceptions": ("AzureError",),
}


def is_url(source: object) -> bool:
    """Whether a source is a URL and no path.

    >>> is_url("s3://bucket/store"), is_url("disk/store"), is_url(PurePosixPath("store"))
    (True, False, False)
    """
    return isinstance(source, str) and "://" in source


def file_system(url: str) -> tuple[Any, str]:
    """fsspec's file system of a URL, and the path in it.

    Errors: ValueError for a kind of URL that is not known or whose package is missing; OSError.
    """
    try:
        from fsspec.core import url_to_fs

        with storage_errors(url):
            return url_to_fs(url)
    except ImportError as error:
        # fsspec says which package it wants; the extra brings fsspec and that of s3.
        in_extra = str(error.name).startswith("fsspec") or url.startswith(("s3://", "s3a://"))
        remedy = ": pip install 'bertsmith[storage]'" * in_extra
        raise ValueError(f"{url}: {error}{remedy}") from error
    except ValueError as error:
        raise ValueError(f"{url}: {error}") from error


@contextmanager
def storage_errors(name: str) -> Iterator[None]:
    """Make any trouble of a storage an OSError in one line that names the file."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, "no such file", name) from error
    except PermissionError as error:
        what = "no permission: check the credentials and the rights of this user"
        raise PermissionError(errno.EACCES, what, name) from error
    except (OSError, *_library_errors()) as error:
        if isinstance(error, OSError) and error.filename is not None:
            raise
        text = " ".join(str(error).split())
        raise OSError(f"{name}: {type(error).__name__}: {text}") from error


def _library_errors() -> list[type[Exception]]:
    return [
        getattr(sys.modules[module], name)
        for module, names in LIBRARY_ERRORS.items()
        if module in sys.modules
        for name in names
    ]


@dataclass(frozen=True)
class RemoteFile:
    """A file of a storage; its text is its URL. Errors: those of `storage_errors`."""

    url: str
    filesystem: Any
    path: str  # within the storage

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        return PurePosixPath(self.path).name

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.path).suffix

    def open(self) -> BinaryIO:
        """A stream with read-ahead that can be entered anywhere, as parquet needs."""
        with storage_errors(self.url):
            return self.filesystem.open(self.path, "rb")

    def size(self) -> int:
        """Bytes; 0 where the storage does not tell."""
        with storage_errors(self.url):
            return self.filesystem.size(self.path) or 0

    def fingerprint(self) -> str:
        """Differs when the file has changed, by what the storage tells of it (an ETag, a time)."""
        with storage_errors(self.url):
            return str(self.filesystem.ukey(self.path))


def remote_files(url: str) -> tuple[list[RemoteFile], bool]:
    """The files of a URL, sorted, hidden ones left out, and whether it is a folder.

    Errors: ValueError for what is not there; those of `file_system`.
    """
    system, path = file_system(url)
    with storage_errors(url):
        if system.isfile(path):
            return [RemoteFile(url, system, path)], False
        if not system.exists(path):
            raise ValueError(f"{url}: no such file or folder")
        found = sorted(system.find(path))
    return [
        RemoteFile(system.unstrip_protocol(one), system, one)
        for one in found
        if not any(part.startswith(".") for part in one.removeprefix(path).split("/"))
    ], True
