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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from bertsmith.base.files import nearby, write_text
from bertsmith.base.terminal import counted
from bertsmith.tasks.answer_files import COLUMN, read_texts, text_lines
from bertsmith.tasks.answer_tables import rounded
from bertsmith.tasks.features import cumulate
from bertsmith.tasks.tagging.schemes import (
    Scheme,
    convert_tags,
    detect_scheme,
    find_impossible,
    is_prefixed,
    label_names,
    located_entities,
)
from bertsmith.text.readers.files import read_text, unpacked_name
from bertsmith.text.readers.tables import (
    COLUMNAR_SUFFIXES,
    column_names,
    conll_cells,
    file_suffix,
    parts,
    read_columns,
)
from bertsmith.text.readers.tables import DOCUMENT_MARK as DOCUMENT
from bertsmith.text.tokenizer.rows import concatenated_ranges
from bertsmith.text.tokenizer.wordpiece import SURROGATE

TOKENS = "tokens"
TABLES = (".jsonl", *COLUMNAR_SUFFIXES)  # with lists in their cells
SPLIT_AT_BLANKS = (".csv", ".tsv")
MANY_ROWS = 20  # of one word each are hardly sentences

# what a header calls the columns, which CoNLL's files have not
WORD_NAMES = ("word", "words", "token", "tokens", "form", "text")
TAG_NAMES = (
    *("tag", "tags", "label", "labels", "pos", "upos", "xpos", "ner"),
    *("pos_tag", "pos_tags", "ner_tag", "ner_tags"),
)

_INSIDE = re.compile("[ \t\r\n]+")
_WRITTEN_LIST = re.compile(r"""\s*\[\s*['"].*['"]\s*\]\s*""", re.DOTALL)


@dataclass(frozen=True)
class Sentences:
    """N sentences of W words; sentence k is the words boundaries[k]:boundaries[k + 1].

    Without -DOCSTART- lines every sentence is a document, since nothing says that its neighbours
    belong to it.
    """

    words: list[str]
    tags: list[str] | None  # as the file has them, in `scheme`; None when nobody asked
    boundaries: np.ndarray  # int64 [N + 1]
    documents: np.ndarray  # int64 [N], index of each sentence's document
    has_documents: bool
    scheme: Scheme
    lines: np.ndarray  # int64 [W], 1-based line of each word, for messages
    rows: np.ndarray  # int64 [N], 0-based row of a table or line of a text; of columns 0..N-1
    num_rows: int  # those without a word among them
    source: str
    texts: list[str] | None = None  # running text, one a row; None where the words were given
    spans: np.ndarray | None = None  # int64 [W, 2], begin and end of each word in it

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
            boundaries=cumulate(counts),
            documents=self.documents[chosen],
            lines=self.lines[words],
            rows=self.rows[chosen],
            spans=None if self.spans is None else self.spans[words],
        )

    def labels(self, names: tuple[str, ...] | None = None) -> tuple[np.ndarray, tuple[str, ...]]:
        """The class of each word, int64 [W], and the names of all, by default `label_names`.

        Where they have no B- of a type (IOB1, of other programs) its I- stands for both.

        Errors: ValueError with file and line for a tag that is not among the names.
        """
        assert self.tags is not None
        known = names or label_names(self.tags, self.scheme)
        indices = {name: index for index, name in enumerate(known)}
        tags = self.tags
        if self.scheme != "plain":
            tags = convert_tags(tags, self.boundaries, "IOB2")
            inside = [name for name in known if name[:1] == "I" and is_prefixed(name)]
            indices = {f"B{name[1:]}": indices[name] for name in inside} | indices
        for word, tag in enumerate(tags):
            if tag not in indices:
                where, given = f"{self.source}:{self.lines[word]}", self.tags[word]
                called = f"'{given}'" if given == tag else f"'{given}' ('{tag}' in IOB2)"
                raise ValueError(
                    f"{where}: tag {called} is unknown to the training data (its tags:"
                    f" {', '.join(known[:20])}): correct it, or train on data that has it"
                )
        return np.array([indices[tag] for tag in tags], np.int64), known

    def sentence_tags(self, labels: np.ndarray, names: tuple[str, ...]) -> list[str]:
        """Classes int64 [W] as tags in this file's scheme."""
        tags = [names[label] for label in labels.tolist()]
        return convert_tags(tags, self.boundaries, self.scheme)


def read_sentences(
    path: Path,
    need_tags: bool = True,
    scheme: Scheme | None = None,
    columns: tuple[str, str] = ("tokens", "tags"),
    tag_column: int = -1,
) -> Sentences:
    """Read a file of CoNLL columns, or a table, by its `columns` of words and of tags.

    `need_tags=False` reads the words only; a line may then be a word alone. `scheme`: None = found
    by reading. `tag_column`: of CoNLL columns the one of the tags, the word being 0.

    Errors: ValueError, one line with file and line, for a missing or empty file, a .json, rows that
    do not match the first, tokens that do not match their tags, texts in place of tags, a table of
    a word a row, columns with a header, what `read_columns` refuses, and a tag that is impossible
    in its scheme.
    """
    if not parts(path):
        raise ValueError(f"{path}: no such file{nearby(path)}")
    if unpacked_name(path).endswith(".json"):
        raise ValueError(
            f"{path}: words are not read from a .json: give CoNLL columns, a word a line, or a"
            " .jsonl, .parquet or .csv with a sentence a row"
        )
    found = Columns()
    if is_table(path, columns if need_tags else columns[:1]):
        _read_table(path, need_tags, columns, found)
    else:
        _read_columns(path, need_tags, found, tag_column)
    return check_words(found.sentences(scheme, str(path)))


def check_words(sentences: Sentences) -> Sentences:
    """The sentences. Errors: ValueError when there is no word in them."""
    if not sentences.words:
        raise ValueError(f"{sentences.source}: no words in this file")
    return sentences


def is_table(path: Path, names: Iterable[str]) -> bool:
    """True for a table with names of columns; a .tsv that lacks one of `names` is CoNLL columns."""
    suffix = file_suffix(path)
    is_tsv = suffix == ".tsv" and set(names) <= set(column_names(path))
    return is_tsv or suffix == ".csv" or suffix in TABLES


def has_columns(lines: Sequence[str], names: Sequence[str]) -> bool:
    """True for several lines of CoNLL columns: as many in each, and a tag, of `names` or of a
    scheme, at the end.

    A single line is a text, which may end in "Vitamin B"; so are lines of which each ends in a
    full stop, a tag of some parts of speech.

    >>> has_columns(["Ann B-PER", "sings O", ""], ["O"]), has_columns(["Ann sings"], ["O"])
    (True, False)
    """
    rows = [conll_cells(line) for line in lines if line.strip() and not line.startswith(DOCUMENT)]
    ends = [row[-1] for row in rows]
    return (
        len(rows) > 1
        and len(rows[0]) > 1
        and len(set(map(len, rows))) == 1
        and all(end in names or is_prefixed(end) for end in ends)
        and any(end.isalnum() or is_prefixed(end) for end in ends)
    )


@dataclass
class Columns:
    """The words that a reader has found so far."""

    words: list[str] = field(default_factory=list)
    tags: list[str] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    boundaries: list[int] = field(default_factory=lambda: [0])  # ends of sentences after a 0
    documents: list[int] = field(default_factory=list)  # the word that each begins with
    has_words: list[bool] = field(default_factory=list)  # of every row of a table, or line of text

    def end_sentence(self) -> None:
        if len(self.words) > self.boundaries[-1]:
            self.boundaries.append(len(self.words))

    def add_row(self, words: list[str], line: int) -> None:
        self.words += words
        self.lines += [line] * len(words)
        self.has_words.append(bool(words))
        self.end_sentence()

    def sentences(self, scheme: Scheme | None, source: str) -> Sentences:
        """Errors: ValueError for a tag that is impossible in the scheme."""
        boundaries = np.array(self.boundaries, np.int64)
        documents = np.arange(len(boundaries) - 1)
        if self.documents:
            documents = np.searchsorted(self.documents, boundaries[:-1], side="right")
        if self.tags:
            scheme = scheme or detect_scheme(self.tags, boundaries)
            if impossible := find_impossible(self.tags, boundaries, scheme):
                word, problem = impossible
                where = f"{source}:{self.lines[word]}"
                raise ValueError(f"{where}: {problem} (word '{self.words[word]}')")
        return Sentences(
            words=self.words,
            tags=self.tags or None,
            boundaries=boundaries,
            documents=documents,
            has_documents=bool(self.documents),
            scheme=scheme or "IOB2",
            lines=np.array(self.lines, np.int64),
            rows=np.flatnonzero(self.has_words) if self.has_words else np.arange(len(documents)),
            num_rows=len(self.has_words) or len(documents),
            source=source,
        )


def _read_columns(path: Path, need_tags: bool, found: Columns, tag_column: int) -> None:
    num_columns, min_columns = 0, max(1 + need_tags, 1 + tag_column)
    hint = "the word first, its tag last, an empty line after a sentence"
    if not need_tags:
        hint = "a word a line; sentences of words with blanks between are read from a .txt"
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        line = line.rstrip("\r")
        if not line.strip(" \t"):
            found.end_sentence()
            continue
        cells, where = conll_cells(line), f"{path}:{number}"
        if cells[0] == DOCUMENT:
            found.end_sentence()
            found.documents.append(len(found.words))
            continue
        num_columns = num_columns or len(cells)
        if len(cells) != num_columns or num_columns < min_columns:
            expected = max(num_columns, min_columns)
            raise ValueError(
                f"{where}: {counted(len(cells), 'column')}, expected {expected}: {hint}"
            )
        if " " in cells[-1].strip(" "):
            raise ValueError(f"{where}: the last column holds {cells[-1]!r:.60}, not a tag: {hint}")
        # between tabs blanks would be a part of a tag, which nobody sees
        tag = cells[tag_column].strip(" ")
        if not cells[0] or not tag:
            raise ValueError(f"{where}: an empty word or tag: fill it in")
        found.words.append(cells[0])
        if need_tags:
            found.tags.append(tag)
        found.lines.append(number)
    found.end_sentence()
    if _has_header(found):
        raise ValueError(
            f"{path}:{found.lines[0]}: the header '{found.words[0]}', '{found.tags[0]}' would be a"
            " word and its tag: CoNLL columns have no header, remove this line"
        )


def _has_header(found: Columns) -> bool:
    """True where the first word and its tag, which no other word has, are names of columns."""
    return (
        len(found.tags) > 1
        and found.words[0].lower() in WORD_NAMES
        and found.tags[0].lower() in TAG_NAMES
        and found.tags.count(found.tags[0]) == 1
    )


def _read_table(path: Path, need_tags: bool, columns: tuple[str, str], found: Columns) -> None:
    roles = ("`text`", "`label`") if need_tags else ("`text`",)
    cells, lines = read_columns(path, dict(zip(columns, roles, strict=False)))
    if file_suffix(path) in SPLIT_AT_BLANKS:
        _refuse_written_lists(path, cells, lines)
        cells = {name: [cell.split() for cell in column] for name, column in cells.items()}
        if need_tags and len(lines) >= MANY_ROWS and all(len(row) < 2 for row in cells[columns[0]]):
            raise ValueError(
                f"{path}: no row holds two words, but a row is a sentence: write its words into one"
                " cell with blanks between, or CoNLL columns without a header: a word a line, its"
                " tag last, an empty line after a sentence, in a .conll"
            )
    for row, line in enumerate(lines):
        where = f"{path}:{line}"
        tokens, *tags = [
            _strings(column[row], name, where, need_tags) for name, column in cells.items()
        ]
        for of_row in tags:
            if len(of_row) != len(tokens):
                raise ValueError(
                    f"{where}: {len(tokens)} tokens, but {len(of_row)} tags: one tag a token"
                )
            found.tags += of_row
        found.add_row(tokens, line)


def _refuse_written_lists(path: Path, cells: dict[str, list[str]], lines: list[int]) -> None:
    """Refuse ['Ann', 'sings'], as pandas writes a list into a csv: the signs would be of words."""
    for name, column in cells.items():
        for cell, line in zip(column, lines, strict=True):
            if _WRITTEN_LIST.fullmatch(cell):
                raise ValueError(
                    f"{path}:{line}: {cell!r:.60} in column '{name}' is a list written as a text:"
                    " write its words with blanks between, or the list itself into a .jsonl"
                )


def _strings(values: Any, name: str, where: str, need_tags: bool) -> list[str]:
    if isinstance(values, list) and all(
        isinstance(value, str) and value != "" and not SURROGATE.search(value) for value in values
    ):
        return values
    hint = 'write it such as ["Ann", "sings"], tags by their names'
    if isinstance(values, str) and not need_tags:
        hint = "running text goes into a .txt"
    raise ValueError(f"{where}: column '{name}' holds {values!r:.60}, not a list of texts: {hint}")


def write_tagged(
    path: Path, sentences: Sentences, predicted: Sequence[str], probabilities: np.ndarray
) -> None:
    """Write `tagged_rows`, a line of JSON each, after the "text" of running text."""
    rows = tagged_rows(sentences, predicted, probabilities)
    if sentences.texts is not None:
        rows = [{"text": text, **row} for text, row in zip(sentences.texts, rows, strict=True)]
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def tagged_rows(
    sentences: Sentences, predicted: Sequence[str], probabilities: np.ndarray
) -> list[dict[str, Any]]:
    """A row each: tokens, tags, probabilities, and of running text entities (`located_entities`).

    Item k is for row k of a table or line k of a text: lists are empty where it has no word.
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
    columns = [[_INSIDE.sub("_", word) for word in sentences.words], predicted]
    if sentences.tags is not None:
        columns.insert(1, sentences.tags)
    rows = [" ".join(cells) for cells in zip(*columns, strict=True)]
    border = f"{DOCUMENT}{' O' * (len(columns) - 1)}\n\n"
    lines = []
    for k in range(len(sentences)):
        is_new = k == 0 or sentences.documents[k] != sentences.documents[k - 1]
        if sentences.has_documents and is_new:
            lines.append(border)
        begin, end = sentences.boundaries[k : k + 2]
        lines.append("\n".join(rows[begin:end]) + "\n\n")
    write_text(path, "".join(lines))


def read_words(path: Path, column: str | None = None) -> tuple[Sentences, np.ndarray]:
    """The words of every text of a file, and how many each text has: int64 [N].

    .txt, .csv, .tsv: texts, whose words blanks part; a .txt of several lines is CoNLL columns where
    all have as many and end in a tag
    .jsonl, .parquet, .arrow: texts or lists of words in `column`; without one lists in "tokens",
    and in a .parquet that has no such column texts in "text"
    any other suffix: CoNLL columns

    The sentences leave texts without a word out. Errors: as `read_texts` and `read_sentences`.
    """
    suffix = file_suffix(path)
    if suffix == ".txt":
        text = [line for _, line in text_lines(str(path), COLUMN)]
        if has_columns(text, ("O",)):
            suffix = None
    if suffix is None and column is not None:
        raise ValueError(f"`text={column!r}`: {path} is read as CoNLL columns, the word first")
    if suffix is None or (suffix in TABLES and _holds_lists(path, column)):
        sentences = read_sentences(path, need_tags=False, columns=(column or TOKENS, ""))
    else:
        found = Columns()
        for line, text in read_texts(path, column):
            found.add_row(text.split(), line)
        sentences = found.sentences("plain", str(path))
    counts = np.zeros(sentences.num_rows, np.int64)
    counts[sentences.rows] = np.diff(sentences.boundaries)
    return sentences, counts


def _holds_lists(path: Path, column: str | None) -> bool:
    """True for a table whose column has lists of words, not texts."""
    if column is None:  # a .parquet may have "text" in its place
        is_parquet = file_suffix(path) == ".parquet"
        return not is_parquet or any(TOKENS in column_names(part) for part in parts(path))
    columns, _ = read_columns(path, {column: "`text`"})
    return isinstance(columns[column][0], list)
