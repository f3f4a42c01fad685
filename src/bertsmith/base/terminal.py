"""Progress of long jobs, a bar on a terminal and plain lines elsewhere; numbers for people."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from types import TracebackType

PLAIN_INTERVAL = 10.0  # seconds between two plain lines
LONGEST_LABEL, SHORTEST_BAR, LONGEST_BAR = 24, 8, 24  # characters of a terminal's line
FIGURES = 50  # what a bar leaves for the figures where it can
SEPARATOR = " · "
MANY_CASES = 1000  # from which on a share stands without their number


class Progress:
    """Counts work done; `update` is cheap enough to call for every batch.

    `total` is None when unknown. `unit` is printed behind the rate ("MB", "documents", "tokens");
    amounts are shown divided by `scale`. `start` was done before, by another process; it does not
    count in the rate. Without a unit neither amount nor rate is shown. Everything goes to stderr,
    so that stdout stays an answer.
    """

    def __init__(
        self,
        label: str,
        total: float | None = None,
        unit: str = "",
        scale: float = 1.0,
        start: float = 0.0,
    ) -> None:
        self.label, self.total, self.unit, self.scale = label, total, unit, scale
        self.done = self._start = start
        self.notes: Sequence[str] = ()
        self._started = self._printed = time.monotonic()
        self._bar = None

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, SpinnerColumn, TextColumn
            from rich.progress import Progress as Bar

            console = Console(stderr=True)
            label = shortened(self.label, LONGEST_LABEL)
            taken = len(label) + 4  # a spinner, and a space between the columns
            bar = min(max(console.width - taken - FIGURES, SHORTEST_BAR), LONGEST_BAR)
            self._taken = taken + bar
            self._bar = Bar(
                SpinnerColumn(),
                TextColumn("{task.description}", style="bold", markup=False),
                BarColumn(bar_width=bar),
                TextColumn("{task.fields[text]}", markup=False),
                console=console,
            )
            self._bar.start()
            self._task = self._bar.add_task(label, total=self.total, text="")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar:
            self._bar.update(self._task, completed=self.done, text=self._fitting())
            self._bar.stop()
        elif kind is None:
            print(f"{self.label}: {self.text()}", file=sys.stderr, flush=True)

    def update(
        self, amount: float = 0.0, *, done: float | None = None, notes: Sequence[str] = ()
    ) -> None:
        """Add `amount`, or set the whole amount `done`.

        `notes` stand behind the figures, those first that a narrow terminal is to show.
        """
        self.done = self.done + amount if done is None else done
        self.notes = notes or self.notes
        now = time.monotonic()
        if self._bar:
            self._bar.update(self._task, completed=self.done, text=self._fitting())
        elif now - self._printed >= PLAIN_INTERVAL:
            self._printed = now
            print(f"{self.label}: {self.text()}", file=sys.stderr, flush=True)

    def text(self) -> str:
        """The figures of a plain line: share, time left or taken, amount, rate, notes."""
        share = [f"{min(1.0, self.done / self.total):4.0%}"] if self.total else []
        return SEPARATOR.join([*share, *self._figures()])

    def _fitting(self) -> str:
        """Figures that fit beside the bar, which shows the share."""
        assert self._bar is not None
        room, text = self._bar.console.width - self._taken, ""
        for part in self._figures():
            longer = f"{text}{SEPARATOR}{part}" if text else part
            if len(longer) > room:
                break
            text = longer
        return text

    def _figures(self) -> list[str]:
        elapsed = time.monotonic() - self._started
        rate = (self.done - self._start) / elapsed if elapsed > 0 else 0.0
        is_under_way = self.total and 0 < self.done < self.total and rate
        left = (self.total - self.done) / rate if self.total and is_under_way else 0.0
        figures = [f"{clock(left)} left" if is_under_way else clock(elapsed)]
        if self.unit:
            figures += [
                f"{self.done / self.scale:,.1f} {self.unit}".replace(".0 ", " "),
                f"{rate / self.scale:,.1f} {self.unit}/s",
            ]
        return [*figures, *self.notes]


def of_cases(number: float | None, noun: str = "") -> str:
    """The number of cases behind a share, if chance alone moves so few by a percent or more.

    None: their number is unknown.

    >>> f"57.2%{of_cases(800)}", f"0.57{of_cases(800, 'texts')}", f"57.2%{of_cases(20_000)}"
    ('57.2% of 800', '0.57 of 800 texts', '57.2%')
    """
    return "" if number is None or number >= MANY_CASES else f" of {number:.0f} {noun}".rstrip()


def shortened(text: str, length: int) -> str:
    """Cut a text to a length, with an ellipsis.

    >>> shortened("sweep 12/48", 8), shortened("pretrain", 8)
    ('sweep 1…', 'pretrain')
    """
    return text if len(text) <= length else f"{text[: length - 1]}…"


def counted(number: int, noun: str) -> str:
    """A number of things, for people.

    >>> counted(1, "file"), counted(0, "file"), counted(12_000, "document")
    ('1 file', '0 files', '12,000 documents')
    """
    return f"{number:,} {noun}" + "s" * (number != 1)


def clock(seconds: float) -> str:
    """A duration for people.

    >>> clock(75), clock(3700)
    ('1:15', '1:01:40')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
