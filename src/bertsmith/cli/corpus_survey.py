"""Commands: corpus report, corpus dedup, corpus contamination."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from bertsmith.base.settings import Count, Positive
from bertsmith.cli.flags import Inputs, TextInput


@dataclass(frozen=True, kw_only=True)
class CorpusReport(Inputs, TextInput):
    """Show what a corpus is before time goes into it: sizes, scripts, repeated documents and lines.

    Examples:
      bertsmith corpus report books/*.txt
      bertsmith corpus report news.jsonl.gz --text-column body --json report.json --html report.html
      bertsmith corpus report s3://bucket/crawl --exact --limit-mb 1000

    Documents are compared as `bertsmith corpus dedup` does it; with --limit-mb among those that
    were read. What a vocabulary does to the text is for `bertsmith vocab report`.
    """

    exact: bool = False
    """Look for equal documents only, for which rensa is not needed."""
    similarity: float = 0.6
    """Least similarity of near duplicates, from 0.5 on."""
    json: Path | None = None
    """File to write all figures to."""
    html: Path | None = None
    """Page to write, one file that needs nothing beside itself."""

    limit_mb: Annotated[float | None, Positive] = None
    """Read only the first so many million bytes of text."""
    workers: Annotated[int | None, Count] = None
    """Processes that compare documents; by default one a core, one for files below 64 MiB."""


def run_corpus_report(settings: CorpusReport) -> None:
    from bertsmith.base.files import write_json, write_text
    from bertsmith.cli.corpus import chosen_workers
    from bertsmith.cli.outputs import check_outputs
    from bertsmith.corpus.statistics import corpus_statistics
    from bertsmith.reports.corpus import corpus_page
    from bertsmith.text.readers.documents import input_files, no_text

    check_outputs(input_files(settings.inputs), {"--json": settings.json, "--html": settings.html})
    _check_similarity(settings)
    figures = corpus_statistics(
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


def _check_similarity(settings: CorpusReport | CorpusDedup) -> None:
    from bertsmith.corpus.dedup import SIMILARITY, check_similarity

    if settings.exact and settings.similarity != SIMILARITY:
        raise ValueError("--similarity has no effect with --exact: leave one of them out")
    check_similarity(settings.similarity)


def rows(figures: dict[str, Any]) -> Iterator[str]:
    from bertsmith.base.terminal import counted, scaled
    from bertsmith.cli.vocab import repeated_lines

    lengths = figures["document_characters"]
    yield (
        f"{counted(figures['files'], 'file')}, {scaled(figures['bytes_stored'])} stored; "
        f"{counted(figures['documents'], 'document')}, {counted(figures['lines'], 'line')}, "
        f"{counted(figures['characters'], 'character')}, {scaled(figures['bytes'])}"
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


@dataclass(frozen=True, kw_only=True)
class CorpusDedup(Inputs, TextInput):
    """List the documents that repeat an earlier one, word for word or nearly, to be left out.

    Examples:
      bertsmith corpus dedup books/*.txt --out duplicates.jsonl
      bertsmith corpus dedup news.jsonl.gz --text-column body --exact --out duplicates.jsonl
      bertsmith corpus books/*.txt --exclude duplicates.jsonl --vocab vocab --out store
      bertsmith corpus dedup may.txt --against april.txt --out known.jsonl

    The first copy stays. Near duplicates share so many of their three-word runs that their Jaccard
    similarity is --similarity or more, as MinHash estimates it: at 0.6 about 9% of the words
    differ. The list says of each document where it stands and which one it repeats. With --against
    it is of new text, before `corpus append`, and what is like older text is listed as well.
    """

    out: Path
    """File to write the list to."""
    against: tuple[str, ...] = ()
    """Files, folders or URLs to compare with as well; their own documents are not listed."""
    exact: bool = False
    """Only equal texts, for which rensa is not needed."""
    similarity: float = 0.6
    """Least similarity of near duplicates, from 0.5 on."""
    workers: Annotated[int | None, Count] = None
    """Processes; by default one a core, and one for files below 64 MiB."""


def run_corpus_dedup(settings: CorpusDedup) -> None:
    from contextlib import ExitStack
    from tempfile import TemporaryDirectory

    from bertsmith.base.files import TEMPORARY_PREFIX
    from bertsmith.base.terminal import Progress, counted
    from bertsmith.cli.corpus import chosen_workers
    from bertsmith.cli.outputs import check_outputs
    from bertsmith.corpus.build.batches import BatchReader, unique_inputs, write_list
    from bertsmith.corpus.dedup import DuplicateFinder, sign
    from bertsmith.text.readers.documents import input_files, no_text
    from bertsmith.text.readers.files import without_password

    _check_similarity(settings)
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
                batches = BatchReader(sources, settings.text_column, workers=workers)
                for _, signed in sign(batches, finder, workers):
                    progress.update(int(signed.sizes.sum()))
        documents = finder.num_documents - finder.num_staying
        if not documents:
            raise no_text(settings.inputs)
        repetitions = finder.repetitions(settings.similarity)
        kind: dict[str, Any] = (
            {"exact": True} if settings.exact else {"similarity": settings.similarity}
        )
        kind["text_column"] = settings.text_column
        if settings.against:
            kind["against"] = [without_password(name) for name in settings.against]
        entries = finder.entries(repetitions)
        write_list(settings.out, "corpus dedup", kind, inputs, entries)
        exact = sum(found.similarity == 1.0 for found in repetitions)
        share = finder.repeated_bytes(repetitions) / max(1, finder.num_bytes - known_bytes)
    print(
        f"{settings.out}: {len(repetitions):,} of {counted(documents, 'document')} repeat "
        f"another ({exact:,} equal, {len(repetitions) - exact:,} near), {share:.1%} of the text"
    )


@dataclass(frozen=True, kw_only=True)
class CorpusContamination(Inputs):
    """List the documents that hold text of evaluation sets, to be left out.

    Examples:
      bertsmith corpus contamination wiki/ --tasks squad/dev-v1.1.json glue/*/dev.tsv --out o.jsonl
      bertsmith corpus contamination news.jsonl --tasks test.csv --words 8 --out overlap.jsonl
      bertsmith corpus news.jsonl --exclude overlap.jsonl --vocab vocab --out store

    A document overlaps when it shares a run of --words words with a string in a file of --tasks,
    whatever the punctuation and line breaks. Shorter texts cannot be checked; they are counted.
    """

    tasks: list[Path]
    """Files of evaluation sets: json, jsonl, csv, tsv, txt, or CoNLL columns."""
    out: Path
    """File to write the list to."""
    words: Annotated[int, Count] = 13
    """Words of a run."""
    least: Annotated[int, Count] = 1
    """Runs a document must share to be listed."""
    workers: Annotated[int | None, Count] = None
    """Processes; by default one a core, and one for files below 64 MiB."""
    text_column: str = "text"
    """Column of jsonl, csv, tsv and parquet files of the corpus that holds the text."""
    json: Path | None = None
    """File to write the counts to."""


def run_corpus_contamination(settings: CorpusContamination) -> None:
    from tempfile import TemporaryDirectory

    from bertsmith.base.files import write_json
    from bertsmith.base.terminal import counted
    from bertsmith.cli.corpus import chosen_workers
    from bertsmith.cli.outputs import check_outputs
    from bertsmith.corpus.build.batches import BatchReader, unique_inputs, write_list
    from bertsmith.corpus.contamination import EvaluationIndex
    from bertsmith.text.readers.documents import input_files, no_text

    read = [*input_files(settings.inputs), *settings.tasks]
    check_outputs(read, {"--out": settings.out, "--json": settings.json})
    workers = chosen_workers(settings.workers, settings.inputs)
    inputs = unique_inputs(settings.inputs)
    with TemporaryDirectory(prefix="bertsmith-") as folder:
        index = EvaluationIndex(settings.tasks, settings.words, Path(folder))
        batches = BatchReader(settings.inputs, settings.text_column, workers=workers)

        def entries() -> Iterator[dict[str, Any]]:
            yield from index.entries(batches, settings.least, workers)
            if not index.documents:  # before the list counts, which may replace an older one
                raise no_text(settings.inputs)

        kind = {"text_column": settings.text_column, "tasks": index.files}
        kind |= {"words": settings.words, "least": settings.least}
        write_list(settings.out, "corpus contamination", kind, inputs, entries())
    result = index.result()
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
