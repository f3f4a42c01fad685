"""An experiment: variants of a model, columns on which they are measured, claims to be tested.

It is data, a TOML file. `tables/` has one for each table and figure of the paper and one for the
lineage; `tables/scales.toml` says how large everything is at a scale, where an experiment has
nothing of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from bertsmith.base.settings import (
    Count,
    NotNegative,
    Positive,
    PositiveFraction,
    check_bounds,
    converted_fields,
    from_mapping,
    nearest,
    toml_values,
)
from bertsmith.experiments.settings import SCALES
from bertsmith.tasks.task import Task, find_task
from bertsmith.training.finetuning.settings import ROWS, FinetuneSettings, FrozenSettings
from bertsmith.training.pretraining.settings import BUDGETS, PretrainSettings

TABLES = Path(__file__).parent / "tables"
LINEAGE = "lineage"  # the experiment that is not the paper's
PERPLEXITY, FEATURES = "perplexity", " features"  # columns that are no fine-tuning
ELMO_READS = {*BUDGETS, "size", "batch_size", "max_length"}  # of `pretrain`: its size and tokens


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Sizes and budgets of an experiment."""

    vocab_size: Annotated[int, Count]
    """Pieces of the vocabulary, which is cased: Tables 7 and 8 have names to tag."""
    seeds: Annotated[int, Count]
    """Fine-tunings of each model, seeds 1 to this."""
    train_examples: Annotated[int, NotNegative] = 0
    """About so many of a task to learn from, drawn once, by document or class; 0: all."""
    dev_examples: Annotated[int, NotNegative] = 0
    """About so many to measure on; 0: all."""
    pretrain: dict[str, Any] = field(default_factory=dict)
    """Keywords of `bertsmith.pretrain`."""
    finetune: dict[str, Any] = field(default_factory=dict)
    """Keywords of `bertsmith.finetune`."""
    finetune_own: dict[str, Any] = field(default_factory=dict)
    """More of them, for the encoders that are pre-trained here."""
    features: dict[str, Any] = field(default_factory=dict)
    """Fields of `FrozenSettings`."""

    def __post_init__(self) -> None:
        check_bounds(self)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A row of the table."""

    name: str
    title: str
    group: str = ""
    """Rows of a group are a table of their own, with this title."""
    system: Literal["encoder", "elmo"] = "encoder"
    """elmo is pre-trained by `lineage elmo`, on the words of the same text."""
    pretrain: dict[str, Any] = field(default_factory=dict)
    share: Annotated[float, Positive] = 1.0
    """Part of the scale's budget that it is pre-trained for; above 1: more than that."""
    at: Annotated[float, PositiveFraction] = 1.0
    """Part of the pre-training after which it is measured."""
    model: str = ""
    """A model that is there, in place of a pre-training."""
    finetune: dict[str, Any] = field(default_factory=dict)
    features: str = "concat-last-four"
    """The row of Table 7 that reads the layers, in columns of features."""
    columns: tuple[str, ...] = ()
    """The columns that it has; (): all."""
    sizes: dict[str, str] = field(default_factory=dict)
    """Its size at each scale, where it is not the scale's."""
    paper: dict[str, float] = field(default_factory=dict)
    """The paper's figures by column, in percent."""


@dataclass(frozen=True)
class Column:
    """A task, its metric and the way to it: "mrpc", "mrpc:accuracy", "ner features"; or
    "perplexity" on held-out text."""

    name: str

    @property
    def is_perplexity(self) -> bool:
        return self.name == PERPLEXITY

    @property
    def is_features(self) -> bool:
        return self.name.endswith(FEATURES)

    @property
    def task(self) -> Task:
        """The row of the task. Errors: ValueError for an unknown one."""
        return find_task(self.name.removesuffix(FEATURES).partition(":")[0])

    @property
    def metric(self) -> str:
        """
        >>> Column("mrpc:accuracy").metric, Column("cola").metric, Column("perplexity").metric
        ('accuracy', 'matthews', 'perplexity')
        """
        if self.is_perplexity:
            return PERPLEXITY
        return self.name.partition(":")[2] or self.task.main_metric


@dataclass(frozen=True, kw_only=True)
class Claim:
    """The paper's word on two variants: the first is better, on these columns."""

    better: str
    worse: str
    columns: tuple[str, ...] = ()
    """(): all that both have."""
    source: str


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """The content of a TOML file, at one scale."""

    title: str
    about: str = ""
    """A paragraph for the page."""
    columns: tuple[str, ...]
    variants: tuple[Variant, ...]
    claims: tuple[Claim, ...] = ()
    tests: Literal["claims", "all"] = "claims"
    """all: every two variants of a group are compared as well."""
    models: bool = False
    """True: models that the user names are rows, too."""
    points: Annotated[tuple[float, ...], PositiveFraction] = ()
    """Parts of a pre-training after which each variant is measured; (): at its end. A variant
    "mlm" is then several, "mlm@0.1" and so on, and its figures in the paper are "mnli@0.1"."""
    scale: Scale

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.points and PERPLEXITY in self.columns:
            raise ValueError("columns: perplexity is that of the end: leave `points` out")
        names = [variant.name for variant in self.variants]
        if twice := [name for name in names if names.count(name) > 1]:
            or_point = ", or leave a point out" if self.points else ""
            raise ValueError(f"two variants are called {twice[0]}: rename one{or_point}")
        for claim in self.claims:
            for name in (claim.better, claim.worse):
                if name not in names:
                    raise ValueError(f"claims: unknown variant '{name}': {nearest(name, names)}")
        for column in map(Column, self.columns):
            if not column.is_perplexity and column.metric not in column.task.metrics:
                known = nearest(column.metric, column.task.metrics)
                raise ValueError(f"columns: {column.name}: unknown metric: {known}")
            if column.is_features and column.task.task_type != "tag":
                raise ValueError(f"columns: {column.name}: features are for taggers")
        for used in (*self.variants, *self.claims):
            for name in used.columns:
                if name not in self.columns:
                    raise ValueError(f"unknown column '{name}': {nearest(name, self.columns)}")
        for variant in self.variants:
            if variant.features not in ROWS:
                row = variant.features
                raise ValueError(f"features: unknown row '{row}': {nearest(row, ROWS)}")
            self._check_variant(variant)

    def _check_variant(self, variant: Variant) -> None:
        """Errors: ValueError that names the variant, for what its system cannot do, a number out of
        bounds, or a part of the pre-training that cannot be measured."""
        try:
            check_bounds(variant)
        except ValueError as error:
            raise ValueError(f"variant {variant.name}: {error}") from error
        if variant.system == "elmo" and Column(PERPLEXITY) in self.columns_of(variant):
            raise ValueError(
                f"variant {variant.name}: perplexity of elmo is over words, not pieces: give it "
                "columns without perplexity"
            )
        if variant.system == "elmo" and (unread := variant.pretrain.keys() - ELMO_READS):
            raise ValueError(
                f"variant {variant.name}: elmo does not read {', '.join(sorted(unread))} of "
                "pretrain: leave it out"
            )
        if variant.at == 1 or variant.model:
            return
        if variant.system == "elmo":
            raise ValueError(
                f"variant {variant.name}: elmo is measured at its end alone: leave it out"
            )
        is_kept = {**self.scale.pretrain, **variant.pretrain}.get("keep_steps")
        if variant.at not in self.points and not is_kept:
            raise ValueError(
                f"variant {variant.name}: at={variant.at} is none of the experiment's points, so "
                "that no checkpoint of it is kept: name it in points, or leave at out"
            )
        if Column(PERPLEXITY) in self.columns_of(variant):
            raise ValueError(
                f"variant {variant.name}: perplexity is that of the end, and at={variant.at} is "
                "before it: give it columns without perplexity"
            )

    def variant(self, name: str) -> Variant:
        return next(one for one in self.variants if one.name == name)

    def columns_of(self, variant: Variant) -> list[Column]:
        """The columns in which the variant has a figure: a model that is there has no perplexity,
        for its held-out text is not known."""
        own = [Column(c) for c in self.columns if not variant.columns or c in variant.columns]
        return [column for column in own if not (variant.model and column.is_perplexity)]


def experiment_names() -> list[str]:
    """The experiments that come along, in the paper's order."""
    names = sorted(path.stem for path in TABLES.glob("*.toml"))
    return sorted(set(names) - {"scales"}, key=lambda name: (not name.startswith("table"), name))


def read_experiment(name: str, scale: str) -> Experiment:
    """Read one that comes along, or a TOML file of the user's.

    Errors: ValueError for an unknown name, or that names the file and the mistake in it.
    """
    path = Path(name)
    if path.suffix != ".toml":
        if name not in experiment_names():
            raise ValueError(
                f"unknown experiment '{name}': {nearest(name, ['all', *experiment_names()])} "
                "(the name of a file ends in .toml)"
            )
        path = TABLES / f"{name}.toml"
    values = toml_values(path)
    own = {one: values.pop(one, {}) for one in SCALES}
    if not isinstance(own[scale], Mapping):
        raise ValueError(f"{path}: {scale} = {own[scale]!r:.80}: expected a table, [{scale}]")
    whole = overridden(toml_values(TABLES / "scales.toml")[scale], own[scale])
    given = values.get("variants", ())
    try:
        values["scale"] = from_mapping(Scale, whole, f"{path}: [{scale}]")
        if points := values.get("points"):
            known = {name: values[name] for name in ("points", "variants") if name in values}
            converted_fields(Experiment, known, str(path))  # numbers, and tables with names
            both = [(variant, point) for variant in values.get("variants", ()) for point in points]
            values["variants"] = [_at(variant, point) for variant, point in both]
        experiment = from_mapping(Experiment, values, str(path))
    except ValueError as error:
        raise ValueError(str(error).replace("`", "")) from error  # the file's, no flag's
    columns = [f"{c}@{p:g}" for c in experiment.columns for p in experiment.points]
    for variant in given:
        for name in variant.get("paper", ()):
            if name not in (known := columns or experiment.columns):
                where = f"{path}: variant {variant['name']}: paper"
                raise ValueError(f"{where}: unknown column '{name}': {nearest(name, known)}")
    _check_keywords(experiment.scale, f"{path}: [{scale}]")
    for variant in experiment.variants:
        where = f"{path}: variant {variant.name}"
        _check_keywords(variant, where)
        for one in variant.sizes:
            if one not in SCALES:
                raise ValueError(f"{where}: sizes: unknown scale '{one}': {nearest(one, SCALES)}")
    return experiment


def _check_keywords(part: Scale | Variant, source: str) -> None:
    """Errors: ValueError for keywords of the public functions that they do not have."""
    kinds = {
        "pretrain": PretrainSettings,
        "finetune": FinetuneSettings,
        "finetune_own": FinetuneSettings,
        "features": FrozenSettings,
    }
    for name, kind in kinds.items():
        if isinstance(found := getattr(part, name, None), Mapping):
            known = {key: value for key, value in found.items() if key != "recipe"}
            converted_fields(kind, known, f"{source}: {name}")


def _at(variant: Mapping[str, Any], point: float) -> dict[str, Any]:
    """The variant after a part of its pre-training."""
    end = f"@{point:g}"
    known = variant.get("paper", {}).items()
    paper = {column.removesuffix(end): value for column, value in known if column.endswith(end)}
    own = {"name": f"{variant.get('name')}{end}", "title": f"{variant.get('title')}, {point:.0%}"}
    return {**variant, **own, "at": point, "paper": paper}


def overridden(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with changes, table by table; a budget takes the place of one of another kind.

    >>> overridden({"pretrain": {"steps": 9, "size": "tiny"}}, {"pretrain": {"tokens": 80}})
    {'pretrain': {'size': 'tiny', 'tokens': 80}}
    """
    kept = dict(base)
    if not changes.keys().isdisjoint(BUDGETS):
        kept = {name: value for name, value in kept.items() if name not in BUDGETS}
    for name, value in changes.items():
        both = isinstance(value, Mapping) and isinstance(kept.get(name), Mapping)
        kept[name] = overridden(kept[name], value) if both else value
    return kept
