"""The feature-based approach (paper section 5.3): BiLSTM taggers over a frozen encoder, Table 7.

The states of all layers are computed once (hidden_states.py); each row of the table then trains its
own tagger over them, through the loop that trains everything.

    OUT/run.json              the settings; another run of the same settings resumes this one
    OUT/states/SPLIT.npy      the states of every word in all layers, float16; may be removed
    OUT/rows/ROW/SEED/        the log of one training
    OUT/result.json table.md  the results so far, written again after every training
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bertsmith.base.files import write_text
from bertsmith.base.terminal import Progress
from bertsmith.checkpoints.config_json import read_config
from bertsmith.checkpoints.model_folder import load_model
from bertsmith.checkpoints.reading import load_tokenizer
from bertsmith.checkpoints.run_folder import RESULT_FILE, RunFolder, describe
from bertsmith.checkpoints.stored import weight_files
from bertsmith.corpus.examples.stream import Position
from bertsmith.model.heads import BareModel
from bertsmith.model.recurrent import FeatureTagger
from bertsmith.tasks.tagging.features import IGNORED, featurize_sentences
from bertsmith.tasks.tagging.schemes import tag_scores
from bertsmith.tasks.tagging.sentences import Sentences
from bertsmith.tasks.task import EncodingSettings
from bertsmith.text.readers.tables import digest
from bertsmith.text.tokenizer.rows import concatenated_ranges, pad
from bertsmith.training import engine as engines
from bertsmith.training.engine import Engine
from bertsmith.training.finetuning.fit import Batches, fit
from bertsmith.training.finetuning.hidden_states import word_states
from bertsmith.training.finetuning.settings import (
    DEEPEST,
    ROWS,
    UNKNOWN,
    FrozenSettings,
    Provenance,
    Row,
)
from bertsmith.training.finetuning.task_types.losses import Objective, class_loss
from bertsmith.training.loop.schedule import Budget
from bertsmith.training.loop.task import LoopSettings, StepBatch
from bertsmith.training.optimizers import build_optimizer
from bertsmith.training.replicas import computed, row_batches

KIND = "features ner"
# of the settings of a run that goes on; files may have moved: what is in them is compared by
# `model_sha256` and `data_sha256`
FREE = "device", "threads", "model", "data", "dev"
WEIGHT_DECAY, MAX_GRAD_NORM, WARMUP = 0.01, 1.0, 0.1
BUDGET_WORDS = 4096  # of a batch of evaluation


@dataclass(frozen=True)
class TaggedStates:
    """Sentences with the states of their W words."""

    sentences: Sentences
    labels: np.ndarray  # int64 [W]
    states: np.ndarray  # float16 [L + 1, W, H]

    @property
    def lengths(self) -> np.ndarray:
        """Words of each sentence, int64 [N]."""
        return np.diff(self.sentences.boundaries)

    def batch(self, chosen: np.ndarray, layers: slice) -> dict[str, np.ndarray]:
        """States float16 [B, S, layers, H], labels int64 [B, S] and lengths int64 [B]."""
        lengths, boundaries = self.lengths[chosen], self.sentences.boundaries
        width = int(lengths.max())
        words = concatenated_ranges(boundaries[chosen], lengths)
        selected = self.states[layers]
        states = np.zeros((len(chosen), width, len(selected), selected.shape[2]), np.float16)
        states[np.arange(width) < lengths[:, None]] = selected[:, words].transpose(1, 0, 2)
        labels = pad(self.labels, boundaries, chosen, width, IGNORED)
        return {"states": states, "labels": labels, "lengths": lengths}


@dataclass(eq=False)
class FrozenTagging:
    """The loop's task: sentences of states in, a tag for every word out."""

    model: FeatureTagger
    data: dict[str, TaggedStates]
    """Trained on "train", measured on every other split."""
    names: tuple[str, ...]
    """The classes."""
    layers: slice
    batches: Batches
    engine: Engine

    def __post_init__(self) -> None:
        self.num_weights = sum(parameter.numel() for parameter in self.model.parameters())

    def advance(self, position: Position) -> Position:
        return self.batches.advance(position)

    def batch(self, position: Position) -> tuple[StepBatch, Position]:
        train, chosen = self.data["train"], self.batches[position]
        parts = np.array_split(chosen, min(self.engine.workers, len(chosen)))
        micro_batches = [train.batch(part, self.layers) for part in parts]
        words = int(train.lengths[chosen].sum())
        return StepBatch(micro_batches, {"words": words}, words), self.advance(position)

    def loss(
        self, model: FeatureTagger, micro: dict[str, np.ndarray], counts: dict[str, int]
    ) -> tuple[Tensor, dict[str, Tensor | float]]:
        batch = {name: self.engine.tensor(array) for name, array in micro.items()}
        is_word = batch["labels"] != IGNORED
        logits = model(batch["states"], batch["lengths"]).float()[is_word]
        labels = batch["labels"][is_word]
        loss = class_loss(logits, labels, Objective()) / counts["words"]
        correct = (logits.argmax(1) == labels).sum()
        return loss, {"right": correct, "words": float(len(labels))}

    def metrics(self, window: dict[str, float]) -> dict[str, float]:
        return {"accuracy": window["right"] / window["words"]}

    def flops(self, batch: StepBatch) -> float:
        return 6.0 * self.num_weights * batch.tokens  # each weight is used once a word

    def evaluate(self) -> dict[str, float]:
        """The scores on every split but "train", each with the split's name before it."""
        found = {}
        for split in [split for split in self.data if split != "train"]:
            gold = self.data[split].sentences
            assert gold.tags is not None
            predicted = gold.sentence_tags(self._classes(self.data[split]), self.names)
            scores = tag_scores(gold.tags, predicted, gold.boundaries, gold.scheme)
            found |= {f"{split}_{name}": score for name, score in scores.items()}
        return found

    def _classes(self, data: TaggedStates) -> np.ndarray:
        """The most probable class of every word, int64 [W]."""
        self.model.eval()
        result = np.empty(len(data.labels), np.int64)

        def best_of(chosen: np.ndarray) -> np.ndarray:
            batch = data.batch(chosen, self.layers)
            states, lengths = (self.engine.tensor(batch[name]) for name in ("states", "lengths"))
            best = self.model(states, lengths).argmax(2).cpu().numpy()
            return best[batch["labels"] != IGNORED]

        batches = row_batches(self.engine, data.lengths, BUDGET_WORDS)
        for chosen, best in zip(batches, computed(self.engine, best_of, batches), strict=True):
            words = concatenated_ranges(data.sentences.boundaries[chosen], data.lengths[chosen])
            result[words] = best
        return result


def train_row(
    row: Row,
    data: dict[str, TaggedStates],
    names: tuple[str, ...],
    settings: FrozenSettings,
    seed: int,
    engine: Engine,
    folder: Path,
) -> dict[str, float]:
    """Train one tagger on data["train"]: its scores on every other split. The log is in `folder`.

    Errors: as `fit`.
    """
    states = data["train"].states
    model = FeatureTagger(
        size=states.shape[2],
        num_read=len(states[row.layers]),
        mixed=row.mixed,
        num_outputs=len(names),
        hidden_size=settings.hidden_size,
        dropout=settings.dropout,
    ).initialize(torch.Generator().manual_seed(seed))
    batches = Batches(data["train"].lengths, settings.batch_size, seed)
    task = FrozenTagging(model.to(engine.device), data, names, row.layers, batches, engine)
    optimizer = build_optimizer(model, "adamw", settings.learning_rate, WEIGHT_DECAY)
    loop = LoopSettings(
        budget=Budget(steps=settings.epochs * batches.per_epoch),
        learning_rate=settings.learning_rate,
        schedule="linear",
        warmup_ratio=WARMUP,
        max_grad_norm=MAX_GRAD_NORM,
        seed=seed,
        num_evals=1,
        label=f"{row.title}, seed {seed}",
        describe=lambda scores: ", ".join(
            f"{name} {scores[name]:.4f}" for name in scores if name.endswith("entity_f1")
        ),
    )
    return fit(task, optimizer, loop, engine, folder)


def check_depth(model: str, num_layers: int) -> None:
    """Errors: ValueError for fewer layers than the rows read."""
    if num_layers < DEEPEST:
        raise ValueError(
            f"{model}: Table 7 reads {DEEPEST} layers, and it has {num_layers}: take a deeper model"
        )


def feature_table(
    folder: Path,
    data: dict[str, Sentences],
    rows: Sequence[str],
    seeds: Sequence[int],
    settings: FrozenSettings,
    out: Path,
    provenance: Provenance = UNKNOWN,
) -> dict[str, Any]:
    """Train `rows` with all `seeds` on the encoder in `folder`: the content of result.json.

    `data` has "train", "dev" and perhaps "test". Trainings that `out` has already are not repeated.

    Errors: ValueError for an unknown row, a model with too few layers or positions, an `out` of
    other settings, or one that another process writes; those of `featurize_sentences` and
    `word_states`.
    """
    config = read_config(folder)
    for name in rows:
        if name not in ROWS:
            raise ValueError(f"unknown row '{name}': known are {', '.join(ROWS)}")
    check_depth(str(folder), config.num_layers)
    length, positions = settings.max_length, config.max_positions
    if not 3 <= length <= positions:
        raise ValueError(f"`max_length={length}`: the model reads 3 to {positions} tokens")
    engine = engines.choose_engine(settings.device, settings.precision, settings.threads)
    run = RunFolder(out)
    described = asdict(settings) | engine.settings() | {"model": str(folder), **provenance.data}
    described["model_sha256"] = [digest(path) for path in weight_files(folder)]
    run.is_begun(KIND, described, FREE)
    with run.locked():
        # again: another process may have been here meanwhile
        if not run.is_begun(KIND, described, FREE):
            machine = engines.machine(engine, engines.measure_peak(engine))
            run.write_settings(describe(KIND, provenance.command, described, machine=machine))
        return _fill(run, folder, data, rows, seeds, settings, engine)


def _fill(
    run: RunFolder,
    folder: Path,
    data: dict[str, Sentences],
    rows: Sequence[str],
    seeds: Sequence[int],
    settings: FrozenSettings,
    engine: Engine,
) -> dict[str, Any]:
    """Train what is missing: the content of result.json."""
    out = run.path
    names = data["train"].labels()[1]  # also of types that begin after the first sentences
    if settings.sentences:
        first = np.arange(min(settings.sentences, len(data["train"])))
        data = {**data, "train": data["train"].select(first)}
    result: dict[str, Any] = {"rows": {}, "sentences": {s: len(d) for s, d in data.items()}}
    if (out / RESULT_FILE).exists():
        result = run.result()
    todo = [
        (row, seed)
        for row in rows
        for seed in seeds
        if str(seed) not in result["rows"].get(row, {"seeds": {}})["seeds"]
    ]
    states = _states(folder, data, names, settings, engine, out / "states") if todo else {}
    for row, seed in todo:
        started, log = time.monotonic(), out / "rows" / row / str(seed)
        scores = train_row(ROWS[row], states, names, settings, seed, engine, log)
        seconds = round(time.monotonic() - started, 1)
        f1 = {split: scores[f"{split}_entity_f1"] for split in data if split != "train"}
        new = {"paper_dev": round(ROWS[row].paper / 100, 4), "seeds": {}}
        done = result["rows"].setdefault(row, new)
        done["seeds"][str(seed)] = {**f1, "seconds": seconds}
        run.write_result(result)
        write_text(out / "table.md", "\n".join(table(result)) + "\n")
    return result


def _states(
    folder: Path,
    data: dict[str, Sentences],
    names: tuple[str, ...],
    settings: FrozenSettings,
    engine: Engine,
    stored: Path,
) -> dict[str, TaggedStates]:
    """The splits with their states; `names` are those of the classes."""
    encoding = EncodingSettings(
        max_length=settings.max_length,
        document_context=settings.document_context,
        tokens_per_window=settings.tokens_per_window,
    )
    tokenizer = load_tokenizer(folder)
    encoder = load_model(folder, BareModel).model.encoder.to(engine.device)
    found = {}
    for split, sentences in data.items():
        labels, _ = sentences.labels(names)
        features = featurize_sentences(tokenizer, sentences, None, encoding)
        with Progress(f"states of {split}", total=len(features), unit="rows") as bar:
            path = stored / f"{split}.npy"
            states = word_states(encoder, features, path, engine, on_batch=bar.update)
        found[split] = TaggedStates(sentences, labels, states)
    return found


def table(result: dict[str, Any]) -> Iterator[str]:
    """The table as lines of Markdown, in the order of the paper.

    Entity F1 in percent: mean over the seeds and, of several, their standard deviation.
    """
    splits = [split for split in result["sentences"] if split != "train"]
    heads = " | ".join(f"{split} F1" for split in splits)
    yield f"| features | {heads} | paper, BASE, dev | seeds | s |"
    yield "|---|" + "---|" * (len(splits) + 3)
    for name in [name for name in ROWS if name in result["rows"]]:
        row, seeds = ROWS[name], list(result["rows"][name]["seeds"].values())
        cells = []
        for split in splits:
            f1 = [100 * seed[split] for seed in seeds]
            std = f" ± {np.std(f1, ddof=1):.2f}" if len(f1) > 1 else ""
            cells.append(f"{np.mean(f1):.2f}{std}")
        seconds = np.mean([seed["seconds"] for seed in seeds])
        cells += [f"{row.paper:.1f}", str(len(seeds)), f"{seconds:.0f}"]
        yield f"| {row.title} | {' | '.join(cells)} |"
