"""A request's way: who may ask, how much, what; every refusal by its status, and what is told."""

import asyncio
import gc
import hmac
import json
import weakref

import pytest

from bertsmith.serving import application as served
from bertsmith.serving.application import Operation, Refused, Reply
from bertsmith.serving.batching import Busy

from .serving_tools import ECHO, HOME, OPEN, EchoModel, Texts, application, ask, asked, echo

TEXT = {"text": ["a"]}


@pytest.fixture(scope="module")
def app():
    with application(max_body=1000, max_texts=4, allow_origin=("https://a.example",)) as made:
        yield made


def test_an_answer_carries_its_length_and_an_id(app):
    answer = ask(app, "POST", "/v1/echo", {"text": ["a", "b"]})
    assert (answer.status, answer.body) == (200, {"answers": ["a", "b"]})
    assert answer.headers["content-type"] == "application/json"
    assert int(answer.headers["content-length"]) == len(b'{"answers":["a","b"]}')
    assert answer.headers["x-request-id"] != ask(app, "GET", "/v1/home").headers["x-request-id"]


@pytest.mark.parametrize(
    "given, kept", [("abc-1", True), ("a b", False), ("é", False), ("x" * 129, False)]
)
def test_the_id_of_a_sender_is_kept_if_it_is_one(app, given, kept):
    answer = ask(app, "GET", "/v1/home", headers={"x-request-id": given})
    assert (answer.headers["x-request-id"] == given) is kept


JSON_CASES = {
    "no JSON": (b"{", 400, None, "not JSON"),
    "nothing": (b"", 400, None, "not JSON"),
    "bad UTF-8": (b'{"text": ["\xff"]}', 400, None, "not JSON"),
    "half a surrogate": (b'{"text": ["\\ud800"]}', 400, None, "not JSON"),
    "deep": (b"[" * 900, 422, None, "Expected `object`"),
    "a number": (b'{"text": ["a", 3]}', 422, "text[1]", "Expected `str`"),
    "a field too few": (b"{}", 422, "text", "missing required field `text`"),
    "a field too many": (b'{"text": [], "txt": 1}', 422, "txt", "did you mean 'text'?"),
    "its values": (b'{"text": ["bad"]}', 422, None, "model 'echo': a bad text"),
    "too many texts": (b'{"text": ["", "", "", "", ""]}', 413, None, "send at most 4"),
    "no such model": (b'{"text": ["a"], "model": "ecko"}', 404, "model", "'echo'"),
}  # fmt: skip


@pytest.mark.parametrize("case", JSON_CASES)
def test_a_body_that_cannot_be_is_refused_with_its_field(app, case):
    body, status, field, message = JSON_CASES[case]
    answer = ask(app, "POST", "/v1/echo", body)
    error = answer.body["error"]
    assert (answer.status, error["code"], error["param"]) == (status, status, field)
    assert message in error["message"] and "secret" not in str(answer)


def test_depth_is_no_fault_of_ours(app):
    body = b'{"text": ' + b"[" * 400_000
    with application(max_body=10**6) as large:
        assert ask(large, "POST", "/v1/echo", body).status in (400, 422)


@pytest.mark.parametrize(
    "kind, status",
    [("application/json; charset=utf-8", 200), ("Application/JSON", 200), ("", 415),
     ("text/plain", 415), ("application/x-www-form-urlencoded", 415)],
)  # fmt: skip
def test_only_json_is_taken(app, kind, status):
    answer = ask(app, "POST", "/v1/echo", TEXT, {"content-type": kind})
    assert answer.status == status
    assert status == 200 or "application/json" in answer.body["error"]["message"]


def test_a_body_with_an_upgrade_is_refused_since_it_is_lost(app):
    answer = ask(app, "POST", "/v1/echo", b"", {"upgrade": "h2c", "connection": "upgrade"})
    assert answer.status == 400 and "HTTP/1.1" in answer.body["error"]["message"]
    assert answer.headers["connection"] == "close"


def in_parts(*parts, then=None):
    """A body that comes piece by piece, and then what `then` says."""
    left = [{"type": "http.request", "body": part, "more_body": True} for part in parts]

    async def receive():
        if left:
            return left.pop(0)
        return then or await asyncio.Future()

    return receive


def test_work_that_cannot_be_done_in_time_is_not_begun():
    """By the pace before it was measured ten tokens take a millisecond."""
    model = EchoModel()
    with application(model, timeout=0.0025) as own:
        answer = ask(own, "POST", "/v1/echo", {"text": ["a", "b", "c"]})
        assert answer.status == 413 and "seconds of work" in answer.body["error"]["message"]
        assert not model.calls


def test_large_bodies_are_refused_by_what_they_say_and_by_what_they_are(app):
    unread = in_parts(then={"type": "nobody reads this"})
    said = ask(app, "POST", "/v1/echo", b"", {"content-length": "1001"}, unread)
    found = ask(
        app, "POST", "/v1/echo", b"", {"content-length": "0"}, in_parts(b"x" * 600, b"x" * 600)
    )
    for answer in said, found:
        assert answer.status == 413 and "1,000 bytes" in answer.body["error"]["message"]
    last = {"type": "http.request", "body": b'["a"]}', "more_body": False}
    assert ask(app, "POST", "/v1/echo", b"", {}, in_parts(b'{"text":', then=last)).status == 200


def test_a_body_that_does_not_come(app, monkeypatch):
    monkeypatch.setattr(served, "BODY_SECONDS", 0.05)
    answer = ask(app, "POST", "/v1/echo", b"", {}, in_parts(b"{"))
    assert answer.status == 408 and answer.headers["connection"] == "close"


def test_a_client_that_leaves_while_it_sends_is_not_answered(app):
    gone = {"type": "http.disconnect"}
    assert ask(app, "POST", "/v1/echo", b"", {}, in_parts(b"{", then=gone)) is None


def test_unknown_paths_and_methods(app):
    answer = ask(app, "POST", "/v1/none", TEXT)
    assert answer.status == 404 and "/v1/echo, /v1/home" in answer.body["error"]["message"]
    answer = ask(app, "GET", "/v1/echo")
    assert (answer.status, answer.headers["allow"]) == (405, "POST")
    answer = ask(app, "POST", "/v1/home", TEXT)
    assert (answer.status, answer.headers["allow"]) == (405, "GET, HEAD")
    assert ask(app, "OPTIONS", "/v1/home").status == 405
    assert ask(app, "HEAD", "/v1/home").status == 200


def test_pages_of_named_origins_may_ask(app):
    preflight = ask(app, "OPTIONS", "/v1/echo", headers={"origin": "https://a.example"})
    assert preflight.status == 204 and "content-length" not in preflight.headers
    assert preflight.headers["access-control-allow-origin"] == "https://a.example"
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    for origin, allowed in {
        "https://a.example": "https://a.example",
        "https://b.example": None,
    }.items():
        answer = ask(app, "POST", "/v1/echo", TEXT, {"origin": origin})
        assert answer.status == 200
        assert answer.headers.get("access-control-allow-origin") == allowed
    with application() as closed:
        answer = ask(closed, "OPTIONS", "/v1/echo", headers={"origin": "https://a.example"})
        assert "access-control-allow-origin" not in answer.headers
    with application(allow_origin=("*",)) as wide:
        answer = ask(wide, "GET", "/v1/home", headers={"origin": "http://x"})
        assert answer.headers["access-control-allow-origin"] == "http://x"
        assert answer.headers["vary"] == "Origin"


def test_keys(tmp_path, monkeypatch):
    path = tmp_path / "keys"
    path.write_text("# of the page\nfirst key\n\n  second\n")
    compared, compare = [], hmac.compare_digest

    def counted(own, other):
        compared.append((own, other))
        return compare(own, other)

    monkeypatch.setattr(hmac, "compare_digest", counted)
    with application(api_key_file=path) as app:
        for given in ("Bearer first key", "bearer second", "Bearer  second "):
            assert ask(app, "POST", "/v1/echo", TEXT, {"authorization": given}).status == 200
        for given in (
            "",
            "Bearer",
            "Bearer third",
            "Basic second",
            "second",
            "Bearer # of the page",
        ):
            compared.clear()
            answer = ask(app, "POST", "/v1/echo", b"{", {"authorization": given})
            assert answer.status == 401 and answer.headers["www-authenticate"] == "Bearer"
            # against every key, of equal length and in constant time, whatever was sent
            assert [len(a) == len(b) == 32 for a, b in compared] == [True, True]
        assert ask(app, "GET", "/open").status == 200
        assert ask(app, "GET", "/v1/home").status == 401
    path.write_text("one\r\ntwo\r\n", encoding="utf-8-sig")  # as Windows' editors write it
    with application(api_key_file=path) as app:
        for given in ("Bearer one", "Bearer two"):
            assert ask(app, "POST", "/v1/echo", TEXT, {"authorization": given}).status == 200
    path.write_text("# none\n")
    with pytest.raises(ValueError, match="keys: no key in it"), application(api_key_file=path):
        pass


def test_a_full_queue_refuses_before_the_body_is_read(app, monkeypatch):
    def full(kind, cost, tokens):
        assert (kind, cost, tokens) == ("", 1, 100)  # four bytes a token
        raise Busy(2.2)

    monkeypatch.setattr(app.batcher, "check_room", full)
    unread = in_parts(then={"type": "nobody reads this"})
    answer = ask(app, "POST", "/v1/echo", b"", {"content-length": "400"}, unread)
    assert (answer.status, answer.headers["retry-after"]) == (429, "3")
    assert answer.body["error"]["type"] == "overloaded"


def test_a_full_queue_refuses_whoever_would_wait_too_long():
    async def go(app):
        running = asyncio.ensure_future(asked(app, "POST", "/v1/echo", {"text": ["a"] * 300}))
        await asyncio.sleep(0.1)
        waiting = asyncio.ensure_future(asked(app, "POST", "/v1/echo", {"text": ["b"] * 50}))
        await asyncio.sleep(0.05)
        late = await asked(app, "POST", "/v1/echo", {"text": ["c"] * 600})
        return late, await running, await waiting

    with application(EchoModel(seconds=0.001), max_wait=0.1) as app:
        late, *others = asyncio.run(go(app))
    assert late.status == 429 and int(late.headers["retry-after"]) >= 1
    assert [other.status for other in others] == [200, 200]


def test_no_answer_in_time():
    with application(EchoModel(seconds=0.3), timeout=0.1) as app:
        answer = ask(app, "POST", "/v1/echo", TEXT)
    assert answer.status == 504 and "0.1 seconds" in answer.body["error"]["message"]


def test_the_work_of_a_client_that_leaves_stops(monkeypatch, capsys):
    monkeypatch.setattr(served, "WATCHED_AFTER", 0.01)
    body = {"type": "http.request", "body": b'{"text": ["a", "a", "a"]}', "more_body": False}
    left = [body]

    async def receive():
        return left.pop() if left else {"type": "http.disconnect"}

    with application(EchoModel(seconds=0.1), log="requests") as app:
        assert ask(app, "POST", "/v1/echo", b"", {}, receive) is None
        assert app.batcher.queued_tokens == 0
    assert json.loads(capsys.readouterr().err)["status"] == 499


def test_a_request_that_was_watched_leaves_nothing_for_the_garbage_collector(monkeypatch):
    monkeypatch.setattr(served, "WATCHED_AFTER", 0.01)
    requests = []

    async def respond(app, request, body):
        requests.append(weakref.ref(request))
        return await echo(app, request, body)

    gc.disable()
    try:
        operation = Operation("/v1/echo", respond, Texts)
        with application(EchoModel(seconds=0.05), [operation]) as app:
            assert ask(app, "POST", "/v1/echo", TEXT).status == 200
        assert [reference() for reference in requests] == [None]
    finally:
        gc.enable()


def test_a_fault_of_ours_is_told_to_the_log_alone(app, capsys):
    answer = ask(app, "POST", "/v1/echo", {"text": ["fault"]})
    assert answer.status == 500 and "secret" not in str(answer) and "Error" not in str(answer.body)
    told = json.loads(capsys.readouterr().err.splitlines()[0])
    assert told["id"] == answer.headers["x-request-id"] and told["id"] in str(answer.body)
    assert told["traceback"][-1] == "RuntimeError: /secret/place is gone"
    assert ask(app, "POST", "/v1/echo", TEXT).status == 200


@pytest.mark.parametrize("kind, lines", [("errors", 0), ("requests", 1), ("texts", 1)])
def test_the_log_has_texts_only_if_told(kind, lines, capsys):
    with application(log=kind) as app:
        name = ask(app, "POST", "/v1/echo", {"text": ["private"]}).headers["x-request-id"]
    told = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert len(told) == lines
    for line in told:
        known = {"id": name, "method": "POST", "path": "/v1/echo", "status": 200, "texts": 1}
        assert line.items() >= known.items() and line["tokens"] == 10 and line["ms"] >= 0
        assert ("private" in str(line)) is (kind == "texts")


def test_a_log_that_nobody_reads_is_survived(app, monkeypatch):
    class Closed:
        def write(self, text):
            raise BrokenPipeError

    monkeypatch.setattr("sys.stderr", Closed())
    assert ask(app, "POST", "/v1/echo", {"text": ["fault"]}).status == 500


def test_the_path_in_the_log_is_that_of_an_operation(capsys):
    with application(log="requests") as app:
        ask(app, "GET", "/private/name")
    assert json.loads(capsys.readouterr().err)["path"] == "other"


def test_operations_may_answer_and_refuse_in_their_own_way():
    async def plain(app, request, body):
        return Reply(b"as it is", b"text/plain", 202, [(b"x-own", b"1")])

    async def refused(app, request, body):
        raise Refused(418, "no")

    def told(refused):
        return Reply(refused.message.upper().encode(), b"text/plain", refused.status)

    operations = Operation("/plain", plain), Operation("/refused", refused, error=told)
    with application(operations=operations) as app:
        answer = ask(app, "GET", "/plain")
        assert (answer.status, answer.body, answer.headers["x-own"]) == (202, b"as it is", "1")
        assert ask(app, "GET", "/refused")[::2] == (418, b"NO")


def test_answers_of_a_server_that_stops_end_their_connection():
    with application(operations=(ECHO, HOME, OPEN)) as app:
        app.is_draining = True
        assert ask(app, "GET", "/v1/home").headers["connection"] == "close"
