"""The serving benchmark: its load on a server of known answers, its figures and its page."""

import asyncio
import json
import shutil
import threading

import numpy as np
import pytest

from bertsmith.base.files import read_json

from ..tiny import write, write_model


class Server:
    """Answers a body with itself, but: "no" is refused, "never" gets no answer, "end" is the last
    of its connection."""

    def __enter__(self):
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        start = asyncio.start_server(self.talk, "127.0.0.1", 0)
        self.server = asyncio.run_coroutine_threadsafe(start, self.loop).result()
        port = self.server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/echo"
        return self

    async def talk(self, reader, writer):
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = int(head.lower().split(b"content-length: ")[1].split()[0])
            body = await reader.readexactly(length)
            if body == b'"never"':
                await asyncio.sleep(60)
            status = b"429 Too Many Requests" if body == b'"no"' else b"200 OK"
            keep = b"connection: close\r\n" if body == b'"end"' else b""
            writer.write(
                b"HTTP/1.1 %s\r\ncontent-length: %d\r\n%s\r\n%s" % (status, len(body), keep, body)
            )
            if keep:
                return writer.close()

    def __exit__(self, *_):
        async def stop():
            self.server.close()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

        asyncio.run_coroutine_threadsafe(stop(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


def test_the_open_loop_tells_answers_refusals_and_losses(module, monkeypatch):
    monkeypatch.setattr(module("serving_load"), "PATIENCE", 0.3)
    bodies = [b'"a"', b'"no"', b'"end"', b'"never"']
    with Server() as server:
        answers, cpu = module("serving_load").open_loop(server.url, bodies, 400, 0.2)
    assert len(answers) == 80 and 0 < cpu <= 1
    for answer in answers:
        body = bodies[answer.number % 4]
        assert answer.status == {b'"no"': 429, b'"never"': 0}.get(body, 200)
        assert answer.body == (body if answer.status else b"")
    found = module("serving").summary(answers)
    assert (found["good"], found["refused"], found["lost"], found["failed"]) == (40, 20, 20, 0)
    assert 0 < found["p50_ms"] <= found["p99_ms"] < 1000


def test_latency_counts_from_the_moment_at_which_a_request_was_due(module, monkeypatch):
    monkeypatch.setattr(module("serving_load"), "MOST_CONNECTIONS", 1)
    monkeypatch.setattr(module("serving_load"), "FIRST_CONNECTIONS", 0)
    slow = Server.talk

    async def talk(self, reader, writer):
        await asyncio.sleep(0.3)  # of the one connection that there may be
        await slow(self, reader, writer)

    monkeypatch.setattr(Server, "talk", talk)
    with Server() as server:
        answers, _ = module("serving_load").open_loop(server.url, [b'"a"'], 20, 0.2)
    seconds = [answer.seconds for answer in answers]
    assert seconds[0] > 0.29 and seconds == sorted(seconds, reverse=True)  # due ever later


@pytest.mark.skipif(shutil.which("wrk") is None, reason="no wrk here")
def test_the_closed_loop_counts_good_answers_and_others(module):
    with Server() as server:
        load = module("serving_load").closed_loop(server.url, [b'"a"', b'"no"'], 2, 1)
    assert load.rate > 20 and 0.5 < load.failed / load.rate < 2
    assert 0 < load.p50_ms <= load.p99_ms < 1000


def test_answers_are_compared_with_those_of_the_texts_alone(module):
    serving, load = module("serving"), module("serving_load")
    alone = np.float32([[1, 0], [0, 1], [1, 1], [2, 0]])

    def answer(number, vectors):
        body = json.dumps({"vectors": np.asarray(vectors).tolist()}).encode()
        return load.Answer(number, 0.0, 200, 0.1, body)

    good = [answer(0, alone[:2]), answer(1, alone[2:]), answer(2, alone[:2])]
    bad = [answer(3, [[1, 1], [2, 2]]), load.Answer(4, 0.0, 429)]
    found = serving.compared("mosec, ONNX Runtime", [*good, *bad], alone, 2)
    assert found == {"other": 0.25, "least_cosine": pytest.approx(0.7071, abs=1e-4)}


def test_capacity_is_the_highest_rate_within_the_limit(module):
    serving = module("serving")

    def turn(*loads):
        rows = [
            {"connections": 1, "rate": rate, "p50_ms": 1.0, "p99_ms": p99, "cpu": 0.1, "failed": 0}
            for rate, p99 in loads
        ]
        return {"memory_mb": 9, "start_seconds": 1, "loads": {kind: rows for kind in serving.KINDS}}

    ours = serving.figures([turn((50.0, 30.0), (90.0, 80.0)), turn((40.0, 30.0), (60.0, 110.0))])
    assert (
        ours["1 text"]["turns"]["capacity"] == [90.0, 40.0] and ours["1 text"]["capacity"] == 65.0
    )
    assert ours["1 text"]["most"] == 75.0
    servers = {
        "bertsmith, int8": {"figures": ours},
        "mosec, ONNX Runtime": {"figures": serving.figures([turn((30.0, 9.0)), turn((8.0, 9.0))])},
        "pipeline, FastAPI": {"figures": serving.figures([turn((9.0, 200.0)), turn((8.0, 9.0))])},
    }
    capacity, most = serving.ratios(servers, "1 text").splitlines()
    assert "**4.00x** of mosec" in capacity and "not in every turn: pipeline" in capacity
    assert "**5.25x** of mosec" in most and "**8.75x** of pipeline" in most


@pytest.mark.slow  # three starts of a server, and loads of a second
@pytest.mark.skipif(shutil.which("wrk") is None, reason="no wrk here")
def test_our_own_server_takes_its_turns(module, run_main, tmp_path, monkeypatch):
    monkeypatch.setattr(module("serving"), "CONNECTIONS", (1,))
    write_model(tmp_path / "tiny" / "hf", ["a good film"], max_positions=512)
    for name in ("dev", "train"):
        lines = [f"{'a good film ' * (k % 5 + 1)}\t1" for k in range(40)]
        write(tmp_path / f"data/glue/SST-2/{name}.tsv", ["sentence\tlabel", *lines])
    words = ("--model", tmp_path / "tiny", "--data", tmp_path / "data", "--out", tmp_path / "out")
    servers = ("--servers", "bertsmith, float32", "mosec", "--turns", 1, "--seconds", 1)
    run_main("serving", *words, *servers)
    result = read_json(next((tmp_path / "out").glob("*.json")))
    row = result["servers"]["bertsmith, float32"]
    assert row["figures"]["1 text"]["capacity"] > 1 and row["figures"]["1 text"]["failed"] == 0
    for kind in ("1 text", "16 texts"):
        over = row["open"][kind]["over"]
        assert over["good"] + over["refused"] == over["asked"] and over["other"] == 0
    assert result["left_out"] == {"mosec, ONNX Runtime": "its environment is not prepared"}
    page = next((tmp_path / "out").glob("*.md")).read_text()
    assert "## 16 texts a request" in page and str(tmp_path) not in page


def test_preparing_needs_a_folder(run_main):
    with pytest.raises(SystemExit, match="--peers DIR"):
        run_main("serving", "--prepare")
