"""A request's way: who asks, how much, what; the models' answer; headers, numbers and a log line.

It is an ASGI application without a framework between: on small models that would cost as much as
the answer. Requests are decoded and checked by msgspec against the classes of routes.py, which are
also what /openapi.json says.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import hashlib
import hmac
import itertools
import os
import re
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

import msgspec
import orjson

from bertsmith.base.settings import nearest, options
from bertsmith.serving.batching import Batcher, Busy, Job
from bertsmith.serving.metrics import Metrics
from bertsmith.serving.models import ServedModel
from bertsmith.serving.settings import ServingSettings

WATCHED_AFTER = 0.05  # seconds until somebody looks whether the client is still there
MAX_NUMBERS = 10_000_000  # in an answer
BODY_SECONDS = 10.0  # for a body to arrive
JSON = b"application/json"
REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
FIELD = re.compile(r" - at `\$\.?(.*)`$")
NAMED = re.compile(r"Object (missing required|contains unknown) field `(.*)`")
SETTING = re.compile(r"`(\w+)=")  # at the start of the library's messages
Headers = list[tuple[bytes, bytes]]


class Refused(Exception):
    """A request that is not answered: status, a message for its sender, and the field at fault."""

    def __init__(
        self, status: int, message: str, field: str | None = None, headers: Sequence[Any] = ()
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.field, self.headers = status, message, field, [*headers]


@dataclass(frozen=True)
class Reply:
    """An answer: a value for JSON, or bytes as they are."""

    body: Any = b""
    content_type: bytes = JSON
    status: int = 200
    headers: Headers = field(default_factory=list)


@dataclass(eq=False)
class Request:
    """A request, and what it has cost until now."""

    method: str
    path: str
    headers: dict[bytes, bytes]
    id: str
    started: float
    body: bytes = b""
    jobs: list[Job] = field(default_factory=list)
    is_left: bool = False
    """The client has gone."""
    watcher: asyncio.Task[None] | None = None


@dataclass(frozen=True)
class Operation:
    """One method of one path, and its description."""

    path: str
    respond: Callable[[Application, Request, Any], Awaitable[Any]]
    """(Application, request, decoded body) -> the answer, or a `Reply`."""
    body: Any = None
    """The class of the body; None: it has none."""
    answer: Any = None
    """The class of the answer, for the documentation."""
    summary: str = ""
    example: dict[str, Any] = field(default_factory=dict)
    error: Callable[[Refused], Any] | None = None
    """The body of a refusal; None: as OpenAI's, see `openai_error`."""
    is_open: bool = False
    """Answered without a key."""
    needs: tuple[str, ...] = ()
    """Methods of which a model must have one; (): none."""

    @property
    def method(self) -> str:
        return "GET" if self.body is None else "POST"

    def decoder(self) -> msgspec.json.Decoder[Any] | None:
        return None if self.body is None else msgspec.json.Decoder(self.body)


ERROR_TYPES = {
    401: "authentication_error",
    404: "not_found",
    413: "request_too_large",
    429: "overloaded",
    500: "server_error",
    503: "unavailable",
    504: "timeout",
}


def openai_error(refused: Refused) -> dict[str, Any]:
    """
    >>> openai_error(Refused(422, "expected a text", "text"))["error"]["param"]
    'text'
    """
    kind = ERROR_TYPES.get(refused.status, "invalid_request_error")
    return {
        "error": {
            "message": refused.message,
            "type": kind,
            "param": refused.field,
            "code": refused.status,
        }
    }


class Application:
    """Models by name, and the operations that they can do."""

    def __init__(
        self,
        models: dict[str, ServedModel],
        operations: Sequence[Operation],
        settings: ServingSettings,
        metrics: Metrics,
        keys: Sequence[bytes],
    ) -> None:
        self.models, self.settings, self.metrics = models, settings, metrics
        self.operations = list(operations)
        self.routes = {
            (method, own.path): (own, own.decoder())
            for own in operations
            for method in ((own.method, "HEAD") if own.body is None else (own.method,))
        }
        self.paths = {own.path for own in operations}
        self.keys = keys
        threads = max(model.threads for model in models.values())
        self.batcher = Batcher(threads, settings.max_wait, settings.max_tokens, metrics.on_batch)
        self.is_draining = False
        self.lifeline = -1  # a file that can be read when the first process is gone
        self._prefix, self._numbers = "", itertools.count(1)

    def start(self) -> None:
        """Begin to answer, in this process."""
        self._prefix = os.urandom(6).hex()
        self.batcher.start()

    # --- the way of a request

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        assert scope["type"] == "http", scope["type"]
        started = time.perf_counter()
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        name = given if REQUEST_ID.fullmatch(given) else b"%s-%x" % (
            self._prefix.encode(), next(self._numbers),
        )  # fmt: skip
        request = Request(scope["method"], scope["path"], headers, name.decode(), started)
        operation, decoder = self.routes.get((request.method, request.path), (None, None))
        try:
            reply = await self._reply(request, operation, decoder, receive)
        except Refused as refused:
            reply = self._refusal(refused, operation)
        except TimeoutError:
            message = f"no answer within {self.settings.timeout:g} seconds"
            reply = self._refusal(Refused(504, message), operation)
        except asyncio.CancelledError:
            if not request.is_left:
                raise
            reply = Reply(status=499)  # for the log alone
        except Exception:
            reply = self._failure(request, operation)
        if not request.is_left:
            await self._send(request, reply, send)
        self._account(request, operation, reply)

    async def _reply(
        self, request: Request, operation: Operation | None, decoder: Any, receive: Any
    ) -> Reply:
        if request.method == "OPTIONS" and b"origin" in request.headers:
            return Reply(status=204, headers=self._preflight())
        if operation is None:
            self._refuse_unknown(request)
        if not operation.is_open:
            self._check_key(request)
        try:
            if decoder is not None:
                # where there is no room it is refused before it is read
                self.batcher.check_room("", 1, self._length(request) // 4)
            async with asyncio.timeout(self.settings.timeout):
                found = await self._respond(request, operation, decoder, receive)
        except Busy as busy:
            wait = b"%d" % max(1, round(busy.seconds + 0.5))
            raise Refused(429, str(busy), headers=[(b"retry-after", wait)]) from busy
        return found if isinstance(found, Reply) else Reply(found)

    async def _respond(
        self, request: Request, operation: Operation, decoder: Any, receive: Any
    ) -> Any:
        given = None
        if decoder is not None:
            request.body = await self._read(request, receive)
            given = decoded(decoder, request.body)
        watch = asyncio.get_running_loop().call_later(
            WATCHED_AFTER, self._watch, request, receive, asyncio.current_task()
        )
        try:
            return await operation.respond(self, request, given)
        finally:
            watch.cancel()
            if request.watcher:
                request.watcher.cancel()
                request.watcher = None  # a circle, which only the garbage collector would free

    def _watch(self, request: Request, receive: Any, task: asyncio.Task[Any] | None) -> None:
        """Stop the work of a request whose client leaves."""

        async def wait() -> None:
            assert task is not None
            while (await receive())["type"] != "http.disconnect":
                pass
            request.is_left = True
            task.cancel()

        request.watcher = asyncio.ensure_future(wait())

    def _refuse_unknown(self, request: Request) -> NoReturn:
        methods = [own.method for own in self.operations if own.path == request.path]
        if methods:
            allowed = ", ".join(sorted({*methods, *(["HEAD"] if "GET" in methods else [])}))
            raise Refused(
                405, f"{request.path} is for {allowed}", headers=[(b"allow", allowed.encode())]
            )
        known = ", ".join(sorted(path for path in self.paths if path.startswith("/v1/")))
        raise Refused(404, f"no such path here; known are {known}")

    def _check_key(self, request: Request) -> None:
        if not self.keys:
            return
        scheme, _, key = request.headers.get(b"authorization", b"").partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        # all are compared, in constant time
        found = [hmac.compare_digest(digest, own) for own in self.keys]
        if scheme.lower() != b"bearer" or not any(found):
            raise Refused(
                401, "no valid key: send the header Authorization: Bearer KEY",
                headers=[(b"www-authenticate", b"Bearer")],
            )  # fmt: skip

    def _length(self, request: Request) -> int:
        """Bytes of the body, as its sender says; 0 where it does not say."""
        given = request.headers.get(b"content-length", b"0")
        length = int(given) if given.isdigit() and len(given) < 16 else 0
        if length > self.settings.max_body:
            self._refuse_large()
        kind = request.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if kind != JSON:  # a page elsewhere cannot send it unasked
            raise Refused(415, "the body must be JSON: send Content-Type: application/json")
        if b"upgrade" in request.headers:  # the parser takes what follows for the other protocol's
            raise Refused(
                400, "a body cannot come with an upgrade of the protocol: use HTTP/1.1",
                headers=[(b"connection", b"close")],
            )  # fmt: skip
        return length

    def _refuse_large(self) -> NoReturn:
        # the connection stays: closed, it would break before its client reads why
        raise Refused(
            413, f"the body has more than {self.settings.max_body:,} bytes: send less at once"
        )

    async def _read(self, request: Request, receive: Any) -> bytes:
        parts, size = [], 0
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        request.is_left = True
                        raise asyncio.CancelledError
                    parts.append(message["body"])
                    size += len(message["body"])
                    if size > self.settings.max_body:
                        self._refuse_large()
                    if not message["more_body"]:
                        return b"".join(parts)
        except TimeoutError:
            raise Refused(
                408, f"the body did not arrive within {BODY_SECONDS:g} seconds",
                headers=[(b"connection", b"close")],
            ) from None  # fmt: skip

    # --- what operations use

    def model(self, name: str | None, *methods: str) -> ServedModel:
        """The model of that name, or the first for one of the methods, see `choose_model`."""
        try:
            return choose_model(self.models, name, methods)
        except ValueError as error:
            raise Refused(404, str(error), "model") from error

    async def ask(
        self,
        request: Request,
        model: ServedModel,
        method: str,
        items: Sequence[tuple[Any, ...]],
        /,
        **options: Any,
    ) -> list[Any]:
        """The answers of a model's method to items, computed together with other requests'."""
        if len(items) > self.settings.max_texts:
            raise Refused(
                413, f"{len(items):,} texts: send at most {self.settings.max_texts:,} at once"
            )
        job, timeout = model.job(method, items, **options), self.settings.timeout
        seconds = self.batcher.seconds(job.kind, sum(job.costs)) / self.batcher.threads
        # such work would be for nothing, and a text that has begun cannot be stopped
        if seconds > timeout:
            raise Refused(
                413,
                f"about {seconds:,.0f} seconds of work, of {timeout:g} at most: send less at once",
            )
        if job.numbers > MAX_NUMBERS:
            raise Refused(
                413,
                f"an answer of {job.numbers:,} numbers, of {MAX_NUMBERS:,} at most: send less at"
                " once, or ask for fewer of each",
            )
        request.jobs.append(job)
        try:
            return await self.batcher.run(job)
        except ValueError as error:
            named = SETTING.match(str(error))
            field = named[1] if named and named[1] in options else None
            raise Refused(422, model.public(str(error)), field) from error

    # --- answers

    def _refusal(self, refused: Refused, operation: Operation | None) -> Reply:
        body = ((operation and operation.error) or openai_error)(refused)
        found = body if isinstance(body, Reply) else Reply(body, status=refused.status)
        return Reply(
            found.body, found.content_type, found.status, [*found.headers, *refused.headers]
        )

    def _failure(self, request: Request, operation: Operation | None) -> Reply:
        """The answer to a fault of ours, which is told to the log alone."""
        lines = traceback.format_exc().splitlines()
        log({"level": "error", "id": request.id, "path": request.path, "traceback": lines})
        message = f"a fault of the server; its log tells more under {request.id}"
        return self._refusal(Refused(500, message), operation)

    def _preflight(self) -> Headers:
        return [
            (b"access-control-allow-methods", b"GET, POST"),
            (b"access-control-allow-headers", b"authorization, content-type, x-request-id"),
            (b"access-control-max-age", b"600"),
        ]

    async def _send(self, request: Request, reply: Reply, send: Any) -> None:
        body = reply.body
        if not isinstance(body, bytes):
            body = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        headers = [(b"x-request-id", request.id.encode()), *reply.headers]
        if reply.status != 204:
            headers.append((b"content-length", b"%d" % len(body)))
        if body:
            headers.append((b"content-type", reply.content_type))
        if self.is_draining:
            headers.append((b"connection", b"close"))
        allowed = self.settings.allow_origin
        origin = request.headers.get(b"origin")
        if origin and ("*" in allowed or origin.decode("latin-1") in allowed):
            headers += [(b"access-control-allow-origin", origin), (b"vary", b"Origin")]
        start = {"type": "http.response.start", "status": reply.status, "headers": headers}
        await send(start)
        await send({"type": "http.response.body", "body": body})

    def _account(self, request: Request, operation: Operation | None, reply: Reply) -> None:
        seconds = time.perf_counter() - request.started
        route = operation.path if operation else "other"
        self.metrics.on_request(route, reply.status, seconds)
        began = [job.began - job.queued_at for job in request.jobs if job.began is not None]
        tokens = sum(sum(job.tokens) for job in request.jobs)
        if began:
            self.metrics.queue_seconds.observe(max(began))
            self.metrics.request_tokens.observe(tokens)
        if request.jobs:
            self.metrics.queued_requests.set(len(self.batcher.queue))
            self.metrics.queued_tokens.set(self.batcher.queued_tokens)
        kind = self.settings.log
        if kind == "errors" and reply.status < 500:
            return
        line = {
            "time": round(time.time(), 3),
            "id": request.id,
            "method": request.method,
            "path": route,
            "status": reply.status,
            "ms": round(1000 * seconds, 2),
            "texts": sum(len(job.items) for job in request.jobs),
            "tokens": tokens,
        }
        if kind == "texts":
            line["body"] = request.body.decode(errors="replace")
        log(line)


def log(line: dict[str, Any]) -> None:
    """Write a line of JSON on stderr; that nobody reads it is no reason to answer nobody."""
    with contextlib.suppress(OSError):
        sys.stderr.write(orjson.dumps(line).decode() + "\n")


def decoded(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    """A body as its class has it. Errors: `Refused` with 422 and the field, or 400 for no JSON."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        message, field = str(error), None
        if place := FIELD.search(message):
            message, field = message[: place.start()], place[1]
        if named := NAMED.fullmatch(message):
            field = named[2] if field is None else f"{field}.{named[2]}"
            if named[1] == "contains unknown":
                known = decoder.type.__struct_fields__
                message += f": {nearest(named[2][:64], known)}"
        elif message.startswith("Invalid enum value"):
            known = options(get_type_hints(decoder.type).get(field or "", type(None)))
            message += f": known are {', '.join(known)}" if known else ""
        raise Refused(422, message, field) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(400, f"the body is not JSON in UTF-8: {error}") from error


def choose_model(
    models: dict[str, ServedModel], name: str | None, methods: Sequence[str]
) -> ServedModel:
    """The model of that name, or without one the first that was made for one of the methods, or
    can do it besides.

    Errors: ValueError for an unknown name, and a model that can do none of them.
    """
    if name is not None:
        if name not in models:
            raise ValueError(f"model {name!r}: {nearest(name, models)}")
        found = models[name]
        if not set(methods) & set(found.methods):
            raise ValueError(
                f"model {name!r} cannot {' or '.join(methods)}, but {', '.join(found.methods)}"
            )
        return found
    for found in sorted(models.values(), key=lambda model: model.methods[0] not in methods):
        if set(methods) & set(found.methods):
            return found
    raise ValueError(f"no model here can {' or '.join(methods)}")


def read_keys(path: Path | None) -> list[bytes]:
    """Digests of the keys in a file, one a line; [] without a file.

    Errors: ValueError for a file without a key.
    """
    if path is None:
        return []
    stored = path.read_bytes().removeprefix(codecs.BOM_UTF8)  # of an editor on Windows
    keys = [line.strip() for line in stored.splitlines()]
    found = [hashlib.sha256(key).digest() for key in keys if key and not key.startswith(b"#")]
    if not found:
        raise ValueError(f"{path}: no key in it: write one a line")
    return found
