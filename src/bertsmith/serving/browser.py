"""Files for a browser: the page, the files it is made of, and the reports of run folders.

Every file has an operation of its own, made when the models are opened: no part of a request's path
ever becomes part of a file's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from bertsmith.serving.application import Application, Headers, Operation, Refused, Reply, Request
from bertsmith.serving.models import ServedModel

TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
}
NOTHING_LEAVES = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
PAGE_POLICY = NOTHING_LEAVES + "script-src 'self'; style-src 'self'; img-src data:; "
PAGE_POLICY += "connect-src 'self'"
# A report is one file. In a sandbox it is of no origin: its scripts reach neither key nor routes.
REPORT_POLICY = NOTHING_LEAVES + "script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
REPORT_POLICY += "img-src data:; font-src data:; sandbox allow-scripts"
FOR_EVER = b"public, max-age=31536000, immutable"  # the address has a digest of the contents


def page_operations(models: Iterable[ServedModel]) -> list[Operation]:
    """The page at /, its files below /page/DIGEST/, and reports at /reports/MODEL/FILE."""
    folder = Path(__file__).with_name("page")
    assets = {path.name: path.read_bytes() for path in folder.iterdir()}
    names = sorted(assets)
    digest = hashlib.sha256(b"".join(assets[name] for name in names)).hexdigest()[:16]
    index = assets.pop("index.html").replace(b"page/HASH/", f"page/{digest}/".encode())
    found = [_page(index)]
    found += [_asset(f"/page/{digest}/{name}", body) for name, body in assets.items()]
    found += [_report(model, name) for model in models for name in model.reports]
    return found


def headers(cached: bytes, policy: str) -> Headers:
    """The headers that every file has."""
    return [
        (b"cache-control", cached),
        (b"content-security-policy", policy.encode()),
        (b"x-content-type-options", b"nosniff"),
        (b"referrer-policy", b"no-referrer"),
    ]


def _page(index: bytes) -> Operation:
    """The page for browsers; for clients of text-embeddings-inference / is the server's health."""

    async def respond(app: Application, request: Request, body: None) -> Reply:
        if b"text/html" not in request.headers.get(b"accept", b""):
            return Reply(content_type=b"text/plain", headers=[(b"vary", b"Accept")])
        own = [*headers(b"no-cache", PAGE_POLICY), (b"vary", b"Accept")]
        return Reply(index, TYPES[".html"], headers=own)

    return Operation("/", respond, summary="The page", is_open=True)


def _asset(path: str, body: bytes) -> Operation:
    reply = Reply(body, TYPES[path[path.rindex(".") :]], headers=headers(FOR_EVER, PAGE_POLICY))

    async def respond(app: Application, request: Request, body: None) -> Reply:
        return reply

    return Operation(path, respond, summary="A file of the page", is_open=True)


def _report(model: ServedModel, name: str) -> Operation:
    """A report as it is now. It may tell texts of the training data, and needs a key."""

    async def respond(app: Application, request: Request, body: None) -> Reply:
        try:
            report = (model.folder / name).read_bytes()
        except OSError as error:
            raise Refused(404, f"report {name!r} of model {model.name!r} is gone") from error
        return Reply(report, TYPES[".html"], headers=headers(b"no-cache", REPORT_POLICY))

    return Operation(f"/reports/{model.name}/{name}", respond, summary="A report")
