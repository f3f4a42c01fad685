"""Settings: dataclasses <- TOML <- flags. An unknown or contradictory setting is an error."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import json
import math
import numbers
import os
import re
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

Settings = TypeVar("Settings")
Function = TypeVar("Function", bound=Callable[..., Any])


class Marker(str):
    """A mark in a field's `Annotated`, for whoever makes flags of the fields."""


class Alias(Marker):
    """Another spelling of the flag, such as --lr."""


class Metavar(Marker):
    """The placeholder of the value in the help."""


Advanced = Marker("advanced")  # shown by --help-all alone
Positional = Marker("positional")  # given by its place among the words, without a flag
Hidden = Marker("hidden")  # no flag


_type_hints = functools.cache(typing.get_type_hints)  # a millisecond a class


@dataclasses.dataclass(frozen=True)
class Bounds:
    """The numbers that a setting may have; None is always allowed."""

    words: str
    minimum: float = -math.inf
    above: float = -math.inf
    below: float = math.inf
    maximum: float = math.inf

    def holds(self, value: float) -> bool:
        """True within the bounds; NaN never is."""
        return self.minimum <= value <= self.maximum and self.above < value < self.below


Count = Bounds("must be at least 1", minimum=1)
Positive = Bounds("must be above 0, and finite", above=0)
NotNegative = Bounds("must be at least 0, and finite", minimum=0)
Seed = Bounds("must be at least 0 and at most 2**63 - 1", minimum=0, maximum=2**63 - 1)
Fraction = Bounds("must be in [0, 1)", minimum=0, below=1)
Weight = Bounds("must be in [0, 1]", minimum=0, maximum=1)
PositiveFraction = Bounds("must be above 0 and at most 1", above=0, maximum=1)


def check_bounds(settings: Any) -> None:
    """Refuse words that a field's `Literal` does not list, and numbers outside its `Bounds`.

    Errors: ValueError that names the first such setting, its value and what it must be.
    """
    plain = _type_hints(type(settings))
    for name, hint in _type_hints(type(settings), include_extras=True).items():
        value, words = getattr(settings, name), [o for o in options(plain[name]) if type(o) is str]
        if isinstance(value, str) and words and value not in words:
            raise ValueError(f"`{name}={value!r}`: known are {', '.join(words)}")
        for bounds in (m for m in getattr(hint, "__metadata__", ()) if isinstance(m, Bounds)):
            for number in value if isinstance(value, tuple) else (value,):
                if isinstance(number, int | float) and not bounds.holds(number):
                    raise ValueError(f"`{name}={number}`: {bounds.words}")


LIMIT = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
# What may stand for a type besides itself, in TOML and JSON or from NumPy.
ACCEPTED: dict[Any, Any] = {
    **{int: numbers.Integral, float: numbers.Real, Path: (str, os.PathLike), dict: Mapping},
    **dict.fromkeys((tuple, list), (list, tuple)),
}
EXPECTED: dict[Any, str] = {
    **{int: "a whole number", float: "a number", str: "a text", Path: "a path"},
    **{bool: "True or False", Iterable: "a list", Sequence: "a list"},
}


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint: the closest known word, the one with these initials, or all of them.

    >>> nearest("leraning_rate", ["learning_rate", "seed"])
    "did you mean 'learning_rate'?"
    >>> nearest("xyz", ["seed", "steps"])
    'known: seed, steps'
    >>> nearest("--learning-rate", ["--mlm-probability", "--learning-rate"])
    "did you mean '--learning-rate'?"
    >>> nearest("lr", ["learning_rate", "seed"])
    "did you mean 'learning_rate'?"
    """
    known = list(known)
    short = [word for word in known if len(name) > 1 and _initials(word) == name.strip("-")]
    within = [word for word in known if _parts(word) and _parts(word) <= _parts(name)]
    close = (
        difflib.get_close_matches(name, known, n=1, cutoff=0.9)
        or short[:1]
        or (difflib.get_close_matches(name, within or known, n=1, cutoff=0.0 if within else 0.5))
    )
    return f"did you mean '{close[0]}'?" if close else f"known: {', '.join(known) or 'none'}"


def _parts(name: str) -> set[str]:
    return set(name.replace("-", "_").split("_")) - {""}


def _initials(name: str) -> str:
    return "".join(part[0] for part in name.replace("-", "_").split("_") if part)


def from_mapping(kind: type[Settings], values: Mapping[str, Any], source: str) -> Settings:
    """Build a settings dataclass from plain values; `source` names the file in errors.

    Nested dataclasses take nested mappings. A whole number is accepted where a float is asked for.

    Errors: ValueError for an unknown name (with the nearest one), a wrong type, a missing setting.
    """
    assert dataclasses.is_dataclass(kind)
    converted = converted_fields(kind, values, source)
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
    nothing = dataclasses.MISSING
    missing = [
        name
        for name, field in fields.items()
        if field.default is nothing and field.default_factory is nothing and name not in values
    ]
    if missing:
        raise ValueError(f"{source}: missing setting {', '.join(missing)}")
    try:
        return kind(**converted)  # type: ignore[return-value]
    except ValueError as error:  # of bounds, or of settings together
        raise ValueError(f"{source}: {error}") from error


def group_values(settings: Any, group: type[Settings]) -> Settings:
    """The settings of one of the groups that these inherit from."""
    names = [field.name for field in dataclasses.fields(group)]  # type: ignore[arg-type]
    return group(**{name: getattr(settings, name) for name in names})


def converted_fields(kind: type, values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Some settings of a dataclass, each of the type of its field.

    Errors: ValueError for an unknown name (with the nearest one) or a wrong type.
    """
    hints = _type_hints(kind)
    fields = [field.name for field in dataclasses.fields(kind) if field.init]
    converted = {}
    for name, value in values.items():
        if name not in fields:
            raise ValueError(f"{source}: unknown setting '{name}': {nearest(name, fields)}")
        converted[name] = _convert(hints[name], value, f"{source}: {name}")
    return converted


def checked(fields: type | None = None) -> Callable[[Function], Function]:
    """Make a public function refuse unknown keywords, and arguments that its types do not allow.

    `fields`: a settings dataclass whose fields are keywords as well.

    >>> @checked()
    ... def fill(text: str, top: int = 5) -> None: ...
    >>> fill("a", top="x")
    Traceback (most recent call last):
    ValueError: fill(): top = 'x': expected a whole number
    """

    def decorated(function: Function) -> Function:
        parameters = inspect.signature(function).parameters

        @functools.cache
        def hints() -> dict[str, Any]:
            own = typing.get_type_hints(function)
            named = {
                k: own[k]
                for k, one in parameters.items()
                if k in own and one.kind != one.VAR_KEYWORD
            }
            return {**(typing.get_type_hints(fields) if fields else {}), **named}

        @functools.wraps(function)
        def call(*given: Any, **keywords: Any) -> Any:
            for name, value in {**dict(zip(parameters, given, strict=False)), **keywords}.items():
                if name in hints():
                    _convert(hints()[name], value, f"{call.__name__}(): {name}")
                elif name != "self":
                    unknown = f"{call.__name__}(): unknown setting '{name}'"
                    raise ValueError(f"{unknown}: {nearest(name, hints())}")
            return function(*given, **keywords)

        return call  # type: ignore[return-value]

    return decorated


def read_toml(kind: type[Settings], path: Path) -> Settings:
    """Read a settings dataclass from a TOML file.

    Errors: ValueError that names the file, and the line or the setting at fault.
    """
    return from_mapping(kind, toml_values(path), str(path))


def toml_values(path: Path) -> dict[str, Any]:
    """The content of a TOML file. Errors: ValueError that names the file, and line or byte."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))  # as `read_json`
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: not valid TOML: {error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text at byte {error.start}") from error


def to_mapping(settings: Any) -> dict[str, Any]:
    """The plain values of a settings dataclass, as JSON has them (paths become strings)."""
    return json.loads(json.dumps(dataclasses.asdict(settings), default=str))


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(value, str) and not value and Path in (hint, *parts):
        raise ValueError(f"{where} = '': expected a path; the current folder is '.'")
    if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        return from_mapping(hint, value, where)  # type: ignore[arg-type]
    for option in parts if origin in (typing.Union, types.UnionType) else (hint,):
        if _fits(option, value):
            kind = typing.get_origin(option) or option
            # TOML has no paths or tuples, and 1 stands for 1.0.
            if kind is tuple:
                item = typing.get_args(option)[0]
                return tuple(_convert(item, one, where) for one in value)
            return kind(value) if kind in (Path, float, int) else value
    wanted = expected(hint)
    if item := _item(hint):
        wanted = f"a list, such as [{json.dumps(value) if _fits(item, value) else '...'}]"
    raise ValueError(f"{where} = {value!r:.80}: expected {wanted}")


def expected(hint: Any) -> str:
    """The kind of value that a type asks for.

    >>> expected(int | typing.Literal["auto"] | None), expected(typing.Literal["best", "last"])
    ('a whole number or auto', 'best or last')
    >>> expected(tuple[int, ...]), expected(tuple[str, ...] | None)
    ('a whole number, or several', 'a text, or several')
    """
    if item := _item(hint):
        return f"{expected(item)}, or several"
    kinds = ((typing.get_origin(option) or option, option) for option in options(hint))
    words = [EXPECTED.get(kind) or getattr(kind, "__name__", word) for kind, word in kinds]
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _item(hint: Any) -> Any:
    """The type of the items, where a type asks for a list or tuple alone; None elsewhere."""
    found = options(hint)
    is_list = len(found) == 1 and typing.get_origin(found[0]) in (list, tuple)
    return typing.get_args(found[0])[0] if is_list else None


def options(hint: Any) -> list[Any]:
    """The types of a union without None, and the words of its literals."""
    found: list[Any] = []
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    for option in typing.get_args(hint) if is_union else (hint,):
        if typing.get_origin(option) is typing.Literal:
            found += map(str, typing.get_args(option))
        elif option is not type(None):
            found.append(option)
    return found


def _fits(option: Any, value: Any) -> bool:
    kind = typing.get_origin(option) or option
    if kind is Any:
        return True
    if kind is typing.Literal:
        return value in typing.get_args(option)
    if isinstance(value, bool):  # for Python an int as well
        return kind is bool
    return isinstance(value, ACCEPTED.get(kind, kind))


def parse_duration(limit: str) -> float:
    """Seconds of a time limit as Slurm writes it: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S.

    Errors: ValueError for anything else, and for a limit of nothing.

    >>> parse_duration("90"), parse_duration("23:50:00"), parse_duration("1-12")
    (5400, 85800, 129600)
    """
    parts = LIMIT.fullmatch(limit)
    if parts is None:
        raise ValueError(f"time limit '{limit}': give minutes, H:M:S or D-H:M:S, such as 23:50:00")
    days, first, second, third = (int(part) if part else None for part in parts.groups())
    if days is None and third is None:  # minutes lead only where nothing says hours
        hours, minutes, seconds = 0, first, second
    else:
        hours, minutes, seconds = first, second, third
    total = (((days or 0) * 24 + (hours or 0)) * 60 + (minutes or 0)) * 60 + (seconds or 0)
    if not total:
        raise ValueError(f"time limit '{limit}': must be above 0")
    return total
