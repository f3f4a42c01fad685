"""Answers under load equal those of a model alone; hostile senders harm nobody; memory is flat.

All of it is drawn by a seed.
"""

import asyncio
import json
import random
import time
from collections import Counter

import numpy as np
import psutil
import pytest

import bertsmith
from bertsmith.model.config import ModelConfig
from bertsmith.model.heads import SequenceClassifier

from ..tiny import piece_tokenizer, random_model
from .serving_tools import server

pytestmark = pytest.mark.slow
LETTERS = "abcdefghijklmnopqrstuvwxyz"
PIECES = [*LETTERS, *(f"##{letter}" for letter in LETTERS)]
LEAKS = b"Traceback", b'File "', b".py", b"/tmp/", b"site-packages"
POST = b"POST /v1/classify HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    tokenizer = piece_tokenizer(" ".join(PIECES))
    config = ModelConfig(len(tokenizer.vocabulary), 64, 2, 2, 256, max_positions=128)
    return random_model(
        tmp_path_factory.mktemp("load") / "letters", tokenizer, SequenceClassifier, 2,
        config=config, std=0.3, label_names=("bad", "good"), extra_config={"kind": "classify"},
    )  # fmt: skip


def drawn_texts(count, seed=1):
    """Distinct texts of 1 to 20 words."""
    draw = random.Random(seed)
    word = lambda: "".join(draw.choices(LETTERS, k=draw.randint(1, 7)))  # noqa: E731
    texts = {}
    while len(texts) < count:
        texts[" ".join(word() for _ in range(draw.randint(1, 20)))] = None
    return list(texts)


async def post(streams, body):
    """(Status, seconds, answer) over a kept connection."""
    reader, writer = streams
    started = time.perf_counter()
    writer.write(POST + b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
    head = await reader.readuntil(b"\r\n\r\n")
    size = int(head.lower().partition(b"content-length: ")[2].split(b"\r", 1)[0])
    content = await reader.readexactly(size)
    return int(head[9:12]), time.perf_counter() - started, content


async def answered(port, texts, seed, clients=32):
    """The answers to texts, sent by several clients alone and in lists of any size."""
    draw, place, found = random.Random(seed), 0, [None] * len(texts)
    parts = []
    while place < len(texts):
        size = draw.choice((1, 1, 1, draw.randint(2, 64)))
        parts.append((place, texts[place : place + size]))
        place += size
    parts.reverse()

    async def client():
        streams = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
        while parts:
            begin, own = parts.pop()
            given = json.dumps({"text": own if len(own) > 1 else own[0]}).encode()
            while True:
                status, _, content = await post(streams, given)
                if status != 429:
                    break
                await asyncio.sleep(0.1)
            assert status == 200, content
            found[begin : begin + len(own)] = json.loads(content)["answers"]
        streams[1].close()

    await asyncio.gather(*(client() for _ in range(clients)))
    return found


@pytest.mark.parametrize("precision", ["int8", "float32"])
def test_ten_thousand_texts_are_answered_as_by_the_model_alone(folder, precision):
    texts = drawn_texts(10_000)
    alone = bertsmith.load(folder, precision=precision)
    expected = [alone.classify(text).to_dict()["probabilities"] for text in texts]
    with server(folder, "--precision", precision, "--log", "errors") as served:
        answers = asyncio.run(answered(served.port, texts, seed=2))
    found = np.array([list(answer["probabilities"].values()) for answer in answers])
    wanted = np.array([list(one.values()) for one in expected])
    print(f"{precision}: largest difference {np.abs(found - wanted).max():.2g}")
    if precision == "int8":
        assert (found == wanted).all()
    else:
        assert np.abs(found - wanted).max() <= 1e-5


def test_overload_keeps_who_is_accepted_quick_and_refuses_at_once(folder):
    """Clients that ask without pause, many more than are served within the wait that is allowed."""

    async def go(port, clients, texts, seconds):
        found, end = [], time.perf_counter() + seconds
        body = json.dumps({"text": texts}).encode()

        async def client():
            streams = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
            while time.perf_counter() < end:
                status, spent, content = await post(streams, body)
                found.append((status, spent))
                assert status in (200, 429), content
                assert status == 429 or len(json.loads(content)["answers"]) == len(texts)
            streams[1].close()

        await asyncio.gather(*(client() for _ in range(clients)))
        return found

    with server(folder, "--log", "errors") as served:
        for texts in (drawn_texts(1), drawn_texts(16)):
            found = asyncio.run(go(served.port, 256, texts, 10))
            spent = {
                status: np.array([s for own, s in found if own == status]) for status in (200, 429)
            }
            told = {
                k: (len(v), *np.quantile(v, (0.5, 0.99)).round(3))
                for k, v in spent.items()
                if len(v)
            }
            print(f"{len(texts)} texts: status: (count, p50, p99): {told}")
            assert np.quantile(spent[200], 0.99) < 1.5


def test_memory_is_flat_over_texts_of_all_lengths(folder):
    draw = random.Random(3)
    texts = ["a " * draw.randint(1, 120) + str(n) for n in range(4000)]
    sizes = []
    with server(folder, "--log", "errors") as served:
        (worker,) = served.workers
        for seed in range(42):  # ten million tokens
            asyncio.run(answered(served.port, texts, seed))
            sizes.append(psutil.Process(worker).memory_info().rss / 2**20)
    print("MB after each 240,000 tokens:", np.round(sizes, 1))
    slope = np.polyfit(np.arange(38), sizes[4:], 1)[0]
    print(f"{42 * slope:.2f} MB in ten million tokens")
    assert 42 * slope < 10, sizes


# What may stand in a request where a length, a chunk and so on belong.
LENGTHS = b"-1", b"+5", b"0x5", b"1,2", b"9" * 30, b""
CHUNKS = b"zz\r\n", b"5\r\nab", b"ffffffffffffffff\r\n", b"0\r\n" + b"a: b\r\n" * 3000 + b"\r\n"
FIELDS, VALUES = ("text", "model", "x"), (None, {}, [], 1, "../..", [[]])
CODES = 0, 0x202E, 0x1F600, 0xFFFF  # of a letter
PATHS = (
    b"*", b"/%00", b"/../../etc/passwd", b"/%2e%2e/%2e%2e/etc/passwd", b"//v1//models",
    b"http://a/v1/models", b"/v1/models?x=%ff", b"a", b"", b"/\xff", b"/%ff%fe",
)  # fmt: skip
METHODS = (
    b"CONNECT a:80", b"TRACE /", b"OPTIONS *", b"PRI *", b"BREW /pot", b"HEAD /v1/models",
    b"DELETE /v1/classify", b"get /",
)  # fmt: skip
VERSIONS = b" HTTP/1.1", b" HTTP/1.0", b" HTTP/2.0", b" HTTP/9", b""
# headers
LONG, CHUNKED = b"y" * 90 + b"\r\n", b"Transfer-Encoding: chunked\r\n"
UPGRADE = b"Connection: upgrade\r\nUpgrade: %s\r\n"
FOREIGN = b"X-Request-Id: \xe9\xff\r\nOrigin: \xff\r\nContent-Type: \xff\r\n"


def junk(draw):
    """Bytes that no client should send."""
    body, some, number = b'{"text":"abc"}', draw.choice, draw.randint
    length = b"Content-Length: %d\r\n\r\n"
    sized = lambda content: length % len(content) + content  # noqa: E731
    coded = lambda value: POST + sized(json.dumps(value).encode())  # noqa: E731
    whole = POST + sized(body)
    return draw.choice(
        [
            lambda: draw.randbytes(number(1, 2000)),
            lambda: POST + sized(b"[" * number(1, 100_000)),
            lambda: POST + sized(b'{"a":' * number(1, 50_000)),
            lambda: POST + sized(b'{"text":"' + draw.randbytes(20) + b'"}'),
            lambda: POST + sized(b'{"text":"\\ud8%02x"}' % number(0, 255)),
            lambda: POST + sized(b'{"text":"a","top":%s}' % (b"9" * number(1, 5000))),
            lambda: POST + sized(b'{"text":%de%d}' % (number(0, 9), number(0, 10**6))),
            lambda: POST + sized(b'{"text":"a\\u0000b"}'),
            lambda: coded({"text": chr(some(CODES)) * number(0, 3000)}),
            lambda: coded({"text": "x" * number(1, 100_000)}),
            lambda: coded({"text": ["a"] * number(1, 3000)}),
            lambda: coded({some(FIELDS): some(VALUES)}),
            lambda: POST + length % number(0, 10**10) + body,
            lambda: POST + b"Content-Length: %s\r\n\r\n" % some(LENGTHS) + body,
            lambda: POST + CHUNKED + b"\r\n" + some((*CHUNKS, draw.randbytes(50))),
            lambda: POST + CHUNKED + b"Content-Length: 3\r\n\r\n0\r\n\r\n",
            lambda: POST + b"".join(b"X-%d: " % n + LONG for n in range(number(1, 3000))) + b"\r\n",
            lambda: b"GET /" + b"a/" * number(1, 60_000) + b" HTTP/1.1\r\n\r\n",
            lambda: b"GET %s HTTP/1.1\r\n\r\n" % some(PATHS),
            lambda: some(METHODS) + some(VERSIONS) + b"\r\n\r\n",
            lambda: POST + UPGRADE % some((b"websocket", b"h2c")) + sized(body),
            lambda: whole * number(2, 50),
            lambda: whole[: number(1, 80)],
            lambda: POST + b"X: \x00\x01\r\n\r\n",
            lambda: POST + FOREIGN + sized(body),
            lambda: POST + b"Expect: 100-continue\r\n" + length % len(body),
        ]
    )()


async def harass(port, rounds, seed):
    """Send junk, whole or slowly, and leave in several ways: how often each status came."""
    found, draws = Counter(), random.Random(seed)

    async def one(seed):
        draw = random.Random(seed)
        data = junk(draw)
        way = draw.choice(("whole", "whole", "slow", "half", "leave", "reset"))
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError as error:
            found[type(error).__name__] += 1
            return
        try:
            for begin in range(
                0, len(data), step := max(1, len(data) // 7) if way == "slow" else len(data)
            ):
                writer.write(data[begin : begin + step])
                await writer.drain()
                await asyncio.sleep(0.05 if way == "slow" else 0)
            if way == "half":
                writer.write_eof()
            if way in ("leave", "reset"):
                await asyncio.sleep(draw.random() * 0.1)
                if way == "reset":
                    writer.transport.abort()
                return
            answer = b""
            while part := await asyncio.wait_for(reader.read(65536), 0.7):
                answer += part
        except TimeoutError:
            found["still open"] += 1  # it waits for the rest
        except OSError:
            found["reset"] += 1
            answer = b""
        finally:
            writer.close()
        for place in answer.split(b"HTTP/1.1 ")[1:]:
            found[place[:3].decode()] += 1
        assert not any(leak in answer for leak in LEAKS), (seed, answer)

    gate = asyncio.Semaphore(32)

    async def gated(seed):
        async with gate:
            await asyncio.wait_for(one(seed), 40)

    await asyncio.gather(*(gated(draws.random()) for _ in range(rounds)))
    return found


def test_five_thousand_hostile_requests_harm_nobody(folder):
    texts = drawn_texts(20)
    alone = bertsmith.load(folder)
    expected = np.array([[*alone.classify(text).probabilities.values()] for text in texts])
    with server(folder, "--log", "errors") as served:
        (worker,) = served.workers
        found, sizes = Counter(), []
        for seed in range(5):
            found += asyncio.run(harass(served.port, 1000, seed))
            sizes.append(psutil.Process(worker).memory_info().rss / 2**20)
            answers = asyncio.run(answered(served.port, texts, seed, clients=2))
            given = np.array([[*answer["probabilities"].values()] for answer in answers])
            assert np.allclose(given, expected, atol=1e-5)
        print("statuses:", dict(found), "MB:", np.round(sizes, 1))
        assert served.workers == [worker] and "Traceback" not in served.log
        assert not [status for status in found if status.startswith("5")], served.log
        assert found["200"] and found["400"] and found["422"] and found["413"]
        assert sizes[-1] - sizes[1] < 30, sizes
        assert served.end() == 0
