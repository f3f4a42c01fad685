"""Settings dataclasses from TOML: what is accepted, and how a mistake is named."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from bertsmith.base.settings import from_mapping, parse_duration, read_toml, to_mapping

from ..tiny import write


@dataclass
class Optimizer:
    rate: float = 1e-4
    betas: tuple[float, ...] = (0.9, 0.999)


@dataclass
class Recipe:
    corpus: Path
    size: Literal["tiny", "mini"] = "tiny"
    steps: int | None = None
    dynamic: bool = True
    inputs: list[Path] = field(default_factory=list)
    keep: tuple[int, ...] = ()
    loggers: tuple[str, ...] | None = None
    optimizer: Optimizer = field(default_factory=Optimizer)


def test_a_toml_file_becomes_the_dataclass(tmp_path):
    lines = ['corpus = "store"', "steps = 10", "[optimizer]", "rate = 1", "betas = [0.9, 0.98]"]
    recipe = read_toml(Recipe, write(tmp_path / "recipe.toml", lines))
    assert recipe == Recipe(Path("store"), steps=10, optimizer=Optimizer(1.0, (0.9, 0.98)))
    assert isinstance(recipe.optimizer.rate, float)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('corpus = "c"\nstepz = 1', "unknown setting 'stepz': did you mean 'steps'?"),
        ('corpus = "c"\n[optimizer]\nrates = 1', "optimizer: unknown setting 'rates'"),
        ('corpus = "c"\nsteps = "ten"', "steps = 'ten': expected a whole number"),
        ('corpus = "c"\nsteps = true', "steps = True: expected a whole number"),
        ('corpus = "c"\nsize = "huge"', "size = 'huge': expected tiny or mini"),
        ('corpus = "c"\ndynamic = 1', "dynamic = 1: expected True or False"),
        ("corpus = 3", "corpus = 3: expected a path"),
        ('corpus = "c"\ninputs = "a"', "inputs = 'a': expected a list, such as [\"a\"]"),
        ('corpus = "c"\ninputs = 3', "inputs = 3: expected a list, such as [...]"),
        ('corpus = "c"\nloggers = "a"', "loggers = 'a': expected a list, such as [\"a\"]"),
        ('corpus = "c"\nkeep = [1, "500"]', "keep = '500': expected a whole number"),
        ('corpus = "c"\nloggers = ["a", 1]', "loggers = 1: expected a text"),
        ('corpus = "c"\n[optimizer]\nbetas = ["x"]', "betas = 'x': expected a number"),
        ("steps = 3", "missing setting corpus"),
        ("corpus = ", "not valid TOML: Invalid value (at end of document)"),
        (b'corpus = "\xe9"', "not UTF-8 text at byte 10"),
    ],
)
def test_a_mistake_is_named_with_its_file(tmp_path, text, message):
    path = write(tmp_path / "recipe.toml", text)
    with pytest.raises(ValueError) as caught:
        read_toml(Recipe, path)
    assert str(caught.value).startswith(f"{path}: ") and message in str(caught.value)


def test_plain_values_give_the_dataclass_back():
    recipe = Recipe(Path("store"), inputs=[Path("a"), Path("b")], steps=None)
    values = to_mapping(recipe)
    assert values["corpus"] == "store" and values["inputs"] == ["a", "b"]
    again = from_mapping(Recipe, values, "run.json")
    assert again.corpus == Path("store") and again.optimizer == recipe.optimizer


@dataclass
class Runner:
    optimizers: tuple[Optimizer, ...] = ()


def test_a_tuple_of_dataclasses_is_read_again():
    runner = Runner((Optimizer(rate=1.0), Optimizer(betas=(0.5,))))
    assert from_mapping(Runner, to_mapping(runner), "file") == runner
    with pytest.raises(ValueError, match="file: optimizers: unknown setting 'rates'"):
        from_mapping(Runner, {"optimizers": [{"rates": 1}]}, "file")


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        ("90", 90 * 60),
        ("5:30", 5 * 60 + 30),
        ("23:50:00", 23 * 3600 + 50 * 60),
        ("2-0", 48 * 3600),
        ("1-12:30", 36.5 * 3600),
        ("1-00:00:01", 24 * 3600 + 1),
    ],
)
def test_a_limit_is_read_as_slurm_writes_it(limit, seconds):
    assert parse_duration(limit) == seconds


@pytest.mark.parametrize("limit", ["", "x", "1h", "1:2:3:4", "-5", "1.5", "1-"])
def test_another_limit_is_refused(limit):
    with pytest.raises(ValueError, match=f"time limit '{limit}': give minutes, H:M:S or D-H:M:S"):
        parse_duration(limit)


@pytest.mark.parametrize("limit", ["0", "0:00", "0-0:00:00"])
def test_a_limit_of_nothing_is_refused(limit):
    with pytest.raises(ValueError, match="must be above 0"):
        parse_duration(limit)
