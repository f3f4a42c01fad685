"""Show what a vocabulary does to a text, also beside a second one.

Examples:
    bertsmith vocab-report books/*.txt --vocab vocab
    bertsmith vocab-report news.jsonl.gz --text-column body --vocab vocab --against bert-base-cased
    bertsmith vocab-report wiki/ --vocab vocab --limit-mb 100 --json figures.json --plot figures.png

A word is what the tokenizer takes for one; its length is counted in characters of the raw text.
A sequence is a line (a paragraph) or a document with [CLS] and [SEP] around it. Every tokenizer
normalises the text in its own way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

if TYPE_CHECKING:
    from bertsmith.text.wordpiece import Tokenizer

MAX_NAME = 18  # characters of a vocabulary's name above its column
MAX_WORD = 60  # characters of a word that are shown


@dataclass
class VocabReport:
    inputs: Annotated[list[str], tyro.conf.Positional, tyro.conf.arg(metavar="INPUT...")]
    """Files (.txt, .jsonl, .csv, .tsv, also with .gz, .xz or .zst; .parquet), folders, or URLs."""
    vocab: str
    """Folder with a vocabulary, run directory, or folder or hub name of a model."""
    against: str | None = None
    """A second one to compare with."""
    json: Path | None = None
    """File to write all figures to."""
    plot: Path | None = None
    """Picture to draw: a .png or .svg file."""
    text_column: str = "text"
    """Column of jsonl, csv, tsv and parquet files that holds the text."""
    limit_mb: float | None = None
    """Read only the first so many million bytes of text."""


def run_vocab_report(settings: VocabReport) -> None:
    from bertsmith.cli.outputs import check_outputs
    from bertsmith.files import write_json
    from bertsmith.reports.vocabulary import check_plot_path, write_plot
    from bertsmith.text.readers import input_files, no_text, read_documents
    from bertsmith.text.vocabulary_figures import measure

    check_outputs(input_files(settings.inputs), {"--json": settings.json, "--plot": settings.plot})
    vocabularies = {Path(name).resolve() for name in (settings.vocab, settings.against) if name}
    for flag, out in (("--json", settings.json), ("--plot", settings.plot)):
        if out and out.exists() and out.resolve().parent in vocabularies:
            raise ValueError(f"{flag} {out} is a file beside a vocabulary: name another file")
    if settings.plot:
        check_plot_path(settings.plot)
    if settings.limit_mb is not None and not settings.limit_mb > 0:
        raise ValueError(f"--limit-mb {settings.limit_mb}: must be more than 0")
    names = [name for name in (settings.vocab, settings.against) if name]
    if len(set(names)) < len(names):
        raise ValueError(f"--against {settings.against} is --vocab itself: name another vocabulary")
    figures = measure(
        read_documents(settings.inputs, text_column=settings.text_column),
        {name: open_tokenizer(name) for name in names},
        settings.limit_mb,
    )
    if not figures["text"]["documents"]:
        raise no_text(settings.inputs)
    for row in rows(figures):
        print(row)
    if settings.json:
        write_json(settings.json, figures)
    if settings.plot:
        write_plot(figures, settings.plot)


def open_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of a folder, which need not hold a model, or of a model of the hub."""
    from bertsmith.text.wordpiece import Tokenizer

    if Path(name).is_dir():
        return Tokenizer.from_pretrained(name)
    from bertsmith.checkpoints.open import open_model_folder

    return Tokenizer.from_pretrained(open_model_folder(name))


def rows(figures: dict[str, Any]) -> Iterator[str]:
    """The figures as lines of text."""
    text, sides = figures["text"], figures["vocabularies"]
    yield (
        f"{text['documents']:,} documents, {text['lines']:,} lines, "
        f"{text['characters']:,} characters, {text['bytes'] / 1e6:,.1f} MB"
    )
    yield ""
    yield from _table(sides)
    yield ""
    yield from _by_word_length(sides)
    for side in sides:
        if side["unknown_characters"]:
            yield ""
            yield f"characters that no piece of {side['name']} holds, the most frequent:"
        for found in side["unknown_characters"]:
            yield (
                f"{found['count']:>14,}  {found['code_point']:<8}  {shown(found['character'])}"
                f"  {found['name']}"
            )
    yield ""
    yield "longest words: characters, pieces, word"
    for word in text["longest_words"]:
        pieces = "".join(f"{count or '[UNK]':>8}" for count in word["pieces"])
        yield f"{word['characters']:>14,}{pieces}  {shown(word['word'])}"
    yield ""
    yield from repeated_lines(text["duplicate_lines"])
    for side in sides:
        if side["altered_letters"]["warning"]:
            yield f"{side['name']}: {side['altered_letters']['warning']}"


def _table(sides: Sequence[dict[str, Any]]) -> Iterator[str]:
    heads = [_clip(side["name"], MAX_NAME) for side in sides]
    yield _row("", *heads, *["difference"] * (len(sides) - 1))
    whole, number, share = "{:,.0f}", "{:.3f}", "{:.2%}"
    for label, form, *path in (
        ("pieces in the vocabulary", whole, "size"),
        ("words", whole, "words"),
        ("pieces", whole, "pieces"),
        ("pieces per word", number, "pieces_per_word"),
        ("characters per piece", number, "characters_per_piece"),
        ("words covered", share, "word_coverage"),
        ("characters covered", share, "character_coverage"),
        ("pieces that are [UNK]", share, "unknown_pieces"),
        ("lines over 128 pieces", share, "lines", "over_128"),
        ("lines over 512 pieces", share, "lines", "over_512"),
        ("pieces of the middle line", whole, "lines", "median"),
        ("documents over 128 pieces", share, "documents", "over_128"),
        ("documents over 512 pieces", share, "documents", "over_512"),
        ("pieces of the middle document", whole, "documents", "median"),
        ("vocabulary never used", share, "unused_pieces"),
        ("letters altered", share, "altered_letters", "share"),
    ):
        values = []
        for side in sides:
            value: Any = side
            for key in path:
                value = value[key]
            values.append(value)
        yield _row(label, *_cells(values, form))


def _by_word_length(sides: Sequence[dict[str, Any]]) -> Iterator[str]:
    from bertsmith.reports.vocabulary import length_label

    yield "pieces per word, by characters of the word (and its share of all words)"
    for found in zip(*(side["by_word_length"] for side in sides), strict=True):
        if not any(row["words"] for row in found):
            continue
        label = f"{length_label(found[0]['from'], found[0]['to']):>14}"
        label += f"  ({found[0]['words'] / max(1, sides[0]['words']):.1%})"
        yield _row(label, *_cells([row["pieces_per_word"] for row in found], "{:.2f}"))


def repeated_lines(found: dict[str, Any]) -> Iterator[str]:
    part = "" if found["counted"] == 1 else f" (estimated from {found['counted']:.2%} of them)"
    yield f"lines that repeat an earlier one: {found['count']:,}, {found['share']:.2%}{part}"
    for one in found["most_frequent"]:
        yield f"{one['count']:>14,}  {shown(one['line'])}"


def _cells(values: Sequence[float], form: str) -> list[str]:
    """The values of a row, and the difference when there are two."""
    cells = [form.format(value) for value in values]
    if len(values) == 2:
        difference = values[0] - values[1]
        cells.append(form.replace(":", ":+").format(difference))
    return cells


def _row(label: str, *cells: str) -> str:
    return f"{label:<30}" + "".join(f"{cell:>{MAX_NAME + 2}}" for cell in cells)


def shown(text: str) -> str:
    """Text that a terminal can show: cut, and without control characters and lone surrogates."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:MAX_WORD]
    ) + ("…" if len(text) > MAX_WORD else "")


def _clip(name: str, width: int) -> str:
    """The end of a long name.

    >>> _clip("runs/2024/vocabulary-8k", 14)
    '…vocabulary-8k'
    """
    return name if len(name) <= width else "…" + name[1 - width :]
