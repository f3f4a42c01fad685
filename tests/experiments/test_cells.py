"""Cells of the experiments: made once, by whichever process, and kept as they were written."""

import threading
from dataclasses import replace

import pytest

from bertsmith.base.files import read_json, write_json, write_text
from bertsmith.experiments.paper import cells as cells_file
from bertsmith.experiments.paper.cells import Cell, compute, needed, time_left


def test_two_processes_share_the_work(tmp_path):
    """Each cell is made once, by either; both return when all are done."""
    at_work, calls = threading.Barrier(2, timeout=20), []

    def make(folder):
        if len(calls) < 2:
            calls.append(folder)
            at_work.wait()  # both are in a cell
        calls.append(folder)
        write_json(folder / "result.json", {})

    def cells():
        first = [Cell("a", str(k), {"k": k}, make) for k in range(2)]
        return [*first, Cell("b", "last", {}, make, tuple(first))]

    threads = [threading.Thread(target=lambda: [*compute(cells(), tmp_path)]) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(calls) == 2 + 3 and len({*calls[2:]}) == 3


def test_what_does_not_build_on_a_failure_is_done(tmp_path):
    calls = []

    def make(folder):
        calls.append(folder.name.split("-")[1])
        if calls[-1] == "bad":
            raise RuntimeError("no memory")
        write_json(folder / "result.json", {})

    bad, good = (Cell("a", label, {"of": label}, make) for label in ("bad", "good"))
    lost = Cell("a", "lost", {"of": "lost"}, make, (good, bad))
    with pytest.raises(RuntimeError, match="no memory"):
        [*compute([lost, good], tmp_path)]
    assert calls == ["good", "bad"]
    assert not bad.folder(tmp_path).exists() and not lost.folder(tmp_path).exists()


@pytest.mark.parametrize("elsewhere", ["meanwhile", "last"])
def test_what_failed_here_may_be_done_elsewhere(tmp_path, elsewhere):
    """A machine without the memory for a cell goes on with what another one made of it."""
    calls, seen = [], []

    def make(folder):
        calls.append(folder.name.split("-")[1])
        if calls == ["large"]:
            raise RuntimeError("no memory")
        if calls[-1] == elsewhere:
            replace(large).compute(tmp_path)  # another process does it
        write_json(folder / "result.json", {})

    large, meanwhile = (Cell("a", label, {"of": label}, make) for label in ("large", "meanwhile"))
    last = Cell("a", "last", {"of": "last"}, make, (meanwhile,))
    for _ in compute([large, last], tmp_path):
        seen.append(large.seconds(tmp_path) is not None)
    assert sorted(calls) == ["large", "large", "last", "meanwhile"]
    assert seen[-1]  # a caller that writes pages of what is there sees it


def test_a_changed_cell_is_named(tmp_path):
    def make(folder):
        write_json(folder / "result.json", {"f1": 0.5})

    cell = Cell("finetune", "x", {}, make)
    assert len([*compute([cell], tmp_path)]) == 3  # at the start, when it is done, at the end
    write_text(cell.folder(tmp_path) / "result.json", '{"f1": 0.9}')
    with pytest.raises(ValueError, match=r"result.json is not as it was written: remove .*finetun"):
        [*compute([cell], tmp_path)]


def test_keys_are_of_all_that_decides(monkeypatch):
    def cell(made_of=1, inputs=(), kind="a", label="x"):
        return Cell(kind, label, {"v": made_of}, lambda folder: None, inputs)

    assert cell().key == cell(label="y").key
    others = {cell().key, cell(2).key, cell(kind="b").key, cell(inputs=(cell(),)).key}
    monkeypatch.setattr(cells_file, "VERSION", "another")
    assert len(others | {cell().key}) == 5
    chain = cell(3, (cell(2, (cell(1),)),))
    assert [one.made_of["v"] for one in needed([chain, chain])] == [1, 2, 3]


def test_time_left_goes_by_what_was_measured(tmp_path):
    def make(folder):
        write_json(folder / "result.json", {})

    first, second, other = (
        Cell(kind, "x", {"n": n}, make, flops=8.0, budget=budget)
        for kind, n, budget in (("a", 1, 0.0), ("a", 2, 0.0), ("b", 3, 1.0))
    )
    [*compute([first], tmp_path)]
    done = first.folder(tmp_path) / "cell.json"
    write_json(done, read_json(done) | {"seconds": 4.0})
    left = time_left([first, second, other], tmp_path, flops_per_second=1.0)
    assert left["a"] == {"done": 1, "left": 1, "flops": 8.0, "seconds": 4.0}
    assert left["b"]["seconds"] == 8.0 + 1.0  # FLOPs and the budget
