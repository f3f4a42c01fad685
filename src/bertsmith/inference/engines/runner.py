"""A model folder's models, each read when it is first needed, and run by the engine that fits.

On a CPU that is our own engine (`native.py`), for models that it can read; PyTorch (`pytorch.py`)
runs the others and GPUs; it is imported when it is needed. ONNX Runtime and OpenVINO
(`exported.py`) run what was exported, if they are named or measure quickest.
"""

from __future__ import annotations

import copy
import functools
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from bertsmith.base.terminal import OnBatch, ignore
from bertsmith.checkpoints.config_json import TASK_KINDS, model_kind, read_config
from bertsmith.checkpoints.reading import load_tokenizer, open_tensors
from bertsmith.inference.engines import exported, native
from bertsmith.inference.engines.choice import FEWEST_ROWS, Compute, kept_choice, quickest
from bertsmith.inference.engines.exported import ExportedModel
from bertsmith.inference.engines.native import NativeModel
from bertsmith.inference.engines.processor import Processor
from bertsmith.inference.model_task import task_of_texts
from bertsmith.tasks.features import Features
from bertsmith.tasks.vectors import Pool
from bertsmith.training.finetuning.task_types import TASK_TYPES
from bertsmith.training.finetuning.task_types.base import ModelTask, TaskType

if TYPE_CHECKING:
    from bertsmith.inference.engines.pytorch import TorchModel

    EngineModel = NativeModel | TorchModel | ExportedModel  # of the same five methods

ENCODER, LANGUAGE_MODEL = "BareModel", "PreTrainingModel"
# Task type -> the method that answers as it was trained, if it has another name.
METHODS = {"multilabel": "classify", "regress": "score", "choice": "choose"}


class Runner:
    """The models of a folder, by kinds (`model_kind`). `processor` None: the runner's own.

    Errors: ValueError for an engine that cannot read this model, or has no file here.
    """

    def __init__(self, folder: Path, processor: Processor) -> None:
        self.folder = folder
        self._models: dict[tuple[str, Processor], EngineModel] = {}  # of any number of threads
        self._torch: dict[str, TorchModel] = {}
        self._opening = threading.RLock()  # held while weights are read
        self.config = read_config(folder)
        self.tokenizer = load_tokenizer(folder)
        self.asked = processor  # whose precision, if it is open, `resolve` chooses
        self._exact = self.processor = self._first_able(processor)

    def note(self, message: str) -> None:
        """Tell the user, on stderr, what was done to texts besides what was asked for."""
        print(message, file=sys.stderr)

    def with_threads(self, threads: int) -> Self:
        """The same models, computed by so many threads of our own engine."""
        twin = copy.copy(self)
        twin.processor = replace(self.processor, threads=threads)
        twin._exact = replace(self._exact, threads=threads)
        return twin

    def outputs(
        self, features: Features, on_batch: OnBatch = ignore, processor: Processor | None = None
    ) -> np.ndarray:
        """The head's outputs for rows, float32 [R, K], or [T, K] of a head over tokens."""
        return self.model(self.task_kind, processor).outputs(features, on_batch)

    def vectors(
        self,
        features: Features,
        pool: Pool,
        skip: int = 0,
        on_batch: OnBatch = ignore,
        processor: Processor | None = None,
    ) -> np.ndarray:
        """Pooled states of rows, float32 [R, H]; see `pooled` of hidden_states.py."""
        return self.model(ENCODER, processor).vectors(features, pool, skip, on_batch)

    def states_at(
        self,
        features: Features,
        places: np.ndarray,
        layers: Sequence[int],
        on_batch: OnBatch = ignore,
        processor: Processor | None = None,
    ) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
        """States of some tokens in some layers, some rows at a time; see `NativeModel`."""
        model = self.model(ENCODER, processor, layers)
        return model.states_at(features, places, layers, on_batch)

    def piece_logits(
        self, features: Features, places: np.ndarray
    ) -> Iterator[tuple[int, np.ndarray]]:
        """(A row's number, the masked-LM head's outputs float32 [P, V] at its places) for all rows
        in any order; see `NativeModel`."""
        return self.model(LANGUAGE_MODEL).piece_logits(features, places)

    def piece_log_probabilities(
        self, features: Features, places: np.ndarray, labels: np.ndarray, counts: np.ndarray
    ) -> np.ndarray:
        """The log-probabilities of `labels` int64 [N] where the model reads `places`, float32 [N].

        `places` int64 [P] are tokens in rising order; place k is asked for the next counts[k] of
        the labels. A left-to-right model's are those of the token behind the place.
        """
        model = self.model(LANGUAGE_MODEL)
        return model.piece_log_probabilities(features, places, labels, counts)

    def model(
        self,
        kind: str,
        processor: Processor | None = None,
        layers: Sequence[int] | None = None,
    ) -> EngineModel:
        """The model of that kind in the processor's engine, read now if it was not.

        Where the engine was measured for other work, and cannot do this, it is the exact one's.
        """
        for own in (processor or self.processor, self._exact):
            reason = self.why_not(own, kind, layers) if own.engine in exported.PROGRAMS else None
            if reason is None:
                break
        else:
            raise ValueError(f"{self.folder}: `engine={own.engine!r}`: {reason}")
        key = kind, replace(own, threads=0)
        with self._opening:
            if kind == ENCODER and own.engine == "bertsmith":  # one with a head has it, too
                key = next((k for k in self._models if k[1] == key[1]), key)
            if key not in self._models:
                self._models[key] = self._opened(kind, own)
            found = self._models[key]
        return replace(found, threads=own.threads) if isinstance(found, NativeModel) else found

    def _opened(self, kind: str, own: Processor) -> EngineModel:
        if own.engine == "pytorch":
            return replace(self.pytorch(kind), engine=own.of_torch())
        if own.engine == "bertsmith":
            tensors = open_tensors(self.folder, kind)
            bias = tensors.get("classifier.bias", tensors.get("span.bias"))
            self.check_head(kind, tensors.missing, None if bias is None else len(bias))
            return NativeModel.make(tensors, self.config, own.precision, own.threads)
        program = exported.PROGRAMS[own.engine]
        path = program.path(self.folder, own.precision)
        session = program.open(path, own.precision, own.threads)
        return ExportedModel(session, exported.HEADS.get(kind, "encoder"), self.config)

    def pytorch(self, kind: str) -> TorchModel:
        """The model of that kind in PyTorch, whose weights all precisions share."""
        with self._opening:
            if kind not in self._torch:
                from bertsmith.inference.engines.pytorch import TorchModel  # imports torch

                own = replace(self.processor, precision="float32")
                model = TorchModel.open(self.folder, kind, own)
                self.check_head(kind, model.missing, getattr(model.model, "num_outputs", None))
                self._torch[kind] = model
            return self._torch[kind]

    def keep_in_memory(self) -> None:
        """Copy what our own engine's models map from files, which may change."""
        for key, model in self._models.items():
            if isinstance(model, NativeModel):
                self._models[key] = model.in_memory()

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

    def why_not(
        self, own: Processor, kind: str = "", layers: Sequence[int] | None = None
    ) -> str | None:
        """The reason why an engine cannot give such a model, or these layers; None: it can."""
        if own.engine != "pytorch" and not own.is_cpu:
            return f"{own.device} is no CPU, on which alone it computes"
        if own.engine in exported.PROGRAMS:
            if layers is not None and list(layers) != [self.config.num_layers]:
                return "an exported file gives the last layer alone: `layers='last'`"
            if (kind, replace(own, threads=0)) in self._models:
                return None  # it was opened, whatever became of the files since
            return exported.why_not(self.folder, own, kind)
        if not exported.model_files(self.folder)[0]:
            return "the folder has exported files, but no weights"
        if own.engine == "pytorch":
            return None
        if model_kind(self.folder) == "FrozenTagger":
            return "an LSTM reads its layers"
        return native.why_not(self.config, own.precision)

    def _first_able(self, asked: Processor) -> Processor:
        """The first of those asked for that can read this model; a line says where it is not exact
        and nobody asked for that. Errors: ValueError if there is none."""
        reasons = []
        for own in asked.options():
            if (reason := self.why_not(own)) is None:
                if asked.precision == "auto" and own.precision != "float32":
                    how = f"answers by {own.engine} in {own.precision}"
                    print(f"{self.folder}: {how}: {reasons[0]}", file=sys.stderr)
                return own
            reasons.append(reason)
        given = {"engine": asked.engine, "precision": asked.precision}
        flags = [f"`{name}={value!r}`" for name, value in given.items() if value != "auto"]
        raise ValueError(f"{self.folder}: {', '.join(flags)}: {reasons[0]}")

    def use(self, engine: str, precision: str) -> None:
        """Compute so from now on. Errors: ValueError where that cannot be done."""
        asked = replace(self.processor, engine=engine, precision=precision)
        self._exact = self.processor = self.asked = self._first_able(asked)

    def resolve_for(self, features: Features) -> None:
        """`resolve` by the head's outputs for some of these rows."""
        self.resolve(
            len(features),
            lambda own, rows: self.outputs(features.of_rows(rows), processor=own),
            self.task_kind,
        )

    def resolve(
        self, count: int, compute: Compute, kind: str, layers: Sequence[int] | None = None
    ) -> None:
        """Choose engine and precision for good, if the precision is open, by some of `count` rows.

        `kind` and `layers` are what is asked of the model. A line on stderr says the choice.
        """
        asked, exact = self.asked, self._exact
        self.asked = replace(asked, precision=exact.precision)
        if asked.precision != "auto" or count < FEWEST_ROWS or self.why_not(exact, kind, layers):
            return
        others = [
            own
            for own in asked.options()
            if own != exact and self.why_not(own, kind, layers) is None
            # where ours can read the model PyTorch was slower
            if own.engine != "pytorch" or exact.engine == "pytorch" and own.has_bf16()
        ]
        if others:
            able = [exact, *others]
            self.processor = kept_choice(
                self.folder, able, (kind, layers), lambda: quickest(exact, count, compute, others)
            )
            # the others' weights go
            chosen = replace(self.processor, threads=0)
            self._models = {k: model for k, model in self._models.items() if k[1] == chosen}
            if self.processor.engine != "pytorch":
                self._torch.clear()

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
        vectors = () if self.config.is_frozen else ("embed", "features")
        if kind not in TASK_KINDS and not vectors:
            raise ValueError(
                f"{self.folder}: a model of the family {self.config.family} answers with a head "
                "for a task alone: train one with `bertsmith finetune`"
            )
        if kind not in TASK_KINDS:
            return vectors
        name = METHODS.get(self.task_type.name, self.task_type.name)
        more = ("explain",) if self.task_type.head == "SequenceClassifier" else ()
        return name, *more, *vectors
