"""Write a report on runs as one HTML file that needs nothing beside itself.

Examples:
    bertsmith report runs/pretrain
    bertsmith report runs/tiny runs/mini --out compare.html
    bertsmith report quickstart
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro


@dataclass
class Report:
    """Write a report on runs as one HTML file that needs nothing beside itself."""

    runs: Annotated[list[Path], tyro.conf.Positional, tyro.conf.arg(metavar="RUN...")]
    """Run directories of pretrain, finetune or embed-train (several are compared), or one folder
    of quickstart."""
    out: Path | None = None
    """The file to write; by default report.html in the run, or here when there are several runs."""


def run_report(settings: Report) -> None:
    """Write the report and print where it is."""
    from bertsmith.cli.outputs import check_outputs
    from bertsmith.reports.pages import write_report

    folder = settings.runs[0] if len(settings.runs) == 1 else Path()
    out = settings.out or folder / "report.html"
    check_outputs((), {"--out": out})
    write_report(settings.runs, out)
    print(out)
