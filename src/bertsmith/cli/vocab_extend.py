"""Put the words of a domain into an existing model's vocabulary.

Examples:
    bertsmith vocab-extend manuals/ --model runs/books --out models/manuals
    bertsmith vocab-extend notes.jsonl --model bert-base-uncased --out models/notes --add 3000
    bertsmith vocab-extend notes.jsonl --model runs/books --out models/notes --keep terms.txt

Added are the pieces that shorten the text most: words, starts of words and parts inside them. Old
pieces keep their ids. The new model is ready to use; it gets better by training on the text:

    bertsmith corpus manuals/ --vocab models/manuals --out store
    bertsmith pretrain --corpus store --init models/manuals --out run --minutes 30
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

if TYPE_CHECKING:
    from bertsmith.text.readers import Document
    from bertsmith.text.wordpiece import Tokenizer

DEFAULT_ADD = 1024
HELD_OUT = 10  # every tenth document is only measured
SHOWN = 20


@dataclass
class VocabExtend:
    inputs: Annotated[list[str], tyro.conf.Positional, tyro.conf.arg(metavar="INPUT...")]
    """Text of the domain: files (.txt, .jsonl, .csv, .tsv, each also with .gz, .xz or .zst;
    .parquet) or folders."""
    model: str
    """Model to extend: a run, a Hugging Face folder or hub name."""
    out: Path
    """Folder for the extended model; it must be new or empty."""
    add: int | None = None
    """Pieces to choose. Default: 1,024, or as many as the text gives."""
    keep: Path | None = None
    """File with words, or parts of words as ##ing, to add besides those chosen: one a line."""
    min_frequency: int = 5
    """Choose no piece that the text would use less often: its row could not be learned."""
    text_column: str = "text"
    """Column of jsonl, csv, tsv and parquet files that holds the text."""
    workers: int | None = None
    """Processes that count words, by default one a core; the result is the same for any."""


def run_vocab_extend(settings: VocabExtend) -> None:
    from bertsmith.checkpoints.extend import extend_model
    from bertsmith.checkpoints.open import open_model_folder
    from bertsmith.text.vocabulary_extension import mine_additions, piece_counts
    from bertsmith.text.vocabulary_trainer import read_kept
    from bertsmith.text.wordpiece import Tokenizer

    _check(settings)
    folder = open_model_folder(settings.model)
    tokenizer = Tokenizer.from_pretrained(folder)
    old = tokenizer.vocabulary
    keep = read_kept(settings.keep, tokenizer.normalization) if settings.keep else []
    words, held_out = _counted(settings, tokenizer)
    additions = mine_additions(
        words,
        old,
        DEFAULT_ADD if settings.add is None else settings.add,
        min_frequency=settings.min_frequency,
        keep=keep,
    )
    _check_additions(settings, len(additions), len(set(keep).difference(old.ids)))
    new = extend_model(folder, settings.out, additions, piece_counts(words, old)).vocabulary
    unused = len(new) - len(old) - len(additions)
    print(
        f"{settings.out}: {len(additions):,} pieces added to {len(old):,}"
        + (f", and {unused:,} [unused] ones that hold places" if unused else "")
    )
    first = " ".join(addition.piece for addition in additions[:SHOWN])
    print(f"first: {first}" + (" ..." if len(additions) > SHOWN else ""))
    where = "held-out documents, every tenth" if held_out else "the text (too few to hold any out)"
    before, after = (piece_counts(held_out or words, each).sum() for each in (old, new))
    num_words = sum((held_out or words).values())
    print(
        f"{where}: {before:,} pieces before, {after:,} after ({1 - after / before:.1%} fewer); "
        f"{before / num_words:.2f} a word before, {after / num_words:.2f} after"
    )


def _check(settings: VocabExtend) -> None:
    """Refuse what contradicts itself before anything is read."""
    from bertsmith.cli.outputs import check_new_folder

    check_new_folder(settings.out)
    for flag, value, least in (
        ("--add", settings.add, 0),
        ("--min-frequency", settings.min_frequency, 1),
        ("--workers", settings.workers, 1),
    ):
        if value is not None and value < least:
            raise ValueError(f"{flag} {value}: must be {least} or more")


def _counted(settings: VocabExtend, tokenizer: Tokenizer) -> tuple[dict[str, int], dict[str, int]]:
    """The words of the text and those of the documents held out, each with its count."""
    from bertsmith.text.readers import no_text, read_documents
    from bertsmith.text.word_counts import count_words
    from bertsmith.text.workers import usable_cores

    def documents(held_out: bool) -> Iterator[Document]:
        numbered = enumerate(read_documents(settings.inputs, text_column=settings.text_column), 1)
        return (one for number, one in numbered if (number % HELD_OUT == 0) == held_out)

    workers = settings.workers or usable_cores()
    words = count_words(documents(False), tokenizer.normalization, workers)
    if not words:
        raise no_text(settings.inputs)
    return words, count_words(documents(True), tokenizer.normalization, 1)


def _check_additions(settings: VocabExtend, added: int, kept: int) -> None:
    found, asked, least = added - kept, settings.add, settings.min_frequency
    if asked is not None and found < asked:
        raise ValueError(
            f"--add {asked}: the text has only {found:,} pieces to add that it would use {least} "
            f"times or more: use --add {found}, give more text, or lower --min-frequency"
        )
    if not added:
        raise ValueError(
            f"nothing to add: the text has no piece that would shorten it and that it would use "
            f"{least} times or more: give more text, or lower --min-frequency"
        )
