"""The whole way, from raw text to a classifier, on text that is already on this machine.

Examples:
  bertsmith quickstart
  bertsmith quickstart --minutes 10 --size mini --out my-first-bert
  bertsmith quickstart --corpus book1.txt book2.txt --out books

It trains a vocabulary, builds a token store, pre-trains a small BERT, fills masks, fine-tunes a
classifier against the same network from scratch, and writes a report to open in a browser.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, fields
from pathlib import Path

from bertsmith.cli.try_next import after_pretraining


@dataclass(frozen=True)
class Quickstart:
    out: Path = Path("quickstart")
    """Folder for everything; an earlier quickstart in it is replaced."""
    corpus: list[Path] = field(default_factory=list)
    """Your own text instead: files or folders."""
    minutes: float = 4.0
    """Minutes of pre-training."""
    size: str = "tiny"
    """tiny, mini, small, ... or LAYERSxHIDDEN."""
    vocabulary: int = 8000
    """Pieces of the vocabulary."""
    rate: float = 2e-3
    """Peak learning rate of pre-training; larger sizes want less."""
    epochs: int = 5
    """Epochs of each fine-tuning."""
    seed: int = 12345
    workers: int = 2
    """Processes that read and tokenise."""


def run_quickstart(settings: Quickstart) -> int:
    from bertsmith.quickstart import QuickstartSettings, quickstart
    from bertsmith.reports.pages import write_report

    started = time.monotonic()
    names = [item.name for item in fields(QuickstartSettings)]
    chosen = QuickstartSettings(**{name: getattr(settings, name) for name in names})
    summary = quickstart(settings.out, chosen, settings.corpus)
    report = settings.out / "report.html"
    write_report([settings.out], report)
    if "classification" in summary:
        sides = summary["classification"]
        print(f"\n{len(sides['labels'])} classes, {sides['test_examples']} test texts, 3 seeds:")
        for side, name in (("pretrained", "pre-trained"), ("scratch", "from scratch")):
            figures = sides[side]
            each = ", ".join(f"{value:.1%}" for value in figures["accuracies"].values())
            print(f"  {name:<13}{figures['mean']:.1%} +- {figures['spread']:.1%}   ({each})")
        print(sides["verdict"])
    minutes, seconds = divmod(round(time.monotonic() - started), 60)
    print(f"\nall done in {minutes} min {seconds} s; open {report}")
    print(after_pretraining(settings.out / "pretrain"))
    return 0
