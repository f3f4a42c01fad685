"""A task without any network: overlap of words, or tf-idf, and a linear model.

A figure of a small BERT says little without this line beside it: on MRPC, RTE and STS-B published
models of 4 to 11 million weights stand where word overlap stands. Single texts are read as tf-idf
of runs of one to three words, pairs as 14 numbers:

    words, pairs of words, runs of four characters: Jaccard, and the share of either text's units
    that the other has (9); of words the same weighted by idf (3); the difference of the lengths;
    and whether one text alone has a negation
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from bertsmith.inference.evaluation.labelled import find_evaluation_files
from bertsmith.tasks.examples import Examples, single_file
from bertsmith.tasks.metrics import compute_metrics
from bertsmith.tasks.task import Task
from bertsmith.training.finetuning.task_types import TASK_TYPES

UNITS = (  # analyzer and n-grams of scikit-learn
    {"analyzer": "word", "ngram_range": (1, 1)},
    {"analyzer": "word", "ngram_range": (2, 2)},
    {"analyzer": "char_wb", "ngram_range": (4, 4)},
)
WORD = r"\w+"
TOKEN = r"\w+|[^\w\s]"
NEGATION = re.compile(r"\b(no|not|never|none|nobody|nothing|neither|nor|without|cannot)\b|n['’]t\b")
TYPES = ("classify", "regress")


def no_network(task: Task, train: Examples, dev: Examples) -> dict[str, float]:
    """The metrics on `dev` of a linear model that learns from `train`; nothing is drawn.

    Errors: ValueError as `check_kind`; ModuleNotFoundError that names the extra when scikit-learn
    is absent.
    """
    check_kind(task)
    assert train.labels is not None and dev.labels is not None
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    is_class = task.task_type == "classify"
    if train.pairs is None:
        reader = TfidfVectorizer(token_pattern=TOKEN, ngram_range=(1, 3), sublinear_tf=True)
        steps = [reader, LogisticRegression(C=10.0, max_iter=1000) if is_class else Ridge()]
        read, asked = train.texts, dev.texts
    else:
        steps = [StandardScaler(), LogisticRegression(max_iter=1000) if is_class else Ridge()]
        read, asked = overlap_features(train, dev)
    answers = make_pipeline(*steps).fit(read, train.labels).predict(asked)
    if task.bounds:
        answers = answers.clip(*task.bounds)
    return compute_metrics(task.metrics, answers, dev.labels, dev.num_classes)


def measure_no_network(task: Task, data: Path, dev: Path | None = None) -> dict[str, Any]:
    """`no_network` of files: {"metrics", "examples", "train_examples", "task"}, and "splits" where
    there are several dev sets.

    It learns from all of the training file and is measured where `bertsmith evaluate` measures a
    model: on `dev`, else on the labelled test file of the folder `data`, else on its dev file.

    Errors: ValueError as `no_network`, for files that cannot be read, and for one file alone.
    """
    check_kind(task)
    task_type = TASK_TYPES[task.task_type]
    if dev is None and single_file(data):
        raise ValueError(f"{data}: one file: name another one to measure on with `dev`")
    train_file = task_type.find_file(task, data, "train")
    assert train_file is not None
    train = task_type.read(train_file, task)
    names = task_type.label_names(train)
    found, counts = {}, {}
    for split, file in find_evaluation_files(task_type, task, dev or data).items():
        examples = task_type.read(file, task, names)
        found[split], counts[split] = no_network(task, train, examples), len(examples)
    first = next(iter(found))
    sizes = {"examples": counts[first], "train_examples": len(train)}
    result = {"metrics": found[first], **sizes, "task": task.name}
    return result | ({"splits": found} if len(found) > 1 else {})


def check_kind(task: Task) -> None:
    """Errors: ValueError for a task of other than a class or a number for a text or a pair."""
    if task.task_type not in TYPES:
        kinds = " and ".join(TYPES)
        raise ValueError(
            f"task {task.name} is of kind '{task.task_type}': without a network are those of kind "
            f"{kinds}"
        )


def overlap_features(*data: Examples) -> list[np.ndarray]:
    """The 14 numbers of every pair, float64 [N, 14], of each data set; idf is that of the first."""
    from sklearn.feature_extraction.text import HashingVectorizer

    found: list[list[np.ndarray]] = [[] for _ in data]
    for unit in UNITS:
        # a vocabulary would not know what train lacks, such as most names
        given: dict[str, Any] = {"token_pattern": WORD, "norm": None, **unit}
        reader = HashingVectorizer(binary=True, alternate_sign=False, **given)
        units: Any = [[reader.transform(texts) for texts in (own.texts, own.pairs)] for own in data]
        for columns, (first, second) in zip(found, units, strict=True):
            columns += _shares(first, second)
        if unit is UNITS[0]:
            counts = np.asarray(sum(side.sum(axis=0) for side in units[0])).ravel()
            idf = np.log((1 + 2 * len(data[0])) / (1 + counts))  # of the texts of all pairs
            for columns, (first, second) in zip(found, units, strict=True):
                columns += _shares(first.multiply(idf).tocsr(), second.multiply(idf).tocsr())
    for columns, own in zip(found, data, strict=True):
        assert own.pairs is not None
        sizes = [np.array([len(text.split()) for text in side]) for side in (own.texts, own.pairs)]
        negated = [
            np.array([NEGATION.search(text.lower()) is not None for text in side])
            for side in (own.texts, own.pairs)
        ]
        columns += [np.log1p(sizes[0]) - np.log1p(sizes[1]), negated[0] != negated[1]]
    return [np.stack(columns, axis=1).astype(np.float64) for columns in found]


def _shares(first: Any, second: Any) -> list[np.ndarray]:
    """Jaccard, and what the second has of the first and the first of the second, of sparse rows
    [N, K] in which a unit has the same weight wherever it stands; 0 of texts without a unit."""
    a, b, both = (
        np.asarray(units.sum(axis=1)).ravel() for units in (first, second, first.minimum(second))
    )
    return [both / np.maximum(whole, 1e-9) for whole in (a + b - both, a, b)]
