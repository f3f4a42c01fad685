"""The server as processes: signals, workers that die, reloads, connections that misbehave."""

import asyncio
import http.client
import os
import shutil
import signal
import socket
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

import bertsmith
from bertsmith.model.heads import SequenceClassifier
from bertsmith.serving.server import Joined

from ..tiny import ANIMALS, piece_tokenizer, random_model, refused
from .serving_tools import server, until

WORDS = piece_tokenizer(" ".join(["the", "sat", *ANIMALS]))
TEXT = {"text": "the cat sat"}
BODY = b'{"text":"the cat sat"}'
HEAD = b"POST /v1/classify HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
POST = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY)


def classifier(folder, seed=1):
    return random_model(
        folder, WORDS, SequenceClassifier, 2, seed=seed, label_names=("bad", "good"),
        extra_config={"kind": "classify"},
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return classifier(tmp_path_factory.mktemp("models") / "reviews")


def received(connection):
    """All that comes until the other side closes."""
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


class Load:
    """Clients that ask in a loop over kept connections, and what became of it."""

    def __init__(self, served, clients=4, texts=1):
        self.served, self.texts = served, texts
        self.answers, self.errors, self.is_over = [], [], False
        self.threads = [threading.Thread(target=self.run, daemon=True) for _ in range(clients)]
        for thread in self.threads:
            thread.start()

    def run(self):
        own = self.served.connect()
        body = {"text": ["the cat sat", "the owl", *(f"the {a} sat" for a in ANIMALS)] * self.texts}
        while not self.is_over:
            try:
                answer = self.served.ask("POST", "/v1/classify", body, own)
                self.answers.append(answer)
            except (OSError, http.client.HTTPException) as error:
                self.errors.append(error)
                own.close()
                if isinstance(error, ConnectionRefusedError):
                    return

    def end(self):
        self.is_over = True
        for thread in self.threads:
            thread.join()


def test_start_answer_and_end(folder):
    """And with it what needs but one server: idle, half-sent and over-long requests."""
    with server(folder, "--log", "errors") as served:
        assert served.line.startswith("serving reviews (classify) at http://127.0.0.1:")
        expected = bertsmith.load(folder).classify("the cat sat").to_dict()
        (answer,) = served.ask("POST", "/v1/classify", TEXT).body["answers"]
        assert answer["probabilities"] == pytest.approx(expected["probabilities"], abs=1e-5)
        with served.raw() as own:  # pipelined: answered in their order
            own.sendall((POST + BODY) * 2 + b"GET /none HTTP/1.1\r\nConnection: close\r\n\r\n")
            lines = [part.partition(b"\r\n")[0] for part in received(own).split(b"HTTP/1.1 ")[1:]]
            assert lines == [b"200 OK", b"200 OK", b"404 Not Found"]
        with served.raw() as own:
            own.sendall(b"GET /health HTTP/1.1\r\n" + b"X-A: " + b"a" * 40_000)
            assert b" 431 " in own.recv(100)
        with served.raw() as own:  # 3 MB more than is taken: its sender is told, not cut off
            own.sendall(POST.replace(b"%d" % len(BODY), b"5000000") + bytes(5_000_000))
            assert b" 413 " in own.recv(4096)
            own.sendall(POST + BODY)
            assert b" 200 " in own.recv(100)
        assert served.end() == 0
        assert "Traceback" not in served.log


def test_what_is_written_in_one_turn_of_the_loop_is_sent_at_once():
    class Transport:
        sent, closed = [], False

        def write(self, data):
            self.sent.append(data)

        def close(self):
            self.closed = True

        def is_closing(self):
            return self.closed

    async def go(transport):
        joined = Joined(transport, asyncio.get_running_loop())
        joined.write(b"head ")
        joined.write(b"body")
        assert not transport.sent
        await asyncio.sleep(0)
        assert transport.sent == [b"head body"]
        joined.write(b"last")
        joined.close()
        assert transport.sent == [b"head body", b"last"] and joined.closed
        joined.write(b"too late")
        await asyncio.sleep(0)
        assert len(transport.sent) == 2

    asyncio.run(go(Transport()))


def test_ctrl_c_ends_it_though_a_connection_is_open(folder):
    with server(folder) as served:
        own = served.connect()
        assert served.ask("GET", "/health", None, own).status == 200
        started = time.monotonic()
        for worker in served.workers:  # a terminal's goes to all of them
            os.kill(worker, signal.SIGINT)
        assert served.end(signal.SIGINT) == 0
        assert time.monotonic() - started < 4
        assert "Traceback" not in served.log


def test_what_cannot_be_served_is_named(folder, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = refused("serve", folder, "--port", port)
        assert f"--port {port}: " in line and "in use" in line
    line = refused("serve", folder, classifier(tmp_path / "reviews"), "--port", 0)
    assert "a second model of the name reviews" in line and "reviews2=" in line
    for host in ("300.1.1.1", "a..b", "x" * 64):
        assert f"--host {host}, " in refused("serve", folder, "--host", host, "--port", 0)
    for file, told in ((os.devnull, "no key in it"), (tmp_path / "nope", str(tmp_path / "nope"))):
        line = refused("serve", folder, "--port", 0, "--api-key-file", file)
        assert told in line  # before the models, of which it has a line, are opened
    assert str(tmp_path) in refused("serve", tmp_path, "--port", 0)
    if not torch.cuda.is_available():
        assert "--device cuda: " in refused("serve", folder, "--device", "cuda", "--port", 0)


@pytest.mark.slow
def test_all_that_was_accepted_is_answered_after_sigterm(folder):
    for _ in range(3):
        with server(folder, "--workers", 2) as served:
            load = Load(served)
            until(lambda: len(load.answers) > 100)  # noqa: B023
            assert served.end() == 0
            load.end()
            assert all(answer.status == 200 for answer in load.answers)
            # each client got its last answer with the word to close, and then no connection, or
            # one that nobody accepted any more
            kinds = ConnectionRefusedError, ConnectionResetError
            assert all(isinstance(error, kinds) for error in load.errors)
            assert "Traceback" not in served.log


@pytest.mark.slow
def test_a_reload_under_load_mixes_no_models_and_loses_nothing(tmp_path):
    folder = classifier(tmp_path / "reviews", seed=1)
    with server(folder, "--workers", 2, "--log", "errors") as served:
        load = Load(served, texts=5)
        until(lambda: len(load.answers) > 50)
        before = served.workers
        for seed in (2, 3):
            classifier(tmp_path / f"new{seed}", seed=seed)
            shutil.copyfile(tmp_path / f"new{seed}/model.safetensors", tmp_path / "part")
            os.replace(tmp_path / "part", folder / "model.safetensors")
            served.send(signal.SIGHUP)
            until(lambda: served.log.count('"reloaded"') == seed - 1, 30)  # noqa: B023
            count = len(load.answers)
            until(lambda: len(load.answers) > count + 50)  # noqa: B023
        until(lambda: len(served.workers) == 2)
        assert not set(before) & set(served.workers)

        (folder / "model.safetensors").write_bytes(b"broken")
        kept = served.workers
        served.send(signal.SIGHUP)
        until(lambda: "not reloaded" in served.log)
        count = len(load.answers)
        until(lambda: len(load.answers) > count + 50)
        assert served.workers == kept
        load.end()
        assert not load.errors
        kinds = []  # of 35 texts: wholly of the first, second or third; last digits may differ
        for answer in load.answers:
            found = [one["probabilities"]["bad"] for one in answer.body["answers"]]
            if not any(found == pytest.approx(kind, abs=1e-4) for kind in kinds):
                kinds.append(found)
        assert len(kinds) == 3
        assert all(answer.status == 200 for answer in load.answers)
        assert served.end() == 0


@pytest.mark.slow
def test_a_worker_that_is_killed_is_replaced_and_nothing_hangs(folder):
    with server(folder, "--workers", 2) as served:
        load = Load(served, clients=8)
        for _ in range(3):
            count = len(load.answers)
            until(lambda: len(load.answers) > count + 50)  # noqa: B023
            victim = served.workers[0]
            os.kill(victim, signal.SIGKILL)
            until(lambda: len(served.workers) == 2 and victim not in served.workers)  # noqa: B023
        count = len(load.answers)
        until(lambda: len(load.answers) > count + 50)
        load.end()
        assert all(answer.status == 200 for answer in load.answers)
        # at most one request of each client for each worker; it sees its connection close
        assert len(load.errors) <= 24
        kinds = http.client.RemoteDisconnected, ConnectionResetError, http.client.IncompleteRead
        assert all(isinstance(error, kinds) for error in load.errors)
        assert served.log.count("ended with -9") == 3
        assert served.end() == 0


@pytest.mark.slow
def test_a_worker_told_to_end_is_replaced_too(folder):
    with server(folder) as served:
        (worker,) = served.workers
        os.kill(worker, signal.SIGTERM)
        until(lambda: served.workers and worker not in served.workers)
        assert served.ask("POST", "/v1/classify", TEXT).status == 200
        assert served.end() == 0


@pytest.mark.slow
def test_workers_leave_when_the_first_process_is_killed(folder):
    with server(folder, "--workers", 2) as served:
        workers = [psutil.Process(number) for number in served.workers]
        served.send(signal.SIGKILL)
        gone, alive = psutil.wait_procs(workers, 10)
        assert not alive
        with pytest.raises(ConnectionRefusedError):
            served.raw()


@pytest.mark.slow
def test_workers_share_the_weights_and_the_work(tmp_path):
    from bertsmith.model.config import ModelConfig

    config = ModelConfig(len(WORDS.vocabulary), 512, 6, 8, 2048, max_positions=512)
    folder = random_model(
        tmp_path / "large", WORDS, SequenceClassifier, 2, config=config, std=0.02,
        label_names=("bad", "good"), extra_config={"kind": "classify"},
    )  # fmt: skip
    weights = (folder / "model.safetensors").stat().st_size
    with server(folder, "--workers", 2, "--max-wait", 60) as served:
        load = Load(served, clients=6)
        until(lambda: len(load.answers) > 300, 60)
        load.end()
        assert not load.errors
        metrics = served.ask("GET", "/metrics").body.decode()
        assert f'status="200"}} {len(load.answers)}.0' in metrics
        private = {}
        for worker in served.workers:
            memory = psutil.Process(worker).memory_full_info()
            private[worker] = memory.uss
            assert sum(psutil.Process(worker).cpu_times()[:2]) > 0.1  # it has worked
        # a worker's own pages: buffers and Python's counters, not the weights once more
        assert max(private.values()) < 0.8 * weights, (private, weights)


@pytest.mark.slow
def test_an_idle_server_is_idle(folder):
    with server(folder, "--workers", 1) as served:
        assert served.ask("POST", "/v1/classify", TEXT).status == 200
        processes = [psutil.Process(n) for n in (served.process.pid, *served.workers)]
        before = [sum(process.cpu_times()[:2]) for process in processes]
        time.sleep(20)
        used = sum(sum(p.cpu_times()[:2]) for p in processes) - sum(before)
        assert used / 20 < 0.01, used


@pytest.mark.slow
def test_the_first_process_has_one_thread(folder):
    """A fork of a process of several may find their locks held for ever."""
    with server(folder, OMP_NUM_THREADS="2") as served:
        first = Path(f"/proc/{served.process.pid}/task")
        assert len([*first.iterdir()]) == 1
        served.send(signal.SIGHUP)
        until(lambda: '"reloaded"' in served.log)
        assert len([*first.iterdir()]) == 1


@pytest.mark.slow
def test_connections_that_send_nothing_are_closed(folder):
    with server(folder) as served:
        connections = {"nothing": b"", "half a head": b"GET / HT", "line ends": b"\r\n"}
        opened = {name: served.raw() for name in connections}
        for name, sent in connections.items():
            opened[name].sendall(sent)
        started = time.monotonic()
        for own in opened.values():
            assert own.recv(100) == b""
        assert 5 < time.monotonic() - started < 15
        assert served.ask("GET", "/health").status == 200
