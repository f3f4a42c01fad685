"""docs/design/scale.md holds what benchmarks/scale.py computes."""

import pytest

from bertsmith.base.files import read_json

from .conftest import BENCHMARKS


@pytest.fixture
def scale(module):
    return module("scale")


def test_the_page_holds_the_tables(scale):
    page = (BENCHMARKS.parent / "docs/design/scale.md").read_text(encoding="utf-8")
    for table in scale.tables():
        assert table in page, f"python benchmarks/scale.py prints:\n{table}"


def test_the_arithmetic_by_hand(scale):
    # a ring sends 2 (n - 1) / n times the gradients, 4 bytes a parameter
    sent = 2 * 63 / 64 * 4 * 110e6
    assert scale.all_reduce("base", 64, "between") == pytest.approx(sent / (50e9 * 0.8))
    assert scale.rows_to_hide("base", 64, "between") == pytest.approx(
        sent / (50e9 * 0.8) / (2 / 3) * 5622
    )
    assert scale.shards(1e12) == pytest.approx(1e12 * scale.measured("tokens") / 2**24)


@pytest.mark.parametrize(
    ("figure", "file", "wanted", "name", "unit"),
    [
        ("load", "loader", {"name": "mlm+nsp", "length": 128}, "tokens_per_second", 1),
        ("build", "corpus", {"megabytes": 1000, "workers": 2}, "megabytes_per_core_second", 1e6),
    ],
)
def test_constants_are_those_of_the_results(scale, figure, file, wanted, name, unit):
    runs = read_json(BENCHMARKS / "results" / f"{file}.json")["runs"]
    (run,) = (run for run in runs if wanted.items() <= run.items())
    assert scale.measured(figure) == pytest.approx(run[name] * unit, rel=0.005)  # to three digits
