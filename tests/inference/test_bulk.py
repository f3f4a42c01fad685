"""What is done of long work is there after a stop, a kill or a full disk, and is taken up again."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bertsmith.inference import bulk
from bertsmith.inference.bulk import kept_parts, request_digest
from bertsmith.inference.engines.processor import Processor
from bertsmith.model.heads import SequenceClassifier

from ..tiny import bertsmith, piece_tokenizer, python, random_model, write

SIZES = [2, 3, 1]


def digest(number, job="job"):
    """As if it were made of the window's rows."""
    return f"{job} {number}"


def made(number):
    return bytes([number]) * (50 + number), {"odd": number % 2}


def go_through(kept, job="job", last=None, error=KeyboardInterrupt, computed=None):
    """Makes the parts before `last`; in it comes the end."""
    kept.set_engines([], print)

    def make(number):
        if number == last:
            raise error
        if computed is not None:
            computed.append(number)
        return made(number)

    for number, size in enumerate(SIZES):
        kept.add(digest(number, job), size, lambda number=number: make(number))


def stopped(out, job, last, error=KeyboardInterrupt):
    with pytest.raises(error) as raised, kept_parts(out, "request", "rows") as kept:
        go_through(kept, job, last, error)
    return raised.value


def finished(out, job, request="request"):
    """The numbers of the parts that were made; all parts must be right."""
    computed = []
    with kept_parts(out, request, "rows") as kept:
        go_through(kept, job, computed=computed)
        assert list(kept.of(slice(None))) == [made(number)[0] for number in range(3)]
        assert list(kept.of(slice(1, 2))) == [made(1)[0]]
        assert kept.counts() == {"odd": 1, "rows": 6} and kept.counts(slice(2, 3))["rows"] == 1
    assert list(out.parent.iterdir()) == []
    return computed


def test_work_without_a_stop_leaves_nothing_beside_the_output(tmp_path):
    assert finished(tmp_path / "new" / "out.csv", "job") == [0, 1, 2]


def test_work_that_was_stopped_goes_on(tmp_path, capsys):
    out, partial = tmp_path / "out.csv", tmp_path / "out.csv.partial"
    kept = f"5 rows are kept in {partial}"
    assert str(stopped(out, "job", 2)) == f"{kept}: the same command goes on"
    assert capsys.readouterr().err == ""
    assert str(stopped(out, "job", 2)) == f"{kept}: the same command goes on"  # and again
    assert finished(out, "job") == [2]
    assert capsys.readouterr().err == f"{kept}: going on behind them\n" * 2


def test_messages_show_the_output_as_it_was_given(tmp_path, monkeypatch):
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    for out, partial in (
        ("out.csv", "out.csv.partial"),
        ("new/out.csv", "new/out.csv.partial"),
        (".", tmp_path / "sub.partial"),  # has no name to put the ending to
        ("..", f"{tmp_path}.partial"),
    ):
        said = f"5 rows are kept in {partial}: the same command goes on"
        assert str(stopped(Path(out), "job", 2)) == said
        assert Path(partial).is_file()
        Path(partial).unlink()


def test_an_error_keeps_what_is_done_as_well(tmp_path):
    stopped(tmp_path / "out.csv", "job", 1, MemoryError)
    assert finished(tmp_path / "out.csv", "job") == [1, 2]


def test_a_stop_before_the_first_block_leaves_nothing(tmp_path):
    assert stopped(tmp_path / "out.csv", "job", 0).args == ()
    assert list(tmp_path.iterdir()) == []


def test_other_work_starts_anew_and_says_so(tmp_path, capsys):
    out = tmp_path / "out.csv"
    stopped(out, "job", 2)
    assert finished(out, "job", "other request") == [0, 1, 2]
    said = "of another model or other flags: what it keeps is dropped"
    assert capsys.readouterr().err == f"{out}.partial: {said}\n"


def test_an_input_that_was_mended_goes_on_behind_what_is_the_same(tmp_path, capsys, monkeypatch):
    out = tmp_path / "out.csv"
    stopped(out, "job", 2)
    same = digest
    monkeypatch.setitem(globals(), "digest", lambda k, job: same(k, "new" if k else job))
    assert finished(out, "job") == [1, 2]
    said = "another input behind 2 rows: what it keeps of that is dropped"
    assert f"{out}.partial: {said}\n" in capsys.readouterr().err
    stopped(out, "job", 2)
    assert finished(out, "another") == [0, 1, 2]


def test_an_input_that_became_shorter(tmp_path):
    out = tmp_path / "out.csv"
    stopped(out, "job", 2)
    with kept_parts(out, "request", "rows") as kept:
        kept.set_engines([], print)
        assert not kept.add(digest(0), 2, pytest.fail)
        assert list(kept.of(slice(None))) == [made(0)[0]] and kept.counts()["rows"] == 2


def test_windows_are_cut_by_rows_and_by_characters(monkeypatch):
    monkeypatch.setattr(bulk, "WINDOW_CHARACTERS", 20)
    monkeypatch.setattr(bulk, "WINDOW_ROWS", 3)
    rows = [{"a": "b"}, "x" * 30, "a", "b", "c", "half \ud83d"]
    parts = list(bulk.windows(enumerate(rows, start=1)))
    assert [part.lines for part in parts] == [[1, 2], [3, 4, 5], [6]]
    assert [row for part in parts for row in part.rows] == rows
    other = list(bulk.windows(enumerate([*rows[:4], "d", rows[5]])))
    same = [a.digest == b.digest for a, b in zip(parts, other, strict=True)]
    assert same == [True, False, True]
    assert list(bulk.windows([])) == []


@pytest.mark.parametrize("lost", [1, 30])
def test_a_part_that_a_kill_cut_short_is_made_again(tmp_path, lost):
    out = tmp_path / "out.csv"
    stopped(out, "job", 2)
    partial = tmp_path / "out.csv.partial"
    os.truncate(partial, partial.stat().st_size - lost)
    assert finished(out, "job") == [1, 2]
    stopped(out, "job", 2)
    data = bytearray(partial.read_bytes())
    data[-20] ^= 0xFF
    partial.write_bytes(data)
    assert finished(out, "job") == [1, 2]
    stopped(out, "job", 2)
    data = partial.read_bytes()
    partial.write_bytes(data[:-60] + b"{" + data[-60:])  # in the line on the second part
    assert finished(out, "job") == [1, 2]
    stopped(out, "job", 2)
    partial.write_bytes(partial.read_bytes().partition(b"\n")[0][:-3])  # cut in its first line
    assert finished(out, "job") == [0, 1, 2]


def test_two_processes_are_not_at_one_work(tmp_path):
    out = tmp_path / "out.csv"
    with kept_parts(out, "request", "rows") as kept:
        go_through(kept)
        refused = pytest.raises(ValueError, match="another process is at this work")
        with refused, kept_parts(out, "request", "rows"):
            pass


def test_what_the_job_is_told_by(tmp_path):
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"12")
    job = request_digest([tmp_path], "float32")
    assert job == request_digest(iter([tmp_path]), "float32")
    others = {request_digest([tmp_path], "bf16"), request_digest([tmp_path, tmp_path], "float32")}
    weights.write_bytes(b"123")
    others.add(request_digest([tmp_path], "float32"))
    assert len({job, *others}) == 4


def test_arrays_and_their_texts_come_back():
    array, texts = np.arange(6, dtype=np.float32).reshape(2, 3), ["a", "half \ud83d"]
    found, beside = bulk.array_of(bulk.array_bytes(array, *texts))
    np.testing.assert_array_equal(found, array)
    assert found.dtype == array.dtype and beside == texts


class Model:
    """Takes an engine and a precision, as a predictor does."""

    def __init__(self):
        self.processor = Processor("cpu", "float32", 1)

    def use(self, engine, precision):
        self.processor = replace(self.processor, engine=engine, precision=precision)


def test_work_that_goes_on_keeps_its_engine(tmp_path):
    first, then = Model(), Model()
    out = tmp_path / "out.csv"
    with pytest.raises(KeyboardInterrupt), kept_parts(out, "request", "rows") as kept:
        kept.set_engines([first], lambda model: model.use("pytorch", "bf16"))
        kept.add(digest(0), 2, lambda: made(0))
        raise KeyboardInterrupt
    with kept_parts(out, "request", "rows") as kept:
        kept.set_engines([then], pytest.fail)
    assert then.processor == Processor("cpu", "bf16", 1, "pytorch")


PREDICT = "import sys; from bertsmith.cli.main import main; sys.exit(main(sys.argv[1:]))"


@pytest.mark.slow  # three processes
def test_a_file_of_many_windows_survives_kills(tmp_path):
    """Killed in the middle of a part, twice: in the end every row is there once, in its order."""
    tokenizer = piece_tokenizer("good bad old new film")
    run = {"task": "classify", "text": "text", "text_pair": None, "label": "stars"}
    made = {"run": run, "label_names": ("bad", "good"), "extra_config": {"max_length": 16}}
    folder = random_model(tmp_path / "run", tokenizer, SequenceClassifier, 2, **made)
    rows = [json.dumps({"id": k, "text": "good old film " * (k % 5)}) for k in range(30_000)]
    source, out = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    words = ("predict", folder, source, "--precision", "float32", "--out")
    for place in ("part:2", "part:1"):
        ran = python(PREDICT, *words, out, BERTSMITH_KILL_AT=place)
        assert ran.code == -signal.SIGKILL and not out.exists()
    bertsmith(*words, out)
    bertsmith(*words, tmp_path / "whole.jsonl")
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert [json.loads(line)["id"] for line in out.open()] == list(range(30_000))
    assert not list(tmp_path.glob("*.partial"))
