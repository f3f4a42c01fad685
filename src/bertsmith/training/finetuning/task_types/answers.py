"""Extractive question answering: SQuAD (paper sections 4.2 and 4.3)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bertsmith.tasks.answer_files import read_rows
from bertsmith.tasks.answer_tables import answer_columns, answer_names, rounded, write_rows
from bertsmith.tasks.metrics import count_entropy
from bertsmith.tasks.squad.answers import (
    Answer,
    Candidate,
    answer_questions,
    search_threshold,
    squad1_scores,
    squad2_scores,
    write_answers,
)
from bertsmith.tasks.squad.files import has_answers, is_json, read_question_rows, read_questions
from bertsmith.tasks.squad.questions import Questions, split_questions, summarize_questions
from bertsmith.tasks.squad.windows import Windows, featurize_questions
from bertsmith.tasks.task import Task
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.training.finetuning.task_types.base import ModelTask, Records, TaskType

BESIDE = ("answer_start", "probability")  # columns of an answer besides itself
SHOWN_CONTEXT = 400  # characters of a context in a record
MEASURES = {  # ours: the scoring scripts' name
    "answer_f1": "f1",
    "exact_match": "exact",
    "has_answer_f1": "HasAns_f1",
    "has_answer_exact_match": "HasAns_exact",
    "no_answer_exact_match": "NoAns_exact",  # as large as its F1
}
NEVER_NULL = (
    "the model was not made for questions without an answer; if transformers trained it for them, "
    'write "bertsmith": {"task": "squad2"} into its config.json'
)


class Answers(NamedTuple):
    """Answers to Q questions."""

    found: list[Answer]  # with their candidates
    chosen: list[Candidate]  # one a question; without a text: there is no answer


class AnswerQuestions(TaskType):
    """The answer to a question, cut out of a context, or that there is none.

    The outputs are the logits of start and end of every token of every window.
    """

    name = "answer"
    head = "SpanPredictor"
    default_length = 384
    always_tuned = True

    def is_labelled(self, path: Path, task: Task) -> bool:
        return has_answers(path) if is_json(path) else super().is_labelled(path, task)

    def is_table(self, path: Path, task: Task) -> bool:
        return not is_json(path)

    def read(self, path: Path, task: Task, label_names: Sequence[str] | None = None) -> Questions:
        """Read SQuAD's or TriviaQA's JSON, else columns; warn of problems in a training file."""
        questions = read_questions(path) if is_json(path) else read_question_rows(path, task)
        if label_names is None:
            questions.check_learnable()
            if problems := questions.problems():
                print(f"warning: {path}: {'; '.join(problems)}", file=sys.stderr)
        return questions

    def read_input(self, source: str, model_task: ModelTask) -> Questions:
        """Read SQuAD's JSON, leaving answers out, or rows with the columns of training."""
        path, task = Path(source), model_task.task
        if source == "-":
            raise ValueError("questions with their contexts are read from a file, not from '-'")
        if is_json(path):
            return read_questions(path, need_answers=False)
        rows = [row for _, row in read_rows(source, task)]
        return replace(read_question_rows(path, task, need_answers=False), rows=rows)

    def split_dev(self, data: Questions, share: float, seed: int) -> tuple[Questions, Questions]:
        return split_questions(data, share, seed)

    def summarize(self, train: Questions, dev: Questions) -> str:
        return summarize_questions(train, dev)

    def num_outputs(self, label_names: Sequence[str]) -> int:
        return 2

    def featurize(self, tokenizer: Tokenizer, data: Questions, model_task: ModelTask) -> Windows:
        return featurize_questions(tokenizer, data, model_task.encoding)

    def num_labelled(self, labels: np.ndarray) -> int:
        return len(labels)

    def baseline_loss(self, features: Windows) -> float:
        """Loss of a model that knows how many windows hold their answer, and nothing of where."""
        assert features.labels is not None
        is_inside = features.labels[features.learnable, 1] > 0
        num_tokens = (features.lengths - features.context_begins - 1)[features.learnable]
        place = np.where(is_inside, np.log(np.maximum(num_tokens, 1)), 0)
        return count_entropy(np.bincount(is_inside)) + float(place.mean())

    def first_thresholds(self, train: Questions) -> dict[str, Any]:
        """Null odds of 0 where the model learns of questions without an answer."""
        return {} if train.has_answer.all() else {"null_threshold": 0.0}

    def tune(
        self, outputs: np.ndarray, features: Windows, data: Questions, model_task: ModelTask
    ) -> dict[str, Any]:
        """The null odds above which there is no answer, by the main metric; the first thresholds
        where all have one."""
        if data.has_answer.all():
            return model_task.thresholds
        # only the candidate null and the best with a text matter
        found = _find(outputs, features, data, model_task, with_null=True, n_best=2)
        score = MEASURES[model_task.task.main_metric]
        return {"null_threshold": search_threshold(data, found, score)}

    def answers(
        self, outputs: np.ndarray, features: Windows, data: Questions, model_task: ModelTask
    ) -> Answers:
        found = _find(outputs, features, data, model_task, with_null=answers_null(model_task))
        threshold = model_task.thresholds.get("null_threshold", 0.0)
        return Answers(found, [answer.chosen(threshold) for answer in found])

    def measure(self, answers: Answers, data: Questions, model_task: ModelTask) -> dict[str, float]:
        """Score by the rules of SQuAD 1.1 in `squad1`, else by those of 2.0."""
        all_have_one = bool(data.has_answer.all())
        by_first_rules = model_task.task.name == "squad1" and all_have_one
        score = squad1_scores if by_first_rules else squad2_scores
        texts = [candidate.text for candidate in answers.chosen]
        scores = score(data, dict(zip(data.ids, texts, strict=True)))
        names = model_task.task.metrics if all_have_one else (*model_task.task.metrics, *MEASURES)
        return {name: scores[MEASURES[name]] / 100 for name in names if MEASURES[name] in scores}

    def notes(self, answers: Answers, data: Questions, model_task: ModelTask) -> dict[str, str]:
        if data.has_answer.all() or answers_null(model_task):
            return {}
        return {"no_answer_exact_match": f"no value, counts 0: {NEVER_NULL}"}

    def constant_prediction(self, answers: Answers, data: Questions) -> str | None:
        says_nothing = not any(candidate.text for candidate in answers.chosen)
        return "no answer" if says_nothing and 2 * data.has_answer.sum() > len(data) else None

    def to_records(self, answers: Answers, data: Questions, model_task: ModelTask) -> Records:
        records = []
        for q, chosen in enumerate(answers.chosen):
            context, (begin, end) = data.contexts[data.context_numbers[q]], data.spans[q]
            if begin < 0:  # nothing is known to be right: show what was answered
                begin, end = chosen.begin, chosen.end
            record = {
                "id": data.ids[q],
                "question": data.texts[q],
                "context": excerpt(context, int(begin), int(end)),
                "predicted": chosen.text,
                "probability": round(chosen.probability, 5),
            }
            if data.answers is not None:
                record["answers"] = data.answers[q]
            records.append(record)
        return records

    def check_output(self, data: Questions, out: Path, model_task: ModelTask) -> None:
        if data.rows is not None and out.suffix != ".json":
            answer_names(data.rows, answer_columns(model_task.task.label, BESIDE), out)
        elif out.suffix != ".json":
            raise ValueError(f"{out}: answers to a JSON file are JSON too: end `out` in .json")

    def write_answers(
        self, out: Path, answers: Answers, data: Questions, model_task: ModelTask
    ) -> None:
        """Write a .json with texts by id, n-best lists and null odds; else the rows again."""
        if data.rows is None or out.suffix == ".json":
            write_answers(out, answers.found, answers.chosen)
            return
        columns = answer_columns(model_task.task.label, BESIDE)
        values = [
            (c.text, c.begin if c.text else None, rounded(c.probability)) for c in answers.chosen
        ]
        found = [dict(zip(columns, row, strict=True)) for row in values]
        write_rows(data.rows, found, out, data.source)


def answers_null(model_task: ModelTask) -> bool:
    """True if "there is no answer" may be the answer: it was tuned, or is in the task."""
    return model_task.task.name == "squad2" or "null_threshold" in model_task.thresholds


def excerpt(context: str, begin: int, end: int, size: int = SHOWN_CONTEXT) -> str:
    """At most `size` characters of a context, with begin:end in the middle.

    >>> excerpt("one two three four", 8, 13, 9), excerpt("one two", 0, 3, 5)
    ('o three f', 'one t')
    """
    first = max(0, min((begin + end - size) // 2, len(context) - size))
    return context[first : first + size]


def _find(
    outputs: np.ndarray,
    windows: Windows,
    data: Questions,
    model_task: ModelTask,
    with_null: bool,
    n_best: int = 20,
) -> list[Answer]:
    return answer_questions(
        data,
        windows,
        outputs[:, 0],
        outputs[:, 1],
        with_null=with_null,
        n_best=n_best,
        max_answer_tokens=model_task.encoding.max_answer_length,
    )
