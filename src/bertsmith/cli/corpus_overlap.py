"""List the documents that hold text of evaluation sets, to be left out.

Examples:
    bertsmith corpus-overlap wiki/ --tasks squad/dev-v1.1.json glue/*/dev.tsv --out overlap.jsonl
    bertsmith corpus-overlap news.jsonl --tasks test.csv --words 8 --out overlap.jsonl
    bertsmith corpus news.jsonl --leave-out overlap.jsonl --vocab vocab --out store

A document overlaps when it shares a run of --words words with a string in a file of --tasks,
whatever the punctuation and line breaks. Shorter texts cannot be checked; they are counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro


@dataclass
class CorpusOverlap:
    inputs: Annotated[list[str], tyro.conf.Positional, tyro.conf.arg(metavar="INPUT...")]
    """Files or folders as `bertsmith corpus` reads them, or URLs."""
    tasks: list[Path]
    """Files of evaluation sets: json, jsonl, csv, tsv, txt, or CoNLL columns."""
    out: Path
    """File to write the list to."""
    words: int = 13
    """Words of a run."""
    least: int = 1
    """Runs a document must share to be listed."""
    workers: int | None = None
    """Processes; by default one a core, and one for files below 64 MiB."""
    text_column: str = "text"
    """Column of jsonl, csv, tsv and parquet files of the corpus that holds the text."""
    json: Path | None = None
    """File to write the counts to."""


def run_corpus_overlap(settings: CorpusOverlap) -> None:
    from collections.abc import Iterator
    from pathlib import Path
    from tempfile import TemporaryDirectory

    from bertsmith.cli.corpus import chosen_workers
    from bertsmith.cli.outputs import check_outputs
    from bertsmith.corpus.left_out import unique_inputs, write_list
    from bertsmith.corpus.overlap import OverlapCounts, find_overlaps, write_index
    from bertsmith.corpus.sources import all_batches
    from bertsmith.files import write_json
    from bertsmith.progress import counted
    from bertsmith.text.readers import input_files, no_text

    for name in ("words", "least"):
        if getattr(settings, name) < 1:
            raise ValueError(f"--{name} {getattr(settings, name)}: expected at least 1")
    read = [*input_files(settings.inputs), *settings.tasks]
    check_outputs(read, {"--out": settings.out, "--json": settings.json})
    workers = chosen_workers(settings.workers, settings.inputs)
    inputs = unique_inputs(settings.inputs)
    with TemporaryDirectory(prefix="bertsmith-") as folder:
        texts = write_index(settings.tasks, settings.words, Path(folder))
        counts = OverlapCounts(texts, settings.least)
        batches = all_batches(settings.inputs, settings.text_column)
        found = find_overlaps(batches, Path(folder), settings.words, workers)

        def entries() -> Iterator[dict[str, Any]]:
            yield from counts.entries(found)
            if not counts.documents:  # before the list counts, which may replace an older one
                raise no_text(settings.inputs)

        kind = {"words": settings.words, "least": settings.least, "tasks": texts.files}
        write_list(settings.out, "corpus-overlap", kind, inputs, entries())
    result = counts.result()
    print(
        f"{settings.out}: {result['listed']:,} of {counted(result['documents'], 'document')} share "
        f"{settings.least} or more runs of {settings.words} words with the evaluation sets"
    )
    print(f"{'texts':>12}{'too short':>12}{'in corpus':>12}{'share':>9}  file")
    for one in result["tasks"]:
        print(
            f"{one['texts']:>12,}{one['too_short']:>12,}{one['in_corpus']:>12,}"
            f"{one['share']:>9.2%}  {one['file']}"
        )
    if settings.json:
        write_json(settings.json, result)
