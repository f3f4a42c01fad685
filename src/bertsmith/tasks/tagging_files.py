"""Tagged words out of files, and predicted tags back into one.

CoNLL columns   a word a line, its columns parted by blanks or tabs, the word first and the tag
                last; an empty line ends a sentence, a line -DOCSTART- begins a document
.jsonl          a sentence a line: {"tokens": ["Ann", "sings"], "tags": ["B-PER", "O"]}
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bertsmith.files import write_text
from bertsmith.tasks.tagging_schemes import (
    Scheme,
    convert_tags,
    detect_scheme,
    find_impossible,
    label_names,
)
from bertsmith.text.sequences import concatenated_ranges

DOCUMENT = "-DOCSTART-"
NAMES = {  # split -> what a file is called, before its suffix or as a suffix after "eng"
    "train": ("train", "eng.train"),
    "dev": ("dev", "valid", "eng.testa"),
    "test": ("test", "eng.testb"),
}
SUFFIXES = ("", ".txt", ".conll", ".tsv", ".iob", ".iob2", ".bio", ".bioes", ".jsonl")

_BLANKS = re.compile("[ \t]+")  # a no-break space may stand inside a word
_SURROGATE = re.compile("[\ud800-\udfff]")  # could not be written again
_INSIDE = re.compile("[ \t\r\n]+")


@dataclass(frozen=True)
class Sentences:
    """N sentences of W words; sentence k is the words boundaries[k]:boundaries[k + 1].

    tags       as the file has them, in `scheme`; None when nobody asked
    documents  int64 [N], number of each sentence's document; without -DOCSTART- lines every
               sentence is a document, since nothing says that its neighbours belong to it
    lines      int64 [W], 1-based line of each word, for messages
    """

    words: list[str]
    tags: list[str] | None
    boundaries: np.ndarray  # int64 [N + 1]
    documents: np.ndarray
    has_documents: bool
    scheme: Scheme
    lines: np.ndarray
    source: str

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


def find_sentences(data: Path, split: str) -> Path | None:
    """The file of `split` ("train", "dev" or "test") behind --data, a folder or a file.

    A file is the training set and nothing else. None: there is no dev or test file.

    Errors: ValueError when `data` does not exist or has no training file.
    """
    if data.is_file():
        return data if split == "train" else None
    if not data.is_dir():
        raise ValueError(f"{data}: no such file or folder (--data)")
    for name in NAMES[split]:
        for suffix in SUFFIXES:
            if (data / (name + suffix)).is_file():
                return data / (name + suffix)
    if split == "train":
        raise ValueError(
            f"{data}: no training file (--data): call it train.conll (CoNLL columns) or train.jsonl"
        )
    return None


def read_sentences(path: Path, need_tags: bool = True, scheme: Scheme | None = None) -> Sentences:
    """Read a file of CoNLL columns, or .jsonl. `scheme`: None = found by reading.

    `need_tags=False` reads the words only, and a line may then be a word alone.

    Errors: ValueError, one line with file and line, for a missing or empty file, text that is not
    UTF-8, a line with another number of columns than the first, broken JSON, tokens that do not
    match their tags, and a tag that is impossible in its scheme.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    found = _Found([], [], [], [0], [])
    (_read_json_lines if path.suffix == ".jsonl" else _read_columns)(path, need_tags, found)
    if not found.words:
        raise ValueError(f"{path}: no words in this file")
    boundaries = np.array(found.boundaries, np.int64)
    documents = np.arange(len(boundaries) - 1)
    if found.documents:
        documents = np.searchsorted(found.documents, boundaries[:-1], side="right")
    tags = found.tags if need_tags else None
    if tags is not None:
        scheme = scheme or detect_scheme(tags, boundaries)
        if impossible := find_impossible(tags, boundaries, scheme):
            word, what = impossible
            raise ValueError(f"{path}:{found.lines[word]}: {what} (word '{found.words[word]}')")
    return Sentences(
        words=found.words,
        tags=tags,
        boundaries=boundaries,
        documents=documents,
        has_documents=bool(found.documents),
        scheme=scheme or "IOB2",
        lines=np.array(found.lines, np.int64),
        source=str(path),
    )


class _Found(NamedTuple):
    words: list[str]
    tags: list[str]
    lines: list[int]
    boundaries: list[int]  # ends of sentences, after a 0
    documents: list[int]  # number of the word that each document begins with

    def end_sentence(self) -> None:
        if len(self.words) > self.boundaries[-1]:
            self.boundaries.append(len(self.words))


def _read_columns(path: Path, need_tags: bool, found: _Found) -> None:
    num_columns = 0
    for number, line in enumerate(_read_text(path).split("\n"), start=1):
        line = line.rstrip("\r")
        if not line.strip(" \t"):
            found.end_sentence()
            continue
        cells = line.split("\t") if "\t" in line else _BLANKS.split(line.strip(" "))
        if cells[0] == DOCUMENT:
            found.end_sentence()
            found.documents.append(len(found.words))
            continue
        num_columns = num_columns or len(cells)
        if need_tags and (len(cells) != num_columns or num_columns < 2):
            raise ValueError(
                f"{path}:{number}: {len(cells)} columns, expected {max(num_columns, 2)}:"
                " the word first, its tag last, an empty line after a sentence"
            )
        if not cells[0] or not cells[-1]:
            raise ValueError(f"{path}:{number}: an empty word or tag: fill it in")
        found.words.append(cells[0])
        found.tags.append(cells[-1])
        found.lines.append(number)
    found.end_sentence()


def _read_json_lines(path: Path, need_tags: bool, found: _Found) -> None:
    for number, line in enumerate(_read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number}: not valid JSON ({error.msg})") from error
        tokens = _strings(value, "tokens", f"{path}:{number}")
        tags = _strings(value, "tags", f"{path}:{number}") if need_tags else tokens
        if len(tags) != len(tokens):
            raise ValueError(
                f"{path}:{number}: {len(tokens)} tokens, but {len(tags)} tags: one tag a token"
            )
        found.words.extend(tokens)
        found.tags.extend(tags)
        found.lines.extend([number] * len(tokens))
        found.end_sentence()


def _strings(value: Any, name: str, where: str) -> list[str]:
    strings = value.get(name) if isinstance(value, dict) else None
    if not isinstance(strings, list) or not all(map(_is_text, strings)):
        raise ValueError(
            f'{where}: expected {{"tokens": [...], "tags": [...]}} with lists of texts, none'
            f" empty; '{name}' is {strings!r:.60}"
        )
    return strings


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != "" and not _SURROGATE.search(value)


def _read_text(path: Path) -> str:
    data = path.read_bytes()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}:{line}: not UTF-8 text: convert the file to UTF-8") from error


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
