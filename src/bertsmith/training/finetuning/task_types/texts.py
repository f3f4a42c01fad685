"""One label an example: a class, a number or a set of labels for a text, or one of n options."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bertsmith.tasks.answer_files import is_lines, read_rows
from bertsmith.tasks.answer_tables import (
    AnswerTable,
    answer_columns,
    answer_names,
    check_cells,
    format_of,
    rounded,
    write_rows,
)
from bertsmith.tasks.choice import ChoiceExamples, ChoiceFeatures, featurize_choice, read_choices
from bertsmith.tasks.examples import Examples, read_examples
from bertsmith.tasks.features import Features, featurize
from bertsmith.tasks.metrics import (
    best_thresholds,
    check_two_classes,
    compute_metrics,
    count_entropy,
    label_threshold,
    metric_notes,
    sigmoid,
    softmax,
)
from bertsmith.tasks.task import Task
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.training.finetuning.task_types.base import ModelTask, Records, TaskType


class Labelled(NamedTuple):
    """Answers of N examples."""

    predicted: np.ndarray  # int64 [N] classes, float32 [N] scores or bool [N, K]
    probabilities: np.ndarray | None  # float32 [N, K]; None of scores


class LabelType(TaskType):
    """A label an example; `data` is `Examples` or `ChoiceExamples`, `answers` is `Labelled`."""

    more_columns: tuple[str, ...] = ("probability",)
    """Columns of an answer after itself."""

    def columns(self, out: Path, model_task: ModelTask) -> list[str]:
        """The columns that an answer adds to a row of a table, the answer itself first."""
        more = ["probabilities"] if format_of(out).is_nested else []
        return answer_columns(model_task.task.label, [*self.more_columns, *more])

    def to_json(self, answer: Any, model_task: ModelTask) -> Any:
        """An answer or label as people write it."""
        raise NotImplementedError

    def measure(self, answers: Labelled, data: Any, model_task: ModelTask) -> dict[str, float]:
        metrics, count = model_task.task.metrics, data.num_classes
        return compute_metrics(metrics, answers.predicted, data.labels, count)

    def notes(self, answers: Labelled, data: Any, model_task: ModelTask) -> dict[str, str]:
        metrics, names = model_task.task.metrics, model_task.label_names
        return metric_notes(metrics, answers.predicted, data.labels, names)

    def to_records(self, answers: Labelled, data: Any, model_task: ModelTask) -> Records:
        records = []
        for k in range(len(data)):
            record = data.record(k)
            if data.labels is not None:
                record["label"] = self.to_json(data.labels[k], model_task)
            record["predicted"] = self.to_json(answers.predicted[k], model_task)
            if answers.probabilities is not None:
                record["probabilities"] = [round(float(p), 5) for p in answers.probabilities[k]]
            records.append(record)
        return records


class TextType(LabelType):
    """A label for a text or a pair of texts."""

    head = "SequenceClassifier"

    def is_table(self, path: Path, task: Task) -> bool:
        return not is_lines(str(path), task)

    def read(self, path: Path, task: Task, label_names: Sequence[str] | None = None) -> Examples:
        return read_examples(path, task, label_names)

    def read_input(self, source: str, model_task: ModelTask) -> Examples:
        lines, rows = zip(*read_rows(source, model_task.task), strict=True)
        return self.examples(source, list(lines), list(rows), model_task)

    def examples(
        self, source: str, lines: list[int], rows: list[dict[str, Any]], model_task: ModelTask
    ) -> Examples:
        """Some rows of an input, with their lines."""
        task = model_task.task
        pairs = None if task.text_pair is None else [row[task.text_pair] for row in rows]
        texts = [row[task.text] for row in rows]
        return Examples(texts, pairs, None, model_task.label_names, source, lines, rows)

    def label_names(self, data: Examples) -> tuple[str, ...]:
        return data.label_names

    def featurize(self, tokenizer: Tokenizer, data: Examples, model_task: ModelTask) -> Features:
        return featurize(tokenizer, data, model_task.encoding)

    def label_fields(self, answers: Labelled, model_task: ModelTask) -> Records:
        """The entries that are added to each row, in the order of `columns`, which may be fewer."""
        raise NotImplementedError

    def cells(self, answer: dict[str, Any], is_nested: bool) -> list[Any]:
        """The values of `columns`, of a `Format` that is nested or not."""
        return list(answer.values())

    def answer_table(self, first: Examples, out: Path, model_task: ModelTask) -> AnswerTable:
        """The table that `out` is to be. Errors: ValueError for one that could not be written."""
        separator, columns = model_task.task.separator, self.columns(out, model_task)
        table = AnswerTable(first.rows or [], columns, out, first.source, separator)
        between = {"separator": separator}
        check_cells(out, [{"label": name, **between} for name in model_task.label_names], "label")
        return table

    def answer_part(
        self, table: AnswerTable, answers: Labelled, data: Examples, model_task: ModelTask
    ) -> bytes:
        """The rows again, each with its answer at the end, as the table keeps them."""
        found = []
        for answer in self.label_fields(answers, model_task):
            first, *more = self.cells(answer, table.format.is_nested)
            found.append(dict(zip(table.columns, [first, *map(rounded, more)], strict=False)))
        return table.part(data.rows or [], found)


class Classify(TextType):
    """One class for a text or a pair."""

    name = "classify"
    problem_type = "single_label_classification"

    def baseline_loss(self, features: Features) -> float:
        assert features.labels is not None
        return count_entropy(np.bincount(features.labels))

    def tune(
        self, outputs: np.ndarray, features: Features, data: Examples, model_task: ModelTask
    ) -> dict[str, Any]:
        """The probability above which the second of two classes is the answer.

        Errors: ValueError for another number of classes.
        """
        check_two_classes(model_task.label_names)
        assert data.labels is not None
        probabilities = softmax(features.pooled(outputs, model_task.encoding.pool, exclusive=True))
        metric = model_task.task.main_metric
        return {"thresholds": [label_threshold(probabilities[:, 1], data.labels == 1, metric)]}

    def answers(
        self, outputs: np.ndarray, features: Features, data: Examples, model_task: ModelTask
    ) -> Labelled:
        probabilities = softmax(features.pooled(outputs, model_task.encoding.pool, exclusive=True))
        if thresholds := model_task.thresholds.get("thresholds"):
            is_second = probabilities[:, 1].astype(np.float64) > thresholds[0]
            return Labelled(is_second.astype(np.int64), probabilities)
        return Labelled(probabilities.argmax(axis=1), probabilities)

    def constant_prediction(self, answers: Labelled, data: Examples) -> str | None:
        return constant_class(answers.predicted, data.labels, data.label_names)

    def label_fields(self, answers: Labelled, model_task: ModelTask) -> Records:
        assert answers.probabilities is not None
        labels, rows = answers.predicted.tolist(), answers.probabilities.tolist()
        return [
            {
                "label": model_task.label_names[label],
                "probability": row[label],
                "probabilities": dict(zip(model_task.label_names, row, strict=True)),
            }
            for label, row in zip(labels, rows, strict=True)
        ]

    def to_json(self, answer: Any, model_task: ModelTask) -> str:
        return model_task.label_names[answer]


class Regress(TextType):
    """A number for a text or a pair."""

    name = "regress"
    problem_type = "regression"
    has_scores = True

    def num_outputs(self, label_names: Sequence[str]) -> int:
        return 1

    def baseline_loss(self, features: Features) -> float:
        assert features.labels is not None
        return float(features.labels.var())

    def answers(
        self, outputs: np.ndarray, features: Features, data: Examples, model_task: ModelTask
    ) -> Labelled:
        scores = model_task.scores(features.pooled(outputs, model_task.encoding.pool))
        return Labelled(scores[:, 0], None)

    def constant_prediction(self, answers: Labelled, data: Examples) -> str | None:
        assert data.labels is not None
        spread = float(data.labels.std())
        # rounding alone makes scores of a dead model differ a little
        if len(data) > 1 and spread > 0 and answers.predicted.std() < 0.01 * spread:
            return f"{answers.predicted.mean():.3g}"
        return None

    def label_fields(self, answers: Labelled, model_task: ModelTask) -> Records:
        return [{"score": self.to_json(score, model_task)} for score in answers.predicted]

    def columns(self, out: Path, model_task: ModelTask) -> list[str]:
        return answer_columns(model_task.task.label, [])

    def to_json(self, answer: Any, model_task: ModelTask) -> float:
        return float(str(answer))  # the shortest decimal of a float32: 0.1, not 0.10000000149


class MultiLabel(TextType):
    """Any number of labels for a text or a pair."""

    name = "multilabel"
    problem_type = "multi_label_classification"

    def baseline_loss(self, features: Features) -> float:
        assert features.labels is not None
        return float(np.mean([count_entropy(np.bincount(one)) for one in features.labels.T]))

    def tune(
        self, outputs: np.ndarray, features: Features, data: Examples, model_task: ModelTask
    ) -> dict[str, Any]:
        """A threshold a label."""
        assert data.labels is not None
        probabilities = sigmoid(features.pooled(outputs, model_task.encoding.pool))
        thresholds = best_thresholds(probabilities, data.labels, model_task.task.main_metric)
        return {"thresholds": thresholds}

    def answers(
        self, outputs: np.ndarray, features: Features, data: Examples, model_task: ModelTask
    ) -> Labelled:
        probabilities = sigmoid(features.pooled(outputs, model_task.encoding.pool))
        thresholds = np.array(model_task.thresholds.get("thresholds", 0.5))
        return Labelled(probabilities > thresholds, probabilities)

    def constant_prediction(self, answers: Labelled, data: Examples) -> str | None:
        assert data.labels is not None
        same = (answers.predicted == answers.predicted[0]).all()
        varied = len(data) > 1 and (data.labels != data.labels[0]).any()
        names = [n for n, has in zip(data.label_names, answers.predicted[0], strict=True) if has]
        return (", ".join(names) or "no label") if same and varied else None

    def label_fields(self, answers: Labelled, model_task: ModelTask) -> Records:
        assert answers.probabilities is not None
        return [
            {
                "labels": self.to_json(has, model_task),
                "probabilities": dict(zip(model_task.label_names, row, strict=True)),
            }
            for has, row in zip(answers.predicted, answers.probabilities.tolist(), strict=True)
        ]

    def answer_table(self, first: Examples, out: Path, model_task: ModelTask) -> AnswerTable:
        table, separator = super().answer_table(first, out, model_task), model_task.task.separator
        held = [name for name in model_task.label_names if separator in name]
        if held and not table.format.is_nested:
            raise ValueError(
                f"{out}: label '{held[0]}' holds {separator!r}, which stands between labels: end"
                " `out` in .jsonl, or train with another `separator`"
            )
        return table

    def columns(self, out: Path, model_task: ModelTask) -> list[str]:
        more = ["probabilities"]
        if not format_of(out).is_nested:
            more = [f"probability_{name}" for name in model_task.label_names]
        return answer_columns(model_task.task.label, more)

    def cells(self, answer: dict[str, Any], is_nested: bool) -> list[Any]:
        labels, probabilities = answer.values()
        return [labels, *([probabilities] if is_nested else probabilities.values())]

    def to_json(self, answer: Any, model_task: ModelTask) -> list[str]:
        return [name for name, has in zip(model_task.label_names, answer, strict=True) if has]


class Choice(LabelType):
    """The one of n options that continues the text."""

    name = "choice"
    head = "OptionScorer"
    more_columns = ("option", "probability")

    def read(
        self, path: Path, task: Task, label_names: Sequence[str] | None = None
    ) -> ChoiceExamples:
        return read_choices(path, task)

    def read_input(self, source: str, model_task: ModelTask) -> ChoiceExamples:
        """Rows with the columns of training."""
        if source == "-":
            raise ValueError("texts with their options are read from a file, not from '-'")
        rows = [row for _, row in read_rows(source, model_task.task)]
        return replace(read_choices(Path(source), model_task.task, need_labels=False), rows=rows)

    def num_outputs(self, label_names: Sequence[str]) -> int:
        return 1

    def featurize(
        self, tokenizer: Tokenizer, data: ChoiceExamples, model_task: ModelTask
    ) -> ChoiceFeatures:
        return featurize_choice(tokenizer, data, model_task.encoding)

    def baseline_loss(self, features: ChoiceFeatures) -> float:
        return math.log(features.num_options)

    def answers(
        self,
        outputs: np.ndarray,
        features: ChoiceFeatures,
        data: ChoiceExamples,
        model_task: ModelTask,
    ) -> Labelled:
        logits = features.pooled(outputs, model_task.encoding.pool).reshape(len(data), -1)
        probabilities = softmax(logits)
        return Labelled(probabilities.argmax(axis=1), probabilities)

    def constant_prediction(self, answers: Labelled, data: ChoiceExamples) -> str | None:
        names = [f"option {k}" for k in range(data.num_options)]
        return constant_class(answers.predicted, data.labels, names)

    def to_json(self, answer: Any, model_task: ModelTask) -> str:
        return str(answer)

    def check_output(self, data: ChoiceExamples, out: Path, model_task: ModelTask) -> None:
        answer_names(data.rows or [], self.columns(out, model_task), out)
        assert data.names is not None
        # options of a list or mapping are written by themselves
        named = (zip(*row, strict=True) for row in zip(data.names, data.options, strict=True))
        check_cells(out, [{f"option {name}": text for name, text in row} for row in named])

    def write_answers(
        self, out: Path, answers: Labelled, data: ChoiceExamples, model_task: ModelTask
    ) -> None:
        """Write the rows again with the option's name and text at the end; if nested also the
        probabilities of all options by their names."""
        assert data.rows is not None and data.names is not None
        assert answers.probabilities is not None
        columns, found = self.columns(out, model_task), []
        shares = answers.probabilities.tolist()
        rows = zip(answers.predicted, data.names, data.options, shares, strict=True)
        for choice, names, options, row in rows:
            by_name = dict(zip(names, row, strict=True))
            values = names[choice], options[choice], row[choice], by_name
            found.append(dict(zip(columns, map(rounded, values), strict=False)))
        write_rows(data.rows, found, out, data.source)


def constant_class(
    predicted: np.ndarray, labels: np.ndarray | None, names: Sequence[str]
) -> str | None:
    """The class that every example is given, where their labels differ."""
    assert labels is not None
    if len(np.unique(labels)) > 1 and len(np.unique(predicted)) == 1:
        return names[int(predicted[0])]
    return None
