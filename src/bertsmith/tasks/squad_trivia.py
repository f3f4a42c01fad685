"""TriviaQA's own format (arXiv 1705.03551): questions in one file, documents in others.

Nobody marked where an answer stands: in each document that has one of a question's aliases, the
first is taken for it (distant supervision). As in the paper (section 4.2) only the beginning of a
document is read, and one without an alias there is left out.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Any

from bertsmith.tasks.squad_questions import Question, Questions, any_of

MAX_WORDS = 400  # of a document
SOURCES = {"EntityPages": "wikipedia", "SearchResults": "web"}  # field -> folder of its documents

_BEGINNING = re.compile(r"\s*\S+")


def read_trivia(value: dict[str, Any], path: Path, need_answers: bool = True) -> Questions:
    """The question-document pairs of a file of `qa/`, its documents being in `../evidence`.

    The same question about two documents is two questions, `id--file name`, as in TriviaQA's own
    conversion. `need_answers=False` leaves the answers alone: all documents are kept, also those of
    files without answers.

    Errors: ValueError when a field or a document's file is missing, a document's name leads out of
    the folder, or no document has an answer.
    """
    evidence = path.absolute().parent.parent / "evidence"
    if not evidence.is_dir():
        raise ValueError(f"{path}: no folder {evidence} with the documents of TriviaQA")
    found: list[Question] = []
    contexts: list[str] = []
    articles: list[int] = []
    for number, item in enumerate(value["Data"]):
        where = f"{path}: Data[{number}]"
        try:
            identity, text = item["QuestionId"], item["Question"]
            aliases = _aliases(item["Answer"]) if need_answers else []
            documents = [
                f"{folder}/{page['Filename']}"
                for source, folder in SOURCES.items()
                for page in item.get(source, [])
            ]
        except (KeyError, TypeError) as error:
            raise ValueError(f"{where}: not as TriviaQA has it: {error} is missing") from error
        pattern = any_of(aliases, re.IGNORECASE)
        for name in dict.fromkeys(documents):
            context = _beginning(evidence, name, where)
            pair, place = f"{identity}--{name.partition('/')[2]}", len(contexts)
            if not need_answers:
                found.append(Question(pair, text, place, None, None))
            elif match := pattern.search(context):
                right = list(dict.fromkeys([match.group(), *aliases]))
                found.append(Question(pair, text, place, right, match.span()))
            else:
                continue
            contexts.append(context)
            articles.append(number)
    if value["Data"] and not found:
        raise ValueError(
            f"{path}: no document has an answer to its question in its first {MAX_WORDS} words"
        )
    return Questions.of(found, contexts, articles, str(path))


def _aliases(answer: dict[str, Any]) -> list[str]:
    return [answer["Value"], *answer["Aliases"], *answer.get("HumanAnswers", [])]


def _beginning(evidence: Path, name: str, where: str) -> str:
    parts = PurePosixPath(name).parts
    if ".." in parts or PurePosixPath(name).is_absolute():
        raise ValueError(f"{where}: the document '{name}' is outside of {evidence}")
    file = evidence / name
    try:
        text = file.read_text(encoding="utf-8", errors="replace")  # TriviaQA's web pages need it
    except FileNotFoundError as error:
        raise ValueError(f"{where}: no document {file}") from error
    end = 0
    for _ in range(MAX_WORDS):
        match = _BEGINNING.match(text, end)
        if match is None:
            break
        end = match.end()
    return text[:end]
