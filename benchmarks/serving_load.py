"""Load for benchmarks/serving.py: closed loop by wrk, open loop by a client of our own.

Closed loop: so many connections, each sends when it has its answer; what a server can do at most.
Open loop: requests are sent at a constant rate, whatever the answers do, and latency counts from
the moment at which a request should have been sent; what users feel.
"""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httptools
import numpy as np

MOST_CONNECTIONS = 4096  # of the open loop; later requests wait, and their clock runs
FIRST_CONNECTIONS = 1024  # of it, opened before its clock runs; more when all are in use
PATIENCE = 5.0  # seconds for answers after the last request
SCRIPT = """
local requests, k = {}, 0
function init(arguments)
  for body in io.lines(arguments[1]) do
    requests[#requests + 1] = wrk.format(
      "POST", nil, {["content-type"] = "application/json"}, body)
  end
end
function request()
  k = k % #requests + 1
  return requests[k]
end
function done(summary, latency)
  local e = summary.errors
  print(string.format("counted %d %d %d %d %d", summary.requests, summary.duration,
    latency:percentile(50), latency:percentile(99),
    e.connect + e.read + e.write + e.status + e.timeout))
end
"""


@dataclass(frozen=True)
class Load:
    """A load, as its answers were."""

    rate: float
    """Answers a second."""
    p50_ms: float
    p99_ms: float
    failed: int
    """Requests without a good answer."""
    cpu: float
    """The generator's share of all cores."""


def closed_loop(url: str, bodies: Sequence[bytes], connections: int, seconds: int) -> Load:
    """Load by wrk; connections send the bodies in turn. Errors: SystemExit if wrk ends badly."""
    with tempfile.TemporaryDirectory() as work:
        script, file = Path(work) / "load.lua", Path(work) / "bodies"
        script.write_text(SCRIPT)
        file.write_bytes(b"\n".join(bodies))
        words = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "--timeout", "30s"]
        before = _seconds(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [*words, "-s", str(script), url, "--", str(file)], capture_output=True, text=True
        )
        used = _seconds(resource.RUSAGE_CHILDREN) - before
    if done.returncode:
        raise SystemExit(f"wrk: {done.stdout}{done.stderr}")
    [line] = [line for line in done.stdout.splitlines() if line.startswith("counted")]
    answers, duration, p50, p99, failed = map(int, line.split()[1:])
    if not answers:
        p50 = p99 = duration  # at least
    return Load(
        round((answers - failed) / duration * 1e6, 2),
        round(p50 / 1e3, 2),
        round(p99 / 1e3, 2),
        failed,
        round(used / (duration / 1e6) / (os.cpu_count() or 1), 4),
    )


def _seconds(whose: int) -> float:
    """Of processor time."""
    used = resource.getrusage(whose)
    return used.ru_utime + used.ru_stime


@dataclass
class Answer:
    """An answer of the open loop; without one, status 0."""

    number: int
    due: float
    status: int = 0
    seconds: float = 0.0
    """From the moment at which the request was due."""
    body: bytes = b""


class Connection(asyncio.Protocol):
    """One that is kept open: a request, its answer, the next request."""

    def __init__(self, client: Client) -> None:
        self.client, self.answer, self.parts = client, None, []
        self.parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.client.free(self)

    def send(self, answer: Answer) -> None:
        self.answer, self.parts = answer, []
        requests = self.client.requests
        self.transport.write(requests[answer.number % len(requests)])

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self.parts.append(body)

    def on_message_complete(self) -> None:
        answer, self.answer = self.answer, None
        if answer is None:  # nobody asked
            return
        answer.seconds = time.perf_counter() - answer.due
        answer.status, answer.body = self.parser.get_status_code(), b"".join(self.parts)
        is_kept = self.parser.should_keep_alive()
        self.parser = httptools.HttpResponseParser(self)
        if is_kept:
            self.client.free(self)
        else:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.client.lose(self)


class Client:
    """Requests at their times over as many connections as it takes."""

    def __init__(self, port: int, requests: Sequence[bytes]) -> None:
        self.port, self.requests = port, requests
        self.idle: list[Connection] = []
        self.waiting: deque[Answer] = deque()
        self.open = 0

    def free(self, connection: Connection) -> None:
        if self.waiting:
            connection.send(self.waiting.popleft())
        else:
            self.idle.append(connection)

    def lose(self, connection: Connection) -> None:
        self.open -= 1
        if connection in self.idle:
            self.idle.remove(connection)

    def send(self, answer: Answer) -> None:
        if self.idle:
            self.idle.pop().send(answer)
            return
        self.waiting.append(answer)
        self.connect()

    def connect(self) -> None:
        """Begin to open one more."""
        if self.open < MOST_CONNECTIONS:
            self.open += 1
            loop = asyncio.get_running_loop()
            task = loop.create_task(
                loop.create_connection(lambda: Connection(self), "127.0.0.1", self.port)
            )
            task.add_done_callback(self._opened)

    def _opened(self, task: asyncio.Task[Any]) -> None:
        if task.cancelled() or task.exception() is not None:
            self.open -= 1

    async def run(self, rate: float, seconds: float) -> list[Answer]:
        for _ in range(FIRST_CONNECTIONS):
            self.connect()
        end = time.perf_counter() + PATIENCE
        while len(self.idle) < self.open and time.perf_counter() < end:
            await asyncio.sleep(0.01)
        started = time.perf_counter() + 0.1
        answers = [Answer(k, started + k / rate) for k in range(round(rate * seconds))]
        for answer in answers:
            if (early := answer.due - time.perf_counter()) > 0:
                await asyncio.sleep(early)
            self.send(answer)
        end = time.perf_counter() + PATIENCE
        while any(not answer.status for answer in answers) and time.perf_counter() < end:
            await asyncio.sleep(0.05)
        return answers


def open_loop(
    url: str, bodies: Sequence[bytes], rate: float, seconds: float
) -> tuple[list[Answer], float]:
    """(The answers at so many requests a second, the generator's share of all cores)."""
    host, _, path = url.removeprefix("http://").partition("/")
    head = f"POST /{path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    requests = [f"{head}content-length: {len(body)}\r\n\r\n".encode() + body for body in bodies]
    client = Client(int(host.partition(":")[2]), requests)
    began, used = time.perf_counter(), _seconds(resource.RUSAGE_SELF)
    answers = asyncio.run(client.run(rate, seconds))
    used = _seconds(resource.RUSAGE_SELF) - used
    return answers, round(used / (time.perf_counter() - began) / (os.cpu_count() or 1), 4)


def percentile_ms(seconds: Sequence[float], percent: float) -> float | None:
    """In milliseconds; None of nothing.

    >>> percentile_ms([0.001, 0.002, 0.003], 50)
    2.0
    """
    return round(1000 * float(np.percentile(seconds, percent)), 1) if len(seconds) else None
