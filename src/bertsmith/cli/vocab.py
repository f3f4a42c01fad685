"""Train a WordPiece vocabulary from text.

Examples:
    bertsmith vocab books/*.txt --out vocab --size 30522
    bertsmith vocab korean.jsonl.gz --out vocab --size 16000 --strip-accents none
    bertsmith vocab languages/ --out vocab --size 60000 --preset multilingual
    bertsmith vocab wiki/ --out vocab --size 28996 --cased --reserve-unused 99 --workers 8
    bertsmith vocab web.jsonl.gz --out vocab --coverage 0.9999 --keep product-names.txt

In a text file a line is a paragraph and a blank line ends a document; in jsonl, csv, tsv and
parquet a row is a document. The vocabulary has exactly the size asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

if TYPE_CHECKING:
    from bertsmith.text.normalize import Normalization
    from bertsmith.text.wordpiece import Tokenizer


@dataclass
class Vocab:
    inputs: Annotated[list[str], tyro.conf.Positional, tyro.conf.arg(metavar="INPUT...")]
    """Files (.txt, .jsonl, .csv, .tsv, also with .gz, .xz or .zst; .parquet), folders, or URLs."""
    out: Path
    """Folder to write vocab.txt, tokenizer.json and tokenizer_config.json to."""
    size: int = 30522
    """Number of pieces, special tokens and alphabet included."""
    preset: Literal["google-uncased", "google-cased", "multilingual"] = "google-uncased"
    """google-uncased: lower-case, strip all accents. google-cased: change nothing. multilingual:
    lower-case, keep accents, compose (NFC)."""
    cased: bool = False
    """Keep capitals and, unless --strip-accents says otherwise, accents."""
    strip_accents: Literal["preset", "none", "latin", "all"] = "preset"
    """Instead of the preset's: none keeps Hangul whole and all accents; latin strips Latin letters
    only; all takes Hangul apart and the voicing marks off Kana."""
    unicode: Literal["preset", "none", "nfc", "nfkc"] = "preset"
    """Instead of the preset's: form of Unicode the text is brought to."""
    split_cjk: bool = True
    """Every ideograph is a word of its own; with the flag it stays with its neighbours."""
    sentence_per_line: bool = False
    """A line is a sentence; the words, and so the vocabulary, are the same either way."""
    min_frequency: int = 2
    """Do not join pieces that stand side by side less often."""
    coverage: float = 1.0
    """Share of the text's characters that the alphabet makes up, such as 0.9999; words with one of
    the rarest, which are left out, are unknown."""
    max_alphabet: int | None = None
    """Keep at most this many characters, the most frequent; words with others are unknown."""
    keep: Path | None = None
    """File with a word or ##piece a line; all of them, normalised, will be in the vocabulary."""
    reserve_unused: int = 0
    """[unused] pieces to set aside; from 99 on the layout is that of Google's files."""
    workers: int | None = None
    """Processes that count words, by default one a core; the vocabulary is the same for any."""
    text_column: str = "text"
    """Column of jsonl, csv, tsv and parquet files that holds the text."""


def run_vocab(settings: Vocab) -> None:
    import time

    from bertsmith.cli.outputs import check_folder
    from bertsmith.text.readers import no_text, read_documents
    from bertsmith.text.sample import sample_lines
    from bertsmith.text.tokenizer_files import VOCABULARY_FILE
    from bertsmith.text.vocabulary_trainer import read_kept, train_vocabulary
    from bertsmith.text.wordpiece import Tokenizer
    from bertsmith.text.workers import usable_cores

    started = time.monotonic()
    if any((settings.out / name).exists() for name in (VOCABULARY_FILE, "config.json")):
        raise ValueError(
            f"{settings.out}: holds a vocabulary or a model already, and what was made with it "
            "would no longer fit: name another --out"
        )
    check_folder(settings.out)
    if not any(read_documents(settings.inputs, text_column=settings.text_column)):
        raise no_text(settings.inputs)
    normalization = chosen_normalization(settings)
    keep = read_kept(settings.keep, normalization) if settings.keep else []
    vocabulary = train_vocabulary(
        read_documents(settings.inputs, text_column=settings.text_column),
        settings.size,
        normalization,
        reserve_unused=settings.reserve_unused,
        min_frequency=settings.min_frequency,
        coverage=settings.coverage,
        max_alphabet=settings.max_alphabet,
        keep=keep,
        workers=usable_cores() if settings.workers is None else settings.workers,
    )
    tokenizer = Tokenizer(vocabulary, normalization)
    tokenizer.save(settings.out)
    letters = {piece.removeprefix("##") for piece in vocabulary.pieces}
    alphabet = sum(len(letter) == 1 for letter in letters)
    print(
        f"{settings.out}: {len(vocabulary):,} pieces, alphabet of {alphabet:,} characters, "
        f"in {time.monotonic() - started:,.1f} s"
    )
    report(tokenizer, sample_lines(settings.inputs, text_column=settings.text_column))


def chosen_normalization(settings: Vocab) -> Normalization:
    """The preset, with what single flags change of it."""
    from bertsmith.text.normalize import PRESETS

    changed: dict[str, Any] = {}
    if settings.cased:
        changed = {"lowercase": False, "strip_accents": "none"}
    if settings.strip_accents != "preset":
        changed["strip_accents"] = settings.strip_accents
    if settings.unicode != "preset":
        changed["unicode"] = settings.unicode
    if not settings.split_cjk:
        changed["split_cjk"] = False
    return replace(PRESETS[settings.preset], **changed)


def report(tokenizer: Tokenizer, lines: list[str]) -> None:
    """Print what the vocabulary does to a text, and warn of scripts that lose their letters."""
    import numpy as np

    from bertsmith.text.alteration import alteration_warning

    encoded = tokenizer.encode_batch(lines)
    unknown = np.count_nonzero(encoded.ids == tokenizer.vocabulary.unk_id)
    ends = encoded.boundaries[1:][np.diff(encoded.boundaries) > 0]
    words = max(1, int((encoded.word_ids[ends - 1] + 1).sum()))
    print(
        f"on {sum(map(len, lines)):,} characters from the start of every file: "
        f"{len(encoded.ids) / words:.2f} pieces a word, {unknown / words:.2%} of the words unknown"
    )
    if warning := alteration_warning(lines, tokenizer.normalization):
        print(warning)
