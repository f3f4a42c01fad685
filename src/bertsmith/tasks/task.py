"""The table of data sets: their files, labels and metrics. A new one like GLUE's is a row here.

A model stores its `EncodingSettings`, so that it reads texts as in training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal

from bertsmith.base.settings import (
    Advanced,
    Count,
    NotNegative,
    check_bounds,
    from_mapping,
    nearest,
)

LENGTHS = (  # settings in tokens
    *("max_length", "doc_stride", "tokens_per_window", "max_question_length", "max_answer_length"),
)


@dataclass(frozen=True)
class EncodingSettings:
    """Settings of `featurize` and its sisters; each task type reads those that it has."""

    title = "rows"

    max_length: int = 128
    """Tokens of a row, [CLS] and [SEP] among them."""
    long_texts: Literal["cut", "head-tail", "windows"] = "cut"
    """Texts that do not fit: keep the head; keep head and tail; read in several windows."""
    doc_stride: Annotated[int, Count] = 128
    """windows, answer: tokens from the start of a window to that of the next."""
    pool: Annotated[Literal["mean", "max", "vote"], Advanced] = "mean"
    """windows: how the scores of a text's windows become one."""
    max_question_length: Annotated[int, Count, Advanced] = 64
    """answer: tokens of a question; longer ones are cut."""
    max_answer_length: Annotated[int, Count, Advanced] = 30
    """answer: tokens of an answer at most."""
    document_context: Annotated[bool, Advanced] = True
    """tag: fill each row with what stands around its sentence in the document."""
    tokens_per_window: Annotated[int, NotNegative, Advanced] = 128
    """tag: a row tags neighbouring sentences up to so many pieces, half a row at most; 0: one."""
    both_orders: Annotated[Literal["auto", "on", "off"], Advanced] = "auto"
    """Pairs are read in both orders, and their outputs averaged; auto: by a GPT on mrpc, qqp and
    stsb."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.both_orders == "on" and self.long_texts == "windows":
            raise ValueError("`both_orders`: not of windows: leave one of them out")

    def scaled(self, factor: int) -> EncodingSettings:
        """The same with all lengths in tokens times a factor, for a model of shorter tokens.

        >>> EncodingSettings(max_length=128).scaled(6).max_length
        768
        """
        lengths = {name: factor * getattr(self, name) for name in LENGTHS}
        return replace(self, **lengths)


def stored_encoding(stored: Mapping[str, Any], positions: int, source: str) -> EncodingSettings:
    """The encoding among the entries that `source` has; rows as long as the model by default.

    >>> stored_encoding({"max_length": 64, "task": "sst2"}, 512, "config.json").max_length
    64

    Errors: ValueError for a value that cannot be, and rows that are longer than the model.
    """
    names = {known.name for known in fields(EncodingSettings)}
    found = {"max_length": positions} | {n: stored[n] for n in stored if n in names}
    encoding = from_mapping(EncodingSettings, found, source)
    if not 2 < encoding.max_length <= positions:
        fault = f"max_length is {encoding.max_length:,}, but the model has {positions:,} positions"
        raise ValueError(f"{source}: {fault}: write 3 to {positions} there")
    return encoding


@dataclass(frozen=True)
class Task:
    """One row of the table; a new data set of a known type is a new row and a test.

    task_type "classify", "regress", "multilabel": a class, a number, any number of labels for a
              text or a pair of texts
              "choice": the one of n options that goes on from the text
              "answer": the span of the second text, the context, that answers a question
              "tag": a tag for every word of a sentence
    """

    name: str
    task_type: str
    text: str  # column names
    text_pair: str | None = None
    label: str = "label"
    labels: tuple[str, ...] | None = None  # the classes in order; None = those of the train file
    metrics: tuple[str, ...] = ("accuracy",)  # of metrics.METRICS; the first decides what is best
    files: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Split -> file names in the data set's own folder."""
    test_is_labelled: bool = True  # False where the publisher keeps the test answers (GLUE)
    header: tuple[str, ...] = ()  # columns of those files that have no header
    has_broken_rows: bool = False  # in its published files; they are left out with a warning
    bounds: tuple[float, float] | None = None  # regress: lowest and highest score
    positive: str | None = None  # classify: the class of two that comes last, as f1 is that of it
    separator: str = ","  # multilabel: between the labels of a cell
    options: tuple[str, ...] = ()  # choice: a column an option, or one column with all of them
    skip_unlabelled: bool = False  # leave rows without a label out of labelled files
    symmetric: bool = False  # a pair means the same in both orders

    @property
    def main_metric(self) -> str:
        return self.metrics[0]

    @property
    def dev_splits(self) -> tuple[str, ...]:
        """The splits on which a model is measured while it is made; MNLI has two."""
        return tuple(split for split in self.files if split.startswith("dev")) or ("dev",)


def _files(train: str, dev: str = "", test: str = "", **others: str) -> dict[str, tuple[str, ...]]:
    """Split -> file names, which are given with blanks between."""
    splits = {"train": train, "dev": dev, "test": test, **others}
    return {split: tuple(names.split()) for split, names in splits.items() if names}


SPLITS = _files("train.tsv", "dev.tsv", "test.tsv")
ENTAILMENT = ("entailment", "not_entailment")
F1 = ("f1", "accuracy")


TWO_CLASSES = Task(
    "glue", "classify", "sentence", labels=("0", "1"), files=SPLITS, test_is_labelled=False
)


def _glue(name: str, text: str, text_pair: str | None = None, **row: Any) -> Task:
    """A row of GLUE; by default two classes "0" and "1", measured by accuracy."""
    return replace(TWO_CLASSES, name=name, text=text, text_pair=text_pair, **row)


# File and column names of the official GLUE distribution, then those of well-known copies.
GLUE = (
    _glue(
        "cola", "sentence", metrics=("matthews",), header=("source", "label", "star", "sentence")
    ),
    _glue("sst2", "sentence"),
    # The original MSR files have no dev set: like GLUE, training cuts one out of train. Their test
    # file is labelled.
    _glue(
        "mrpc",
        "#1 String",
        "#2 String",
        label="Quality",
        metrics=F1,
        files=_files("train.tsv msr_paraphrase_train.txt", "dev.tsv", "msr_paraphrase_test.txt"),
        test_is_labelled=True,
        symmetric=True,
    ),
    _glue(
        "stsb",
        "sentence1",
        "sentence2",
        task_type="regress",
        label="score",
        labels=None,
        metrics=("pearson", "spearman"),
        bounds=(0.0, 5.0),
        symmetric=True,
    ),
    # A few rows of the official train.tsv have lost a tab or a question; others pass over them too.
    _glue(
        "qqp",
        "question1",
        "question2",
        label="is_duplicate",
        metrics=F1,
        has_broken_rows=True,
        symmetric=True,
    ),
    _glue(
        "mnli",
        "sentence1",
        "sentence2",
        label="gold_label",
        labels=("contradiction", "entailment", "neutral"),
        files=_files(
            "train.tsv train.subset.tsv",
            "dev_matched.tsv dev_matched.subset.tsv",
            "test_matched.tsv",
            dev_mismatched="dev_mismatched.tsv dev_mismatched.subset.tsv",
            test_mismatched="test_mismatched.tsv",
        ),
    ),
    _glue(
        "qnli",
        "question",
        "sentence",
        labels=ENTAILMENT,
        files=SPLITS | _files("train.tsv train.derived.tsv.xz"),
    ),
    _glue("rte", "sentence1", "sentence2", labels=ENTAILMENT),
    _glue("wnli", "sentence1", "sentence2"),
)

ENDINGS = ("ending0", "ending1", "ending2", "ending3")
CHOICE = (
    Task(
        "swag",
        "choice",
        "sent1",
        "sent2",
        options=ENDINGS,
        files=_files("train.csv", "val.csv val.first500.csv", "test.csv"),
        test_is_labelled=False,
    ),
    Task(
        "hellaswag",
        "choice",
        "ctx",
        options=("endings",),
        files=_files("hellaswag_train.jsonl", "hellaswag_val.jsonl", "hellaswag_test.jsonl"),
        test_is_labelled=False,
    ),
    # One file without splits: a part is cut off for dev.
    Task(
        "codah",
        "choice",
        "prompt",
        options=ENDINGS,
        files=_files("codah.tsv full_data.tsv"),
        header=("category", "prompt", *ENDINGS, "label"),
    ),
)

OTHER_NAMES = {"dev": ("validation", "valid", "val")}  # what else a split is called
STEMS = {split: (split, *OTHER_NAMES.get(split, ())) for split in ("train", "dev", "test")}


def _json_files(*versions: str) -> dict[str, tuple[str, ...]]:
    """SQuAD's names for the versions in them."""
    ends = [f"{version}.json" for version in versions]
    return {split: tuple(stem + end for stem in STEMS[split] for end in ends) for split in STEMS}


def _tag_files() -> dict[str, tuple[str, ...]]:
    """Names of CoNLL columns, those of CoNLL-2003 first, and of tables."""
    ends = ("", ".txt", ".conll", ".tsv", ".iob", ".iob2", ".bio", ".bioes", ".jsonl", ".csv")
    conll_2003 = {"train": "eng.train", "dev": "eng.testa", "test": "eng.testb"}
    return {
        split: (name, *(stem + end for stem in STEMS[split] for end in ends))
        for split, name in conll_2003.items()
    }


TEXTS = ("classify", "regress", "multilabel", "choice")
READ_BY = {  # settings that not every type of task reads
    "text_pair": (*TEXTS, "answer"),
    "positive": ("classify",),
    "separator": ("multilabel",),
    "options": ("choice",),
    "skip_unlabelled": TEXTS,
    "long_texts": TEXTS,
    "pool": TEXTS,
    "both_orders": ("classify", "regress", "multilabel"),
    "doc_stride": (*TEXTS, "answer"),
    "max_question_length": ("answer",),
    "max_answer_length": ("answer",),
    "document_context": ("tag",),
    "tokens_per_window": ("tag",),
    "freeze_encoder": ("tag",),
    "class_weights": ("classify", "multilabel", "tag"),
    "focal_gamma": ("classify", "multilabel", "choice", "tag", "answer"),
    "tune_thresholds": ("classify", "multilabel"),
    "temperature": ("classify", "multilabel", "choice"),
}
# Task types as which people's own files can be read, see `own_task`; each with its metrics.
OWN_KINDS = {
    "classify": ("accuracy", "macro_f1"),
    "regress": ("pearson", "spearman", "mse"),
    "multilabel": ("micro_f1", "macro_f1", "accuracy"),
    "choice": ("accuracy",),
    "answer": ("answer_f1", "exact_match"),
    "tag": ("entity_f1", "entity_precision", "entity_recall", "tag_accuracy"),
}
# names of their files besides those of `examples.find_file`
OWN_FILES = {"answer": _json_files(""), "tag": _tag_files()}

SQUAD = Task("squad", "answer", "question", "context", "answers", metrics=OWN_KINDS["answer"])
ANSWER = tuple(
    replace(SQUAD, name=name, files=_json_files(version, ""))
    for name, version in (("squad1", "-v1.1"), ("squad2", "-v2.0"))
)
NER = Task("ner", "tag", "tokens", label="tags", metrics=OWN_KINDS["tag"], files=OWN_FILES["tag"])
TASKS = {task.name: task for task in (*GLUE, *CHOICE, *ANSWER, NER)}


def find_task(name: str) -> Task:
    """The row of a published data set. Errors: ValueError for an unknown name, with the nearest.

    >>> find_task("SST-2").name
    'sst2'
    """
    key = name.lower().replace("-", "").replace("_", "")
    if key not in TASKS:
        raise ValueError(f"unknown task '{name}': {nearest(key, [*TASKS, *OWN_KINDS])}")
    return TASKS[key]


def own_task(
    task_type: str,
    text: str,
    text_pair: str | None,
    label: str,
    *,
    positive: str | None = None,
    separator: str = ",",
    options: tuple[str, ...] = (),
) -> Task:
    """The row for one's own files, with the columns and the rest as in `Task`.

    >>> own_task("classify", "review", None, "stars").metrics
    ('accuracy', 'macro_f1')

    Errors: ValueError for an unknown type, a column named twice, a separator of other than one
    character, options missing or out of place.
    """
    if task_type not in OWN_KINDS:
        raise ValueError(f"unknown kind of task '{task_type}': {nearest(task_type, OWN_KINDS)}")
    columns = (text, text_pair, label, *options)
    for name in columns:
        if name is not None and columns.count(name) > 1:
            raise ValueError(
                f"column '{name}' is named twice: `text`, `text_pair`, `label` and `options`"
                " must name different columns"
            )
    if len(separator) != 1:
        raise ValueError(f"separator {separator!r}: name one character, such as ',' or '|'")
    if task_type == "choice" and not options:
        raise ValueError("choice needs `options`, the columns of the options")
    if task_type != "choice" and options:
        raise ValueError(f"`options` are for choice, not for {task_type}")
    return Task(
        task_type,
        task_type,
        text,
        text_pair,
        label,
        metrics=OWN_KINDS[task_type],
        files=OWN_FILES.get(task_type, {}),
        positive=positive,
        separator=separator,
        options=options,
    )
