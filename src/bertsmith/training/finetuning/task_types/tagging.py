"""A tag for every word of a sentence: named entities, parts of speech.

The classes of entities are those of IOB2 whatever scheme a file has (paper section 5.3, without
a CRF); answers are tags in the scheme of the file that they are for.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bertsmith.tasks.answer_files import text_lines
from bertsmith.tasks.labels import different, same_but_for_case
from bertsmith.tasks.metrics import count_entropy, softmax
from bertsmith.tasks.tagging.features import IGNORED, TagFeatures, featurize_sentences
from bertsmith.tasks.tagging.running_text import running_text
from bertsmith.tasks.tagging.schemes import OUTSIDE, classes_scheme, tag_scores
from bertsmith.tasks.tagging.sentences import (
    Sentences,
    has_columns,
    is_table,
    read_sentences,
    write_columns,
    write_tagged,
)
from bertsmith.tasks.tagging.summary import split_sentences, summarize_sentences
from bertsmith.tasks.task import Task
from bertsmith.text.readers.tables import file_suffix
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.training.finetuning.task_types.base import ModelTask, Records, TaskType

OUTPUTS = (".conll", ".txt", ".jsonl")


class Tagged(NamedTuple):
    """Answers of W words."""

    tags: list[str]  # in the scheme of the data
    probabilities: np.ndarray  # float32 [W], of each word's most probable class


class Tag(TaskType):
    """One tag for every word."""

    name = "tag"
    head = "TokenClassifier"
    default_length = 256
    default_batch = 8  # rows, which hold several sentences each

    def is_table(self, path: Path, task: Task) -> bool:
        return is_table(path, [task.text])

    def read(self, path: Path, task: Task, label_names: Sequence[str] | None = None) -> Sentences:
        """Read CoNLL columns or a table of words.

        Errors: ValueError for a tag that the training data does not have, and for training data of
        a single class; those of `read_sentences`.
        """
        plain = label_names is not None and classes_scheme(label_names) == "plain"
        scheme = "plain" if plain else None
        data = read_sentences(path, True, scheme, (task.text, task.label))
        assert data.tags is not None
        data.labels(None if label_names is None else tuple(label_names))
        if label_names is None and len(set(data.tags)) == 1:
            raise ValueError(
                f"{path}: every word has the tag '{data.tags[0]}': nothing to learn from it"
            )
        if label_names is None and (same := same_but_for_case(self.label_names(data))):
            print(f"warning: {path}: {different(same)}", file=sys.stderr)
        return data

    def read_input(self, source: str, model_task: ModelTask) -> Sentences:
        """Read the words of CoNLL columns or a table, or of a text (.txt, packed or not, and "-"):
        a sentence a line, split as `word_spans` does."""
        path, task, scheme = Path(source), model_task.task, classes_scheme(model_task.label_names)
        if source == "-" or file_suffix(path) == ".txt":
            lines = [line for _, line in text_lines(source, task.text)]
            if source == "-" or not has_columns(lines, model_task.label_names):
                return running_text(lines, scheme, source)
        return read_sentences(path, False, scheme, (task.text, task.label))

    def split_dev(self, data: Sentences, share: float, seed: int) -> tuple[Sentences, Sentences]:
        return split_sentences(data, share, seed)

    def summarize(self, train: Sentences, dev: Sentences) -> str:
        return summarize_sentences(train, dev)

    def label_names(self, data: Sentences) -> tuple[str, ...]:
        return data.labels()[1]

    def featurize(
        self, tokenizer: Tokenizer, data: Sentences, model_task: ModelTask
    ) -> TagFeatures:
        labels = None if data.tags is None else data.labels(model_task.label_names)[0]
        return featurize_sentences(tokenizer, data, labels, model_task.encoding)

    def num_labelled(self, labels: np.ndarray) -> int:
        return int((labels != IGNORED).sum())

    def baseline_loss(self, features: TagFeatures) -> float:
        assert features.labels is not None
        return count_entropy(np.bincount(features.labels[features.labels != IGNORED]))

    def answers(
        self, outputs: np.ndarray, features: TagFeatures, data: Sentences, model_task: ModelTask
    ) -> Tagged:
        probabilities = softmax(features.by_word(outputs))
        tags = data.sentence_tags(probabilities.argmax(axis=1), model_task.label_names)
        return Tagged(tags, probabilities.max(axis=1))

    def measure(self, answers: Tagged, data: Sentences, model_task: ModelTask) -> dict[str, float]:
        assert data.tags is not None
        scores = tag_scores(data.tags, answers.tags, data.boundaries, data.scheme)
        return {name: scores[name] for name in model_task.task.metrics}

    def notes(self, answers: Tagged, data: Sentences, model_task: ModelTask) -> dict[str, str]:
        assert data.tags is not None
        if any(tag != OUTSIDE for tag in (*data.tags, *answers.tags)):
            return {}
        note = "no value, counts 0: there is no entity"
        return {name: note for name in model_task.task.metrics if "entity" in name}

    def constant_prediction(self, answers: Tagged, data: Sentences) -> str | None:
        assert data.tags is not None
        same = len(set(answers.tags)) == 1 and len(set(data.tags)) > 1
        return answers.tags[0] if same else None

    def to_records(self, answers: Tagged, data: Sentences, model_task: ModelTask) -> Records:
        """A sentence each: its words, tags, predicted tags, and how probable these are."""
        records = []
        for begin, end in zip(data.boundaries[:-1], data.boundaries[1:], strict=True):
            record: dict[str, Any] = {"words": data.words[begin:end]}
            if data.tags is not None:
                record["label"] = data.tags[begin:end]
            record["predicted"] = answers.tags[begin:end]
            record["probabilities"] = [round(float(p), 5) for p in answers.probabilities[begin:end]]
            records.append(record)
        return records

    def check_output(self, data: Sentences, out: Path, model_task: ModelTask) -> None:
        if out.suffix not in OUTPUTS:
            raise ValueError(
                f"{out}: cannot write tags to '{out.suffix}': end `out` in {', '.join(OUTPUTS)}"
            )

    def write_answers(
        self, out: Path, answers: Tagged, data: Sentences, model_task: ModelTask
    ) -> None:
        """Write columns "word tag" (gold in between where known), or .jsonl with probabilities."""
        if out.suffix == ".jsonl":
            write_tagged(out, data, answers.tags, answers.probabilities)
        else:
            write_columns(out, data, answers.tags)
