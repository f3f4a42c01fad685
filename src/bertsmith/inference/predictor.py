"""A model that answers: text in, typed answers out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bertsmith.checkpoints.folder import BareModel, kind_of, load_model, load_tokenizer
from bertsmith.checkpoints.model_config import read_config, read_extra_config
from bertsmith.checkpoints.open import open_model_folder
from bertsmith.finetuning.kind import Kind, Purpose
from bertsmith.finetuning.kinds import KINDS
from bertsmith.finetuning.scoring import head_outputs
from bertsmith.finetuning.sequence_kinds import OfTexts
from bertsmith.inference.fill import MaskFiller
from bertsmith.inference.purpose import read_purpose, read_run
from bertsmith.model.encoder import Encoder
from bertsmith.model.heads import PreTrainingModel, TaskModel
from bertsmith.model.initial_weights import Module
from bertsmith.model.tagger import FrozenTagger
from bertsmith.tasks.features import Features
from bertsmith.tasks.reading import Examples
from bertsmith.tasks.table import OWN_KINDS
from bertsmith.training.engine import Engine, choose_engine


class Asked(NamedTuple):
    """Answers to some data, and the rows that were read for them."""

    answers: Any
    features: Features


def load(model: str | Path, *, device: str = "auto", precision: str = "float32") -> Predictor:
    """Open a run directory, a Hugging Face folder or a model of the Hugging Face hub.

    `device` "auto" is the GPU where there is one. `precision` "bf16" makes the matrix products
    quicker on machines that have them, and the answers a little less exact.

    Errors: ValueError for a folder that holds no model, files that do not fit one another, a
    device or precision that this machine does not have.
    """
    return Predictor(open_model_folder(str(model)), choose_engine(device, precision))


class Predictor:
    """Answers of one model folder. The weights are read when the first answer is asked for."""

    def __init__(self, folder: Path, engine: Engine) -> None:
        self.folder = folder
        self.engine = engine
        self.config = read_config(folder)
        self.tokenizer = load_tokenizer(folder)

    def fill(self, text: str, top: int = 5) -> list[list[dict[str, Any]]]:
        """The `top` likeliest pieces at each [MASK] of the text, best first.

        Returns one list a [MASK] of {"token": "cat", "id": 4937, "probability": 0.31}. The
        probability is that of the softmax over the whole vocabulary, each mask by itself;
        [PAD], [CLS], [SEP], [MASK] and [unused] pieces are left out of the answers.

        Errors: ValueError for a text without [MASK], one longer than the model's positions, a
        model without a masked-LM head.
        """
        return self.filler.pieces(text, top)

    @functools.cached_property
    def filler(self) -> MaskFiller:
        """What fills masks, also several together and with whole words: fill.py, fill_words.py.

        Errors: ValueError for a model that reads from left to right, or has no masked-LM head.
        """
        if self.config.causal:
            raise ValueError(
                f"{self.folder}: a left-to-right model, which sees nothing behind a [MASK]: use "
                "one pre-trained with --objective mlm"
            )
        return MaskFiller(self.language_model, self.tokenizer, self.engine)

    def classify(
        self, texts: Sequence[str], pairs: Sequence[str] | None = None
    ) -> list[dict[str, Any]]:
        """The class, labels or score of each text, or of each with its second text, in order.

        Returns {"label": "good", "probability": 0.9, "probabilities": {"bad": 0.1, ...}} for each;
        of a model of several labels {"labels": [...], "probabilities": {...}}, of one of scores
        {"score": 3.1}. A text longer than the model was trained at is treated as in training.

        Errors: ValueError for a model that is no such classifier, texts and pairs of unequal
        number, single texts for a model that was trained on pairs and the other way round.
        """
        if pairs is not None and len(pairs) != len(texts):
            raise ValueError(f"{len(texts)} texts, but {len(pairs)} second texts")
        kind = self.kind
        if not isinstance(kind, OfTexts):
            raise ValueError(f"{self.folder}: not a fine-tuned classifier but one of '{kind.name}'")
        self._check_shape(pairs is not None)
        if not texts:
            return []
        second, lines = None if pairs is None else list(pairs), list(range(1, len(texts) + 1))
        names = self.purpose.label_names
        examples = Examples(list(texts), second, None, names, "texts", lines)
        return kind.answered(self.ask(examples).answers, self.purpose)

    def _check_shape(self, are_pairs: bool) -> None:
        task = self.purpose.task
        if task.text_pair is not None and not are_pairs:
            raise ValueError(f"{self.folder}: trained on pairs of texts: give the second ones, too")
        # others than bertsmith do not say what columns a model of own data was trained on
        says = task.name not in OWN_KINDS or "text_pair" in read_extra_config(self.folder)
        says = says or bool(read_run(self.folder))
        if task.text_pair is None and are_pairs and says:
            raise ValueError(f"{self.folder}: trained on single texts: leave the second ones out")

    def ask(self, data: Any, on_batch: Callable[[int], None] | None = None) -> Asked:
        """The answers to data of the model's kind, as its `read` or `read_input` gives it.

        `on_batch` is told how many rows were done.
        """
        purpose = self.purpose
        rows = self.kind.featurise(self.tokenizer, data, purpose.layout, purpose.label_names)
        outputs = self.outputs(rows, on_batch)
        return Asked(self.kind.answers(outputs, rows, data, purpose), rows)

    def outputs(
        self, features: Features, on_batch: Callable[[int], None] | None = None
    ) -> np.ndarray:
        """The head's outputs for rows, float32; see `head_outputs`."""
        pad_id = self.tokenizer.vocabulary.pad_id
        return head_outputs(self.task_model, features, pad_id, self.engine, on_batch=on_batch)

    @property
    def kind(self) -> Kind:
        """The kind of task that the model was fine-tuned for. Errors: as `task_model`."""
        return KINDS[self.purpose.task.kind]

    @functools.cached_property
    def purpose(self) -> Purpose:
        """What the model was fine-tuned for. Errors: ValueError for a model that was not."""
        return read_purpose(self.folder)

    @functools.cached_property
    def task_model(self) -> TaskModel:
        """The model with its head. Errors: ValueError when a part of that was never trained."""
        frozen = kind_of(self.folder) is FrozenTagger
        loaded = load_model(self.folder, FrozenTagger if frozen else self.kind.head)
        if loaded.missing:
            raise ValueError(
                f"{self.folder}: the weights lack {', '.join(loaded.missing)}, without which the"
                " head was never trained: copy the model again, or fine-tune it"
            )
        model = self._ready(loaded.model)
        wanted = self.kind.num_outputs(self.purpose.label_names)
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
        """Whether that head of the language model was trained, or is there for show."""
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
