"""The space of a sweep: settings with their choices or ranges, as users write them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from bertsmith.base.settings import from_mapping
from bertsmith.tasks.task import EncodingSettings
from bertsmith.training.finetuning.settings import FinetuneSettings

LOGARITHMIC = ("learning_rate", "weight_decay")
LEFT_OPEN = ("batch_size", "epochs", "learning_rate")  # 0: as the data and the model suggest
WIDE = 10  # times the lowest: a range beyond is logarithmic too
MACHINE = ("device", "precision", "threads", "checkpoint_every")  # and how it is kept
# All trials share the rows of the texts and what measures them; another head wants other settings.
NOT_SEARCHED = (
    *(field.name for field in fields(EncodingSettings)),
    *MACHINE,
    "metric",
    "max_retries",
    "freeze_encoder",
    "bilstm",
)


@dataclass(frozen=True)
class Range:
    """Numbers from low to high, both among them."""

    low: float
    high: float
    is_whole: bool
    is_logarithmic: bool


Space = Mapping[str, tuple[Any, ...] | Range]  # the setting's choices, or its range

# the exhaustive search of the paper's A.3
PAPER_SWEEP: dict[str, tuple[Any, ...] | Range] = {
    "batch_size": (16, 32),
    "learning_rate": (5e-5, 3e-5, 2e-5),
    "epochs": (2, 3, 4),
}


@dataclass(frozen=True)
class Search:
    """A space, how much of it is tried, and where the trials are kept."""

    space: Space
    trials: int | None = None
    """Finished trials, of any process, that end the search; None: all of a space of choices."""
    store: str | None = None
    """The study's file or database URL; None: study.db in the folder of the sweep."""


def parse_space(text: str) -> Space:
    """Read a space to search: "paper", or such as "learning_rate=1e-5..1e-3 batch_size=16|32".

    A range of `learning_rate`, `weight_decay` or what spans more than a factor of 10 is logarithmic
    where it begins above 0.

    >>> parse_space("learning_rate=1e-5..1e-3 batch_size=16|32")
    {'learning_rate': Range(low=1e-05, high=0.001, is_whole=False, is_logarithmic=True),
     'batch_size': (16, 32)}
    >>> parse_space("epochs=2..5 keep=best|last")["epochs"]
    Range(low=2, high=5, is_whole=True, is_logarithmic=False)

    Errors: ValueError for a setting that does not exist (with the nearest one), is not searched or
    stands there twice, a value that it cannot have, a range without numbers or upside down.
    """
    if text.strip() == "paper":
        return PAPER_SWEEP
    space: dict[str, tuple[Any, ...] | Range] = {}
    for part in text.split():
        name, sign, values = part.partition("=")
        name = name.replace("-", "_")
        if not (name and sign and values):
            raise ValueError(f"`sweep`: '{part}': write paper, or name=low..high, or name=a|b|c")
        if name in space:
            raise ValueError(f"`sweep`: {name} is there twice")
        if name in NOT_SEARCHED:
            raise ValueError(f"`sweep`: {name} is the same in every trial: set it with `{name}`")
        if ".." in values:
            space[name] = _range(name, *values.split("..", 1))
        else:
            choices = [_value(name, value) for value in values.split("|")]
            space[name] = tuple(dict.fromkeys(choices))
    if not space:
        raise ValueError(
            "`sweep`: nothing to search: write paper, or such as learning_rate=1e-5..1e-4"
        )
    return space


def _range(name: str, first: str, last: str) -> Range:
    low, high = _value(name, first), _value(name, last)
    for value in (low, high):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"`sweep`: {name}: {value!r} is no number: write {name}=a|b|c")
    if not low < high:
        raise ValueError(f"`sweep`: {name} = {first}..{last}: write the lower one first")
    logarithmic = low > 0 and (name in LOGARITHMIC or high > WIDE * low)
    return Range(low, high, isinstance(low, int), logarithmic)


def _value(name: str, text: str) -> Any:
    """A value with the type of its setting.

    >>> _value("dropout", "0"), _value("batch_size", "16"), _value("keep", "last")
    (0.0, 16, 'last')
    """
    value: Any = {"true": True, "false": False}.get(text, text)
    for number in (float, int):
        try:
            value = number(text)
        except ValueError:
            continue
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"`sweep`: `{name}={text}`: must be finite")
    if name in LEFT_OPEN and value == 0:
        raise ValueError(f"`sweep`: `{name}={text}`: must be above 0")
    return getattr(from_mapping(FinetuneSettings, {name: value}, "`sweep`"), name)


def check_trials(space: Space, trials: int | None) -> None:
    """Refuse a range, which has no end, without a number of trials. Errors: ValueError."""
    if trials is None and any(isinstance(values, Range) for values in space.values()):
        raise ValueError("`sweep` with a range needs `trials`, the number of settings to try")


def check_points(
    space: Space,
    settings: FinetuneSettings,
    check: Callable[[FinetuneSettings], object] | None = None,
) -> None:
    """Refuse a space with a point that cannot be; `settings` are those that are not searched.

    `check` refuses settings by a ValueError of its own.

    Settings forbid a value or a pair of them, so every pair of choices or ends of ranges is looked
    at, the rest at its first: all combinations may be too many to look at.

    Errors: ValueError that names the point.
    """
    ends = {
        name: values if isinstance(values, tuple) else (values.low, values.high)
        for name, values in space.items()
    }
    first = {name: values[0] for name, values in ends.items()}
    for names in itertools.combinations(ends, min(2, len(ends))):
        for chosen in itertools.product(*(ends[name] for name in names)):
            point = first | dict(zip(names, chosen, strict=True))
            try:
                one = replace(settings, **point)
                if check:
                    check(one)
            except ValueError as error:
                raise ValueError(f"`sweep`: {shown(point)}: {error}") from error


def shown(point: Mapping[str, Any]) -> str:
    """A point of a space for people.

    >>> shown({"learning_rate": 3.14159e-05, "batch_size": 16})
    'learning_rate 3.14e-05, batch_size 16'
    """
    return ", ".join(
        f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in point.items()
    )


def expand_grid(space: Space) -> list[dict[str, Any]]:
    """Every setting of a space of choices, the last name going fastest.

    >>> expand_grid({"batch_size": (16, 32), "epochs": (2,)})
    [{'batch_size': 16, 'epochs': 2}, {'batch_size': 32, 'epochs': 2}]
    """
    choices = [values for values in space.values() if isinstance(values, tuple)]
    assert len(choices) == len(space), "a range has no grid"
    return [dict(zip(space, point, strict=True)) for point in itertools.product(*choices)]
