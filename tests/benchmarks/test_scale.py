"""docs/design/scale.md holds what benchmarks/scale.py computes."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def scale(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import scale

    yield scale
    sys.modules.pop("scale", None)


def test_the_page_holds_the_tables(scale):
    page = (ROOT / "docs/design/scale.md").read_text(encoding="utf-8")
    for table in scale.tables():
        assert table in page, f"python benchmarks/scale.py prints:\n{table}"


def test_the_arithmetic_by_hand(scale):
    # a ring sends 2 (n - 1) / n times the gradients, 4 bytes a parameter
    sent = 2 * 63 / 64 * 4 * 110e6
    assert scale.all_reduce("base", 64, "between") == pytest.approx(sent / (50e9 * 0.8))
    assert scale.rows_to_hide("base", 64, "between") == pytest.approx(
        sent / (50e9 * 0.8) / (2 / 3) * 6000
    )
    assert scale.shards(1e12) == pytest.approx(1e12 * scale.measured("tokens") / 2**24)


def test_constants_are_those_of_the_results(scale):
    def runs(name):
        file = ROOT / "benchmarks/results" / name
        return json.loads(file.read_text(encoding="utf-8"))["runs"]

    (load,) = (
        run["tokens_per_second"]
        for run in runs("loader.json")
        if (run["name"], run["length"]) == ("mlm+nsp", 128)
    )
    (build,) = (
        run["megabytes_per_core_second"]
        for run in runs("corpus.json")
        if (run["megabytes"], run["workers"]) == (1000, 2)
    )
    assert scale.measured("load") == pytest.approx(load, rel=0.005)  # to three digits
    assert scale.measured("build") == pytest.approx(build * 1e6)
