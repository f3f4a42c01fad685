"""How far a long job is: a bar with rate and time left on a terminal, plain lines otherwise."""

from __future__ import annotations

import sys
import time
from types import TracebackType

PLAIN_INTERVAL = 10.0  # seconds between two plain lines


class Progress:
    """Counts work done; `update` is cheap enough to call for every batch.

    `total` is None when unknown. `unit` is printed behind the rate ("MB", "documents", "tokens");
    amounts are shown divided by `scale`. `start` was done before, by another process; it does not
    count in the rate. With the unit "s" no rate is shown. Everything goes to stderr, so that stdout
    stays an answer.
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
        self.note = ""
        self._started = self._printed = time.monotonic()
        self._bar = None

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, SpinnerColumn, TextColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(
                SpinnerColumn(),
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[text]}"),
                console=Console(stderr=True),
            )
            self._bar.start()
            self._task = self._bar.add_task(self.label, total=self.total, text="")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar:
            self._bar.update(self._task, completed=self.done, text=self.text())
            self._bar.stop()
        elif kind is None:
            print(f"{self.label}: {self.text()}", file=sys.stderr, flush=True)

    def update(self, amount: float = 0.0, *, done: float | None = None, note: str = "") -> None:
        """Add `amount`, or set the whole amount `done`; `note` is shown behind the figures."""
        self.done = self.done + amount if done is None else done
        self.note = note or self.note
        now = time.monotonic()
        if self._bar:
            self._bar.update(self._task, completed=self.done, text=self.text())
        elif now - self._printed >= PLAIN_INTERVAL:
            self._printed = now
            print(f"{self.label}: {self.text()}", file=sys.stderr, flush=True)

    def text(self) -> str:
        """The figures: share or amount, rate, time left or taken, note."""
        elapsed = time.monotonic() - self._started
        rate = (self.done - self._start) / elapsed if elapsed > 0 else 0.0
        parts = [f"{self.done / self.scale:,.1f} {self.unit}".replace(".0 ", " ").strip()]
        if self.total:
            parts.insert(0, f"{min(1.0, self.done / self.total):4.0%}")
        if self.unit != "s":
            parts.append(f"{rate / self.scale:,.1f} {self.unit}/s")
        if self.total and 0 < self.done < self.total and rate:
            parts.append(f"{clock((self.total - self.done) / rate)} left")
        else:
            parts.append(f"{clock(elapsed)}")
        if self.note:
            parts.append(self.note)
        return " · ".join(parts)


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
