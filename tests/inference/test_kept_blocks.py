"""What is done of long work is there after a stop, a kill or a full disk, and is taken up again."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bertsmith.inference.engines.processor import Processor
from bertsmith.inference.kept_blocks import kept_blocks, request_digest

SIZES = [2, 3, 1]


def block(number):
    """As a model would give it: vectors, and a count."""
    return np.full((SIZES[number], 2), number, np.float32), np.array(number)


def up_to(last, error=KeyboardInterrupt):
    """Computes the blocks before `last`; in it comes the end."""

    def compute(number):
        if number == last:
            raise error
        return block(number)

    return compute


def stopped(out, job, last, error=KeyboardInterrupt):
    with pytest.raises(error) as raised, kept_blocks(out, job, SIZES, "rows") as kept:
        kept.set_precision([], print)
        kept.arrays(up_to(last, error))
    return raised.value


def finished(out, job):
    """The numbers of the blocks that were computed; all blocks must be right."""
    computed = []
    with kept_blocks(out, job, SIZES, "rows") as kept:
        kept.set_precision([], print)
        found = kept.arrays(lambda number: (computed.append(number), block(number))[1])
    for number, arrays in enumerate(found):
        for array, wanted in zip(arrays, block(number), strict=True):
            np.testing.assert_array_equal(array, wanted)
            assert array.dtype == wanted.dtype
    assert len(found) == len(SIZES) and list(out.parent.iterdir()) == []
    return computed


def test_work_without_a_stop_leaves_nothing_beside_the_output(tmp_path):
    assert finished(tmp_path / "new" / "out.csv", "job") == [0, 1, 2]


def test_work_that_was_stopped_goes_on(tmp_path, capsys):
    out, partial = tmp_path / "out.csv", tmp_path / "out.csv.partial"
    kept = f"5 of 6 rows are kept in {partial}"
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
        said = f"5 of 6 rows are kept in {partial}: the same command goes on"
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
    assert finished(out, "other") == [0, 1, 2]
    said = "of another input, model or flags: what it keeps is dropped"
    assert capsys.readouterr().err == f"{out}.partial: {said}\n"


@pytest.mark.parametrize("lost", [1, 30])
def test_a_block_that_a_kill_cut_short_is_computed_again(tmp_path, lost):
    out = tmp_path / "out.csv"
    stopped(out, "job", 2)
    partial = tmp_path / "out.csv.partial"
    os.truncate(partial, partial.stat().st_size - lost)
    assert finished(out, "job") == [1, 2]
    stopped(out, "job", 2)
    data = bytearray(partial.read_bytes())
    data[-60] ^= 0xFF
    partial.write_bytes(data)
    assert finished(out, "job") == [1, 2]
    stopped(out, "job", 2)
    partial.write_bytes(partial.read_bytes().partition(b"\n")[0][:-3])  # cut in its first line
    assert finished(out, "job") == [0, 1, 2]


def test_two_processes_are_not_at_one_work(tmp_path):
    out = tmp_path / "out.csv"
    with kept_blocks(out, "job", SIZES, "rows") as kept:
        kept.set_precision([], print)
        kept.arrays(block)
        refused = pytest.raises(ValueError, match="another process is at this work")
        with refused, kept_blocks(out, "job", SIZES, "rows"):
            pass


def test_what_the_job_is_told_by(tmp_path):
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"12")
    job = request_digest([tmp_path], [b"a", b"bc"], "float32")
    assert job == request_digest([tmp_path], iter([b"a", b"bc"]), "float32")
    others = {
        request_digest([tmp_path], [b"ab", b"c"], "float32"),
        request_digest([tmp_path], [b"a", b"bc"], "bf16"),
        request_digest([tmp_path, tmp_path], [b"a", b"bc"], "float32"),
    }
    weights.write_bytes(b"123")
    others.add(request_digest([tmp_path], [b"a", b"bc"], "float32"))
    assert len({job, *others}) == 5


class Model:
    """Takes a precision, as a predictor does."""

    def __init__(self):
        self.processor = Processor("cpu", "float32", 1)

    def use_precision(self, precision):
        self.processor = replace(self.processor, precision=precision)


def test_work_that_goes_on_keeps_its_precision(tmp_path):
    first, then = Model(), Model()
    out = tmp_path / "out.csv"
    with pytest.raises(KeyboardInterrupt), kept_blocks(out, "job", SIZES, "rows") as kept:
        kept.set_precision([first], lambda model: model.use_precision("bf16"))
        kept.arrays(up_to(1))
    with kept_blocks(out, "job", SIZES, "rows") as kept:
        kept.set_precision([then], pytest.fail)
        assert len(kept.arrays(block)) == len(SIZES)
    assert then.processor.precision == "bf16"
