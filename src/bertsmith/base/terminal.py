"""Progress of long jobs, a bar on a terminal and plain lines elsewhere; numbers for people."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

PLAIN_INTERVAL = 10.0  # seconds between two plain lines
LONGEST_LABEL, SHORTEST_BAR, LONGEST_BAR = 24, 8, 24  # characters of a terminal's line
FIGURES = 50  # characters that a bar leaves for the figures where it can
SEPARATOR = " · "
MANY_CASES = 1000  # from which on a fraction stands without their number
NO_VALUE = "–"


def ignore(*given: object) -> None:
    """Do nothing."""


OnBatch = Callable[[int], object]
"""It is given the number of rows in each batch that is done."""


class Progress:
    """Count work done; `update` is cheap enough to call for every batch.

    `total` is None when unknown. Amounts are divided by `scale` and shown in `unit` ("MB",
    "tokens"), with their rate; without a unit neither is shown. `start` was done before, by another
    process, and does not count in the rate. The first update may have waited for a compiler: time
    left goes by those after it. All goes to stderr, so that stdout stays an answer.
    """

    def __init__(
        self,
        label: str,
        total: float | None = None,
        unit: str = "",
        scale: float = 1,
        start: float = 0,
    ) -> None:
        self.label, self.total, self.unit, self.scale = label, total, unit, scale
        self.done = self._start = start
        self.notes: Sequence[str] = ()
        self._started = self._printed = time.monotonic()
        self._first: tuple[float, float] | None = None  # time and work done
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
            self._capacity = console.width - taken - bar
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

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self._bar:
            self._bar.update(self._task, completed=self.done, text=self._fitting())
            self._bar.stop()
        elif kind is None:
            print(f"{self.label}: {self.text()}", file=sys.stderr, flush=True)

    def update(
        self, amount: float = 0.0, *, done: float | None = None, notes: Sequence[str] = ()
    ) -> None:
        """Add `amount`, or set the total `done`.

        `notes` follow the figures, the most important first: a narrow terminal shows only some.
        """
        self.done = self.done + amount if done is None else done
        self.notes = notes or self.notes
        now = time.monotonic()
        if self._first is None and self.done > self._start:
            self._first = now, self.done
        if self._bar:
            self._bar.update(self._task, completed=self.done, text=self._fitting())
        elif now - self._printed >= PLAIN_INTERVAL:
            self._printed = now
            print(f"{self.label}: {self.text()}", file=sys.stderr, flush=True)

    def text(self) -> str:
        """The figures of a plain line: percentage, time left or taken, amount, rate, notes."""
        percentage = [f"{min(1.0, self.done / self.total):4.0%}"] if self.total else []
        return SEPARATOR.join([*percentage, *self._figures()])

    def _fitting(self) -> str:
        """Figures that fit next to the bar, which shows the percentage."""
        text = ""
        for part in self._figures():
            longer = f"{text}{SEPARATOR}{part}" if text else part
            if len(longer) > self._capacity:
                break
            text = longer
        return text

    def _figures(self) -> list[str]:
        now = time.monotonic()
        elapsed = now - self._started
        since, before = self._first or (now, self.done)
        if self.total and before < self.done < self.total and since < now:
            left = (self.total - self.done) * (now - since) / (self.done - before)
            figures = [f"{clock(left)} left"]
        else:
            figures = [clock(elapsed)]
        if self.unit:
            rate = (self.done - self._start) / elapsed if elapsed > 0 else 0.0
            amount = scaled(self.done, self.unit, self.scale).replace(".0 ", " ")
            figures += [amount, f"{scaled(rate, self.unit, self.scale)}/s"]
        return [*figures, *self.notes]


# Numbers for people


def is_number(value: Any) -> TypeGuard[float]:
    """True for a finite number (a null stands for one that was not finite)."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def counted(number: int, noun: str) -> str:
    """A number of things.

    >>> counted(1, "file"), counted(0, "file"), counted(12_000, "document")
    ('1 file', '0 files', '12,000 documents')
    """
    return f"{number:,} {noun}" + "s" * (number != 1)


def scaled(amount: float, unit: str = "MB", scale: float = 1e6) -> str:
    """An amount in its unit; where that would be nearly 0 millions, in thousands.

    >>> scaled(2_500_000), scaled(31_000), scaled(7, "rows", 1)
    ('2.5 MB', '31.0 kB', '7.0 rows')
    """
    if scale == 1e6 and amount < 1e5:
        unit, scale = f"k{unit[1:]}", 1e3
    return f"{amount / scale:,.1f} {unit}"


def of_cases(number: float | None, noun: str = "") -> str:
    """The number of cases behind a fraction, if chance alone moves so few by a percent or more.

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


def clock(seconds: float) -> str:
    """A duration as a clock shows it.

    >>> clock(75), clock(3700)
    ('1:15', '1:01:40')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


# The same for values out of files: what is no number is a dash


def duration(seconds: Any) -> str:
    """A duration in words.

    >>> duration(3.21), duration(245), duration(8100), duration(None)
    ('3.2 s', '4 min 05 s', '2 h 15 min', '–')
    """
    if not is_number(seconds):
        return NO_VALUE
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return (
        f"{minutes} min {rest:02d} s"
        if minutes < 60
        else f"{minutes // 60} h {minutes % 60:02d} min"
    )


def number(value: Any) -> str:
    """A figure at the precision people read.

    >>> number(4.09312), number(0.0004), number(12), number(None)
    ('4.093', '0.0004', '12', '–')
    """
    if not is_number(value):
        return NO_VALUE
    if isinstance(value, int) or (value.is_integer() and abs(value) >= 1000):
        return f"{int(value):,}"
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def short(value: Any) -> str:
    """A large count in few letters.

    >>> short(8_812_000), short(950), short(64_500)
    ('8.8 M', '950', '64.5 k')
    """
    for least, unit, letter in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if is_number(value) and abs(value) >= least:
            return f"{round(value / unit, 1):,g} {letter}"
    return number(value)


def fixed(value: Any) -> str:
    """A figure with three decimals, as its neighbors in a column."""
    return f"{value:.3f}" if is_number(value) else NO_VALUE


def percent(fraction: Any) -> str:
    """A fraction in percent. `percent(0.3412)` is '34.1%'."""
    return f"{fraction:.1%}" if is_number(fraction) else NO_VALUE
