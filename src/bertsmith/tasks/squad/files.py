"""Question answering files: SQuAD 1.1 and 2.0 (arXiv 1606.05250, 1806.03822), columns, TriviaQA.

    {"data": [{"paragraphs": [{"context": ..., "qas": [
        {"id": ..., "question": ..., "answers": [{"text": ..., "answer_start": ...}, ...]}]}]}]}

SQuAD 2.0 adds `is_impossible` to a question, whose `answers` are empty then. The first answer is
the one to learn; all of them are correct.

TriviaQA (arXiv 1705.03551) has questions in one file, documents in others. Nobody marked where an
answer stands: the first alias in each document is taken for it (distant supervision). As in the
paper (section 4.2) only the beginning of a document is read; one without an alias is left out.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path, PurePosixPath
from typing import Any

from bertsmith.base.files import nearby, parse_json
from bertsmith.tasks.examples import check_texts, read_task
from bertsmith.tasks.squad.questions import Question, Questions, locate_answer, phrase_pattern
from bertsmith.tasks.task import Task
from bertsmith.text.readers.files import read_text, unpacked_name
from bertsmith.text.tokenizer.wordpiece import SURROGATE


def read_questions(path: Path, need_answers: bool = True) -> Questions:
    """Read a file in SQuAD's or TriviaQA's format, packed or not, with or without its answers.

    Errors: ValueError, one line with the file and the place in it, for what is no such file, a
    field that is missing or of the wrong type, an empty question, context or answer, a question
    that is impossible yet answered, and what `Questions.of` refuses.
    """
    value = _read_json(path)
    if isinstance(value, dict) and "Data" in value:
        return read_trivia(value, path, need_answers)
    found: list[Question] = []
    contexts: list[str] = []
    for a, article in enumerate(_field(value, "data", list, str(path))):
        for p, paragraph in enumerate(_field(article, "paragraphs", list, f"{path}: data[{a}]")):
            where = f"{path}: data[{a}].paragraphs[{p}]"
            context = _text(paragraph, "context", where)
            asked = _field(paragraph, "qas", list, where)
            for q, question in enumerate(asked):
                place = f"{where}.qas[{q}]"
                found.append(_question(question, context, len(contexts), need_answers, place))
            if asked:  # else the context is passed over
                contexts.append(context)
    return Questions.of(found, contexts, str(path))


def is_json(path: Path) -> bool:
    """True for a .json, packed or not.

    >>> is_json(Path("TRAIN.JSON.gz")), is_json(Path("train.json.csv"))
    (True, False)
    """
    return unpacked_name(path).endswith(".json")


def has_answers(path: Path) -> bool:
    """True if a file gives the answer to any question; test sets often do not.

    Errors: ValueError for what is no JSON.
    """
    value = _read_json(path)
    levels = [value.get("data", value.get("Data"))] if isinstance(value, dict) else []
    while parts := [part for level in levels if isinstance(level, list) for part in level]:
        parts = [part for part in parts if isinstance(part, dict)]
        names = ("answers", "Answer", "is_impossible")
        if any(part.get(name) for part in parts for name in names):
            return True
        levels = [part.get("paragraphs") or part.get("qas") for part in parts]
    return False


def _question(value: Any, context: str, index: int, need_answers: bool, where: str) -> Question:
    identity, text = _text(value, "id", where), _text(value, "question", where)
    if not need_answers:
        return Question(identity, text, index, None, None)
    is_impossible = value.get("is_impossible", False)
    answers = value.get("answers") if is_impossible else _field(value, "answers", list, where)
    if not answers:
        return Question(identity, text, index, [], None)
    if is_impossible:
        raise ValueError(f"{where}: is_impossible, yet it has answers: remove one of the two")
    texts = [_text(answer, "text", f"{where}.answers[{k}]") for k, answer in enumerate(answers)]
    start = _field(answers[0], "answer_start", int, f"{where}.answers[0]")
    span, repair = locate_answer(context, texts[0], start)
    place = f"'{identity}' at {where.rpartition(': ')[2]}"
    return Question(identity, text, index, texts, span, repair, place)


def _text(value: Any, name: str, where: str) -> str:
    text = _field(value, name, str, where)
    if not text.strip():
        raise ValueError(f"{where}: '{name}' is empty: remove it or fill it in")
    if SURROGATE.search(text):
        raise ValueError(f"{where}: '{name}' holds half a character (\\ud800 to \\udfff)")
    return text


_TYPES = {list: "a list", str: "a text", int: "a whole number"}


def _field(value: Any, name: str, expected: type, where: str) -> Any:
    if not isinstance(value, dict) or name not in value:
        raise ValueError(f"{where}: no '{name}' here, as SQuAD's format has it")
    if not isinstance(value[name], expected):
        raise ValueError(f"{where}: '{name}' is {value[name]!r:.60}, not {_TYPES[expected]}")
    return value[name]


def _read_json(path: Path) -> Any:
    if not path.is_file():
        raise ValueError(f"{path}: no such file{nearby(path)}")
    return parse_json(read_text(path), path)


def read_question_rows(path: Path, task: Task, need_answers: bool = True) -> Questions:
    """A question a row, with its context (the row's text_pair) and its answers (the label).

    A cell of answers holds a text; or, in jsonl, parquet and arrow, a list of texts, or what
    Hugging Face's copies of SQuAD have, {"text": [...], "answer_start": [...]}. An empty one says
    that there is no answer. The id of a question is the line it starts on.

    Errors: ValueError, one line with file and line, for all that `read_columns` refuses, an empty
    question or context, answers of another form, and what `Questions.of` refuses.
    """
    if task.text_pair is None:
        raise ValueError(f"{path}: name the column of the contexts with `text_pair`")
    columns, lines = read_task(path, task, need_answers)
    texts = check_texts(columns[task.text], task.text, path, lines)
    contexts = check_texts(columns[task.text_pair], task.text_pair, path, lines)
    indices: dict[str, int] = {}  # a context once, however many questions are about it
    found = []
    for k, (line, context) in enumerate(zip(lines, contexts, strict=True)):
        index = indices.setdefault(context, len(indices))
        answers, span, repair = None, None, ""
        if need_answers:
            answers, start = _answers(columns[task.label][k], task.label, f"{path}:{line}")
            if answers:
                span, repair = locate_answer(context, answers[0], start)
        found.append(Question(str(line), texts[k], index, answers, span, repair, f"line {line}"))
    return Questions.of(found, list(indices), str(path))


def _answers(cell: Any, column: str, where: str) -> tuple[list[str], int | None]:
    """The correct answers, and the `answer_start` of the first, if there is one.

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


MAX_WORDS = 400  # of a document
SOURCES = {"EntityPages": "wikipedia", "SearchResults": "web"}  # field -> folder of its documents


def read_trivia(value: dict[str, Any], path: Path, need_answers: bool = True) -> Questions:
    """The question-document pairs of a file of `qa/`, its documents being in `../evidence`.

    The same question about two documents is two questions, `id--file name`, as in TriviaQA's own
    conversion. Without answers all documents are kept.

    Errors: ValueError when a field or a document's file is missing, a field is of the wrong type, a
    document's name leads out of the folder, or no document has an answer.
    """
    evidence = path.absolute().parent.parent / "evidence"
    if not evidence.is_dir():
        raise ValueError(f"{path}: no folder {evidence} with the documents of TriviaQA")
    found: list[Question] = []
    contexts: list[str] = []
    for number, item in enumerate(_field(value, "Data", list, str(path))):
        where = f"{path}: Data[{number}]"
        try:
            identity, text = item["QuestionId"], item["Question"]
            aliases: list[str] = []
            if need_answers:
                answer = item["Answer"]
                aliases = [answer["Value"], *answer["Aliases"], *answer.get("HumanAnswers", [])]
            documents = [
                f"{folder}/{page['Filename']}"
                for source, folder in SOURCES.items()
                for page in item.get(source, [])
            ]
        except (KeyError, TypeError) as error:
            raise ValueError(f"{where}: not as TriviaQA has it: {error} is missing") from error
        if not all(isinstance(one, str) for one in (identity, text, *aliases)):
            raise ValueError(f"{where}: not as TriviaQA has it: id, question, answers are texts")
        pattern = phrase_pattern(aliases, re.IGNORECASE)
        for name in dict.fromkeys(documents):
            context = _beginning(evidence, name, where)
            answers, span = None, None
            if need_answers:
                match = pattern.search(context)
                if match is None:
                    continue
                answers, span = list(dict.fromkeys([match.group(), *aliases])), match.span()
            pair = f"{identity}--{name.partition('/')[2]}"
            found.append(Question(pair, text, len(contexts), answers, span))
            contexts.append(context)
    if value["Data"] and not found:
        raise ValueError(
            f"{path}: no document has an answer to its question in its first {MAX_WORDS} words"
        )
    return Questions.of(found, contexts, str(path))


def _beginning(evidence: Path, name: str, where: str) -> str:
    parts = PurePosixPath(name).parts
    if ".." in parts or PurePosixPath(name).is_absolute():
        raise ValueError(f"{where}: the document '{name}' is outside of {evidence}")
    file = evidence / name
    try:
        text = file.read_text(encoding="utf-8", errors="replace")  # TriviaQA's web pages need it
    except FileNotFoundError as error:
        raise ValueError(f"{where}: no document {file}") from error
    words = itertools.islice(re.finditer(r"\S+", text), MAX_WORDS)
    end = max((word.end() for word in words), default=0)
    return text[:end]
