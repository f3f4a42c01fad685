"""Run directories, read as plain data.

Nothing here knows how a run was trained. A figure that a file does not hold is absent from the
report; a file that must be there and is not is an error that names it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from bertsmith.base.files import nearby, read_json_lines, read_json_object, read_optional_json
from bertsmith.base.terminal import is_number

Points = tuple[list[float], list[float]]  # x, y
# Keys that each example of dev_scores.json must have, by the task type.
DEV_KEYS = {
    "classify": ("label", "predicted"),
    "choice": ("label", "predicted"),
    "multilabel": ("label", "predicted", "probabilities"),
    "regress": ("label", "predicted"),
    "tag": ("label", "predicted", "words", "probabilities"),
    "answer": ("answers", "predicted", "question", "context"),
}
NO_REPORT = {  # kinds of runs without a training of their own: what to look at
    "features ner": "see {folder}/table.md and result.json",
    "lineage word-for-word": "`bertsmith lineage evaluate` measures it",
}


@dataclass(frozen=True)
class Run:
    """One run directory. `result` is empty while the run is still in progress."""

    name: str
    description: dict[str, Any]  # run.json
    events: list[dict[str, Any]]  # log.jsonl
    result: dict[str, Any]  # result.json
    seeds: dict[str, Run]  # RUN/seeds/*, for a fine-tuning run with several seeds
    dev: dict[str, Any] = field(default_factory=dict)  # dev_scores.json: each dev example's answer

    @property
    def kind(self) -> str:
        return str(self.description.get("kind", "pretrain"))

    @property
    def machine(self) -> dict[str, Any]:
        return self.description.get("machine") or {}

    @property
    def settings(self) -> dict[str, Any]:
        return self.description.get("settings") or {}

    @property
    def finished(self) -> bool:
        return bool(self.result)

    @property
    def part_runs(self) -> dict[str, Run]:
        """The runs that hold the curves: one a seed, or the run itself."""
        return self.seeds or {str(self.setting("seed", "")): self}

    @property
    def newest(self) -> dict[str, Any]:
        """The figures of the result; until then those of the newest training step."""
        return {**self.last("train"), **self.result}

    @property
    def eval_metrics(self) -> dict[str, Any]:
        """The final figures on held-out text; until then the newest ones."""
        return {**self.last("evaluate"), **self.result.get("held_out", {})}

    @property
    def phases(self) -> list[list[dict[str, Any]]]:
        """The log's lines by phase; a line that names none is of the phase it stands in."""
        phases, newest = [[]], 1
        for line in self.events:
            if line.get("phase", newest) != newest:
                newest = line["phase"]
                phases.append([])
            phases[-1].append(line)
        return phases

    def setting(self, name: str, default: Any = None) -> Any:
        """A setting by its last name, however deep it lies."""
        known = (value for path, value in flatten(self.settings) if path.split(".")[-1] == name)
        return next(known, default)

    def curve(self, event: str, name: str, along: str = "step") -> Points:
        """The steps and values of one logged figure; lines without it are left out."""
        return _points(self.events, event, name, along)

    def pieces(self, event: str, name: str, along: str = "step") -> list[Points]:
        """`curve`, one a phase: rows of another length have figures that must not be joined."""
        return [_points(lines, event, name, along) for lines in self.phases]

    def last(self, event: str) -> dict[str, Any]:
        """The newest line of that event, or an empty one."""
        return next((line for line in reversed(self.events) if line.get("event") == event), {})


def _points(lines: Iterable[Mapping[str, Any]], event: str, name: str, along: str) -> Points:
    points = [(line.get(along), line.get(name)) for line in lines if line.get("event") == event]
    points = [(float(x), float(y)) for x, y in points if is_number(x) and is_number(y)]
    return [x for x, _ in points], [y for _, y in points]


def read_run(folder: Path) -> Run:
    """Read a run directory.

    Errors: ValueError that names the folder or file that is missing or damaged, or the files of a
    run that there is no report on.
    """
    if not folder.is_dir():
        raise ValueError(
            f"{folder}: no such run directory{nearby(folder, 'run.json')}: give a folder that "
            "pretrain, finetune or quickstart wrote"
        )
    if not (folder / "run.json").exists():
        raise ValueError(
            f"{folder}/run.json is missing: not a run directory "
            "(give a folder that pretrain, finetune or quickstart wrote)"
        )
    description = read_json_object(folder / "run.json")
    if instead := NO_REPORT.get(str(description.get("kind"))):
        kind = description["kind"]
        raise ValueError(f"{folder}: a {kind} run has no report: {instead.format(folder=folder)}")
    parts = sorted((folder / "seeds").glob("*/log.jsonl"), key=lambda log: _order(log.parent.name))
    seeds = {log.parent.name: _read_part(log.parent, description, {}) for log in parts}
    return _read_part(folder, description, seeds)


def _order(seed: str) -> tuple[int, str]:
    return len(seed), seed  # as numbers


def _read_part(folder: Path, description: dict[str, Any], seeds: dict[str, Run]) -> Run:
    log = folder / "log.jsonl"
    if not log.exists() and not seeds:
        raise ValueError(f"{log} is missing: the run directory is incomplete")
    paths = folder / "result.json", folder / "dev_scores.json"
    result, dev = map(read_optional_json, paths)
    check_confusion(paths[0], result)
    if dev:
        check_dev_scores(paths[1], dev)
    events = read_json_lines(log) if log.exists() else []
    return Run(folder.resolve().name, description, events, result, seeds, dev)


def check_confusion(path: Path, result: Mapping[str, Any]) -> None:
    """Errors: ValueError when the confusion matrix has not one row and one column a label."""
    size, counts = len(result.get("labels") or []), result.get("confusion") or []
    if counts and (len(counts) != size or any(len(row) != size for row in counts)):
        raise ValueError(f"{path}: the confusion matrix is not {size} by {size}, one row a label")


def check_dev_scores(path: Path, scores: Mapping[str, Any]) -> None:
    """Errors: ValueError that names the example without what its task type must have."""
    kind, examples = scores.get("kind"), scores.get("examples")
    if kind not in DEV_KEYS:
        raise ValueError(f"{path}: unknown kind of task {kind!r}: known: {', '.join(DEV_KEYS)}")
    if not isinstance(examples, list):
        raise ValueError(f"{path}: holds no list of examples")
    for number, example in enumerate(examples, start=1):
        if missing := [name for name in DEV_KEYS[kind] if example.get(name) is None]:
            raise ValueError(f"{path}: example {number} has no '{missing[0]}'")
        if kind == "tag" and len({len(example[name]) for name in DEV_KEYS["tag"]}) > 1:
            raise ValueError(f"{path}: example {number} has not one tag or probability a word")
        if kind == "multilabel" and len(example["probabilities"]) != len(
            scores.get("labels") or []
        ):
            raise ValueError(f"{path}: example {number} has not one probability a label")


def flatten(settings: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Nested settings as (dotted name, value).

    >>> flatten({"steps": 10, "model": {"size": "tiny"}})
    [('steps', 10), ('model.size', 'tiny')]
    """
    flat: list[tuple[str, Any]] = []
    for name, value in settings.items():
        nested = isinstance(value, dict) and value
        flat += flatten(value, f"{prefix}{name}.") if nested else [(f"{prefix}{name}", value)]
    return flat


def mean_and_std(values: Iterable[float]) -> tuple[float, float]:
    """Mean and sample standard deviation (0 for a single value).

    >>> mean_and_std([1.0, 2.0, 3.0])
    (2.0, 1.0)
    """
    values = list(values)
    return fmean(values), stdev(values) if len(values) > 1 else 0.0
