"""Tagged words out of files, and predicted tags back into one.

CoNLL columns   a word a line, its columns parted by blanks or tabs, the word first and the tag
                last; an empty line ends a sentence, a line -DOCSTART- begins a document; under any
                suffix that is not of a table, packed or not
tables          .jsonl, .parquet and .arrow, a sentence a row, with a column of lists of words
                and one of tags: {"tokens": ["Ann", "sings"], "tags": ["B-PER", "O"]}; .csv, and a
                .tsv whose header names the columns, with blanks in a cell between words or tags
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bertsmith.base.files import write_text
from bertsmith.tasks.answer_files import COLUMN, read_texts, rounded, text_lines
from bertsmith.tasks.tagging.schemes import (
    Scheme,
    convert_tags,
    detect_scheme,
    find_impossible,
    is_prefixed,
    label_names,
    located_entities,
)
from bertsmith.text.readers.files import COMPRESSIONS, read_text
from bertsmith.text.readers.tables import (
    COLUMNAR_SUFFIXES,
    column_names,
    conll_cells,
    parts,
    read_columns,
    suffix_of,
)
from bertsmith.text.readers.tables import DOCUMENT_MARK as DOCUMENT
from bertsmith.text.tokenizer.rows import concatenated_ranges

TOKENS = "tokens"
TABLES = (".jsonl", *COLUMNAR_SUFFIXES)  # with lists in their cells
SPLIT_AT_BLANKS = (".csv", ".tsv")

_SURROGATE = re.compile("[\ud800-\udfff]")  # could not be written again
_INSIDE = re.compile("[ \t\r\n]+")


@dataclass(frozen=True)
class Sentences:
    """N sentences of W words; sentence k is the words boundaries[k]:boundaries[k + 1].

    tags       as the file has them, in `scheme`; None when nobody asked
    documents  int64 [N], number of each sentence's document; without -DOCSTART- lines every
               sentence is a document, since nothing says that its neighbours belong to it
    lines      int64 [W], 1-based line of each word, for messages
    rows       int64 [N], 0-based row of a table, or line of a text, that each sentence is; of
               columns 0..N-1
    num_rows   those without a word among them
    texts      running text, one a row; None where the words were given
    spans      int64 [W, 2], begin and end of each word in it
    """

    words: list[str]
    tags: list[str] | None
    boundaries: np.ndarray  # int64 [N + 1]
    documents: np.ndarray
    has_documents: bool
    scheme: Scheme
    lines: np.ndarray
    rows: np.ndarray
    num_rows: int
    source: str
    texts: list[str] | None = None
    spans: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.boundaries) - 1

    def select(self, indices: Sequence[int] | np.ndarray) -> Sentences:
        """The sentences at `indices`, in that order."""
        chosen = np.asarray(indices, np.int64)
        counts = np.diff(self.boundaries)[chosen]
        words = concatenated_ranges(self.boundaries[chosen], counts)
        tags = self.tags
        return replace(
            self,
            words=[self.words[word] for word in words],
            tags=None if tags is None else [tags[word] for word in words],
            boundaries=np.concatenate([[0], np.cumsum(counts)]),
            documents=self.documents[chosen],
            lines=self.lines[words],
            rows=self.rows[chosen],
            spans=None if self.spans is None else self.spans[words],
        )

    def labels(self, names: tuple[str, ...] | None = None) -> tuple[np.ndarray, tuple[str, ...]]:
        """The class of each word, int64 [W], and the names of the classes.

        Without `names` they are found here, see `label_names`.

        Errors: ValueError with file and line for a tag that is not among the names.
        """
        assert self.tags is not None
        known = names or label_names(self.tags, self.scheme)
        numbers = {name: number for number, name in enumerate(known)}
        tags = self.tags
        if self.scheme != "plain":
            tags = convert_tags(self.tags, self.boundaries, "IOB2")
        for word, tag in enumerate(tags):
            if tag not in numbers:
                raise ValueError(
                    f"{self.source}:{self.lines[word]}: tag '{self.tags[word]}' is unknown to the"
                    f" training data (its tags: {', '.join(known[:20])}): correct it, or train on"
                    " data that has it"
                )
        return np.array([numbers[tag] for tag in tags], np.int64), known

    def tags_of(self, labels: np.ndarray, names: tuple[str, ...]) -> list[str]:
        """Classes int64 [W] as tags in this file's scheme."""
        tags = [names[label] for label in labels.tolist()]
        return convert_tags(tags, self.boundaries, self.scheme)


def read_sentences(
    path: Path,
    need_tags: bool = True,
    scheme: Scheme | None = None,
    columns: tuple[str, str] = ("tokens", "tags"),
) -> Sentences:
    """Read a file of CoNLL columns, or a table. `scheme`: None = found by reading.

    `need_tags=False` reads the words only, and a line of columns may then be a word alone.
    `columns` are those of the words and the tags in a table.

    Errors: ValueError, one line with file and line, for a missing or empty file, a .json,
    text that is not UTF-8, a line with another number of columns than the first, a last column with
    texts in place of tags, what `read_columns` refuses, tokens that do not match their tags, and a
    tag that is impossible in its scheme.
    """
    if not parts(path):
        raise ValueError(f"{path}: no such file")
    unpacked = path.with_suffix("") if path.suffix.lower() in COMPRESSIONS else path
    if unpacked.suffix.lower() == ".json":
        raise ValueError(
            f"{path}: words are not read from a .json: give CoNLL columns, a word a line, or a"
            " .jsonl, .parquet or .csv with a sentence a row"
        )
    found = _Found([], [], [], [0], [], [])
    suffix, names = suffix_of(path), set(columns if need_tags else columns[:1])
    # a .tsv may hold CoNLL columns
    is_tsv = suffix == ".tsv" and names <= set(column_names(path))
    if is_tsv or suffix == ".csv" or suffix in TABLES:
        _read_table(path, need_tags, columns, found)
    else:
        _read_columns(path, need_tags, found)
    return _sentences(found, need_tags, scheme, str(path))


def sentences_of(lines: Sequence[str], scheme: Scheme, source: str) -> Sentences:
    """Sentences without tags: one a line, its words parted by blanks.

    Errors: ValueError when there is no word in them.
    """
    found = _Found([], [], [], [0], [], [])
    for number, line in enumerate(lines, start=1):
        words = line.split()
        found.words.extend(words)
        found.lines.extend([number] * len(words))
        found.end_row()
    return _sentences(found, False, scheme, source)


def has_columns(lines: Sequence[str], names: Sequence[str]) -> bool:
    """True for lines of CoNLL columns: each ends with a tag, of `names` or of a scheme.

    >>> has_columns(["Ann B-PER", "sings O", ""], ["O"]), has_columns(["Ann sings"], ["O"])
    (True, False)
    """
    rows = [line.split() for line in lines if line.strip() and not line.startswith(DOCUMENT)]
    return bool(rows) and all(
        len(row) > 1 and (row[-1] in names or is_prefixed(row[-1])) for row in rows
    )


def _sentences(found: _Found, need_tags: bool, scheme: Scheme | None, source: str) -> Sentences:
    if not found.words:
        raise ValueError(f"{source}: no words in this file")
    boundaries = np.array(found.boundaries, np.int64)
    documents = np.arange(len(boundaries) - 1)
    if found.documents:
        documents = np.searchsorted(found.documents, boundaries[:-1], side="right")
    tags = found.tags if need_tags else None
    if tags is not None:
        scheme = scheme or detect_scheme(tags, boundaries)
        if impossible := find_impossible(tags, boundaries, scheme):
            word, what = impossible
            raise ValueError(f"{source}:{found.lines[word]}: {what} (word '{found.words[word]}')")
    return Sentences(
        words=found.words,
        tags=tags,
        boundaries=boundaries,
        documents=documents,
        has_documents=bool(found.documents),
        scheme=scheme or "IOB2",
        lines=np.array(found.lines, np.int64),
        rows=np.flatnonzero(found.has_words) if found.has_words else np.arange(len(documents)),
        num_rows=len(found.has_words) or len(documents),
        source=source,
    )


class _Found(NamedTuple):
    words: list[str]
    tags: list[str]
    lines: list[int]
    boundaries: list[int]  # ends of sentences, after a 0
    documents: list[int]  # number of the word that each document begins with
    has_words: list[bool]  # of every row of a table, or line of a text

    def end_sentence(self) -> None:
        if len(self.words) > self.boundaries[-1]:
            self.boundaries.append(len(self.words))

    def end_row(self) -> None:
        self.has_words.append(len(self.words) > self.boundaries[-1])
        self.end_sentence()


def _read_columns(path: Path, need_tags: bool, found: _Found) -> None:
    num_columns, least = 0, 2 if need_tags else 1
    how = "the word first, its tag last, an empty line after a sentence"
    if not need_tags:
        how = "a word a line; sentences of words with blanks between are read from a .txt"
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        line = line.rstrip("\r")
        if not line.strip(" \t"):
            found.end_sentence()
            continue
        cells = conll_cells(line)
        if cells[0] == DOCUMENT:
            found.end_sentence()
            found.documents.append(len(found.words))
            continue
        num_columns = num_columns or len(cells)
        if len(cells) != num_columns or num_columns < least:
            raise ValueError(
                f"{path}:{number}: {len(cells)} columns, expected {max(num_columns, least)}: {how}"
            )
        if " " in cells[-1].strip():
            raise ValueError(
                f"{path}:{number}: the last column holds {cells[-1]!r:.60}, not a tag: {how}"
            )
        if not cells[0] or not cells[-1]:
            raise ValueError(f"{path}:{number}: an empty word or tag: fill it in")
        found.words.append(cells[0])
        found.tags.append(cells[-1])
        found.lines.append(number)
    found.end_sentence()


def _read_table(path: Path, need_tags: bool, columns: tuple[str, str], found: _Found) -> None:
    flags = ("--text", "--label") if need_tags else ("--text",)
    cells, lines = read_columns(path, dict(zip(columns, flags, strict=False)))
    if suffix_of(path) in SPLIT_AT_BLANKS:
        cells = {name: [cell.split() for cell in column] for name, column in cells.items()}
    for row, line in enumerate(lines):
        tokens = _strings(cells[columns[0]][row], columns[0], f"{path}:{line}")
        found.words.extend(tokens)
        found.lines.extend([line] * len(tokens))
        if need_tags:
            tags = _strings(cells[columns[1]][row], columns[1], f"{path}:{line}")
            if len(tags) != len(tokens):
                raise ValueError(
                    f"{path}:{line}: {len(tokens)} tokens, but {len(tags)} tags: one tag a token"
                )
            found.tags.extend(tags)
        found.end_row()


def _strings(values: Any, name: str, where: str) -> list[str]:
    if isinstance(values, list) and all(
        isinstance(value, str) and value != "" and not _SURROGATE.search(value) for value in values
    ):
        return values
    raise ValueError(
        f"{where}: column '{name}' holds {values!r:.60}, not a list of words; running text goes"
        " into a .txt"
    )


def write_tagged(
    path: Path, sentences: Sentences, predicted: Sequence[str], probabilities: np.ndarray
) -> None:
    """Write `tagged_rows`, a line of JSON each; running text stands before its answer."""
    rows = tagged_rows(sentences, predicted, probabilities)
    if sentences.texts is not None:
        rows = [{"text": text, **row} for text, row in zip(sentences.texts, rows, strict=True)]
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def tagged_rows(
    sentences: Sentences, predicted: Sequence[str], probabilities: np.ndarray
) -> list[dict[str, Any]]:
    """A row each: tokens, tags, probabilities, and of running text entities (`located_entities`).

    Item k answers row k of a table and line k of a text: lists are empty where it has no word.
    """
    texts, spans = sentences.texts, sentences.spans
    lists = ["tokens", "tags", "probabilities"] + (["entities"] if texts else [])
    rows: list[dict[str, Any]] = [{name: [] for name in lists} for _ in range(sentences.num_rows)]
    for number, row in enumerate(sentences.rows):
        begin, end = sentences.boundaries[number : number + 2]
        tags, sure = list(predicted[begin:end]), probabilities[begin:end]
        rows[row] |= {"tokens": sentences.words[begin:end], "tags": tags}
        rows[row]["probabilities"] = [rounded(float(p)) for p in sure]
        if texts is not None and spans is not None:
            rows[row]["entities"] = located_entities(
                texts[row], spans[begin:end], tags, sure, sentences.scheme
            )
    return rows


def write_columns(path: Path, sentences: Sentences, predicted: Sequence[str]) -> None:
    """Write "word tag predicted" a line, as the CoNLL script reads it, or "word predicted".

    -DOCSTART- lines are kept. Blanks inside a word (from .jsonl) become "_".
    """
    gold = sentences.tags
    columns = [[_INSIDE.sub("_", word) for word in sentences.words], predicted]
    if gold is not None:
        columns.insert(1, gold)
    rows = [" ".join(cells) for cells in zip(*columns, strict=True)]
    border = f"{DOCUMENT}{' O' * (len(columns) - 1)}\n\n"
    parts = []
    for k in range(len(sentences)):
        is_new = k == 0 or sentences.documents[k] != sentences.documents[k - 1]
        if sentences.has_documents and is_new:
            parts.append(border)
        begin, end = sentences.boundaries[k : k + 2]
        parts.append("\n".join(rows[begin:end]) + "\n\n")
    write_text(path, "".join(parts))


def read_words(path: Path, column: str | None = None) -> tuple[Sentences, np.ndarray]:
    """The words of every text of a file, and how many each text has: int64 [N].

    .txt, .csv, .tsv: texts, whose words blanks part; a .txt all of whose lines end in a tag is
    CoNLL columns
    .jsonl, .parquet, .arrow: {"tokens": ["Ann", "sings"]} a row; texts or such lists in `column`,
    and in the "text" of a .parquet without "tokens"
    any other suffix: CoNLL columns, the word first, an empty line after a sentence

    The sentences leave texts without a word out; the counts, which are 0 there, do not.

    Errors: ValueError, one line with file and line, as `read_texts` and `read_sentences`.
    """
    suffix = suffix_of(path)
    if suffix == ".txt" and _are_columns(list(text_lines(str(path), COLUMN))):
        suffix = None
    if suffix is None and column is not None:
        raise ValueError(f"--text {column}: {path} is read as CoNLL columns, the word first")
    if suffix is None or (suffix in TABLES and _holds_lists(path, column)):
        name = column or TOKENS
        sentences = read_sentences(path, need_tags=False, columns=(name, ""))
        if suffix is None:
            return sentences, np.diff(sentences.boundaries)
        rows, _ = read_columns(path, {name: "--text"})  # there are no sentences of empty lists
        return sentences, np.array([len(words) for words in rows[name]])
    texts, lines = read_texts(path, column)
    counts = np.array([len(text.split()) for text in texts])
    sentences = sentences_of(texts, "plain", str(path))
    return replace(sentences, lines=np.repeat(lines, counts)), counts


def _are_columns(lines: list[str]) -> bool:
    """True for lines of CoNLL columns: as many cells in each, the last of them a tag.

    A single line never is: a text may end in "Vitamin B".
    """
    rows = [line.split() for line in lines if line.strip() and not line.startswith(DOCUMENT)]
    return len(rows) > 1 and len(set(map(len, rows))) == 1 and has_columns(lines, ("O",))


def _holds_lists(path: Path, column: str | None) -> bool:
    """True for a table whose column has lists of words, not texts."""
    if column is None:  # a .parquet may have "text" in its place
        is_parquet = suffix_of(path) == ".parquet"
        return not is_parquet or any(TOKENS in column_names(part) for part in parts(path))
    columns, _ = read_columns(path, {column: "--text"})
    return isinstance(columns[column][0], list)
