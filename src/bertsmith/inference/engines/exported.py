"""Engines that others keep: ONNX Runtime and OpenVINO run what `bertsmith export` wrote.

A session takes arrays by the names of `input_names` and gives the graph's outputs in their order.
Beside each file lies a record, its name with .json: `ExportReport` of the export.
"""

# pyright: reportMissingImports=false
# the packages are extras

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from bertsmith.base.files import read_json_object
from bertsmith.base.terminal import OnBatch, ignore
from bertsmith.checkpoints.config_json import model_kind
from bertsmith.checkpoints.stored import weight_files
from bertsmith.inference.engines.processor import Processor
from bertsmith.model.config import ModelConfig
from bertsmith.tasks.features import Features, token_budget_batches
from bertsmith.tasks.vectors import Pool, picked_log_probabilities, pooled
from bertsmith.text.readers.tables import known_digest
from bertsmith.text.tokenizer.rows import concatenated_ranges

Head = Literal["encoder", "masked-lm", "sequence", "choice", "token", "span"]
Feeds = Mapping[str, np.ndarray]
Session = Callable[[Feeds], list[np.ndarray]]
HEADS: dict[str, Head] = {
    "PreTrainingModel": "masked-lm",
    "SequenceClassifier": "sequence",
    "OptionScorer": "choice",
    "TokenClassifier": "token",
    "SpanPredictor": "span",
}  # all else is a bare encoder
PER_TOKEN = ("encoder", "masked-lm", "token", "span")
BATCH_TOKENS = 1024  # with padding


def open_onnx(path: Path, precision: str, threads: int) -> Session:
    """Read a file of ONNX and make it ready to answer."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda feeds: list(session.run(None, dict(feeds)))


def open_openvino(path: Path, precision: str, threads: int) -> Session:
    """Read a file of OpenVINO's and make it ready to answer."""
    import openvino

    hint = "bf16" if precision == "bf16" else "f32"  # else bf16 wherever the processor has it
    settings = {"INFERENCE_PRECISION_HINT": hint, "INFERENCE_NUM_THREADS": threads}
    compiled = openvino.Core().compile_model(path, "CPU", settings)

    def run(feeds: Feeds) -> list[np.ndarray]:
        found = compiled(dict(feeds))
        return [found[number] for number in range(len(compiled.outputs))]

    return run


class Program(NamedTuple):
    """A program that runs exported files."""

    package: str
    files: Mapping[str, str]
    """By precision, where other programs look for them in a model folder."""
    open: Callable[[Path, str, int], Session]

    def path(self, folder: Path, precision: str) -> Path:
        return folder / self.files[precision]


OPENVINO_FILE = "openvino/openvino_model.xml"
PROGRAMS = {
    "onnx": Program(
        "onnxruntime",
        # optimum and transformers.js (dtype q8) call them so
        {"float32": "onnx/model.onnx", "int8": "onnx/model_quantized.onnx"},
        open_onnx,
    ),
    "openvino": Program(
        "openvino", dict.fromkeys(("float32", "bf16", "int8"), OPENVINO_FILE), open_openvino
    ),
}


def record_file(path: Path) -> Path:
    """The record beside an exported file."""
    return path.with_suffix(".json")


def size_of(path: Path) -> int:
    """Bytes of an exported file and of those beside it that belong to it."""
    parts = (part for part in path.parent.glob(f"{path.stem}.*") if part != record_file(path))
    return sum(part.stat().st_size for part in parts)


def model_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """(The files with a folder's weights, its exported files). Errors: ValueError for neither."""
    names = {name for program in PROGRAMS.values() for name in program.files.values()}
    exports = sorted(path for name in names if (path := folder / name).exists())
    try:
        return weight_files(folder), exports
    except ValueError:
        if not exports:
            raise
        return [], exports


def weight_digests(folder: Path) -> list[str]:
    """The SHA-256 of each file of weights; none in the folder of an export alone."""
    return list(map(known_digest, model_files(folder)[0]))


def why_not(folder: Path, own: Processor, kind: str = "") -> str | None:
    """The reason why an exported file cannot answer as a model of that kind; None: it can."""
    program = PROGRAMS[own.engine]
    path, precision = program.path(folder, own.precision), own.precision
    flags = "" if precision == "float32" else f" --{precision}"
    again = f"`bertsmith export {folder} --to {own.engine}{flags}`"
    if find_spec(program.package) is None:
        return f"{program.package} is not installed: pip install 'bertsmith[{own.engine}]'"
    if not (path.exists() and record_file(path).exists()):
        return f"{path} is not there, or has no record beside it: {again} writes it"
    try:
        record: dict[str, Any] = read_json_object(record_file(path))
    except ValueError as error:
        return f"{error}: {again} replaces it"
    if record.get("precision") != precision:
        return f"{path} holds {record.get('precision')}: {again} replaces it"
    if record.get("bytes") != size_of(path):
        return f"{path} is damaged: {again} replaces it"
    weights = weight_digests(folder)
    if weights and record.get("model_sha256") != weights:
        return f"{path} was exported from other weights: {again} replaces it"
    has = HEADS.get(model_kind(folder), "encoder")
    if kind and HEADS.get(kind, "encoder") != has:
        return f"{path} gives the outputs of its head ({has}) alone, not hidden states"
    return None


def input_names(config: ModelConfig) -> list[str]:
    """DistilBERT has no types of tokens."""
    return ["input_ids", "attention_mask", *["token_type_ids"] * (config.type_vocab_size > 0)]


def feeds(features: Features, rows: np.ndarray, head: Head, config: ModelConfig) -> Feeds:
    """Some rows as a graph reads them."""
    ids, types, lengths = features.padded(rows, config.pad_id)
    mask = np.arange(ids.shape[1]) < lengths[:, None]
    every = {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}
    found = {name: every[name].astype(np.int64) for name in input_names(config)}
    # of a choice they are examples of one option
    return {name: array[:, None] for name, array in found.items()} if head == "choice" else found


@dataclass(frozen=True)
class ExportedModel:
    """A model as a session; its methods are those of `Runner`.

    It has the outputs of its head, or the encoder's last states, whichever was exported.
    """

    session: Session
    head: Head
    config: ModelConfig

    def outputs(
        self, features: Features, on_batch: OnBatch = ignore, places: np.ndarray | None = None
    ) -> np.ndarray:
        """`places` int64 [P]: these tokens alone."""
        found, numbers = [], []
        for _, own, made in self._batches(features, on_batch):
            is_asked = slice(None) if places is None else np.isin(own, places)
            found.append(made[is_asked])
            numbers.append(own[is_asked])
        return np.concatenate(found)[np.argsort(np.concatenate(numbers))]

    def vectors(
        self, features: Features, pool: Pool, skip: int = 0, on_batch: OnBatch = ignore
    ) -> np.ndarray:
        vectors = np.empty((len(features), self.config.hidden_size), np.float32)
        for rows, _, states in self._batches(features, on_batch):
            vectors[rows] = pooled(states, features.lengths[rows], pool, skip)
        return vectors

    def states_at(
        self,
        features: Features,
        places: np.ndarray,
        layers: Sequence[int],
        on_batch: OnBatch = ignore,
    ) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
        assert list(layers) == [self.config.num_layers]
        for _, tokens, states in self._batches(features, on_batch):
            is_asked = np.isin(tokens, places)
            yield np.searchsorted(places, tokens[is_asked]), [states[is_asked]]

    def piece_logits(
        self, features: Features, places: np.ndarray
    ) -> Iterator[tuple[int, np.ndarray]]:
        edges = np.searchsorted(places, features.boundaries)
        for rows, _, logits in self._batches(features):
            ends = np.cumsum(features.lengths[rows])
            for row, end in zip(rows.tolist(), ends.tolist(), strict=True):
                own = places[edges[row] : edges[row + 1]] - features.boundaries[row + 1] + end
                yield row, logits[own]

    def piece_log_probabilities(
        self, features: Features, places: np.ndarray, labels: np.ndarray, counts: np.ndarray
    ) -> np.ndarray:
        edges = np.searchsorted(places, features.boundaries)
        firsts = np.concatenate([[0], np.cumsum(counts)])
        result = np.empty(len(labels), np.float32)
        for row, logits in self.piece_logits(features, places):
            own = slice(*firsts[edges[row : row + 2]])
            asked = counts[edges[row] : edges[row + 1]]
            result[own] = picked_log_probabilities(logits, labels[own], asked)
        return result

    def _batches(
        self, features: Features, on_batch: OnBatch = ignore
    ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """(Numbers of rows, of what the graph gives numbers for: the rows or their tokens, these
        numbers), long rows first."""
        features.check_lengths(self.config.max_positions)
        for rows in token_budget_batches(features.lengths, BATCH_TOKENS):
            batch = feeds(features, rows, self.head, self.config)
            outputs = self.session(batch)
            made = np.stack(outputs, axis=-1) if self.head == "span" else outputs[0]
            if self.head in PER_TOKEN:
                tokens = concatenated_ranges(features.boundaries[rows], features.lengths[rows])
                yield rows, tokens, made[batch["attention_mask"].astype(bool)]
            else:
                yield rows, rows, made.reshape(len(rows), -1)
            on_batch(len(rows))
