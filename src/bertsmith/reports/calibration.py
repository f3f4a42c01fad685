"""Whether a model is right as often as it is sure: the reliability diagram and its error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from bertsmith.reports import html, plots

NUM_BINS = 10


class Bin(NamedTuple):
    """The answers whose confidence lies in a tenth of the way from 0 to 1."""

    count: int
    confidence: float  # mean of the answers in it
    right: float  # share of them that is right


def reliability(
    confidences: Sequence[float], right: Sequence[bool], num_bins: int = NUM_BINS
) -> list[Bin]:
    """The answers in bins of equal width over their confidence, 0 to 1; an empty bin is left out.

    Bin k holds k / num_bins <= confidence < (k + 1) / num_bins, the last one 1 as well.

    >>> reliability([0.92, 0.98, 0.55], [True, False, True])
    [Bin(count=1, confidence=0.55, right=1.0), Bin(count=2, confidence=0.95, right=0.5)]
    """
    members: dict[int, list[tuple[float, bool]]] = {}
    for confidence, is_right in zip(confidences, right, strict=True):
        number = min(int(confidence * num_bins), num_bins - 1)
        members.setdefault(number, []).append((confidence, is_right))
    bins = []
    for _, found in sorted(members.items()):
        sure = sum(confidence for confidence, _ in found) / len(found)
        bins.append(Bin(len(found), sure, sum(is_right for _, is_right in found) / len(found)))
    return bins


def expected_calibration_error(bins: Sequence[Bin]) -> float:
    """The mean distance between confidence and share of right answers (Guo et al. 2017, eq. 5).

    A bin counts by its answers: 0 is perfect.

    >>> round(expected_calibration_error([Bin(1, 0.55, 1.0), Bin(2, 0.95, 0.5)]), 4)
    0.45
    """
    total = sum(one.count for one in bins)
    return sum(one.count * abs(one.right - one.confidence) for one in bins) / total


def calibration(confidences: Sequence[float], right: Sequence[bool], axis: str) -> str:
    """The reliability diagram, how sure the answers are, and the error; `axis` says of what."""
    if not confidences:
        return ""
    bins = reliability(confidences, right)
    mean = sum(confidences) / len(confidences)
    share = sum(right) / len(right)
    note = (
        f'<p class="note">Expected calibration error {expected_calibration_error(bins):.1%}: the '
        "mean distance of the dots from the diagonal, where a model that knows how sure it may be "
        f"would lie. On average {html.percent(mean)} was claimed and {html.percent(share)} came "
        "true; a dot under the diagonal is too sure, and a large dot stands for many answers.</p>"
    )
    panels = [
        html.panel("Right as often as sure?", plots.draw_reliability(bins, axis)),
        html.panel("How sure it is", plots.draw_histogram(confidences, axis, (0.0, 1.0))),
    ]
    return html.pair(panels) + note
