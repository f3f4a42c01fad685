"""A model that answers: `load` a folder, give it texts. It knows the task it was fine-tuned for."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, overload

import numpy as np

from bertsmith.checkpoints.config_json import (
    CONFIG_FILE,
    label_names,
    read_config,
    read_extra_config,
    read_stored_config,
)
from bertsmith.checkpoints.hub import open_model_folder
from bertsmith.checkpoints.model_folder import kind_of, load_model, load_tokenizer
from bertsmith.checkpoints.run_folder import SETTINGS_FILE, RunFolder
from bertsmith.inference.embeddings import embed, reading_of
from bertsmith.inference.fill import MaskFiller
from bertsmith.inference.precision import Compute, try_bf16
from bertsmith.model.encoder import Encoder
from bertsmith.model.heads import (
    BareModel,
    OptionScorer,
    PreTrainingModel,
    SequenceClassifier,
    SpanPredictor,
    TaskModel,
    TokenClassifier,
)
from bertsmith.model.initialization import Module
from bertsmith.model.lstm import FrozenTagger
from bertsmith.tasks.examples import Examples
from bertsmith.tasks.features import Features
from bertsmith.tasks.tagging.running_text import given_sentences
from bertsmith.tasks.tagging.schemes import classes_scheme
from bertsmith.tasks.tagging.sentences import tagged_rows
from bertsmith.tasks.task import OWN_KINDS, TASKS, Task, own_task, stored_layout
from bertsmith.text.tokenizer.tokenizer import texts_of
from bertsmith.training.engine import Engine, choose_engine
from bertsmith.training.finetuning.task import head_outputs
from bertsmith.training.finetuning.task_types import TASK_TYPES
from bertsmith.training.finetuning.task_types.base import ModelTask, TaskType
from bertsmith.training.finetuning.task_types.tagging import Tag, Tagged
from bertsmith.training.finetuning.task_types.texts import TextType


def load(model: str | Path, *, device: str = "auto", precision: str = "float32") -> Predictor:
    """Open a run directory, a Hugging Face folder or a model of the Hugging Face hub.

    `device` "auto" is the GPU where there is one. `precision` "bf16" makes the matrix products
    quicker on machines that have them, and the answers a little less exact; "auto" leaves it to the
    first texts, for all that come: bf16 if they are many, and a sample shows it faster and hardly
    less exact (precision.py); masks are filled in float32.

    Errors: ValueError for a folder that holds no model, files that do not fit one another, a
    device or precision that this machine does not have.
    """
    is_open = precision == "auto"
    engine = choose_engine(device, "float32" if is_open else precision)
    return Predictor(open_model_folder(str(model)), engine, is_open)


class Predictor:
    """Answers of one model folder. The weights are read when the first answer is asked for.

    One string is one text and gets one answer; a list, tuple, array or Series of them gets a list
    of answers, in its order. Anything else is refused with a ValueError.
    """

    def __init__(self, folder: Path, engine: Engine, precision_is_open: bool = False) -> None:
        self.folder = folder
        self.engine = engine
        self._precision_is_open = precision_is_open
        self.config = read_config(folder)
        self.tokenizer = load_tokenizer(folder)

    @overload
    def fill(self, texts: str, top: int = 5) -> list[list[dict[str, Any]]]: ...
    @overload
    def fill(self, texts: Iterable[str], top: int = 5) -> list[list[list[dict[str, Any]]]]: ...

    def fill(self, texts: str | Iterable[str], top: int = 5) -> list[Any]:
        """The `top` likeliest pieces at each [MASK] of a text, or of each text, best first.

        The answer to a text is one list a [MASK] of {"token": "cat", "id": 4937, "probability":
        0.31}. The probability is that of the softmax over the whole vocabulary, each mask by
        itself; [PAD], [CLS], [SEP], [MASK] and [unused] pieces are left out of the answers.

        Errors: ValueError for a text without [MASK], one longer than the model's positions, a
        model without a masked-LM head.
        """
        return self.filler.pieces(texts, top)

    @functools.cached_property
    def filler(self) -> MaskFiller:
        """Fills masks, also several together and with whole words, see fill.py.

        Errors: ValueError for a model that reads from left to right, or has no masked-LM head.
        """
        if self.config.causal:
            raise ValueError(
                f"{self.folder}: a left-to-right model, which sees nothing behind a [MASK]: use "
                "one pre-trained with --objective mlm"
            )
        return MaskFiller(self.language_model, self.tokenizer, self.engine)

    @overload
    def classify(self, texts: str, pairs: str | None = None) -> dict[str, Any]: ...
    @overload
    def classify(
        self, texts: Iterable[str], pairs: Iterable[str] | None = None
    ) -> list[dict[str, Any]]: ...

    def classify(
        self, texts: str | Iterable[str], pairs: str | Iterable[str] | None = None
    ) -> dict[str, Any] | list[dict[str, Any]]:
        """The class, labels or score of a text, or of each text; of each with its second text.

        An answer is {"label": "good", "probability": 0.9, "probabilities": {"bad": 0.1, ...}};
        of a model of several labels {"labels": [...], "probabilities": {...}}, of one of scores
        {"score": 3.1}. A text longer than the model was trained at is treated as in training.

        Errors: ValueError for a model that is no such classifier, texts and pairs of unequal
        number, single texts for a model that was trained on pairs and the other way round.
        """
        first, second = texts_of(texts), None if pairs is None else texts_of(pairs, "pairs")
        if second is not None and len(second) != len(first):
            raise ValueError(f"{len(first)} texts, but {len(second)} second texts")
        task_type = self.task_type
        if not isinstance(task_type, TextType):
            raise ValueError(
                f"{self.folder}: not a fine-tuned classifier but one of '{task_type.name}'"
            )
        self._check_shape(second is not None)
        if not first:
            return []
        lines, names = list(range(1, len(first) + 1)), self.model_task.label_names
        examples = Examples(first, second, None, names, "texts", lines)
        answers = task_type.answered(self.predict(examples), self.model_task)
        return answers[0] if isinstance(texts, str) else answers

    @overload
    def tag(self, texts: str) -> dict[str, Any]: ...
    @overload
    def tag(self, texts: Iterable[str] | Iterable[Iterable[str]]) -> list[dict[str, Any]]: ...

    def tag(
        self, texts: str | Iterable[str] | Iterable[Iterable[str]]
    ) -> dict[str, Any] | list[dict[str, Any]]:
        """The words of a text, or of each text, with their tags, and the entities in it.

        An answer is {"tokens": ["In", "Rome", "."], "tags": ["O", "B-LOC", "O"], "probabilities":
        [...], "entities": [{"text": "Rome", "start": 3, "end": 7, "label": "LOC", "score": 0.98}]}:
        start and end count characters of the text, the score is the mean probability of the
        entity's tags. A text is parted by the rules of `tasks/tagging/running_text.py`; in
        its place may stand the list of its words, whose text is they with a blank between.

        Errors: ValueError for a model that does not tag words.
        """
        if not isinstance(task_type := self.task_type, Tag):
            raise ValueError(
                f"{self.folder}: not a fine-tuned tagger but one of '{task_type.name}'"
            )
        sentences = given_sentences(texts, classes_scheme(self.model_task.label_names))
        tagged = Tagged([], np.empty(0))
        if sentences.words:
            tagged = self.predict(sentences)
        answers = tagged_rows(sentences, tagged.tags, tagged.probabilities)
        return answers[0] if isinstance(texts, str) else answers

    def embed(self, texts: str | Iterable[str]) -> np.ndarray:
        """The vector of a text, float32 [H], or of each text, [N, H].

        They are made as the folder says (sentence-transformers, `bertsmith embed train`), else they
        are the mean of all tokens.

        Errors: ValueError as `reading_of` and `embed` of inference/embeddings.py.
        """
        vectors, _ = embed(self, texts, reading_of(self.folder))
        return vectors[0] if isinstance(texts, str) else vectors

    def _check_shape(self, are_pairs: bool) -> None:
        task = self.model_task.task
        if task.text_pair is not None and not are_pairs:
            raise ValueError(f"{self.folder}: trained on pairs of texts: give the second ones, too")
        # others than bertsmith do not say what columns a model of own data was trained on
        says = task.name not in OWN_KINDS or "text_pair" in read_extra_config(self.folder)
        says = says or bool(read_run(self.folder))
        if task.text_pair is None and are_pairs and says:
            raise ValueError(f"{self.folder}: trained on single texts: leave the second ones out")

    def predict(self, data: Any, on_batch: Callable[[int], None] | None = None) -> Any:
        """The answers to data of the model's task type, as its `read` or `read_input` gives it.

        `on_batch` is told how many rows were done.
        """
        model_task = self.model_task
        rows = self.task_type.featurise(
            self.tokenizer, data, model_task.layout, model_task.label_names
        )
        outputs = self.outputs(rows, on_batch)
        return self.task_type.answers(outputs, rows, data, model_task)

    def outputs(
        self, features: Features, on_batch: Callable[[int], None] | None = None
    ) -> np.ndarray:
        """The head's outputs for rows, float32; see `head_outputs`."""
        self.settle_precision_for(features)
        return self._outputs(features, self.engine, on_batch)

    def settle_precision_for(self, features: Features) -> None:
        """`settle_precision` by the head's outputs for some of these rows."""
        self.settle_precision(
            len(features), lambda engine, rows: self._outputs(features.of_rows(rows), engine)
        )

    def _outputs(
        self,
        features: Features,
        engine: Engine,
        on_batch: Callable[[int], None] | None = None,
    ) -> np.ndarray:
        pad_id = self.tokenizer.vocabulary.pad_id
        return head_outputs(self.task_model, features, pad_id, engine, on_batch=on_batch)

    def use_precision(self, precision: str) -> None:
        """Compute in `precision`, float32 or bf16, from now on."""
        self._precision_is_open = False
        self.engine = replace(self.engine, precision=precision)

    def settle_precision(self, count: int, compute: Compute) -> None:
        """Take bf16 or float32 for good, where that is open, by some of `count` rows.

        A line on stderr says when it is bf16.
        """
        if not self._precision_is_open:
            return
        self._precision_is_open = False
        trial = try_bf16(self.engine, count, compute)
        if trial is None or not trial.takes_bf16:
            return
        self.use_precision("bf16")
        print(
            f"{self.folder}: answers in bf16, {trial.float32 / trial.bf16:.1f}x as fast here and "
            f"{trial.deviation:.1%} off at most in a sample; --precision float32 is exact",
            file=sys.stderr,
        )

    @property
    def task_type(self) -> TaskType:
        """The type of the task. Errors: as `model_task`."""
        return TASK_TYPES[self.model_task.task.task_type]

    @functools.cached_property
    def model_task(self) -> ModelTask:
        """The task of the model. Errors: ValueError for a model that was not fine-tuned."""
        return read_model_task(self.folder)

    @functools.cached_property
    def task_model(self) -> TaskModel:
        """The model with its head. Errors: ValueError when a part of that was never trained."""
        frozen = kind_of(self.folder) is FrozenTagger
        loaded = load_model(self.folder, FrozenTagger if frozen else self.task_type.head)
        if loaded.missing:
            raise ValueError(
                f"{self.folder}: the weights lack {', '.join(loaded.missing)}, without which the"
                " head was never trained: copy the model again, or fine-tune it"
            )
        model = self._ready(loaded.model)
        wanted = self.task_type.num_outputs(self.model_task.label_names)
        if model.num_outputs != wanted:
            raise ValueError(
                f"{self.folder}: config.json names {wanted} labels, but the head has "
                f"{model.num_outputs} outputs: correct id2label"
            )
        return model

    @functools.cached_property
    def encoder(self) -> Encoder:
        """The model without a head."""
        return self._ready(load_model(self.folder, BareModel).model).encoder

    @property
    def language_model(self) -> PreTrainingModel:
        """The model with its pre-training heads. Errors: ValueError when it has no MLM head."""
        return self._language_model[0]

    @property
    def has_next_sentence_head(self) -> bool:
        """True if that head of the language model was trained."""
        return not any(name.startswith(("nsp.", "pooler.")) for name in self._language_model[1])

    @functools.cached_property
    def _language_model(self) -> tuple[PreTrainingModel, list[str]]:
        loaded = load_model(self.folder, PreTrainingModel)
        if any(name.startswith("mlm.") for name in loaded.missing):
            raise ValueError(
                f"{self.folder}: this model has no masked-LM head: use a pre-trained one"
            )
        return self._ready(loaded.model), loaded.missing

    def _ready(self, model: Module) -> Module:
        return model.to(self.engine.device).eval()


HEAD_KINDS = {
    TokenClassifier: "tag",
    FrozenTagger: "tag",
    SpanPredictor: "answer",
    OptionScorer: "choice",
}
PROBLEM_TYPES = {"regression": "regress", "multi_label_classification": "multilabel"}


def read_model_task(folder: Path, **columns: str | None) -> ModelTask:
    """Task, classes, layout and decision of a fine-tuned model.

    `columns` (text, text_pair, label) that are given go before those of training. Without a
    run.json, as of a model that transformers trained, its settings of the task (task, text, options
    ...) may stand in config.json under "bertsmith".

    Errors: ValueError for a folder whose model was not fine-tuned, or whose options nothing names,
    and for a second text where it was trained on single ones.
    """
    stored, own = read_stored_config(folder), read_extra_config(folder)
    record = read_run(folder)
    if record.get("kind", "finetune") != "finetune":
        raise ValueError(
            f"{folder}: not a fine-tuned classifier but a run of '{record['kind']}': "
            "train a head on it with `bertsmith finetune`"
        )
    head = kind_of(folder)
    if head is not SequenceClassifier and head not in HEAD_KINDS:
        raise ValueError(f"{folder}: not a fine-tuned classifier: fine-tune the model first")
    names = tuple(label_names(folder)) or ("LABEL_0", "LABEL_1")  # as transformers without names
    problem = stored.get("problem_type")
    guessed = HEAD_KINDS.get(head) or PROBLEM_TYPES.get(str(problem))
    if guessed is None:
        # transformers' rule for a model that does not say
        guessed = "regress" if len(names) == 1 else "classify"
    task_type, settings = own.get("kind", guessed), record.get("settings", own)
    if task_type == "choice" and settings.get("task") not in TASKS and not settings.get("options"):
        raise ValueError(
            f"{folder}: nothing says which columns its options are: write into {CONFIG_FILE} "
            '"bertsmith": {"task": "swag"} or {"text": "context", "options": ["first", "second"]}'
        )
    task = _task(task_type, settings, columns)
    layout = stored_layout(own, read_config(folder).max_positions)
    with_names = task.task_type in ("classify", "multilabel", "tag")
    return ModelTask(task, names if with_names else (), layout, own.get("decision", {}))


def _task(task_type: str, settings: dict[str, Any], columns: dict[str, str | None]) -> Task:
    given = {name: column for name, column in columns.items() if column is not None}
    published = TASKS.get(settings.get("task", ""))
    pair = settings.get("text_pair", "") if published is None else published.text_pair
    # questions may have been trained on JSON, which has no columns
    if "text_pair" in given and pair is None and task_type != "answer":
        raise ValueError(
            f"--text-pair {given['text_pair']}: the model was trained without a second text: leave"
            " it out"
        )
    if published is not None:
        task = replace(published, **given)
        return replace(task, metrics=tuple(settings.get("metrics", task.metrics)))
    label = "answer" if task_type == "answer" else "label"
    names = {"text": "text", "text_pair": None, "label": label}
    names |= {name: settings[name] for name in names if name in settings} | given
    assert task_type in OWN_KINDS
    task = own_task(
        task_type,
        **names,
        separator=settings.get("separator", ","),
        options=tuple(settings.get("options", ())),
    )
    return replace(task, metrics=tuple(settings.get("metrics", task.metrics)))


def read_run(folder: Path) -> dict[str, Any]:
    """The run.json of a run directory; {} for a model folder without one."""
    return RunFolder(folder).settings() if (folder / SETTINGS_FILE).exists() else {}
