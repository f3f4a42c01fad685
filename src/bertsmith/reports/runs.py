"""Run directories, read as plain data.

Nothing here knows how a run was trained. A figure that a file does not hold is absent from the
report; a file that must be there and is not is an error that names it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from bertsmith.base.files import read_json, read_json_lines

# What each example of dev_scores.json must have, by the kind of the task.
DEV_KEYS = {
    "classify": ("label", "predicted"),
    "choice": ("label", "predicted"),
    "multilabel": ("label", "predicted", "probabilities"),
    "regress": ("label", "predicted"),
    "tag": ("label", "predicted", "words", "probabilities"),
    "answer": ("answers", "predicted", "question", "context"),
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
    def finished(self) -> bool:
        return bool(self.result)

    @property
    def part_runs(self) -> dict[str, Run]:
        """The runs that hold the curves: one a seed, or the run itself."""
        return self.seeds or {str(self.setting("seed", "")): self}

    def setting(self, name: str, default: Any = None) -> Any:
        """A setting by its last name, however deep it lies."""
        for path, value in flatten(self.description.get("settings", {})):
            if path.rsplit(".", 1)[-1] == name:
                return value
        return default

    def curve(self, event: str, name: str, along: str = "step") -> tuple[list[float], list[float]]:
        """The steps and values of one logged figure; lines without it are left out."""
        return _points(self.events, event, name, along)

    def pieces(
        self, event: str, name: str, along: str = "step"
    ) -> list[tuple[list[float], list[float]]]:
        """`curve`, one a phase: rows of another length have figures that must not be joined."""
        return [_points(lines, event, name, along) for lines in self.phases]

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

    def last(self, event: str) -> dict[str, Any]:
        """The newest line of that event, or an empty one."""
        return next((line for line in reversed(self.events) if line.get("event") == event), {})

    def messages(self) -> list[str]:
        return [str(line.get("text", "")) for line in self.events if line.get("event") == "message"]


def read_run(folder: Path) -> Run:
    """Read a run directory.

    Errors: ValueError that names the folder or file that is missing or damaged, or the files of a
    run that there is no report on.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such run directory")
    if not (folder / "run.json").exists():
        raise ValueError(
            f"{folder}/run.json is missing: not a run directory "
            "(give a folder that pretrain, finetune or quickstart wrote)"
        )
    description = read_object(folder / "run.json")
    if description.get("kind") == "features ner":  # many trainings, none of them the run's own
        raise ValueError(
            f"{folder}: a features ner run has no report: its figures are in {folder}/table.md and"
            " result.json"
        )
    seeds = {
        part.name: _read_part(part, description, {})
        for part in sorted((folder / "seeds").glob("*"), key=lambda part: _seed_order(part.name))
        if part.is_dir() and (part / "log.jsonl").exists()
    }
    return _read_part(folder, description, seeds)


def _read_part(folder: Path, description: dict[str, Any], seeds: dict[str, Run]) -> Run:
    log = folder / "log.jsonl"
    if not log.exists() and not seeds:
        raise ValueError(f"{log} is missing: the run directory is incomplete")
    paths = folder / "result.json", folder / "dev_scores.json"
    result, dev = (read_object(path) if path.exists() else {} for path in paths)
    check_confusion(paths[0], result)
    if dev:
        check_dev_scores(paths[1], dev)
    return Run(
        name=folder.resolve().name,
        description=description,
        events=read_json_lines(log) if log.exists() else [],
        result=result,
        seeds=seeds,
        dev=dev,
    )


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object. Errors: ValueError that names the file."""
    if not path.exists():
        raise ValueError(f"{path} is missing")
    value = read_json(path)
    if not isinstance(value, dict):
        raise ValueError(f"{path}: holds no JSON object")
    return value


def check_confusion(path: Path, result: Mapping[str, Any]) -> None:
    """Errors: ValueError when the confusion matrix has not one row and one column a label."""
    size, counts = len(result.get("labels") or []), result.get("confusion") or []
    if counts and (len(counts) != size or any(len(row) != size for row in counts)):
        raise ValueError(f"{path}: the confusion matrix is not {size} by {size}, one row a label")


def check_dev_scores(path: Path, scores: Mapping[str, Any]) -> None:
    """Errors: ValueError that names the example without what its kind of task must have."""
    kind, examples = scores.get("kind"), scores.get("examples")
    if kind not in DEV_KEYS:
        raise ValueError(f"{path}: unknown kind of task {kind!r}: known: {', '.join(DEV_KEYS)}")
    if not isinstance(examples, list):
        raise ValueError(f"{path}: holds no list of examples")
    for number, example in enumerate(examples, start=1):
        missing = [name for name in DEV_KEYS[kind] if example.get(name) is None]
        if missing:
            raise ValueError(f"{path}: example {number} has no '{missing[0]}'")
        sizes = {len(example[name]) for name in DEV_KEYS["tag"]} if kind == "tag" else {0}
        if kind == "multilabel":
            sizes = {len(scores.get("labels") or []), len(example["probabilities"])}
        if len(sizes) > 1:
            per = "tag or probability a word" if kind == "tag" else "probability a label"
            raise ValueError(f"{path}: example {number} has not one {per}")


def flatten(settings: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Nested settings as (dotted name, value).

    >>> flatten({"steps": 10, "model": {"size": "tiny"}})
    [('steps', 10), ('model.size', 'tiny')]
    """
    flat: list[tuple[str, Any]] = []
    for name, value in settings.items():
        if isinstance(value, dict) and value:
            flat += flatten(value, f"{prefix}{name}.")
        else:
            flat.append((f"{prefix}{name}", value))
    return flat


def is_number(value: Any) -> TypeGuard[float]:
    """True for a finite number (a null stands for one that was not finite)."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def spread(values: Iterable[float]) -> tuple[float, float]:
    """Mean and sample standard deviation (0 for a single value).

    >>> spread([1.0, 2.0, 3.0])
    (2.0, 1.0)
    """
    values = list(values)
    mean = sum(values) / len(values)
    if len(values) == 1:
        return mean, 0.0
    return mean, math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _points(
    lines: Iterable[Mapping[str, Any]], event: str, name: str, along: str
) -> tuple[list[float], list[float]]:
    points = [(line.get(along), line.get(name)) for line in lines if line.get("event") == event]
    points = [(x, y) for x, y in points if is_number(x) and is_number(y)]
    return [float(x) for x, _ in points], [float(y) for _, y in points]


def _seed_order(name: str) -> tuple[bool, int, str]:
    return (not name.isdecimal(), int(name) if name.isdecimal() else 0, name)
