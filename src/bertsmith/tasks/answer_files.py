"""The files of `predict`: full rows in, the same rows with a model's answers out.

Also texts alone for `embed`, and the files that the GLUE server takes.
"""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bertsmith.base.files import atomic_file, nearby, write_text
from bertsmith.base.settings import nearest
from bertsmith.tasks.examples import check_texts
from bertsmith.tasks.labels import listed
from bertsmith.tasks.task import Task
from bertsmith.text.readers.files import MAX_LINE, decode_text, raw_lines, read_text
from bertsmith.text.readers.tables import column_names, file_suffix, read_columns, table_format

OUTPUTS = (".csv", ".tsv", ".jsonl")
DIGITS = 4  # of a probability that is written
COLUMN = "text"  # of a table where none is named


def read_rows(source: str, task: Task) -> list[dict[str, Any]]:
    """All rows of a csv, tsv, jsonl or parquet file with all their columns, or the lines of a text.

    Lines may be blank, so that line k of the answer is line k of the input (see `is_lines`).
    Columns of no use here that share a name are left out, with a warning.

    Errors: ValueError, one line with file and line: those of `read_columns`, a text that is missing
    (of a choice the start of the sentence may be) or not a string, and "-" for pairs of texts.
    """
    path = Path(source)
    if source == "-" and task.text_pair is not None:
        raise ValueError("pairs of texts are read from a file with two columns, not from '-'")
    if is_lines(source, task):
        rows = [{task.text: line} for line in text_lines(source, task.text)]
        if not rows:
            raise ValueError(f"{source}: no text in it")
        return rows
    wanted = {task.text: "`text`"}
    if task.text_pair is not None:
        wanted[task.text_pair] = "`text_pair`"
    columns, lines = read_columns(path, wanted, task.header)
    for name in wanted:
        may_miss = bool(task.options) and name == task.text_pair
        values = columns[name]
        if may_miss:
            values = ["" if value is None else value for value in values]
        check_texts(values, name, path, lines, may_be_empty=True)
    if table_format(path) == ".jsonl":
        return [json.loads(line) for line in read_text(path).split("\n") if line.strip()]
    names = tuple(column_names(path))
    if set(wanted).isdisjoint(names) and task.header:
        names = task.header
    counts = Counter(names)
    if shared := ", ".join(repr(name) for name, count in counts.items() if count > 1):
        print(
            f"warning: {path}: the columns that share a name ({shared}) are left out: rename them",
            file=sys.stderr,
        )
    kept = {name: f"column '{name}'" for name, count in counts.items() if count == 1}
    columns, _ = read_columns(path, kept, task.header)
    return [dict(zip(kept, row, strict=True)) for row in zip(*columns.values(), strict=True)]


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


def text_lines(source: str, column: str) -> list[str]:
    """The lines of a text file, or of standard input ("-"), without their ends.

    Errors: ValueError, one line with the line's number, when there is no such file, for input that
    is not UTF-8 or holds a NUL byte, and for standard input that is a table with the `column`.
    """
    if source != "-":
        path = Path(source)
        if not path.is_file():
            raise ValueError(f"{source}: no such file{nearby(Path(source))}")
        return [line for _, line in raw_lines(path, MAX_LINE)]
    # not sys.stdin itself: under LANG=C it lets bytes pass that are not UTF-8
    text = decode_text(sys.stdin.buffer.read(), "standard input")
    lines = [line.rstrip("\r\n") for line in io.StringIO(text)]
    if suffix := _table_suffix(lines[0] if lines else "", column):
        raise ValueError(
            f"standard input:1: a table with the column '{column}', but a text a line is read: "
            f"write it to a file that ends in {suffix}"
        )
    return lines


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


def read_texts(source: str | Path, column: str | None = None) -> tuple[list[str], list[int]]:
    """All texts of a file, and their lines: of a .txt, and "-" for standard input, every line, else
    the cells of a `column` ("text" if None). A blank line is a text, so that vector k is of line k.

    Errors: ValueError, one line with file and line, for no file, no text in it, another suffix, a
    missing column, a text that is none.
    """
    path = Path(source)
    if is_text(source):
        if column is not None:
            raise no_columns(source, column)
        texts = [line.strip() for line in text_lines(str(source), COLUMN)]
        if not any(texts):
            raise ValueError(f"{source}: no text in it")
        return texts, list(range(1, len(texts) + 1))
    column = column or COLUMN
    columns, lines = read_columns(path, {column: "`text`"})
    return check_texts(columns[column], column, path, lines, may_be_empty=True), lines


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


def check_tsv(rows: Sequence[Mapping[Any, Any]], noun: str = "row") -> None:
    """Errors: ValueError for the first row that a .tsv cannot hold; `noun` names it there."""
    for number, row in enumerate(rows, start=1):
        for name, value in row.items():
            if any(mark in f"{name}{value}" for mark in "\t\r\n"):
                raise ValueError(
                    f"{noun} {number}: '{name}' holds a tab or a line break, which a .tsv "
                    "cannot: end `out` in .csv or .jsonl"
                )


def write_rows(
    rows: Sequence[dict[str, Any]],
    answers: Sequence[dict[str, Any]],
    out: Path,
    separator: str = ",",
) -> None:
    """Write the rows, each with its answer after it, to a file that is complete or absent.

    A list in an answer is joined by the separator, but in a .jsonl. Names and errors: as
    `answer_names`. Halves of surrogate pairs, which UTF-8 lacks, are written as their escape.
    """
    names = answer_names(rows, list(answers[0]), out)

    def cell(value: Any) -> Any:
        is_joined = isinstance(value, list) and out.suffix != ".jsonl"
        return separator.join(map(str, value)) if is_joined else value

    full = [
        row | {names[name]: cell(value) for name, value in answer.items()}
        for row, answer in zip(rows, answers, strict=True)
    ]
    with (
        atomic_file(out) as temporary,
        temporary.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file,
    ):
        if out.suffix == ".jsonl":
            for row in full:
                file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
            return
        own = dict.fromkeys(name for row in rows for name in row)  # rows of a jsonl may differ
        header = [*own, *names.values()]
        if out.suffix == ".csv":
            # else a carriage return alone, which ends a line for readers, would not be quoted
            returns = any("\r" in str(value) for row in full for value in row.values())
            style: dict[str, Any] = {"quoting": csv.QUOTE_ALL if returns else csv.QUOTE_MINIMAL}
        else:
            style = {"delimiter": "\t", "quoting": csv.QUOTE_NONE, "quotechar": None}
        table = csv.DictWriter(file, header, lineterminator="\n", **style)
        table.writeheader()
        table.writerows(full)


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
