"""Commands: quickstart, and the lineage: the systems before and beside BERT."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from bertsmith.base.terminal import duration
from bertsmith.cli.flags import group_values
from bertsmith.cli.outputs import after_pretraining
from bertsmith.experiments.settings import QuickstartSettings


@dataclass(frozen=True, kw_only=True)
class Quickstart(QuickstartSettings):
    """The whole way, from raw text to a classifier, on text that is already on this machine.

    Examples:
      bertsmith quickstart
      bertsmith quickstart --minutes 10 --size mini --out my-first-bert
      bertsmith quickstart --corpus book1.txt book2.txt --out books

    It trains a vocabulary, builds a token store, pre-trains a small BERT, fills masks, fine-tunes a
    classifier against the same network from scratch, and writes a report to open in a browser.
    """

    arguments = {"size": "vocab_size"}  # of the library's `train_vocabulary`

    out: Path = Path("quickstart")
    """Folder for everything; an earlier quickstart in it is replaced."""
    corpus: list[Path] = field(default_factory=list)
    """Your own text instead: files or folders."""


def run_quickstart(settings: Quickstart) -> int:
    from bertsmith.experiments.quickstart import quickstart
    from bertsmith.reports.pages import write_report

    started = time.monotonic()
    summary = quickstart(settings.out, group_values(settings, QuickstartSettings), settings.corpus)
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
    print(f"\nall done in {duration(time.monotonic() - started)}; open {report}")
    print(after_pretraining(settings.out / "pretrain"))
    return 0
