"""A request without a socket, a model that echoes, and a server as a process."""

import asyncio
import contextlib
import functools
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from bertsmith.serving.application import Application, Operation, read_keys
from bertsmith.serving.batching import Job
from bertsmith.serving.metrics import Metrics
from bertsmith.serving.settings import ServingSettings


class Answer(NamedTuple):
    """What came back; `body` is decoded where it is JSON."""

    status: int
    headers: dict[str, str]
    body: Any


def decoded(status, headers, body):
    if headers.get("content-type") == "application/json" and body:
        body = json.loads(body)
    return Answer(status, headers, body)


@functools.cache
def metrics():
    """Those of this process: prometheus_client has but one folder."""
    return Metrics(Path(tempfile.mkdtemp(prefix="test-metrics-")))


class EchoModel:
    """Answers each text by itself, in `seconds` each; "fault" is a fault of ours, "bad" of theirs.

    `calls` are the texts of each call.
    """

    name, methods, threads = "echo", ("classify",), 1

    def __init__(self, seconds=0.0):
        self.seconds, self.calls = seconds, []

    def call(self, items, threads):
        self.calls.append(texts := [text for (text,) in items])
        time.sleep(self.seconds * len(texts))
        if "fault" in texts:
            raise RuntimeError("/secret/place is gone")
        if "bad" in texts:
            raise ValueError("/secret/place: a bad text")
        return texts

    def job(self, method, items):
        return Job("echo/classify", self, self.call, items, [10] * len(items))

    def public(self, message):
        return message.replace("/secret/place", "model 'echo'")


class Texts(msgspec.Struct, forbid_unknown_fields=True):
    text: list[str]
    model: str | None = None


async def echo(app, request, body):
    return {"answers": await app.ask(request, app.model(body.model, "classify"), "classify",
                                     [(text,) for text in body.text])}  # fmt: skip


async def home(app, request, body):
    return {"at": "home"}


ECHO = Operation("/v1/echo", echo, Texts, example={"text": ["a"]})
HOME = Operation("/v1/home", home)
OPEN = Operation("/open", home, is_open=True)


@contextlib.contextmanager
def application(model=None, operations=(ECHO, HOME, OPEN), **settings):
    """An application of one model, or of several by name, whose threads run."""
    models = model if isinstance(model, dict) else {"echo": model or EchoModel()}
    settings = ServingSettings(**{"log": "errors", **settings})
    operations = operations(models, settings) if callable(operations) else operations
    made = Application(models, operations, settings, metrics(), read_keys(settings.api_key_file))
    made.start()
    try:
        yield made
    finally:
        made.batcher.close()


async def asked(app, method, path, body=b"", headers=(), receive=None):
    """The answer to a request that is sent straight into the application."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    given = {
        "content-type": "application/json",
        "content-length": str(len(content)),
        **dict(headers),
    }
    pairs = [(k.encode(), v.encode()) for k, v in given.items()]
    scope = {"type": "http", "method": method, "path": path, "headers": pairs}
    sent, messages = [], [{"type": "http.request", "body": content, "more_body": False}]

    async def one():
        if messages:
            return messages.pop()
        return await asyncio.Future()  # the client stays

    async def send(message):
        sent.append(message)

    await app(scope, receive or one, send)
    if not sent:
        return None
    start, *parts = sent
    answered = {name.decode(): value.decode() for name, value in start["headers"]}
    return decoded(start["status"], answered, b"".join(part["body"] for part in parts))


def ask(*arguments, **named):
    return asyncio.run(asked(*arguments, **named))


class Served:
    """A server as a process."""

    def __init__(self, process, log):
        self.process, self._log = process, log
        self.line = process.stdout.readline()
        assert "http://" in self.line, self.log
        self.port = int(self.line.partition("http://127.0.0.1:")[2].partition(",")[0])
        self.address = f"http://127.0.0.1:{self.port}"

    @property
    def log(self):
        return self._log.read_text()

    @property
    def workers(self):
        """Processes that answer."""
        task = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return sorted(map(int, task.read_text().split()))

    def connect(self, timeout=20):
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)

    def raw(self, timeout=20):
        return socket.create_connection(("127.0.0.1", self.port), timeout)

    def ask(self, method, path, body=None, connection=None, **headers):
        own = connection or self.connect()
        content = None if body is None else json.dumps(body)
        own.request(method, path, content, {"Content-Type": "application/json", **headers})
        answer = own.getresponse()
        found = {name.lower(): value for name, value in answer.getheaders()}
        result = decoded(answer.status, found, answer.read())
        if connection is None:
            own.close()
        return result

    def send(self, number):
        self.process.send_signal(number)

    def end(self, number=signal.SIGTERM):
        """Its exit code after a signal."""
        self.send(number)
        return self.process.wait(30)


@contextlib.contextmanager
def server(*words, **environment):
    """`bertsmith serve WORDS`, on a free port."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("w") as err:
            process = subprocess.Popen(
                [sys.executable, "-m", "bertsmith", "serve", *map(str, words), "--port", "0"],
                stdout=subprocess.PIPE, stderr=err, text=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
            )  # fmt: skip
            try:
                yield Served(process, log)
            finally:
                process.kill()
                process.wait()
                process.stdout.close()


def until(condition, seconds=15.0):
    """Wait for something to become true."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "waited for nothing"
        time.sleep(0.01)
    return found
