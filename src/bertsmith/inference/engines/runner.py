"""A model folder's models, each read when it is first needed, and run by the engine that fits.

On a CPU that is our own engine (`native.py`) in float32 and int8, for models that it can read;
PyTorch (`pytorch.py`) runs the others, bf16, and GPUs; it is imported when it is needed.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bertsmith.checkpoints.config_json import TASK_KINDS, model_kind, read_config
from bertsmith.checkpoints.reading import load_tokenizer, open_tensors
from bertsmith.inference.engines.native import NativeModel, why_not
from bertsmith.inference.engines.precision import Compute, quickest
from bertsmith.inference.engines.processor import Processor
from bertsmith.inference.model_task import task_of_texts
from bertsmith.tasks.features import Features
from bertsmith.tasks.vectors import Pool
from bertsmith.training.finetuning.task_types import TASK_TYPES
from bertsmith.training.finetuning.task_types.base import ModelTask, TaskType

if TYPE_CHECKING:
    from bertsmith.inference.engines.pytorch import TorchModel

ENCODER, LANGUAGE_MODEL = "BareModel", "PreTrainingModel"
# Task type -> the method that answers as it was trained, if it has another name.
METHODS = {"multilabel": "classify", "regress": "score", "choice": "choose"}
OnBatch = Callable[[int], None] | None
"""It is given the number of rows in each batch that is done."""


class Runner:
    """The models of a folder, by kinds (`model_kind`). `processor` None: the runner's own."""

    def __init__(self, folder: Path, processor: Processor, precision_is_open: bool = False) -> None:
        self.folder = folder
        self.processor = processor
        self._precision_is_open = precision_is_open
        self._native: dict[tuple[str, str], NativeModel] = {}
        self._torch: dict[str, TorchModel] = {}
        self.config = read_config(folder)
        self.tokenizer = load_tokenizer(folder)

    def outputs(
        self, features: Features, on_batch: OnBatch = None, processor: Processor | None = None
    ) -> np.ndarray:
        """The head's outputs for rows, float32 [R, K], or [T, K] of a head over tokens."""
        processor = processor or self.processor
        if native := self.native(processor, self.task_kind):
            return native.run(features, native.outputs, on_batch)
        return self.pytorch(self.task_kind).outputs(features, processor, on_batch)

    def vectors(
        self,
        features: Features,
        pool: Pool,
        skip: int = 0,
        on_batch: OnBatch = None,
        processor: Processor | None = None,
    ) -> np.ndarray:
        """Pooled states of rows, float32 [R, H]; see `pooled` of hidden_states.py."""
        processor = processor or self.processor
        if native := self.native(processor, ENCODER):
            return native.run(features, lambda rows: native.pooled(rows, pool, skip), on_batch)
        return self.pytorch(ENCODER).vectors(features, pool, skip, processor, on_batch)

    def states_at(
        self,
        features: Features,
        places: np.ndarray,
        layers: Sequence[int],
        on_batch: OnBatch = None,
        processor: Processor | None = None,
    ) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
        """States of some tokens in some layers, some rows at a time; see `NativeModel`."""
        processor = processor or self.processor
        if native := self.native(processor, ENCODER):
            return native.states_at(features, places, layers, on_batch)
        model = self.pytorch(ENCODER)
        return model.states_at(features, places, layers, processor, on_batch)

    def log_probabilities(
        self, features: Features, places: np.ndarray
    ) -> Iterator[tuple[int, np.ndarray]]:
        """(A row's number, float32 [P, V] at its masks) for all rows in any order; see
        `NativeModel`."""
        if native := self.native(self.processor, LANGUAGE_MODEL):
            return native.log_probabilities(features, places)
        return self.pytorch(LANGUAGE_MODEL).log_probabilities(features, places, self.processor)

    def native(self, processor: Processor, kind: str) -> NativeModel | None:
        """The model of that kind in our own engine; None where PyTorch is to answer."""
        if self.why_not_native(processor.precision):
            return None
        key = kind, processor.precision
        if key not in self._native:
            tensors = open_tensors(self.folder, kind)
            bias = tensors.get("classifier.bias", tensors.get("span.bias"))
            self.check_head(kind, tensors.missing, None if bias is None else len(bias))
            self._native[key] = NativeModel.make(
                tensors, self.config, processor.precision, processor.threads
            )
        return self._native[key]

    def pytorch(self, kind: str) -> TorchModel:
        """The model of that kind in PyTorch."""
        if kind not in self._torch:
            from bertsmith.inference.engines.pytorch import TorchModel  # imports torch

            model = TorchModel.open(self.folder, kind, self.processor.device)
            self.check_head(kind, model.missing, getattr(model.model, "num_outputs", None))
            self._torch[kind] = model
        return self._torch[kind]

    def open(self, kind: str) -> None:
        """Read the model of that kind, as it is going to answer, now. Errors: ValueError."""
        _ = self.native(self.processor, kind) or self.pytorch(kind)

    def check_head(self, kind: str, missing: Sequence[str], outputs: int | None) -> None:
        """Refuse, by ValueError, a head of which a part was never trained, or with another number
        of outputs than the task's."""
        if kind == "PreTrainingModel":
            if any(name.startswith("mlm.") for name in missing):
                raise ValueError(
                    f"{self.folder}: this model has no masked-LM head: use a pre-trained one; this "
                    f"one can {', '.join(self.methods)}"
                )
        elif kind in TASK_KINDS:
            if missing:
                raise ValueError(
                    f"{self.folder}: the weights lack {', '.join(missing)}, without which the"
                    " head was never trained: copy the model again, or fine-tune it"
                )
            wanted = self.task_type.num_outputs(self.model_task.label_names)
            if outputs != wanted:
                raise ValueError(
                    f"{self.folder}: config.json names {wanted} labels, but the head has "
                    f"{outputs} outputs: correct id2label"
                )

    def why_not_native(self, precision: str) -> str | None:
        """The reason why our own engine cannot answer in `precision`; None: it can."""
        if not self.processor.is_cpu:
            return f"{self.processor.device} is no CPU"
        if model_kind(self.folder) == "FrozenTagger":
            return "an LSTM reads its layers"
        return why_not(self.config, precision)

    def resolve_precision_for(self, features: Features) -> None:
        """`resolve_precision` by the head's outputs for some of these rows."""
        self.resolve_precision(
            len(features), lambda own, k: self.outputs(features.of_rows(k), processor=own)
        )

    def use_precision(self, precision: str) -> None:
        """Compute in `precision`, float32, bf16 or int8, from now on.

        Errors: ValueError for int8 where our own engine cannot.
        """
        if precision == "int8" and (reason := self.why_not_native(precision)):
            raise ValueError(f"{self.folder}: `precision='int8'`: {reason}; use float32")
        self._precision_is_open = False
        self.processor = replace(self.processor, precision=precision)

    def resolve_precision(self, count: int, compute: Compute) -> None:
        """Choose the precision for good, if that is open, by some of `count` rows.

        A line on stderr says when it is not float32.
        """
        if not self._precision_is_open:
            return
        self._precision_is_open = False
        precisions = ["bf16"] if self.processor.has_bf16() else []
        precisions += [] if self.why_not_native("int8") else ["int8"]
        if trial := quickest(self.processor, count, compute, precisions):
            self.use_precision(trial.precision)
            print(
                f"{self.folder}: answers in {trial.precision}, {trial.gain:.1f}x as fast here and "
                f"{trial.deviation:.1%} off at most in a sample; float32 precision is exact",
                file=sys.stderr,
            )

    @property
    def task_type(self) -> TaskType:
        """The type of the task. Errors: as `model_task`."""
        return TASK_TYPES[self.model_task.task.task_type]

    @functools.cached_property
    def model_task(self) -> ModelTask:
        """The task of the model. Errors: ValueError for a model that was not fine-tuned."""
        return task_of_texts(self.folder)

    @functools.cached_property
    def task_kind(self) -> str:
        """The kind of the model with its head. Errors: as `model_task`."""
        frozen = model_kind(self.folder) == "FrozenTagger"
        return "FrozenTagger" if frozen else self.task_type.head

    @functools.cached_property
    def methods(self) -> tuple[str, ...]:
        """The methods of a `Predictor` that this model can do. Errors: as `model_task`."""
        kind = model_kind(self.folder)
        if kind == "PreTrainingModel" and not self.config.causal:
            return "fill", "embed", "features"
        if kind not in TASK_KINDS:
            return "embed", "features"
        name = METHODS.get(self.task_type.name, self.task_type.name)
        more = ("explain",) if self.task_type.head == "SequenceClassifier" else ()
        return name, *more, "embed", "features"
