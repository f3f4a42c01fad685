"""A model folder's models, each read when it is first needed, and run by the engine that fits.

On a CPU that is our own engine (`native.py`) in float32 and int8, for models that it can read;
PyTorch runs the others, bf16, and GPUs.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from bertsmith.checkpoints.config_json import read_config
from bertsmith.checkpoints.model_folder import load_model, load_tokenizer, model_class
from bertsmith.inference.engines.native import NativeModel, why_not
from bertsmith.inference.engines.precision import Compute, quickest
from bertsmith.inference.model_task import task_of_texts
from bertsmith.model.encoder import Encoder
from bertsmith.model.heads import BareModel, TaskModel
from bertsmith.model.initialization import Module
from bertsmith.model.lstm import FrozenTagger
from bertsmith.tasks.features import Features
from bertsmith.training.engine import Engine, has_bf16
from bertsmith.training.finetuning.hidden_states import (
    Pool,
    head_outputs,
    sentence_vectors,
    states_at,
)
from bertsmith.training.finetuning.task_types import TASK_TYPES
from bertsmith.training.finetuning.task_types.base import ModelTask, TaskType

BATCH_TOKENS = 4096  # of states of all layers
OnBatch = Callable[[int], None] | None
"""It is given the number of rows in each batch that is done."""


class Runner:
    """The models of a folder. Arguments `engine` None: the runner's own."""

    def __init__(self, folder: Path, engine: Engine, precision_is_open: bool = False) -> None:
        self.folder = folder
        self.engine = engine
        self._precision_is_open = precision_is_open
        self._native: dict[tuple[str, str], NativeModel] = {}
        self.config = read_config(folder)
        self.tokenizer = load_tokenizer(folder)

    def outputs(
        self, features: Features, on_batch: OnBatch = None, engine: Engine | None = None
    ) -> np.ndarray:
        """The head's outputs for rows, float32; see `head_outputs`."""
        engine = engine or self.engine
        if native := self.native(engine, "task_model"):
            return native.run(features, native.outputs, on_batch)
        pad_id = self.tokenizer.vocabulary.pad_id
        return head_outputs(self.task_model, features, pad_id, engine, on_batch=on_batch)

    def vectors(
        self,
        features: Features,
        pool: Pool,
        skip: int = 0,
        on_batch: OnBatch = None,
        engine: Engine | None = None,
    ) -> np.ndarray:
        """Pooled states of rows, float32 [R, H]; see `sentence_vectors`."""
        engine = engine or self.engine
        if native := self.native(engine, "encoder"):
            return native.run(features, lambda rows: native.pooled(rows, pool, skip), on_batch)
        return sentence_vectors(self.encoder, features, engine, pool, on_batch, skip)

    def states_at(
        self,
        features: Features,
        places: np.ndarray,
        layers: Sequence[int],
        on_batch: OnBatch = None,
        engine: Engine | None = None,
    ) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
        """States of some tokens in some layers, some rows at a time; see `states_at`."""
        engine = engine or self.engine
        if native := self.native(engine, "encoder"):
            yield from native.states_at(features, places, layers, on_batch)
            return
        batches = states_at(self.encoder, features, places, layers, engine, BATCH_TOKENS, on_batch)
        for taken, states in batches:
            yield taken, [layer.cpu().numpy() for layer in states]

    def native(self, engine: Engine, name: str) -> NativeModel | None:
        """The model of that property in our own engine; None where PyTorch is to answer."""
        if self.why_not_native(engine.precision):
            return None
        key = name, engine.precision
        if key not in self._native:
            prefix = "encoder." if name == "encoder" else ""
            state = getattr(self, name).state_dict()
            tensors = {prefix + own: tensor.float().numpy() for own, tensor in state.items()}
            self._native[key] = NativeModel.make(
                tensors, self.config, engine.precision, engine.threads
            )
        return self._native[key]

    def why_not_native(self, precision: str) -> str | None:
        """The reason why our own engine cannot answer in `precision`; None: it can."""
        if self.engine.device.type != "cpu":
            return f"{self.engine.device} is no CPU"
        if model_class(self.folder) is FrozenTagger:
            return "an LSTM reads its layers"
        return why_not(self.config, precision)

    def resolve_precision_for(self, features: Features) -> None:
        """`resolve_precision` by the head's outputs for some of these rows."""
        self.resolve_precision(
            len(features), lambda engine, k: self.outputs(features.of_rows(k), engine=engine)
        )

    def use_precision(self, precision: str) -> None:
        """Compute in `precision`, float32, bf16 or int8, from now on.

        Errors: ValueError for int8 where our own engine cannot.
        """
        if precision == "int8" and (reason := self.why_not_native(precision)):
            raise ValueError(f"{self.folder}: `precision='int8'`: {reason}; use float32")
        self._precision_is_open = False
        self.engine = replace(self.engine, precision=precision)

    def resolve_precision(self, count: int, compute: Compute) -> None:
        """Choose the precision for good, if that is open, by some of `count` rows.

        A line on stderr says when it is not float32.
        """
        if not self._precision_is_open:
            return
        self._precision_is_open = False
        precisions = ["bf16"] if has_bf16(self.engine.device) else []
        precisions += [] if self.why_not_native("int8") else ["int8"]
        if trial := quickest(self.engine, count, compute, precisions):
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
    def task_model(self) -> TaskModel:
        """The model with its head. Errors: ValueError when a part of that was never trained."""
        frozen = model_class(self.folder) is FrozenTagger
        loaded = load_model(self.folder, FrozenTagger if frozen else self.task_type.head)
        if loaded.missing:
            raise ValueError(
                f"{self.folder}: the weights lack {', '.join(loaded.missing)}, without which the"
                " head was never trained: copy the model again, or fine-tune it"
            )
        model = self.ready(loaded.model)
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
        return self.ready(load_model(self.folder, BareModel).model).encoder

    def ready(self, model: Module) -> Module:
        """The model on the engine's device, without dropout."""
        return model.to(self.engine.device).eval()
