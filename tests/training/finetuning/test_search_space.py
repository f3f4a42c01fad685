"""What --sweep may say, and what it is told when it says something else."""

import itertools
from dataclasses import replace

import pytest

from bertsmith.training.finetuning.search_space import (
    PAPER_SWEEP,
    Range,
    check_points,
    expand_grid,
    parse_space,
)
from bertsmith.training.finetuning.settings import FinetuneSettings


def test_the_papers_grid():
    assert parse_space(" paper ") is PAPER_SWEEP
    assert PAPER_SWEEP == {  # A.3
        "batch_size": (16, 32),
        "learning_rate": (5e-5, 3e-5, 2e-5),
        "epochs": (2, 3, 4),
    }
    grid = expand_grid(PAPER_SWEEP)
    assert len(grid) == 18 and len({tuple(point.values()) for point in grid}) == 18


def test_choices_and_ranges_have_the_settings_types():
    text = "weight-decay=0.001|0 batch_size=8|16|8 epochs=2..5 dropout=0|0.1 keep=best|last"
    space = parse_space(text + " tune_thresholds=true|false init_seed=1|2")
    assert space == {
        "weight_decay": (0.001, 0.0),
        "batch_size": (8, 16),
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
        ("learning_rate=1e-5..2e-5", True),  # rates always
        ("weight_decay=0.01..0.02", True),
        ("weight_decay=0..0.1", False),  # 0 has no logarithm
        ("batch_size=8..80", False),  # no more than a factor of 10
        ("batch_size=8..81", True),
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
        ("learning_rate", "'learning_rate': write paper"),
        ("learning_rate=", "'learning_rate=': write paper"),
        ("=3", "'=3': write paper"),
        ("leraning_rate=1|2", "unknown setting 'leraning_rate': did you mean 'learning_rate'"),
        ("learning_rate=1e-5 learning_rate=1e-4", "rate is there twice"),
        ("max-length=64|128", "max_length is the same in every trial: set it with `max_length`"),
        ("metric=accuracy|macro_f1", "metric is the same in every trial"),
        ("batch_size=16|32.5", "batch_size = 32.5: expected a whole number"),
        ("batch_size=16|many", "batch_size = 'many': expected a whole number"),
        ("tune_thresholds=1|0", "tune_thresholds = 1: expected True or False"),
        ("keep=best|worst", "keep = 'worst': expected best or last"),
        ("keep=best..last", "keep: 'best' is no number: write keep=a|b|c"),
        ("tune_thresholds=false..true", "False is no number"),
        ("learning_rate=1e-4..1e-5", "learning_rate = 1e-4..1e-5: write the lower one first"),
        ("learning_rate=1e-4..1e-4", "write the lower one first"),
        ("learning_rate=0..1e-4", "`sweep`: `learning_rate=0`: must be above 0"),
        ("epochs=0|1", "`sweep`: `epochs=0`: must be above 0"),
        ("batch_size=0|1", "`sweep`: `batch_size=0`: must be above 0"),
        ("dropout=0..inf", "`dropout=inf`: must be finite"),
        ("dropout=nan|0", "`dropout=nan`: must be finite"),
        ("dropout=0.1|1.0", "`sweep`: `dropout=1.0`: must be in [0, 1)"),
        ("attention_dropout=0..1", "`sweep`: `attention_dropout=1.0`: must be in [0, 1)"),
        ("order_seed=-1|1", "`sweep`: `order_seed=-1`: must be at least 0"),
        ("learning_rate=..1e-4", "learning_rate = '': expected a number"),
    ],
)
def test_what_is_refused(text, message):
    with pytest.raises(ValueError, match="`sweep`") as refusal:
        parse_space(text)
    assert message in str(refusal.value) and "\n" not in str(refusal.value)


PATIENT, FROZEN = {"early_stopping_patience": 2}, {"freeze_encoder": True}
RATES = "learning_rate=1e-5..1e-3"
KEPT = "keep last: `early_stopping_patience` keeps the"
SPACES = [
    ("early_stopping_patience=0|2 keep=best|last", {}, f"early_stopping_patience 2, {KEPT}"),
    ("keep=best|last", PATIENT, f"{KEPT} weights"),
    (f"{RATES} keep=best|last", PATIENT, f"learning_rate 1e-05, {KEPT}"),
    ("layer_decay=1|0.9", FROZEN, "layer_decay 0.9: `freeze_encoder`: the model's layers"),
    (f"{RATES} early_stopping_patience=0..2 batch_size=8|16 keep=best|last", {},
     "learning_rate 1e-05, early_stopping_patience 2, batch_size 8, keep last: `early"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "given", "message"), SPACES)
def test_a_point_that_cannot_be_is_named(text, given, message):
    with pytest.raises(ValueError) as refusal:
        check_points(parse_space(text), FinetuneSettings(**given))
    assert str(refusal.value).startswith(f"`sweep`: {message}")


def is_possible(settings, point):
    try:
        replace(settings, **point)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(
    "given", [{}, {"freeze_encoder": True}, {"early_stopping_patience": 1}, {"keep": "last"}]
)
def test_a_space_is_refused_when_any_of_its_points_is(given):
    """Pairs of values against all combinations."""
    settings, refused = FinetuneSettings(**given), 0
    choices = {
        "early_stopping_patience": (0, 2),
        "keep": ("best", "last"),
        "reinit_layers": (0, 1),
        "layer_decay": (1.0, 0.9),
        "learning_rate": (1e-5, 1e-4, 1e-3),
    }
    for size in range(1, 1 + len(choices)):
        for names in itertools.combinations(choices, size):
            space = {name: choices[name] for name in names}
            if all(is_possible(settings, point) for point in expand_grid(space)):
                check_points(space, settings)
            else:
                refused += 1
                with pytest.raises(ValueError, match="`sweep`"):
                    check_points(space, settings)
    assert 0 < refused < 31


def test_a_space_of_a_billion_points_is_checked_at_once():
    names = "learning_rate weight_decay max_grad_norm dropout attention_dropout layer_decay "
    names += "focal_gamma warmup_ratio temperature"
    ten = tuple(k / 20 for k in range(1, 11))
    check_points(dict.fromkeys(names.split(), ten), FinetuneSettings())
