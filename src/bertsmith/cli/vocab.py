"""Commands: vocab, vocab report, vocab extend."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import bertsmith
from bertsmith.base.processes import usable_cores
from bertsmith.base.settings import Count, Metavar, NotNegative, Positional, Positive
from bertsmith.base.terminal import scaled
from bertsmith.cli.flags import Inputs, TextInput, as_flags
from bertsmith.cli.outputs import check_folder, check_new_folder, check_outputs

if TYPE_CHECKING:
    from bertsmith.text.readers.documents import Document


@dataclass(frozen=True, kw_only=True)
class Vocab(Inputs, TextInput):
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
    min_frequency: int = 2
    """Do not join pieces that stand side by side less often."""
    coverage: float = 1.0
    """Share of the text's characters that the alphabet makes up, such as 0.9999; words with one of
    the rarest, which are left out, are unknown."""
    keep: Path | None = None
    """File with a word or ##piece a line; all of them, normalized, will be in the vocabulary."""
    reserve_unused: int = 0
    """[unused] pieces to set aside; from 99 on the layout is that of Google's files."""
    workers: int | None = None
    """Processes that count words, by default one a core; the vocabulary is the same for any."""


def run_vocab(settings: Vocab) -> None:
    from bertsmith.text.readers.documents import no_text, read_documents, sample_lines
    from bertsmith.text.tokenizer.files import VOCABULARY_FILE
    from bertsmith.text.vocabulary.train import read_kept

    started, column = time.monotonic(), settings.text_column
    if any((settings.out / name).exists() for name in (VOCABULARY_FILE, "config.json")):
        raise ValueError(
            f"{settings.out}: holds a vocabulary or a model already, and what was made with it "
            "would no longer fit: name another --out"
        )
    check_folder(settings.out)
    if not any(read_documents(settings.inputs, text_column=column)):
        raise no_text(settings.inputs)
    normalization = chosen_normalization(settings)
    keep = read_kept(settings.keep, normalization) if settings.keep else []
    workers = usable_cores() if settings.workers is None else settings.workers
    vocabulary = bertsmith.train_vocabulary(
        read_documents(settings.inputs, text_column=column, workers=workers),
        settings.size,
        normalization,
        bertsmith.VocabularySettings(
            reserve_unused=settings.reserve_unused,
            min_frequency=settings.min_frequency,
            coverage=settings.coverage,
            keep=keep,
        ),
        workers=workers,
    )
    tokenizer = bertsmith.Tokenizer(vocabulary, normalization)
    tokenizer.save(settings.out)
    alphabet = {piece.removeprefix("##") for piece in vocabulary.pieces}
    letters = sum(len(letter) == 1 for letter in alphabet)
    print(
        f"{settings.out}: {len(vocabulary):,} pieces, alphabet of {letters:,} characters, "
        f"in {time.monotonic() - started:,.1f} s"
    )
    report(tokenizer, sample_lines(settings.inputs, text_column=column))


def chosen_normalization(settings: Vocab) -> bertsmith.Normalization:
    """The preset, with what single flags change of it."""
    changed: dict[str, Any] = {}
    if settings.cased:
        changed = {"lowercase": False, "strip_accents": "none"}
    for name in ("strip_accents", "unicode"):
        if (value := getattr(settings, name)) != "preset":
            changed[name] = value
    preset = bertsmith.PRESETS[settings.preset]
    return replace(preset, **changed, split_cjk=preset.split_cjk and settings.split_cjk)


def report(tokenizer: bertsmith.Tokenizer, lines: list[str]) -> None:
    """Print pieces a word and unknown words, and warn of scripts that lose their letters."""
    import numpy as np

    from bertsmith.text.vocabulary.scripts import lost_letters_warning

    encoded = tokenizer.encode_batch(lines)
    unknown = np.count_nonzero(encoded.ids == tokenizer.vocabulary.unk_id)
    ends = encoded.boundaries[1:][np.diff(encoded.boundaries) > 0]
    words = max(1, int((encoded.word_ids[ends - 1] + 1).sum()))
    print(
        f"on {sum(map(len, lines)):,} characters from the start of every file: "
        f"{len(encoded.ids) / words:.2f} pieces a word, {unknown / words:.2%} of the words unknown"
    )
    if warning := lost_letters_warning(lines, tokenizer.normalization):
        print(as_flags(warning, Vocab))


MAX_NAME = 18  # characters of a vocabulary's name above its column
MAX_WORD = 60  # characters of a word that are shown


@dataclass(frozen=True, kw_only=True)
class VocabReport(Inputs, TextInput):
    """Show what a vocabulary does to a text, also beside a second one.

    Examples:
      bertsmith vocab report books/*.txt --vocab vocab
      bertsmith vocab report web.jsonl.gz --text-column body --vocab vocab --against bert-base-cased
      bertsmith vocab report wiki/ --vocab vocab --limit-mb 100 --json sizes.json --plot sizes.png

    A word is what the tokenizer takes for one; its length is counted in characters of the raw text.
    A sequence is a line (a paragraph) or a document with [CLS] and [SEP] around it. Every tokenizer
    normalizes the text in its own way.
    """

    vocab: str
    """Folder with a vocabulary, run directory, or folder or hub name of a model."""
    against: str | None = None
    """A second one to compare with."""
    json: Path | None = None
    """File to write all figures to."""
    plot: Path | None = None
    """Picture to draw: a .png or .svg file."""
    limit_mb: Annotated[float | None, Positive] = None
    """Read only the first so many million bytes of text."""


def run_vocab_report(settings: VocabReport) -> None:
    from bertsmith.base.files import write_json
    from bertsmith.reports.corpus import check_plot_path, write_plot
    from bertsmith.text.readers.documents import input_files, no_text, read_documents
    from bertsmith.text.vocabulary.report import measure

    check_outputs(input_files(settings.inputs), {"--json": settings.json, "--plot": settings.plot})
    vocabularies = {Path(name).resolve() for name in (settings.vocab, settings.against) if name}
    for flag, out in (("--json", settings.json), ("--plot", settings.plot)):
        if out and out.exists() and out.resolve().parent in vocabularies:
            raise ValueError(f"{flag} {out} is a file beside a vocabulary: name another file")
    if settings.plot:
        check_plot_path(settings.plot)
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


def open_tokenizer(name: str) -> bertsmith.Tokenizer:
    """The tokenizer of a folder, which need not hold a model, or of a model of the hub."""
    from bertsmith.checkpoints.hub import open_model_folder

    return bertsmith.Tokenizer.from_pretrained(
        name if Path(name).is_dir() else open_model_folder(name)
    )


def rows(figures: dict[str, Any]) -> Iterator[str]:
    text, sides = figures["text"], figures["vocabularies"]
    yield (
        f"{text['documents']:,} documents, {text['lines']:,} lines, "
        f"{text['characters']:,} characters, {scaled(text['bytes'])}"
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
            yield as_flags(f"{side['name']}: {side['altered_letters']['warning']}", Vocab)


def _table(sides: Sequence[dict[str, Any]]) -> Iterator[str]:
    names = (side["name"] for side in sides)
    heads = [n if len(n) <= MAX_NAME else "…" + n[1 - MAX_NAME :] for n in names]
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
        values: list[Any] = [reduce(getitem, path, side) for side in sides]
        yield _row(label, *_cells(values, form))


def _by_word_length(sides: Sequence[dict[str, Any]]) -> Iterator[str]:
    from bertsmith.reports.corpus import length_label

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
        cells.append(form.replace(":", ":+").format(values[0] - values[1]))
    return cells


def _row(label: str, *cells: str) -> str:
    return f"{label:<30}" + "".join(f"{cell:>{MAX_NAME + 2}}" for cell in cells)


def shown(text: str) -> str:
    """Text that a terminal can show: cut, and without control characters and lone surrogates."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:MAX_WORD]
    ) + ("…" if len(text) > MAX_WORD else "")


DEFAULT_ADD = 1024
HELD_OUT = 10  # every tenth document is only measured
SHOWN = 20


@dataclass(frozen=True, kw_only=True)
class VocabExtend(Inputs, TextInput):
    """Put the words of a domain into an existing model's vocabulary.

    Examples:
      bertsmith vocab extend manuals/ --model runs/books --out models/manuals
      bertsmith vocab extend notes.jsonl --model bert-base-uncased --out models/notes --add 3000
      bertsmith vocab extend notes.jsonl --model runs/books --out models/notes --keep terms.txt

    Added are the pieces that shorten the text most: words, starts of words and parts inside them.
    Old pieces keep their ids. The new model is ready to use; it gets better by training on the
    text:

      bertsmith corpus manuals/ --vocab models/manuals --out store
      bertsmith pretrain --corpus store --config continue --model models/manuals --out r --minutes 9
    """

    inputs: Annotated[list[str], Positional, Metavar("INPUT...")]
    """Text of the domain: files (.txt, .jsonl, .csv, .tsv, .xml, also with .gz, .bz2, .xz or .zst;
    .parquet) or folders."""
    model: str
    """Model to extend: a run, a Hugging Face folder or hub name."""
    out: Path
    """Folder for the extended model; it must be new or empty."""
    add: Annotated[int | None, NotNegative] = None
    """Pieces to choose. Default: 1,024, or as many as the text gives."""
    keep: Path | None = None
    """File with words, or parts of words as ##ing, to add besides those chosen: one a line."""
    min_frequency: Annotated[int, Count] = 5
    """Choose no piece that the text would use less often: its row could not be learned."""
    workers: Annotated[int | None, Count] = None
    """Processes that count words, by default one a core; the result is the same for any."""


def run_vocab_extend(settings: VocabExtend) -> None:
    from bertsmith.checkpoints.convert import extend_model, extensible_tokenizer
    from bertsmith.checkpoints.hub import open_model_folder
    from bertsmith.text.vocabulary.extend import mine_additions, piece_counts
    from bertsmith.text.vocabulary.train import read_kept

    check_new_folder(settings.out)
    folder = open_model_folder(settings.model)
    tokenizer = extensible_tokenizer(folder)  # before the long work
    old, asked, frequency = tokenizer.vocabulary, settings.add, settings.min_frequency
    keep = read_kept(settings.keep, tokenizer.normalization) if settings.keep else []
    words, held_out = _counted(settings, tokenizer)
    size = DEFAULT_ADD if asked is None else asked
    additions = mine_additions(words, old, size, min_frequency=frequency, keep=keep)
    found = len(additions) - len(set(keep).difference(old.ids))
    if asked is not None and found < asked:
        raise ValueError(
            f"--add {asked}: the text has only {found:,} pieces to add that it would use "
            f"{frequency} times or more: use --add {found}, give more text, or lower "
            "--min-frequency"
        )
    if not additions:
        raise ValueError(
            f"nothing to add: the text has no piece that would shorten it and that it would use "
            f"{frequency} times or more: give more text, or lower --min-frequency"
        )
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


def _counted(
    settings: VocabExtend, tokenizer: bertsmith.Tokenizer
) -> tuple[dict[str, int], dict[str, int]]:
    """The words of the text and those of the documents held out, each with its count."""
    from bertsmith.text.readers.documents import no_text, read_documents
    from bertsmith.text.vocabulary.word_counts import count_words

    workers = settings.workers or usable_cores()

    def documents(held_out: bool) -> Iterator[Document]:
        found = read_documents(settings.inputs, text_column=settings.text_column, workers=workers)
        numbered = enumerate(found, 1)
        return (one for number, one in numbered if (number % HELD_OUT == 0) == held_out)

    words = count_words(documents(False), tokenizer.normalization, workers)
    if not words:
        raise no_text(settings.inputs)
    return words, count_words(documents(True), tokenizer.normalization, 1)
