"""Show what a corpus is before time goes into it: sizes, scripts, repeated documents and lines.

Examples:
    bertsmith corpus-report books/*.txt
    bertsmith corpus-report news.jsonl.gz --text-column body --json report.json --html report.html
    bertsmith corpus-report s3://bucket/crawl --exact --limit-mb 1000

Documents are compared as `bertsmith corpus-dedup` does it; with --limit-mb among those that were
read. What a vocabulary does to the text is for `bertsmith vocab-report`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro


@dataclass
class CorpusReport:
    inputs: Annotated[list[str], tyro.conf.Positional, tyro.conf.arg(metavar="INPUT...")]
    """Files or folders as `bertsmith corpus` reads them, or URLs."""
    exact: bool = False
    """Look for equal documents only, for which rensa is not needed."""
    similarity: float = 0.6
    """Least similarity of near duplicates, from 0.5 on."""
    json: Path | None = None
    """File to write all figures to."""
    html: Path | None = None
    """Page to write, one file that needs nothing beside itself."""
    text_column: str = "text"
    """Column of jsonl, csv, tsv and parquet files that holds the text."""
    limit_mb: float | None = None
    """Read only the first so many million bytes of text."""
    workers: int | None = None
    """Processes that compare documents; by default one a core, one for files below 64 MiB."""


def run_corpus_report(settings: CorpusReport) -> None:
    from bertsmith.cli.corpus import chosen_workers
    from bertsmith.cli.outputs import check_outputs
    from bertsmith.corpus.duplicates import check_similarity
    from bertsmith.corpus.survey import survey
    from bertsmith.files import write_json, write_text
    from bertsmith.reports.corpus import corpus_page
    from bertsmith.text.readers import input_files, no_text

    check_outputs(input_files(settings.inputs), {"--json": settings.json, "--html": settings.html})
    if settings.limit_mb is not None and not settings.limit_mb > 0:
        raise ValueError(f"--limit-mb {settings.limit_mb}: must be more than 0")
    check_similarity(settings.similarity)
    figures = survey(
        settings.inputs,
        near=not settings.exact,
        similarity=settings.similarity,
        workers=chosen_workers(settings.workers, settings.inputs),
        text_column=settings.text_column,
        limit=None if settings.limit_mb is None else settings.limit_mb * 1e6,
    )
    if not figures["documents"]:
        raise no_text(settings.inputs)
    for row in rows(figures):
        print(row)
    if settings.json:
        write_json(settings.json, figures)
    if settings.html:
        write_text(settings.html, corpus_page(figures, settings.inputs))


def rows(figures: dict[str, Any]) -> Iterator[str]:
    """The figures as lines of text."""
    from bertsmith.cli.vocab_report import repeated_lines
    from bertsmith.progress import counted

    lengths = figures["document_characters"]
    yield (
        f"{counted(figures['files'], 'file')}, {figures['bytes_stored'] / 1e6:,.1f} MB stored; "
        f"{counted(figures['documents'], 'document')}, {counted(figures['lines'], 'line')}, "
        f"{counted(figures['characters'], 'character')}, {figures['bytes'] / 1e6:,.1f} MB"
    )
    yield (
        f"characters of a document: {lengths['shortest']:,} to {lengths['longest']:,}, "
        f"middle {lengths['median']:,}, a tenth below {lengths['tenth']:,}, "
        f"a tenth above {lengths['nine_tenths']:,}"
    )
    scripts = [f"{one['script']} {one['share']:.2%}" for one in figures["scripts"]]
    yield f"letters by script: {', '.join(scripts) or 'none'}"
    yield from _documents(figures["duplicate_documents"], figures)
    yield from repeated_lines(figures["duplicate_lines"])


def _documents(found: dict[str, Any], figures: dict[str, Any]) -> Iterator[str]:
    for kind, label in (("exact", "equal to an earlier one"), ("near", "nearly so")):
        if kind == "near" and found["similarity"] is None:
            continue
        one = found[kind]
        share = one["bytes"] / max(1, figures["bytes"])
        yield f"documents {label}: {one['documents']:,}, {share:.2%} of the text"
        for example in one["examples"]:
            of = example["of"]
            yield (
                f"{example['similarity']:>14.3f}  {example['source']}:{example['line']} "
                f"like {of['source']}:{of['line']}"
            )
