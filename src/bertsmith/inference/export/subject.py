"""The subject of an export: a model's tensors and head, and rows on which files must answer alike.

The rows are of the data that the user names, else of the run's own dev set, else random pieces.

Sizes: R rows of T tokens, K outputs, P places of a masked-LM's rows, V pieces.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bertsmith.checkpoints.config_json import model_kind
from bertsmith.checkpoints.tensors import to_hugging_face
from bertsmith.inference.engines.exported import (
    HEADS,
    ExportedModel,
    Feeds,
    Head,
    Session,
    feeds,
)
from bertsmith.inference.engines.runner import ENCODER, LANGUAGE_MODEL
from bertsmith.inference.evaluation.labelled import find_evaluation_files
from bertsmith.inference.model_task import read_model_task, read_run
from bertsmith.inference.predictor import Predictor
from bertsmith.tasks.answer_files import read_texts
from bertsmith.tasks.features import Features
from bertsmith.tasks.vectors import text_features
from bertsmith.text.readers.tables import file_suffix, parts
from bertsmith.training.finetuning.task_types.base import DEV_RATIO, DEV_SEED

MOST_TEXTS = 256  # of a model without a task, whose outputs are the largest
MASK_EVERY = 7
RANDOM_ROWS, RANDOM_LENGTH = 32, 64


@dataclass(frozen=True)
class Subject:
    """A model, and rows for it. Of a masked-LM's rows some tokens are masked."""

    predictor: Predictor
    head: Head
    rows: Features
    source: str | None
    """The name of the data; None: pieces drawn at random, which mean nothing."""
    places: np.ndarray | None = None
    """The tokens of a masked LM at which it is asked, int64 [P]."""
    data: Any = None
    """The examples of a task that the rows are made of."""
    is_labelled: bool = False

    def tensors(self) -> dict[str, np.ndarray]:
        """The model's by their canonical names, float32."""
        state = self.predictor.pytorch(self._kind).model.state_dict()
        if self.head == "encoder":
            state = {name: own for name, own in state.items() if name.startswith("encoder.")}
        return {name: tensor.numpy() for name, tensor in to_hugging_face(state).items()}

    @property
    def _kind(self) -> str:
        known = {"encoder": ENCODER, "masked-lm": LANGUAGE_MODEL}
        return known.get(self.head) or self.predictor.task_kind

    def original(self, rows: Features | None = None) -> np.ndarray:
        """The model's own outputs in float32: [R, K]; of tokens [T, K]; of a masked LM [P, V]."""
        if self.head == "masked-lm":
            return self.outputs(self._language_model, rows)
        rows = rows or self.rows
        if self.head != "encoder":
            return self.predictor.outputs(rows)
        every, last = np.arange(len(rows.ids)), self.predictor.config.num_layers
        found = np.empty((len(every), self.predictor.config.hidden_size), np.float32)
        for tokens, states in self.predictor.states_at(rows, every, [last]):
            found[tokens] = states[0]
        return found

    def outputs(self, session: Session, rows: Features | None = None) -> np.ndarray:
        """The same of exported files."""
        model = ExportedModel(session, self.head, self.predictor.config)
        return model.outputs(rows or self.rows, places=self.places)

    def feeds(self, rows: Features) -> list[Feeds]:
        """The inputs of the graph, each row by itself."""
        config = self.predictor.config
        return [feeds(rows, number, self.head, config) for number in np.arange(len(rows))[:, None]]

    def some_rows(self, most: int) -> Features:
        """Rows from all over the data."""
        count = len(self.rows)
        return self.rows.of_rows(np.unique(np.linspace(0, count - 1, min(most, count)).astype(int)))

    def _language_model(self, feeds: Feeds) -> list[np.ndarray]:
        model = self.predictor.pytorch(LANGUAGE_MODEL).model
        ids, lengths = torch.from_numpy(feeds["input_ids"]), feeds["attention_mask"].sum(axis=1)
        types = torch.from_numpy(feeds.get("token_type_ids", np.zeros_like(feeds["input_ids"])))
        with torch.inference_mode():
            hidden = model.encoder(ids, types, torch.from_numpy(lengths))
            return [model.mlm(hidden, model.shared_table()).numpy()]


def find_subject(predictor: Predictor, dev: Path | None) -> Subject:
    """The model of a predictor in float32 on a CPU, with rows of `dev`, or else as said above.

    Errors: ValueError for a model that has no graph here, or data that cannot be read.
    """
    kind, config = model_kind(predictor.folder), predictor.config
    if kind == "FrozenTagger" or config.bilstm:
        raise ValueError(f"{predictor.folder}: an LSTM reads its layers: that is not exported")
    if config.directions == 2:
        raise ValueError(f"{predictor.folder}: it reads in two directions: that is not exported")
    if name := {"gpt": "a GPT", "elmo": "an ELMo"}.get(config.family):
        raise ValueError(f"{predictor.folder}: {name} is not exported: PyTorch answers")
    head = HEADS.get(kind, "encoder")
    if head in ("encoder", "masked-lm"):
        return _with_texts(predictor, head, dev)
    return _with_task(predictor, head, dev)


def _with_texts(predictor: Predictor, head: Head, dev: Path | None) -> Subject:
    if dev is None:
        rows, source = _random_rows(predictor), None
    else:
        texts = [text for _, text in read_texts(dev) if text.strip()][:MOST_TEXTS]
        length = min(predictor.config.max_positions, 512)
        rows, source = text_features(predictor.tokenizer, texts, length), str(dev)
    if head == "encoder":
        return Subject(predictor, head, rows, source)
    inner = np.ones(len(rows.ids), bool)
    inner[rows.boundaries[:-1]] = inner[rows.boundaries[1:] - 1] = False  # [CLS], [SEP]
    places = np.flatnonzero(inner)[::MASK_EVERY]
    if not predictor.config.causal:
        ids = rows.ids.copy()
        ids[places] = predictor.tokenizer.vocabulary.mask_id
        rows = replace(rows, ids=ids)
    return Subject(predictor, head, rows, source, places)


def _with_task(predictor: Predictor, head: Head, dev: Path | None) -> Subject:
    task_type, found = predictor.task_type, None
    model_task = predictor.model_task
    if dev is not None:
        model_task = predictor.model_task = read_model_task(predictor.folder)
        task, names = model_task.task, model_task.label_names
        path = next(iter(find_evaluation_files(task_type, task, dev).values()))
        is_text = file_suffix(path) == ".txt" and head != "token"
        is_labelled = not is_text and task_type.is_labelled(path, task)
        data = (
            task_type.read(path, task, names)
            if is_labelled
            else task_type.read_input(str(path), model_task)
        )
        found = str(path), data, is_labelled
    elif own := _own_dev(predictor):
        found = *own, True
    if found is None:
        return Subject(predictor, head, _random_rows(predictor), None)
    source, data, is_labelled = found
    rows = task_type.featurize(predictor.tokenizer, data, model_task)
    return Subject(predictor, head, rows, source, None, data, is_labelled)


def _own_dev(predictor: Predictor) -> tuple[str, Any] | None:
    """The dev set of a run by its run.json, if its files are still there, and its name."""
    settings = read_run(predictor.folder).get("settings", {})
    task_type, model_task = predictor.task_type, predictor.model_task
    skips = bool(settings.get("skip_unlabelled"))
    task, names = replace(model_task.task, skip_unlabelled=skips), model_task.label_names
    train, dev = (Path(str(settings.get(name, ""))) for name in ("data", "dev"))
    if parts(dev):
        return str(dev), task_type.read(dev, task, names)
    if str(settings.get("dev", "")).endswith("of train") and parts(train):
        data = task_type.read(train, task, names)
        return f"{settings['dev']}, {train}", task_type.split_dev(data, DEV_RATIO, DEV_SEED)[1]
    return None


def _random_rows(predictor: Predictor) -> Features:
    draw = np.random.default_rng(0)
    most = min(RANDOM_LENGTH, predictor.config.max_positions)
    lengths = draw.integers(3, most, size=RANDOM_ROWS, endpoint=True)
    ids = draw.integers(0, len(predictor.tokenizer.vocabulary), size=lengths.sum(), dtype=np.int32)
    boundaries = np.concatenate([[0], np.cumsum(lengths)])
    return Features(ids, np.zeros_like(ids), boundaries, None, most, 0)
