"""The server's processes: one that holds the models and the port, and workers that answer.

The first process reads the weights once and forks the workers, which share them. It forks again
where a worker dies, and on SIGHUP reads the models anew, forks workers of the new ones and lets the
old ones end. All of them take connections from one socket, which is never closed between.

SIGTERM and Ctrl-C: workers take no new connection, answer what is under way, and end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from bertsmith.checkpoints.hub import open_model_folder
from bertsmith.inference.engines.processor import Processor
from bertsmith.serving.application import Application, log
from bertsmith.serving.metrics import Metrics
from bertsmith.serving.models import ServedModel
from bertsmith.serving.operations import operations_of
from bertsmith.serving.settings import ServingSettings

MAX_HEADERS = 32_768  # bytes of a request before its body
HEADER_SECONDS = 10.0  # for them to arrive
KEEP_ALIVE = 5  # seconds of an idle connection
BACKLOG = 2048
STOPPING = signal.SIGTERM, signal.SIGINT
HANDLED = {*STOPPING, signal.SIGHUP, signal.SIGCHLD}
CLOSING = b"content-length: 0\r\nconnection: close\r\n\r\n"
TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\n" + CLOSING


def serve(models: dict[str, str], processor: Processor, settings: ServingSettings) -> None:
    """Serve models (name -> folder or hub name) until SIGTERM or Ctrl-C.

    Errors: ValueError for a model that cannot be opened, or a port that cannot be had.
    """
    listener = listen(settings.host, settings.port)
    folder = Path(tempfile.mkdtemp(prefix="bertsmith-serve-"))
    try:
        Supervisor(models, processor, settings, listener, Metrics(folder)).run()
    finally:
        listener.close()
        shutil.rmtree(folder, ignore_errors=True)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens. Errors: ValueError for an address that cannot be had."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ValueError(
            f"`host={host!r}`, `port={port}`: {error.strerror or error}: take another one;"
            " `port=0` finds a free port"
        ) from error


@dataclass(frozen=True)
class Worker:
    """A worker process, and what its models are."""

    process: int
    application: Application


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
        before = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
        try:
            self.application = self.open_models()
            self.start_workers()
            host, port, *_ = self.listener.getsockname()
            shown = f"[{host}]" if ":" in host else host
            names = ", ".join(
                f"{model.name} ({model.methods[0]})" for model in self.application.models.values()
            )
            print(f"serving {names} at http://{shown}:{port}, to stop press Ctrl-C", flush=True)
            while self.workers:
                self.handle(signal.sigwait(HANDLED))
        finally:
            for process in self.workers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def handle(self, received: int) -> None:
        """Do what a signal asks for."""
        if received in STOPPING:
            self.is_stopping = True
            self.stop_workers(list(self.workers))
        elif received == signal.SIGHUP:
            self.reload()
        else:
            self.bury()

    def open_models(self) -> Application:
        """Read the models and try each: an application that is not yet started."""
        started = time.perf_counter()
        models = {
            name: ServedModel.open(name, open_model_folder(given), self.processor)
            for name, given in self.names.items()
        }
        for model in models.values():
            if model.is_native:  # others' threads do not survive a fork: workers open them
                model.warm_up()
        seconds = time.perf_counter() - started
        print(f"{len(models)} models opened in {seconds:.1f} s", file=sys.stderr)
        operations = operations_of(models, self.settings)
        found = Application(models, operations, self.settings, self.metrics)
        found.lifeline = self.lifeline[0]
        return found

    def start_workers(self) -> None:
        for _ in range(self.settings.workers):
            self.fork()

    def fork(self) -> None:
        """Start a worker with the application as it is now; returns when it takes connections."""
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
                os._exit(code)
        os.close(writer)
        with open(reader, "rb") as ready:
            if not ready.read(1):
                log({"level": "error", "message": "a worker ended before it was ready"})
        self.workers[process] = Worker(process, self.application)

    def stop_workers(self, processes: Sequence[int]) -> None:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGTERM)

    def reload(self) -> None:
        """Serve the models that the folders have now; if these cannot be opened, those before."""
        old = list(self.workers)
        try:
            self.application = self.open_models()
        except (ValueError, OSError) as error:
            log({"level": "error", "message": f"not reloaded: {error}"})
            return
        self.start_workers()
        self.stop_workers(old)
        log({"level": "info", "message": "reloaded", "models": list(self.names)})

    def bury(self) -> None:
        """Take note of workers that ended, and replace those that should not have."""
        while self.workers:
            process, status = os.waitpid(-1, os.WNOHANG)
            if process == 0:
                return
            worker = self.workers.pop(process, None)
            self.metrics.forget(process)
            was_told = os.waitstatus_to_exitcode(status) == 0
            if worker is None or self.is_stopping or was_told:
                continue
            log({"level": "error", "message": f"worker {process} died: another one starts"})
            if worker.application is self.application:
                self.fork()


def work(application: Application, listener: socket.socket, on_ready: Callable[[], Any]) -> None:
    """A worker's life: answer until SIGTERM."""
    application.batcher.start()
    config = uvicorn.Config(
        application,  # type: ignore[arg-type]
        http=Protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE,
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
        while self.server_state.connections and time.monotonic() < end:
            await asyncio.sleep(0.02)
        await super().shutdown(sockets)


class Protocol(HttpToolsProtocol):
    """HTTP with bounds on the size and time of a request's head, of which uvicorn has none."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin_head()

    def _begin_head(self) -> None:
        self._is_head, self._head_bytes = True, 0
        self._timer = self.loop.call_later(HEADER_SECONDS, self.transport.abort)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEADERS and not self.transport.is_closing():
                self.transport.write(TOO_LARGE)
                self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._timer.cancel()
        self._begin_head()

    def on_headers_complete(self) -> None:
        self._is_head = False
        self._timer.cancel()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)
