"""What is done of long work is there after a stop, a kill or a full disk, and is taken up again."""

import json
import os
import platform
import signal
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bertsmith.base.terminal import Progress
from bertsmith.inference import bulk
from bertsmith.inference.bulk import kept_parts, request_digest
from bertsmith.inference.engines.processor import Processor
from bertsmith.inference.predictor import load
from bertsmith.model.heads import SequenceClassifier, TokenClassifier
from bertsmith.text.readers.tables import stream_rows

from ..tiny import bertsmith, cli, piece_tokenizer, python, random_model, refused, write

SIZES = [2, 3, 1]


def digest(number, job="job"):
    """As if it were made of the window's rows."""
    return f"{job} {number}"


def made(number):
    return bytes([number]) * (50 + number), {"odd": number % 2}


def add(kept, make, job="job", sizes=SIZES):
    """Adds parts numbered from 0, of so many rows; `make` is given the numbers."""
    items = (((digest(number, job), size), number) for number, size in enumerate(sizes))
    progress = Progress("test")
    kept.add(items, [], lambda models, number, on_rows: make(number), progress)
    return progress.done


def go_through(kept, job="job", last=None, error=KeyboardInterrupt, computed=None):
    """Makes the parts before `last`; in it comes the end."""
    kept.set_engines([], print)

    def make(number):
        if number == last:
            raise error
        if computed is not None:
            computed.append(number)
        return made(number)

    assert add(kept, make, job) in (0, sum(SIZES))  # 0: all were there


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
        add(kept, pytest.fail, sizes=SIZES[:1])
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
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    weights.write_bytes(b"12")
    config.write_bytes(b"{}")
    job = request_digest([tmp_path], "float32")
    assert job == request_digest(iter([tmp_path]), "float32")
    others = {request_digest([tmp_path], "bf16"), request_digest([tmp_path, tmp_path], "float32")}
    weights.write_bytes(b"123")
    others.add(request_digest([tmp_path], "float32"))
    config.write_bytes(b'{"hidden_act": "gelu_new"}')
    others.add(request_digest([tmp_path], "float32"))
    assert len({job, *others}) == 5


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
        add(kept, made, sizes=SIZES[:1])
        raise KeyboardInterrupt
    with kept_parts(out, "request", "rows") as kept:
        kept.set_engines([then], pytest.fail)
    assert then.processor == Processor("cpu", "bf16", 1, "pytorch")


PREDICT = "import sys; from bertsmith.cli.main import main; sys.exit(main(sys.argv[1:]))"


@pytest.fixture
def run(tmp_path):
    """A folder of a model that tells two classes."""
    run = {"task": "classify", "text": "text", "text_pair": None, "label": "stars"}
    made = {"run": run, "label_names": ("bad", "good"), "extra_config": {"max_length": 16}}
    tokenizer = piece_tokenizer("good bad old new film")
    return random_model(tmp_path / "run", tokenizer, SequenceClassifier, 2, **made)


def films(count):
    return [json.dumps({"id": k, "text": "good old film " * (k % 5)}) for k in range(count)]


@pytest.mark.slow  # three processes
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_file_of_many_windows_survives_kills(tmp_path, run, suffix):
    """Killed in the middle of a part, twice: in the end every row is there once, in its order."""
    source, out = write(tmp_path / "in.jsonl", films(30_000)), tmp_path / f"out{suffix}"
    words = ("predict", run, source, "--precision", "float32", "--out")
    for place in ("part:2", "part:1"):
        ran = python(PREDICT, *words, out, BERTSMITH_KILL_AT=place)
        assert ran.code == -signal.SIGKILL and not out.exists()
    bertsmith(*words, out)
    bertsmith(*words, whole := tmp_path / f"whole{suffix}")
    assert out.read_bytes() == whole.read_bytes()
    assert [int(row["id"]) for _, row in stream_rows(out, {})] == list(range(30_000))
    assert not list(tmp_path.glob("*.partial"))


# --- on a Ray cluster

ON_RAY = ("--backend", "ray")


@pytest.fixture
def few(monkeypatch):
    """Small windows and blocks."""
    monkeypatch.setattr(bulk, "WINDOW_ROWS", 3)
    monkeypatch.setattr(bulk, "BLOCK_TOKENS", 20)


@pytest.mark.parametrize("name", ["o.csv", "o.jsonl"])
def test_predict_on_ray_writes_the_same(tmp_path, run, fake_ray, few, name):
    source, there = write(tmp_path / "in.jsonl", films(40)), tmp_path / name
    for more in ((), ("--ensemble", run)):
        bertsmith("predict", run, source, *more, "--out", tmp_path / f"w{name}")
        bertsmith("predict", run, source, *more, *ON_RAY, "--out", there)
        assert there.read_bytes() == (tmp_path / f"w{name}").read_bytes()
    assert fake_ray.most == 6 and fake_ray.options["num_gpus"] == 0


def test_words_are_answered_on_ray_in_blocks(tmp_path, fake_ray, few):
    kind = {"kind": "tag", "text": "tokens", "label": "tags", "max_length": 16}
    names = {"label_names": ("O", "B-X", "I-X"), "extra_config": kind}
    tokenizer = piece_tokenizer("good bad old new film")
    folder = random_model(tmp_path / "tagger", tokenizer, TokenClassifier, 3, **names)
    source = write(tmp_path / "in.txt", ["good old film " * (k % 3 + 1) for k in range(20)])
    words = "predict", folder, source, "--out"
    bertsmith(*words, tmp_path / "here.jsonl")
    bertsmith(*words, tmp_path / "there.jsonl", *ON_RAY)
    assert (tmp_path / "here.jsonl").read_bytes() == (tmp_path / "there.jsonl").read_bytes()
    assert fake_ray.most > 1


@pytest.mark.parametrize("name", ["o.npy", "o.jsonl"])
def test_embed_on_ray_writes_the_same(tmp_path, run, fake_ray, few, name):
    source = write(tmp_path / "in.txt", ["good old film " * (k % 9 + 1) for k in range(40)])
    other = write(tmp_path / "other.txt", ["bad " * (k % 7) + "film" for k in range(30)])
    words = ("embed", source, "--model", run, "--max-length", "16", "--whiten", other)
    words += ("--dimensions", "3", "--out")
    here = cli(*words, tmp_path / f"w{name}").err.replace(f"w{name}", name)
    there = cli(*words, tmp_path / name, *ON_RAY).err
    assert (tmp_path / name).read_bytes() == (tmp_path / f"w{name}").read_bytes()
    cut = [line for line in here.splitlines() if "texts were cut" in line]
    assert cut and cut == [line for line in there.splitlines() if "texts were cut" in line]


@pytest.mark.parametrize("begun", [(), ON_RAY])
def test_work_goes_on_with_the_other_backend(tmp_path, run, fake_ray, few, monkeypatch, begun):
    """Stopped by Ctrl-C when three windows are kept, here or there."""
    source, out = write(tmp_path / "in.jsonl", films(20)), tmp_path / "o.csv"
    words, appended = ("predict", run, source, "--out", out), []
    append = bulk.KeptParts._append

    def counting(self, label, *made):
        if len(appended) == 3:
            raise KeyboardInterrupt
        appended.append(label)
        append(self, label, *made)

    with monkeypatch.context() as patch:
        patch.setattr(bulk.KeptParts, "_append", counting)
        ran = cli(*words, *begun)
    assert ran.code == 130 and f"9 rows are kept in {out}.partial" in ran.err
    opened = bulk._opened.cache_info()
    ran = cli(*words, *(() if begun else ON_RAY))
    assert ran.code == 0 and f"9 rows are kept in {out}.partial: going on" in ran.err
    bertsmith("predict", run, source, "--out", tmp_path / "w.csv")
    assert out.read_bytes() == (tmp_path / "w.csv").read_bytes()
    calls = bulk._opened.cache_info()
    asked = calls.hits + calls.misses - opened.hits - opened.misses
    assert asked == (0 if begun else 4)  # of 7 windows


def test_a_broken_row_is_named_as_without_ray(tmp_path, run, fake_ray, few):
    source = write(tmp_path / "in.jsonl", [*films(10), '{"id": 10, "text": 5}'])
    words = "predict", run, source, "--out", tmp_path / "o.csv"
    here = cli(*words)
    assert here.code == 2 and "9 rows are kept" in here.err and f"{source}:11: " in here.err
    (tmp_path / "o.csv.partial").unlink()
    assert cli(*words, *ON_RAY).err == here.err


def test_a_tokenizer_that_was_mended_starts_anew(tmp_path, run, few):
    """What is kept was read as other pieces."""
    source = write(tmp_path / "in.jsonl", [*films(4), '{"id": 4, "text": 5}'])
    words, path = (
        ("predict", run, source, "--out", tmp_path / "o.csv"),
        run / "tokenizer_config.json",
    )
    mended = path.read_text()
    write(path, json.dumps(json.loads(mended) | {"do_lower_case": False}))
    assert "3 rows are kept" in cli(*words).err
    write(path, mended)
    write(source, films(4))
    ran = cli(*words)
    assert ran.code == 0 and "of another model or other flags: what it keeps is dropped" in ran.err


def test_a_machine_with_another_model_or_none_is_named(tmp_path, run, fake_ray, monkeypatch):
    source, out = write(tmp_path / "in.jsonl", films(3)), tmp_path / "o.csv"
    shared = bulk.SharedModel.of(load(run, device="cpu"))
    others = {
        f"{run}: another model than where the work began": {"digest": "other"},
        "no such folder": {"folder": tmp_path / "elsewhere"},
    }
    for message, other in others.items():
        monkeypatch.setattr(bulk.SharedModel, "of", lambda _, o=other: shared._replace(**o))
        ran = cli("predict", run, source, *ON_RAY, "--out", out)
        assert ran.code == 1 and f"a machine of the Ray cluster: {platform.node()}: " in ran.err
        assert message in ran.err and {*tmp_path.iterdir()} == {run, source}


def test_a_gpu_here_asks_for_gpus_there(run):
    model = load(run, device="cpu")
    assert bulk.SharedModel.of(model)[:3] == (run, "cpu", "float32")
    model.processor = Processor("cuda:1", "bf16", 1)
    assert bulk.SharedModel.of(model)[1:3] == ("cuda", "bf16")


def test_without_ray_nothing_is_written(tmp_path, run, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    source = write(tmp_path / "in.jsonl", films(3))
    for words in (("predict", run, source), ("embed", source, "--model", run)):
        line = refused(*words, *ON_RAY, "--out", tmp_path / "new" / "o.jsonl")
        assert "bertsmith[ray]" in line
    assert {*tmp_path.iterdir()} == {run, source}


def workers():
    """The processes of Ray that work at this moment."""
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # ended meanwhile
            if line.read_bytes().startswith(b"ray::_call"):
                yield int(line.parent.name)


@pytest.mark.slow
def test_a_worker_that_is_killed_loses_nothing(tmp_path, run, monkeypatch):
    pytest.importorskip("ray", reason="the extra ray is not installed")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "in.jsonl", films(30_000))
    words = ("predict", "run", "in.jsonl", "--precision", "float32", "--out")
    bertsmith(*words, "here.jsonl")
    append, killed = bulk.KeptParts._append, []

    def killing(self, *part):
        append(self, *part)
        for process in () if killed else workers():
            os.kill(process, signal.SIGKILL)
            killed.append(process)

    monkeypatch.setattr(bulk.KeptParts, "_append", killing)
    monkeypatch.setattr(bulk, "WINDOW_ROWS", 2048)
    bertsmith(*words, "there.jsonl", *ON_RAY)
    assert killed and Path("here.jsonl").read_bytes() == Path("there.jsonl").read_bytes()
