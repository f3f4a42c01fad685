"""Questions out of the columns of a csv, tsv, jsonl, parquet or arrow file: one's own data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bertsmith.tasks.reading import asker, check_texts
from bertsmith.tasks.rows import read_columns
from bertsmith.tasks.squad_questions import Question, Questions, locate_answer
from bertsmith.tasks.table import Task


def read_question_rows(path: Path, task: Task, need_answers: bool = True) -> Questions:
    """A question a row, with its context (the row's text_pair) and its answers (the label).

    A cell of answers holds a text; or, in jsonl, parquet and arrow, a list of texts, or what
    Hugging Face's copies of SQuAD have, {"text": [...], "answer_start": [...]}. An empty one says
    that there is no answer. Without an answer_start the first occurrence in the context that is of
    whole words is learned, or the first of any. The id of a question is the line it starts on.

    Errors: ValueError, one line with file and line, for all that `rows.read_columns` refuses, an
    empty question or context, answers of another form, and what `Questions.of` refuses.
    """
    if task.text_pair is None:
        raise ValueError(f"{path}: name the column of the contexts with --text-pair")
    wanted = {task.text: asker(task, "--text"), task.text_pair: asker(task, "--text-pair")}
    if need_answers:
        wanted[task.label] = asker(task, "--label")
    columns, lines = read_columns(path, wanted, task.header)
    texts = check_texts(columns[task.text], task.text, path, lines)
    stated = check_texts(columns[task.text_pair], task.text_pair, path, lines)
    numbers: dict[str, int] = {}  # a context once, however many questions are about it
    found = []
    for k, line in enumerate(lines):
        number = numbers.setdefault(stated[k], len(numbers))
        answers, span, repair = None, None, ""
        if need_answers:
            answers, start = _answers(columns[task.label][k], task.label, f"{path}:{line}")
            if answers:
                span, repair = locate_answer(stated[k], answers[0], start)
        place = f"line {line}"
        found.append(Question(str(line), texts[k], number, answers, span, repair, place))
    return Questions.of(found, list(numbers), range(len(numbers)), str(path))


def _answers(cell: Any, column: str, where: str) -> tuple[list[str], int | None]:
    """The right answers, and where the first stands, if that is told.

    >>> _answers("Bob", "answers", "x:1"), _answers(None, "answers", "x:1")
    ((['Bob'], None), ([], None))
    >>> _answers({"text": ["Bob", "B."], "answer_start": [4, 4]}, "answers", "x:1")
    (['Bob', 'B.'], 4)
    """
    texts, starts = cell, []
    if isinstance(cell, dict):
        texts, starts = cell.get("text"), cell.get("answer_start", [])
    if texts is None or (isinstance(texts, str) and not texts.strip()):
        return [], None
    texts = [texts] if isinstance(texts, str) else texts
    are_texts = isinstance(texts, list) and all(isinstance(t, str) and t.strip() for t in texts)
    are_starts = isinstance(starts, list) and all(type(start) is int for start in starts)
    if not (are_texts and are_starts):
        raise ValueError(
            f"{where}: column '{column}' holds {cell!r:.60}: give a text, a list of texts, or"
            " {'text': [...], 'answer_start': [...]}"
        )
    return texts, starts[0] if texts and starts else None
