"""The report of runs of any kind, with the settings that were changed: `bertsmith report`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bertsmith.base.settings import checked, to_mapping
from bertsmith.reports.pages import write_report
from bertsmith.training.finetuning.settings import ContrastiveSettings, FinetuneSettings
from bertsmith.training.pretraining.settings import PretrainSettings

DEFAULTS = {  # by the kind of run
    "pretrain": PretrainSettings(),
    "finetune": FinetuneSettings(),
    "contrastive": ContrastiveSettings(),
}


@checked()
def report(runs: str | Path | Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Write a report on runs as one HTML file that stands alone, as `bertsmith report` does.

        bertsmith.report("runs/books")  # runs/books/report.html
        bertsmith.report(["runs/tiny", "runs/mini"], "compare.html")

    `runs` are run directories of pretrain, finetune or train_embeddings (several are compared), or
    one folder of quickstart. `out` without an ending gets .html; by default it is report.html in
    the run, or here when there are several. Returns the file that was written.

    Errors: ValueError for a run that is not there, is damaged or has no report, and for an `out`
    of another kind.
    """
    folders = [*map(Path, [runs] if isinstance(runs, str | Path) else runs)]
    out = report_file(folders, None if out is None else Path(out))
    if out.suffix not in ("", ".html", ".htm"):
        raise ValueError(f"{out}: a report is HTML: end `out` in .html")
    write_report(folders, out, {kind: to_mapping(value) for kind, value in DEFAULTS.items()})
    return out


def report_file(runs: Sequence[Path], out: Path | None) -> Path:
    """The file of the report of `runs`, see `report`."""
    out = out or (runs[0] if len(runs) == 1 else Path()) / "report.html"
    return out if out.suffix or out.is_dir() else out.with_suffix(".html")
