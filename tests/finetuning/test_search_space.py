"""What --sweep may say, and what it is told when it says something else."""

import pytest

from bertsmith.finetuning.search_space import PAPER_SWEEP, Range, grid_of, parse_space


def test_the_papers_grid():
    assert parse_space(" paper ") is PAPER_SWEEP
    assert PAPER_SWEEP == {  # A.3
        "batch": (16, 32),
        "rate": (5e-5, 3e-5, 2e-5),
        "epochs": (2, 3, 4),
    }
    grid = grid_of(PAPER_SWEEP)
    assert len(grid) == 18 and len({tuple(point.values()) for point in grid}) == 18


def test_choices_and_ranges_have_the_settings_types():
    text = "weight-decay=0.001|0 batch=8|16|8 epochs=2..5 dropout=0|0.1 keep=best|last"
    space = parse_space(text + " tune_thresholds=true|false init_seed=1|2")
    assert space == {
        "weight_decay": (0.001, 0.0),
        "batch": (8, 16),
        "epochs": Range(2, 5, is_whole=True, is_logarithmic=False),
        "dropout": (0.0, 0.1),
        "keep": ("best", "last"),
        "tune_thresholds": (True, False),
        "init_seed": (1, 2),
    }
    assert isinstance(space["weight_decay"][1], float) and isinstance(space["epochs"].low, int)


@pytest.mark.parametrize(
    ("text", "is_logarithmic"),
    [
        ("rate=1e-5..2e-5", True),  # rates always
        ("weight_decay=0.01..0.02", True),
        ("weight_decay=0..0.1", False),  # 0 has no logarithm
        ("batch=8..80", False),  # no more than a factor of 10
        ("batch=8..81", True),
        ("dropout=0..0.5", False),
    ],
)
def test_what_is_searched_by_orders_of_magnitude(text, is_logarithmic):
    (values,) = parse_space(text).values()
    assert values.is_logarithmic == is_logarithmic


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "nothing to search"),
        ("papers", "'papers': write paper, or name=low..high"),
        ("rate", "'rate': write paper"),
        ("rate=", "'rate=': write paper"),
        ("=3", "'=3': write paper"),
        ("raet=1e-5|1e-4", "unknown setting 'raet': did you mean 'rate'"),
        ("rate=1e-5 rate=1e-4", "rate is there twice"),
        ("max-length=64|128", "max_length is the same in every trial: set it with --max-length"),
        ("metric=accuracy|macro_f1", "metric is the same in every trial"),
        ("batch=16|32.5", "batch = 32.5: expected int"),
        ("batch=16|many", "batch = 'many': expected int"),
        ("tune_thresholds=1|0", "tune_thresholds = 1: expected bool"),
        ("keep=best|worst", "keep = 'worst': expected one of 'best', 'last'"),
        ("keep=best..last", "keep: 'best' is no number: write keep=a|b|c"),
        ("tune_thresholds=false..true", "False is no number"),
        ("rate=1e-4..1e-5", "rate = 1e-4..1e-5: write the lower one first"),
        ("rate=1e-4..1e-4", "write the lower one first"),
        ("rate=0..1e-4", "--sweep: rate = 0: must be above 0"),
        ("epochs=0|1", "--sweep: epochs = 0: must be above 0"),
        ("batch=0|1", "--sweep: batch = 0: must be above 0"),
        ("dropout=0..inf", "dropout = inf: must be finite"),
        ("dropout=nan|0", "dropout = nan: must be finite"),
        ("rate=..1e-4", "rate = '': expected float"),
    ],
)
def test_what_is_refused(text, message):
    with pytest.raises(ValueError, match="--sweep") as refusal:
        parse_space(text)
    assert message in str(refusal.value) and "\n" not in str(refusal.value)
