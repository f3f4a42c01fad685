"""Exported files against the model: answers, figures with a paired test, size and time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from bertsmith.base.terminal import counted
from bertsmith.inference.engines.exported import Session
from bertsmith.inference.export.subject import MASK_EVERY, Subject
from bertsmith.inference.export.targets import Precision
from bertsmith.tasks.bootstrap import dev_metrics, paired_bootstrap
from bertsmith.tasks.features import Features
from bertsmith.tasks.vectors import cosines

RESAMPLES = 1000
SAME_SCORE = 0.01  # of the range of all scores
ROUNDING = 1e-3  # of the largest output: float32 that differs by more is another model
TIMED_ROWS, TIMED_ONES = 256, 20


@dataclass(frozen=True, repr=False)
class ExportReport:
    """An export as it was measured; the record beside the file holds the same."""

    file: str
    """The main file, in the folder of the export."""
    format: str
    precision: Precision
    compared_on: str | None
    """The data; None: rows of random pieces."""
    examples: int
    agreement: float | None
    """Share of examples that get the same answer; of vectors their mean cosine; None: unknown."""
    largest_difference: float
    """Of any output, a logit or a hidden state, from the float32 model's."""
    metrics: dict[str, dict[str, Any]] | None
    """The task's, the main one first: "first" of the model, "second" of the export, "difference",
    "interval" of 95%, "p"; as `bertsmith compare` finds them. None: no labels."""
    bytes: int
    model_sha256: list[str]
    """Of each file of the model's weights: the file answers for these alone."""
    speed: dict[str, dict[str, float]]
    """Of "model" (our own float32 engine) and "export": "one_ms", the median time of an example by
    itself; "per_second", rows of many. Both with `threads`."""
    threads: int
    kept_in_float: tuple[str, ...] = ()
    """Products that int8 left alone, because the answers were too far off with them."""
    advice: str | None = None
    """A setting with which the file must be opened to compute as it was measured."""

    @property
    def drop(self) -> float | None:
        """The loss of the main metric; without labels of agreement; None: nothing to tell by."""
        if self.metrics:
            main = next(iter(self.metrics.values()))
            worse = main["difference"] if main.get("less_is_better") else -main["difference"]
            return float(worse)
        return None if self.agreement is None else 1 - self.agreement

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    def __repr__(self) -> str:
        return f"ExportReport({self.file}: {self.lines()[1]})"

    def lines(self) -> list[str]:
        where = self.compared_on or "random pieces, for want of texts"
        same = "" if self.agreement is None else f"agreement {self.agreement:.2%}, "
        found = [
            f"{self.file}: {self.bytes / 1e6:.1f} MB, {self.precision}",
            f"{same}largest difference {self.largest_difference:.2g}, "
            f"{counted(self.examples, 'example')} of {where}",
        ]
        for name, figures in list((self.metrics or {}).items())[:1]:
            low, high = figures["interval"]
            found.append(
                f"{name} {figures['second']:.4f}, the model's {figures['first']:.4f}: "
                f"{figures['difference']:+.4f} (95%: {low:+.4f} to {high:+.4f}, "
                f"p {figures['p']:.2g})"
            )
        ours, theirs = self.speed["model"], self.speed["export"]
        found.append(
            f"{theirs['one_ms']:.1f} ms an example alone (bertsmith's float32 "
            f"{ours['one_ms']:.1f}), {theirs['per_second']:,.0f} a second of many "
            f"({ours['per_second']:,.0f}), {counted(self.threads, 'thread')}"
        )
        if self.kept_in_float:
            found.append(f"kept in float: {', '.join(self.kept_in_float)}")
        return found if self.advice is None else [*found, self.advice]


class ExportRefused(ValueError):
    """The files answer worse than was allowed; none were kept."""


def check_report(report: ExportReport, scale: float, max_drop: float) -> None:
    """Errors: ExportRefused for an export that is too far off; `scale`: the largest output."""
    if not np.isfinite(report.largest_difference):
        raise ExportRefused(f"{report.file}: outputs that are no numbers: nothing was kept")
    if report.precision == "float32" and report.largest_difference > ROUNDING * max(1.0, scale):
        raise ExportRefused(
            f"{report.file}: outputs are off by {report.largest_difference:.3g}, which is more "
            "than rounding: the file is not this model; nothing was kept"
        )
    if report.drop is not None and report.drop > max_drop:
        name = next(iter(report.metrics)) if report.metrics else "agreement"
        raise ExportRefused(
            f"{report.file}: {name} is {report.drop:.4f} worse in {report.precision}, and "
            f"`max_drop={max_drop:g}`: nothing was kept"
        )


def measure(subject: Subject, session: Session, original: np.ndarray) -> dict[str, Any]:
    """The fields of a report that tell of answers; `original` are the model's own outputs."""
    exported = subject.outputs(session)
    worst = float(np.abs(exported - original).max())  # NaN if one is
    agreement, metrics = None, None
    if subject.data is not None:
        agreement, metrics = _answers(subject, original, exported)
    elif subject.source is not None and subject.places is not None:
        agreement = float((exported.argmax(axis=1) == original.argmax(axis=1)).mean())
    elif subject.source is not None:
        begins = subject.rows.boundaries[:-1]
        sums = (np.add.reduceat(states, begins) for states in (original, exported))
        agreement = float(cosines(*sums).mean())  # of the rows' mean states
    return {
        "compared_on": subject.source,
        "examples": len(subject.rows) if subject.data is None else len(subject.data),
        "agreement": agreement,
        "largest_difference": worst,
        "metrics": metrics,
    }


def _answers(
    subject: Subject, original: np.ndarray, exported: np.ndarray
) -> tuple[float, dict[str, Any] | None]:
    """Share of examples with the same answer, and the metrics of both."""
    predictor, data = subject.predictor, subject.data
    task_type, model_task = predictor.task_type, predictor.model_task
    sides = [
        task_type.answers(outputs, subject.rows, data, model_task)
        for outputs in (original, np.nan_to_num(exported))
    ]
    records = [task_type.to_records(answers, data, model_task) for answers in sides]
    before, after = ([record["predicted"] for record in side] for side in records)
    if task_type.has_scores:
        near = SAME_SCORE * np.ptp(before)
        agreement = float((np.abs(np.subtract(before, after)) <= near).mean())
    else:
        agreement = float(np.mean([one == other for one, other in zip(before, after, strict=True)]))
    if not subject.is_labelled:
        return agreement, None
    about: dict[str, Any] = {"task": model_task.task.name, "kind": task_type.name}
    about["labels"] = list(model_task.label_names)
    (first, _), (second, _) = (dev_metrics({**about, "examples": side}) for side in records)
    names = [name for name in model_task.task.metrics if name in first and name in second]
    names = names or list(first)[:1]
    pairs = {name: (first[name], second[name]) for name in names}
    return agreement, paired_bootstrap(pairs, len(data), RESAMPLES, seed=0)


def measure_speed(subject: Subject, session: Session) -> dict[str, dict[str, float]]:
    """The times of `ExportReport.speed`."""
    rows, ones = subject.some_rows(TIMED_ROWS), subject.some_rows(TIMED_ONES)
    places = subject.places
    if places is not None:  # of those rows
        places = np.arange(0, len(rows.ids), MASK_EVERY)
    timed = Subject(subject.predictor, subject.head, rows, None, places)
    ways: dict[str, Callable[[Features], Any]] = {
        "model": timed.original,
        "export": lambda some: timed.outputs(session, some),
    }
    return {name: _timed(way, rows, ones) for name, way in ways.items()}


def _timed(way: Callable[[Features], Any], rows: Features, ones: Features) -> dict[str, float]:
    singles = [ones.of_rows(np.array([k])) for k in range(len(ones))]
    way(singles[0])
    way(rows)
    begin = time.perf_counter()
    way(rows)
    many, times = time.perf_counter() - begin, []
    for single in singles:
        begin = time.perf_counter()
        way(single)
        times.append(time.perf_counter() - begin)
    return {"one_ms": 1000 * float(np.median(times)), "per_second": len(rows) / many}
