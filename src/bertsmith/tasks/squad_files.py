"""Question answering files: SQuAD 1.1 and 2.0 (arXiv 1606.05250, 1806.03822), and TriviaQA.

    {"data": [{"paragraphs": [{"context": ..., "qas": [
        {"id": ..., "question": ..., "answers": [{"text": ..., "answer_start": ...}, ...]}]}]}]}

Version 2.0 adds `is_impossible` to a question, whose `answers` are empty then. The first answer is
the one to learn; all of them count as right.
"""

from __future__ import annotations

import gzip
import json
import lzma
import re
import zlib
from pathlib import Path
from typing import Any

from bertsmith.tasks.squad_questions import Question, Questions, locate_answer
from bertsmith.tasks.squad_trivia import read_trivia

OPENERS = {".xz": lzma.open, ".gz": gzip.open}
_SURROGATE = re.compile("[\ud800-\udfff]")  # could not be written into the predictions


def read_questions(path: Path, need_answers: bool = True) -> Questions:
    """Read a file in SQuAD's or TriviaQA's format; .xz and .gz are unpacked.

    `need_answers=False` leaves the answers alone, also where the file has some. A context without
    questions is passed over.

    Errors: ValueError, one line with the file and the place in it, for what is no such file, a
    field that is missing or of the wrong kind, an empty question, context or answer, a question
    that is impossible yet answered, and what `Questions.of` refuses.
    """
    value = _read_json(path)
    if isinstance(value, dict) and "Data" in value:
        return read_trivia(value, path, need_answers)
    found: list[Question] = []
    contexts: list[str] = []
    articles: list[int] = []
    for a, article in enumerate(_field(value, "data", list, str(path))):
        for p, paragraph in enumerate(_field(article, "paragraphs", list, f"{path}: data[{a}]")):
            where = f"{path}: data[{a}].paragraphs[{p}]"
            context = _text(paragraph, "context", where)
            asked = _field(paragraph, "qas", list, where)
            for q, question in enumerate(asked):
                place = f"{where}.qas[{q}]"
                found.append(_question(question, context, len(contexts), need_answers, place))
            if asked:
                contexts.append(context)
                articles.append(a)
    return Questions.of(found, contexts, articles, str(path))


def is_json(path: Path) -> bool:
    """Whether a file is of SQuAD's kind by its name, which may say that it is packed.

    >>> is_json(Path("TRAIN.JSON.gz")), is_json(Path("train.json.csv"))
    (True, False)
    """
    name = path.name.lower()
    return name.endswith((".json", *(f".json{packed}" for packed in OPENERS)))


def has_answers(path: Path) -> bool:
    """Whether a file says of any question what the answer is; test sets often do not.

    Errors: ValueError for what is no JSON.
    """
    value = _read_json(path)
    parts = value.get("data", value.get("Data")) if isinstance(value, dict) else None
    parts = parts if isinstance(parts, list) else []
    while parts := [part for part in parts if isinstance(part, dict)]:
        told = ("answers", "Answer", "is_impossible")
        if any(part.get(name) for part in parts for name in told):
            return True
        inner = (part.get("paragraphs") or part.get("qas") for part in parts)
        parts = [item for items in inner if isinstance(items, list) for item in items]
    return False


def _question(value: Any, context: str, number: int, need_answers: bool, where: str) -> Question:
    identity = _text(value, "id", where)
    text = _text(value, "question", where)
    if not need_answers:
        return Question(identity, text, number, None, None)
    impossible = value.get("is_impossible", False)
    if impossible and not value.get("answers"):
        return Question(identity, text, number, [], None)
    answers = _field(value, "answers", list, where)
    if impossible:
        raise ValueError(f"{where}: is_impossible, yet it has answers: remove one of the two")
    if not answers:
        return Question(identity, text, number, [], None)
    texts = [_text(answer, "text", f"{where}.answers[{k}]") for k, answer in enumerate(answers)]
    start = _field(answers[0], "answer_start", int, f"{where}.answers[0]")
    span, repair = locate_answer(context, texts[0], start)
    place = f"'{identity}' at {where.rpartition(': ')[2]}"
    return Question(identity, text, number, texts, span, repair, place)


def _text(value: Any, name: str, where: str) -> str:
    text = _field(value, name, str, where)
    if not text.strip():
        raise ValueError(f"{where}: '{name}' is empty: remove it or fill it in")
    if _SURROGATE.search(text):
        raise ValueError(f"{where}: '{name}' holds half a character (\\ud800 to \\udfff)")
    return text


_KINDS = {list: "a list", str: "a text", int: "a whole number"}


def _field(value: Any, name: str, kind: type, where: str) -> Any:
    if not isinstance(value, dict) or name not in value:
        raise ValueError(f"{where}: no '{name}' here, as SQuAD's format has it")
    if not isinstance(value[name], kind):
        raise ValueError(f"{where}: '{name}' is {value[name]!r:.60}, not {_KINDS[kind]}")
    return value[name]


def _read_json(path: Path) -> Any:
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    try:
        with OPENERS.get(path.suffix.lower(), open)(path, "rb") as file:
            return json.loads(file.read().decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: not valid JSON ({error.msg})") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text at byte {error.start}") from error
    except (lzma.LZMAError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise ValueError(f"{path}: damaged or not compressed ({error})") from error
    except RecursionError as error:
        raise ValueError(f"{path}: nested too deeply to be SQuAD's format") from error
