"""The files that `predict` and `embed` read, full rows or texts alone, and those for GLUE's server.

Inputs are streamed. answer_tables.py writes rows with their answers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bertsmith.base.files import nearby, write_text
from bertsmith.base.settings import nearest
from bertsmith.tasks.examples import check_texts
from bertsmith.tasks.labels import listed
from bertsmith.tasks.task import Task
from bertsmith.text.readers.files import MAX_LINE, STANDARD_INPUT, raw_lines
from bertsmith.text.readers.tables import column_names, file_suffix, stream_rows

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


def no_column(source: str | Path, name: str, column: str) -> ValueError:
    """The error for a column that the setting `name` gives for a file without columns."""
    return ValueError(
        f"`{name}={column!r}`: {source} is no table and has no column '{column}': leave"
        f" `{name}` out"
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
    if not is_text(source):
        texts = _cells(Path(source), column or COLUMN)
    elif column is not None:
        raise no_column(source, "text", column)
    else:
        texts = ((line, text.strip()) for line, text in text_lines(str(source), COLUMN))
    is_empty = True
    for line, text in texts:
        is_empty = is_empty and not text.strip()
        yield line, text
    if is_empty:
        raise ValueError(f"{source}: no text in it")


def _cells(path: Path, column: str) -> Iterator[tuple[int, str]]:
    for line, row in stream_rows(path, {column: "`text`"}):
        check_texts([row[column]], column, path, [line], may_be_empty=True)
        yield line, row[column]


def is_text(source: str | Path) -> bool:
    """True for an input with a text a line and no columns: a .txt, and "-" for standard input."""
    return source == "-" or file_suffix(Path(source)) == ".txt"


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
