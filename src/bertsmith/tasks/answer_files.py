"""The files of `predict`: full rows in, the same rows with a model's answers out.

Also texts alone for `embed`, and the files that the GLUE server takes. Inputs are streamed.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bertsmith.base.files import atomic_file, nearby, write_text
from bertsmith.base.settings import nearest
from bertsmith.tasks.examples import check_texts
from bertsmith.tasks.labels import listed
from bertsmith.tasks.task import Task
from bertsmith.text.readers.files import MAX_LINE, STANDARD_INPUT, raw_lines
from bertsmith.text.readers.tables import column_names, file_suffix, stream_rows

OUTPUTS = (".csv", ".tsv", ".jsonl")
DIGITS = 4  # of a probability that is written
COLUMN = "text"  # of a table where none is named


Numbered = Iterator[tuple[int, dict[str, Any]]]
"""Rows of a table, each with its line."""


def read_rows(source: str, task: Task) -> Numbered:
    """Yield (line, row) of a csv, tsv, jsonl or parquet file with all columns, or lines of a text.

    Lines may be blank, so that line k of the answer is line k of the input (see `is_lines`).

    Errors: ValueError, one line with file and line: those of `stream_rows`, a text that is missing
    (of a choice the start of the sentence may be) or not a string, and "-" for pairs of texts.
    """
    path = Path(source)
    if source == "-" and task.text_pair is not None:
        raise ValueError("pairs of texts are read from a file with two columns, not from '-'")
    if is_lines(source, task):
        number = 0
        for number, line in text_lines(source, task.text):
            yield number, {task.text: line}
        if not number:
            raise ValueError(f"{source}: no text in it")
        return
    wanted = {task.text: "`text`"}
    if task.text_pair is not None:
        wanted[task.text_pair] = "`text_pair`"
    for line, row in stream_rows(path, wanted, task.header):
        for name in wanted:
            value = row[name]
            if value is not None or not task.options or name != task.text_pair:
                check_texts([value], name, path, [line], may_be_empty=True)
        yield line, row


def is_lines(source: str, task: Task) -> bool:
    """True for "-" (standard input) and a .txt, a text a line, unless that is read as a .tsv: for
    pairs, options, and where its first line names the column of the texts."""
    path = Path(source)
    has_columns = task.text_pair is not None or bool(task.options)
    return source == "-" or (
        is_text(source)
        and not has_columns
        and not (path.is_file() and task.text in column_names(path))
    )


def no_columns(source: str | Path, column: str) -> ValueError:
    """The error for a column that is named for a text a line."""
    return ValueError(
        f"`text={column!r}`: {source} is a text a line and has no column '{column}': leave"
        " `text` out"
    )


def text_lines(source: str, column: str) -> Iterator[tuple[int, str]]:
    """Yield (number, line without its end) of a text file, or of standard input ("-").

    Errors: ValueError, one line with the line's number, when there is no such file, for input that
    is not UTF-8 or holds a NUL byte, and for standard input that is a table with the `column`.
    """
    path = STANDARD_INPUT if source == "-" else Path(source)
    if source != "-" and not path.is_file():
        raise ValueError(f"{source}: no such file{nearby(path)}")
    for number, line in raw_lines(path, MAX_LINE):
        if number == 1 and source == "-" and (suffix := _table_suffix(line, column)):
            raise ValueError(
                f"standard input:1: a table with the column '{column}', but a text a line is read: "
                f"write it to a file that ends in {suffix}"
            )
        yield number, line


def _table_suffix(first: str, column: str) -> str | None:
    """The suffix of a table that has this first line, if it names the column.

    >>> _table_suffix("id\\ttext", "text"), _table_suffix('{"text": "a"}', "text")
    ('.tsv', '.jsonl')
    """
    if column in first.split("\t"):
        return ".tsv"
    if column in (cell.strip('"') for cell in first.split(",")):
        return ".csv"
    try:
        row = json.loads(first)
    except (ValueError, RecursionError):
        return None
    return ".jsonl" if isinstance(row, dict) and column in row else None


def read_texts(source: str | Path, column: str | None = None) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of a file: of a .txt, and "-" for standard input, every line, else the
    cells of a `column` ("text" if None). A blank line is a text, so that vector k is of line k.

    Errors: ValueError, one line with file and line, for no file, no text in it, another suffix, a
    missing column, a text that is none.
    """
    path, is_empty = Path(source), True
    if not is_text(source):
        column = column or COLUMN
        for line, row in stream_rows(path, {column: "`text`"}):
            check_texts([row[column]], column, path, [line], may_be_empty=True)
            yield line, row[column]
        return
    if column is not None:
        raise no_columns(source, column)
    for number, line in text_lines(str(source), COLUMN):
        text = line.strip()
        is_empty = is_empty and not text
        yield number, text
    if is_empty:
        raise ValueError(f"{source}: no text in it")


def is_text(source: str | Path) -> bool:
    """True for an input with a text a line and no columns: a .txt, and "-" for standard input."""
    return source == "-" or file_suffix(Path(source)) == ".txt"


def answer_columns(label: str, more: Sequence[str]) -> list[str]:
    """The columns of an answer, which is named as the labels it was learned from.

    >>> answer_columns("stars", ["probability"]), answer_columns("option", ["option"])
    (['stars', 'probability'], ['predicted_option', 'option'])
    """
    return [f"predicted_{label}" if label in more else label, *more]


def rounded(value: Any) -> Any:
    """A probability to 4 digits, or a mapping of them; anything else stays.

    >>> rounded(0.123456), rounded({"good": 0.99996}), rounded("good")
    (0.1235, {'good': 1.0}, 'good')
    """
    if isinstance(value, dict):
        return {name: rounded(part) for name, part in value.items()}
    return round(value, DIGITS) if isinstance(value, float) else value


def answer_names(
    rows: Sequence[dict[str, Any]], columns: Sequence[str], out: Path
) -> dict[str, str]:
    """The names of the answer's columns, after a check that the rows can be written to `out`.

    >>> answer_names([{"text": "good", "label": "1"}], ["label", "score"], Path("answers.csv"))
    {'label': 'predicted_label', 'score': 'score'}

    Errors: ValueError for an unknown ending, rows with both names, a row or a name that a .tsv
    cannot hold.
    """
    if out.suffix not in OUTPUTS:
        raise ValueError(f"{out}: cannot write '{out.suffix}': end `out` in {', '.join(OUTPUTS)}")
    taken = {name for row in rows for name in row}
    names = {}
    for name in columns:
        names[name] = f"predicted_{name}" if name in taken else name
        if names[name] in taken:
            raise ValueError(f"the input has columns '{name}' and '{names[name]}': rename one")
    if out.suffix == ".tsv":
        check_tsv(rows)
        check_tsv([{name: ""} for name in names.values()], "column of the answer")
    return names


def check_tsv(
    rows: Iterable[Mapping[Any, Any]], noun: str = "row", numbers: Iterable[int] | None = None
) -> None:
    """Errors: ValueError for the first row that a .tsv cannot hold; `noun` names it there."""
    for number, row in zip(itertools.count(1) if numbers is None else numbers, rows, strict=False):
        for name, value in row.items():
            if any(mark in f"{name}{value}" for mark in "\t\r\n"):
                raise ValueError(
                    f"{noun} {number}: '{name}' holds a tab or a line break, which a .tsv "
                    "cannot: end `out` in .csv or .jsonl"
                )


class AnswerTable:
    """Rows, each with its answer after it, as the lines of a .csv, .tsv or .jsonl.

    The first rows decide the names of the columns. A list in an answer is joined by the separator,
    but in a .jsonl. Halves of surrogate pairs, which UTF-8 lacks, are written as their escape.

    Errors: ValueError as `answer_names`.
    """

    def __init__(
        self,
        first: Sequence[dict[str, Any]],
        columns: Sequence[str],
        out: Path,
        separator: str = ",",
    ) -> None:
        self.columns, self.is_json = columns, out.suffix == ".jsonl"
        self._suffix, self._separator = out.suffix, separator
        self._names = answer_names(first, columns, out)
        self._own = dict.fromkeys(name for row in first for name in row)  # of a jsonl may differ
        self._taken = frozenset(self._names.values())

    def check(self, rows: Sequence[dict[str, Any]], lines: Sequence[int], source: str) -> None:
        """Errors: ValueError with file and line for a later row that does not fit the first."""
        for row, line in zip(rows, lines, strict=True):
            if row.keys() <= self._own.keys():
                continue
            if taken := ", ".join(row.keys() & self._taken):
                raise ValueError(f"{source}:{line}: '{taken}' is a column of the answer: rename it")
            if not self.is_json:
                name = next(name for name in row if name not in self._own)
                raise ValueError(
                    f"{source}:{line}: column '{name}' is not in the first rows, whose columns the"
                    f" {self._suffix} has: end `out` in .jsonl"
                )
        if self._suffix == ".tsv":
            check_tsv(rows, f"{source}: line", lines)

    def header(self) -> bytes:
        """The first line; nothing in a .jsonl."""
        if self.is_json:
            return b""
        return self._table([{name: name for name in (*self._own, *self._names.values())}])

    def lines(self, rows: Sequence[dict[str, Any]], answers: Sequence[dict[str, Any]]) -> bytes:
        """The lines of these rows, in UTF-8; `answers` have the columns, some at the end apart."""
        full = [
            row | {self._names[name]: self._cell(value) for name, value in answer.items()}
            for row, answer in zip(rows, answers, strict=True)
        ]
        if not self.is_json:
            return self._table(full)
        encode = json.JSONEncoder(ensure_ascii=False, default=str).encode
        lines = "".join(f"{encode(row)}\n" for row in full)
        return lines.encode("utf-8", "backslashreplace")

    def _cell(self, value: Any) -> Any:
        is_joined = isinstance(value, list) and not self.is_json
        return self._separator.join(map(str, value)) if is_joined else value

    def _table(self, rows: Sequence[dict[str, Any]]) -> bytes:
        if self._suffix == ".csv":
            # else a carriage return alone, which ends a line for readers, would not be quoted
            returns = any("\r" in str(value) for row in rows for value in row.values())
            style: dict[str, Any] = {"quoting": csv.QUOTE_ALL if returns else csv.QUOTE_MINIMAL}
        else:
            style = {"delimiter": "\t", "quoting": csv.QUOTE_NONE, "quotechar": None}
        text = io.StringIO(newline="")
        header = [*self._own, *self._names.values()]
        csv.DictWriter(text, header, lineterminator="\n", **style).writerows(rows)
        return text.getvalue().encode("utf-8", "backslashreplace")


def write_rows(
    rows: Sequence[dict[str, Any]], answers: Sequence[dict[str, Any]], out: Path
) -> None:
    """Write all of an `AnswerTable` to a file that is complete or absent."""
    table = AnswerTable(rows, list(answers[0]), out)
    content = table.header() + table.lines(rows, answers)
    with atomic_file(out) as temporary:
        temporary.write_bytes(content)


# (task, split) -> the file's name and the number of examples of the official test set
FILES = {
    ("cola", "test"): ("CoLA.tsv", 1_063),
    ("sst2", "test"): ("SST-2.tsv", 1_821),
    ("mrpc", "test"): ("MRPC.tsv", 1_725),
    ("stsb", "test"): ("STS-B.tsv", 1_379),
    ("qqp", "test"): ("QQP.tsv", 390_965),
    ("mnli", "test"): ("MNLI-m.tsv", 9_796),
    ("mnli", "test_mismatched"): ("MNLI-mm.tsv", 9_847),
    ("mnli", "diagnostic"): ("AX.tsv", 1_104),  # GLUE's own probe, answered by an MNLI model
    ("qnli", "test"): ("QNLI.tsv", 5_463),
    ("rte", "test"): ("RTE.tsv", 3_000),
    ("wnli", "test"): ("WNLI.tsv", 146),
}


def check_size(task: Task, split: str, count: int) -> None:
    """Errors: ValueError, before it is answered, for a file of another size than the official."""
    name, wanted = FILES[task.name, split]
    if count != wanted:
        raise ValueError(
            f"{name}: the server wants {wanted:,} answers, but the input has {count:,} examples:"
            " predict the official test file"
        )


def write_submission(
    task: Task, split: str, answers: Mapping[int, str | float], folder: Path
) -> Path:
    """Write the answers of a test set as "index<tab>prediction" under the name the server expects.

    `answers`: the index of a test example in the official file, from 0 -> the label's name, or for
    STS-B the score, which is clipped to [0, 5] and rounded to 3 decimals. All is checked first.

    Errors: ValueError for a task or split without a submission, an index that is missing or too
    much, a label that the server does not know, a score that is not finite.
    """
    if (task.name, split) not in FILES:
        known = [f"{name}/{part}" for name, part in FILES]
        hint = nearest(f"{task.name}/{split}", known)
        raise ValueError(f"no submission for {task.name}/{split}: {hint}")
    name, count = FILES[task.name, split]
    if missing := sorted(set(range(count)) - answers.keys()):
        raise ValueError(
            f"{name}: the server wants {count:,} answers, {len(missing):,} are missing, the first"
            f" for index {missing[0]}: predict the official test file"
        )
    if extra := answers.keys() - set(range(count)):
        raise ValueError(
            f"{name}: the server wants {count:,} answers, not {len(answers):,}: index {min(extra)}"
            " is not in the official test file"
        )
    rows = [f"{index}\t{_prediction(task, answers[index], name, index)}" for index in range(count)]
    write_text(folder / name, "\n".join(["index\tprediction", *rows]) + "\n")
    return folder / name


def _prediction(task: Task, answer: Any, name: str, index: int) -> str:
    if task.task_type == "regress":
        assert task.bounds is not None
        if not math.isfinite(answer):
            raise ValueError(f"{name}: index {index}: {answer} is not a finite score")
        low, high = task.bounds
        return f"{min(max(answer, low), high):.3f}"
    assert task.labels is not None
    if answer not in task.labels:
        known = listed(task.labels)
        raise ValueError(f"{name}: index {index}: label '{answer}' is not one of {known}")
    return answer
