"""The server's processes: one that holds the models and the port, and workers that answer.

The first process reads the weights once and forks the workers, which share them. It forks again
where a worker dies, and on SIGHUP reads the models anew, forks workers of the new ones and lets the
old ones end. All of them take connections from one socket, which is never closed between.

SIGTERM and Ctrl-C: workers take no new connection, answer what is under way, and end.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import os
import resource
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from bertsmith.checkpoints.hub import open_model_folder
from bertsmith.inference.engines.processor import Processor
from bertsmith.serving.application import Application, log, read_keys
from bertsmith.serving.metrics import Metrics
from bertsmith.serving.models import ServedModel
from bertsmith.serving.operations import operations_of
from bertsmith.serving.settings import ServingSettings

MAX_HEADERS = 32_768  # bytes of a request before its body
HEADER_SECONDS = 10.0  # for them to arrive
KEEP_ALIVE = 75  # seconds of an idle connection: more than the 60 after which proxies close theirs
IDLE_SECONDS = 1.0  # of a connection from which, at the end, no other request is expected
CANCEL_SECONDS = 5.0  # at the end, beyond a request's own time
RESTART_SECONDS = 1.0  # a worker that dies younger is not replaced before
BACKLOG = 2048
STOPPING = signal.SIGTERM, signal.SIGINT
HANDLED = {*STOPPING, signal.SIGHUP, signal.SIGCHLD}
CLOSING = b"content-length: 0\r\nconnection: close\r\n\r\n"
TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\n" + CLOSING


def serve(models: dict[str, str], processor: Processor, settings: ServingSettings) -> None:
    """Serve models (name -> folder or hub name) until SIGTERM or Ctrl-C.

    Errors: ValueError for a model that cannot be opened, or a port that cannot be had.
    """
    allow_files()
    listener = listen(settings.host, settings.port)
    folder = Path(tempfile.mkdtemp(prefix="bertsmith-serve-"))
    try:
        Supervisor(models, processor, settings, listener, Metrics(folder)).run()
    finally:
        listener.close()
        shutil.rmtree(folder, ignore_errors=True)


def allow_files() -> None:
    """Let this process open as many files, which connections are, as it may."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens. Errors: ValueError for an address that cannot be had."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, UnicodeError) as error:  # the latter of a name with an empty or long part
        reason = getattr(error, "strerror", None) or error
        raise ValueError(
            f"`host={host!r}`, `port={port}`: {reason}: take another one;"
            " `port=0` finds a free port"
        ) from error


@dataclass(frozen=True)
class Worker:
    """The application that a worker process serves, and its start."""

    application: Application
    started: float


class Supervisor:
    """The process that holds models and port."""

    def __init__(
        self,
        names: dict[str, str],
        processor: Processor,
        settings: ServingSettings,
        listener: socket.socket,
        metrics: Metrics,
    ) -> None:
        self.names, self.settings, self.listener = names, settings, listener
        threads = max(1, processor.threads // settings.workers)
        self.processor, self.metrics = replace(processor, threads=threads), metrics
        self.workers: dict[int, Worker] = {}
        self.is_stopping = False
        self.lifeline = os.pipe()  # workers read its end when this process is gone

    def run(self) -> None:
        """Serve until told to stop."""
        self.application = self.open_models()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
        try:
            self.start_workers()
            host, port, *_ = self.listener.getsockname()
            shown = f"[{host}]" if ":" in host else host
            names = ", ".join(
                f"{model.name} ({model.methods[0]})" for model in self.application.models.values()
            )
            print(f"serving {names} at http://{shown}:{port}, to stop press Ctrl-C", flush=True)
            while self.workers:
                self.handle(signal.sigwait(HANDLED))
            if not self.is_stopping:
                raise RuntimeError("all workers have ended, and none can be started")
        finally:
            for process in self.workers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def handle(self, received: int) -> None:
        """Do what a signal asks for."""
        if received in STOPPING:
            self.is_stopping = True
            self.listener.close()  # with the workers' the port is closed: none waits for nothing
            self.stop_workers(self.workers)
        elif received == signal.SIGHUP:
            self.reload()
        else:
            self.bury()

    def open_models(self) -> Application:
        """Read the models and try each: an application that is not yet started."""
        keys = read_keys(self.settings.api_key_file)  # before what takes long
        started = time.perf_counter()
        models = {
            name: ServedModel.open(name, open_model_folder(given), self.processor)
            for name, given in self.names.items()
        }
        for model in models.values():
            if model.is_native:  # others' threads do not survive a fork: see `work`
                model.warm_up()
        seconds = time.perf_counter() - started
        print(f"models opened in {seconds:.1f} s", file=sys.stderr)
        operations = operations_of(models, self.settings)
        found = Application(models, operations, self.settings, self.metrics, keys)
        found.lifeline = self.lifeline[0]
        return found

    def start_workers(self) -> None:
        for _ in range(self.settings.workers):
            self.fork()

    def fork(self) -> None:
        """Start a worker with the application as it is now; returns when it takes connections.

        Errors: ChildProcessError for a worker that does not come so far.
        """
        reader, writer = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        process = os.fork()
        if process == 0:
            code = 1
            try:
                os.close(reader)
                os.close(self.lifeline[1])
                work(self.application, self.listener, lambda: os.write(writer, b"."))
                code = 0
            finally:
                if code:
                    traceback.print_exc()
                os._exit(code)
        os.close(writer)
        self.workers[process] = Worker(self.application, time.monotonic())
        with open(reader, "rb") as ready:
            if not ready.read(1):
                raise ChildProcessError("a worker ended before it was ready")

    def stop_workers(self, processes: Iterable[int]) -> None:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGTERM)

    def reload(self) -> None:
        """Serve the models that the folders have now; if these cannot be opened, those before."""
        before, old = self.application, set(self.workers)
        try:
            self.application = self.open_models()
            self.start_workers()
        except Exception as error:  # whatever it is, those from before can answer
            self.application = before
            self.stop_workers(self.workers.keys() - old)
            log({"level": "error", "message": f"not reloaded: {error}"})
            return
        self.stop_workers(old)
        log({"level": "info", "message": "reloaded", "models": list(self.names)})

    def bury(self) -> None:
        """Take note of workers that ended, and replace those that should not have."""
        lost = []
        while self.workers:
            process, status = os.waitpid(-1, os.WNOHANG)
            if process == 0:
                break
            worker = self.workers.pop(process, None)
            if worker is None:  # the first process of a container gets others' orphans
                continue
            self.metrics.forget(process)
            if worker.application is self.application and not self.is_stopping:
                code = os.waitstatus_to_exitcode(status)
                log({"level": "error", "message": f"worker {process} ended with {code}"})
                lost.append(worker)
        for worker in lost:
            time.sleep(max(0.0, worker.started + RESTART_SECONDS - time.monotonic()))
            try:
                self.fork()
            except OSError as error:  # one that was started is buried in its turn
                log({"level": "error", "message": str(error)})


def work(application: Application, listener: socket.socket, on_ready: Callable[[], Any]) -> None:
    """A worker's life: answer until SIGTERM."""
    for model in application.models.values():
        if not model.is_native:
            model.warm_up()
    application.start()
    gc.freeze()  # what is there stays: to walk over it takes 0.1 s, in which nobody is answered
    config = uvicorn.Config(
        application,  # type: ignore[arg-type]
        interface="asgi3",
        http=Protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=math.ceil(application.settings.timeout + CANCEL_SECONDS),
        limit_concurrency=application.settings.max_connections,
        backlog=BACKLOG,
    )
    for number in HANDLED:  # uvicorn sets its own, and sends itself the signal again at its end
        signal.signal(number, signal.SIG_IGN)
    Server(config, application, on_ready).run([listener])


class Server(uvicorn.Server):
    """Uvicorn, which at the end lets open connections send what they have begun to send."""

    def __init__(
        self, config: uvicorn.Config, application: Application, on_ready: Callable[[], Any]
    ) -> None:
        super().__init__(config)
        self.application, self.on_ready = application, on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        asyncio.get_running_loop().add_reader(self.application.lifeline, self.leave)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
        self.on_ready()

    def leave(self) -> None:
        """End as by SIGTERM: the first process is gone."""
        asyncio.get_running_loop().remove_reader(self.application.lifeline)
        self.handle_exit(signal.SIGTERM, None)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        self.application.is_draining = True  # answers now end their connection
        end = time.monotonic() + self.application.settings.drain
        while self.server_state.connections and time.monotonic() < end and not self.force_exit:
            for connection in list(self.server_state.connections):
                if connection.idle_seconds() > IDLE_SECONDS:  # type: ignore[union-attr]
                    connection.shutdown()
            await asyncio.sleep(0.02)
        await super().shutdown(sockets)


class Joined:
    """A transport that sends what is written in a turn of the event loop at once.

    A small answer's head and body cost one call of the system, and wake its reader once.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._parts: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._parts:
            self._loop.call_soon(self._flush)
        self._parts.append(data)

    def _flush(self) -> None:
        if self._parts and not self._transport.is_closing():
            self._transport.write(b"".join(self._parts))
        self._parts.clear()

    def close(self) -> None:
        self._flush()
        self._transport.close()


class Protocol(HttpToolsProtocol):
    """HTTP with bounds on the size and time of a request's head, of which uvicorn has none."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(Joined(transport, self.loop))  # type: ignore[arg-type]
        self._connections = self.config.app.metrics.connections  # type: ignore[union-attr]
        self._connections.inc()
        self._running: RequestResponseCycle | None = None
        self._bytes = 0  # since a head or a part of a body was complete
        self._await_head(HEADER_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._connections.dec()
        if self._running is not None:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle  # of several that were sent at once uvicorn knows the last alone
        super()._start_asgi_task(cycle, app)

    def _await_head(self, seconds: float) -> None:
        self._silent_since: float | None = time.monotonic()
        self._timer = self.loop.call_later(seconds, self.transport.abort)

    def idle_seconds(self) -> float:
        """Seconds since the last answer, or since the connection was opened; 0 in a request."""
        return 0.0 if self._silent_since is None else time.monotonic() - self._silent_since

    def data_received(self, data: bytes) -> None:
        self._bytes += len(data)
        super().data_received(data)
        if self._bytes > MAX_HEADERS and not self.transport.is_closing():
            self.transport.write(TOO_LARGE)
            self.transport.close()

    def on_headers_complete(self) -> None:
        self._bytes, self._silent_since = 0, None
        self._timer.cancel()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._bytes = 0
        super().on_body(body)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete:  # no other request has come meanwhile
            # also for the rest of a refused body, and for an answer that nobody reads
            self._await_head(KEEP_ALIVE + HEADER_SECONDS)
