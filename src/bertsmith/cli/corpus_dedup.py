"""List the documents that repeat an earlier one, word for word or nearly, to be left out.

Examples:
    bertsmith corpus-dedup books/*.txt --out duplicates.jsonl
    bertsmith corpus-dedup news.jsonl.gz --text-column body --exact --out duplicates.jsonl
    bertsmith corpus books/*.txt --leave-out duplicates.jsonl --vocab vocab --out store
    bertsmith corpus-dedup may.txt --against april.txt --out known.jsonl

The first copy stays. Near duplicates share so many of their three-word runs that their Jaccard
similarity is --similarity or more, as MinHash estimates it: at 0.6 about 9% of the words differ.
The list says of each document where it stands and which one it repeats. With --against it is of
new text, before `corpus-append`, and what is like older text is listed as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro


@dataclass
class CorpusDedup:
    inputs: Annotated[list[str], tyro.conf.Positional, tyro.conf.arg(metavar="INPUT...")]
    """Files or folders as `bertsmith corpus` reads them, or URLs."""
    out: Path
    """File to write the list to."""
    against: tuple[str, ...] = ()
    """Files, folders or URLs to compare with as well; their own documents are not listed."""
    exact: bool = False
    """Only equal texts, for which rensa is not needed."""
    similarity: float = 0.6
    """Least similarity of near duplicates, from 0.5 on."""
    workers: int | None = None
    """Processes; by default one a core, and one for files below 64 MiB."""
    text_column: str = "text"
    """Column of jsonl, csv, tsv and parquet files that holds the text."""


def run_corpus_dedup(settings: CorpusDedup) -> None:
    from contextlib import ExitStack
    from tempfile import TemporaryDirectory

    from bertsmith.cli.corpus import chosen_workers
    from bertsmith.cli.outputs import check_outputs
    from bertsmith.corpus.duplicates import SIMILARITY, DuplicateFinder, check_similarity, sign
    from bertsmith.corpus.left_out import unique_inputs, write_list
    from bertsmith.corpus.sources import all_batches
    from bertsmith.files import TEMPORARY_PREFIX
    from bertsmith.progress import Progress, counted
    from bertsmith.text.readers import input_files, no_text

    if settings.exact and settings.similarity != SIMILARITY:
        raise ValueError("--similarity has no effect with --exact: leave one of them out")
    check_similarity(settings.similarity)
    everything = [*settings.against, *settings.inputs]
    check_outputs(input_files(everything), {"--out": settings.out})
    workers = chosen_workers(settings.workers, everything)
    unique_inputs(everything)
    inputs = unique_inputs(settings.inputs)
    settings.out.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        # Beside the list: the files are large, and a temporary folder may lie in memory.
        folder = stack.enter_context(
            TemporaryDirectory(prefix=TEMPORARY_PREFIX, dir=settings.out.parent)
        )
        finder = DuplicateFinder(stack, Path(folder), not settings.exact)
        known_bytes = 0
        with Progress("reading", unit="MB", scale=1e6) as progress:
            for sources in (settings.against, settings.inputs):
                finder.num_staying, known_bytes = finder.num_documents, finder.num_bytes
                batches = all_batches(sources, settings.text_column)
                for signed in sign(batches, finder, workers):
                    progress.update(int(signed.sizes.sum()))
        documents = finder.num_documents - finder.num_staying
        if not documents:
            raise no_text(settings.inputs)
        repetitions = finder.repetitions(settings.similarity)
        kind: dict[str, Any] = (
            {"exact": True} if settings.exact else {"similarity": settings.similarity}
        )
        if settings.against:
            kind["against"] = settings.against
        entries = finder.entries(repetitions)
        write_list(settings.out, "corpus-dedup", kind, inputs, entries)
        exact = sum(found.similarity == 1.0 for found in repetitions)
        share = finder.bytes_of(repetitions) / max(1, finder.num_bytes - known_bytes)
    print(
        f"{settings.out}: {len(repetitions):,} of {counted(documents, 'document')} repeat "
        f"another ({exact:,} equal, {len(repetitions) - exact:,} near), {share:.1%} of the text"
    )
