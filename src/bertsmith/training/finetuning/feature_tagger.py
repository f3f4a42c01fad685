"""The feature-based approach (paper section 5.3): BiLSTM taggers over a frozen encoder, Table 7.

The states of all layers are computed once (hidden_states.py); each row of the table then trains its
own tagger over them, through the loop that trains everything.

    OUT/run.json              the settings; another run of the same settings goes on
    OUT/states/SPLIT.npy      the states of every word in all layers, float16; may be removed
    OUT/rows/ROW/SEED/        the log of one training
    OUT/result.json table.md  what is done so far, written again after every training
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bertsmith.base.files import write_text
from bertsmith.base.terminal import Progress
from bertsmith.checkpoints.config_json import read_config
from bertsmith.checkpoints.model_folder import load_model, load_tokenizer
from bertsmith.checkpoints.run_folder import RESULT_FILE, RunFolder, describe
from bertsmith.corpus.examples.stream import Position
from bertsmith.model.heads import BareModel
from bertsmith.model.lstm import FeatureTagger
from bertsmith.tasks.features import training_batches
from bertsmith.tasks.tagging.features import IGNORED, featurise_sentences
from bertsmith.tasks.tagging.schemes import tag_scores
from bertsmith.tasks.tagging.sentences import Sentences
from bertsmith.tasks.task import Layout
from bertsmith.text.tokenizer.rows import concatenated_ranges, pad
from bertsmith.training import engine as engines
from bertsmith.training.engine import Engine
from bertsmith.training.finetuning.hidden_states import word_states
from bertsmith.training.finetuning.settings import DEEPEST, ROWS, FrozenSettings, Row
from bertsmith.training.finetuning.task_types.base import Objective, class_loss
from bertsmith.training.loop.log import RunLog
from bertsmith.training.loop.loop import train
from bertsmith.training.loop.schedule import Budget
from bertsmith.training.loop.task import LoopSettings, State, StepBatch, Training
from bertsmith.training.optimizers import build_optimizer
from bertsmith.training.replicas import computed, row_batches

WEIGHT_DECAY = 0.01
CLIP = 1.0
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


class FrozenTagging:
    """The loop's task: sentences of states in, a tag for every word out."""

    def __init__(
        self,
        model: FeatureTagger,
        data: TaggedStates,
        layers: slice,
        batch_size: int,
        seed: int,
        engine: Engine,
    ) -> None:
        self.model, self.data, self.layers = model, data, layers
        self.batch_size, self.seed, self.engine = batch_size, seed, engine
        self.batches_per_epoch = len(self._batches(0))
        self.weights = sum(parameter.numel() for parameter in model.parameters())
        self._batches = functools.lru_cache(maxsize=2)(self._batches)

    def _batches(self, epoch: int) -> list[np.ndarray]:
        return training_batches(self.data.lengths, self.batch_size, self.seed, epoch)

    def batch(self, position: Position) -> tuple[StepBatch, Position]:
        chosen = self._batches(position.epoch)[position.index]
        parts = np.array_split(chosen, min(self.engine.workers, len(chosen)))
        pieces = [self.data.batch(part, self.layers) for part in parts]
        words = int(self.data.lengths[chosen].sum())
        return StepBatch(pieces, {"words": words}, words), self.advance(position)

    def advance(self, position: Position) -> Position:
        if position.index + 1 < self.batches_per_epoch:
            return Position(position.epoch, position.index + 1)
        return Position(position.epoch + 1, 0)

    def loss(
        self, model: FeatureTagger, micro: dict[str, np.ndarray], counts: dict[str, int]
    ) -> tuple[Tensor, dict[str, Tensor | float]]:
        batch = {name: self.engine.tensor(array) for name, array in micro.items()}
        is_word = batch["labels"] != IGNORED
        logits = model(batch["states"], batch["lengths"]).float()[is_word]
        labels = batch["labels"][is_word]
        loss = class_loss(logits, labels, Objective()) / counts["words"]
        right = (logits.argmax(1) == labels).sum()
        return loss, {"right": right, "words": float(len(labels))}

    def figures(self, window: dict[str, float]) -> dict[str, float]:
        return {"accuracy": window["right"] / window["words"]}

    def operations(self, batch: StepBatch) -> float:
        return 6.0 * self.weights * batch.tokens  # each weight is used once a word

    def evaluate(self) -> dict[str, float]:
        return {}  # dev and test are measured at the end

    def classes(self, data: TaggedStates) -> np.ndarray:
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
) -> dict[str, dict[str, float]]:
    """Train one tagger on data["train"]; the scores on every other split. The log is in `folder`.

    Errors: KeyboardInterrupt when a signal asked to stop.
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
    task = FrozenTagging(
        model.to(engine.device), data["train"], row.layers, settings.batch, seed, engine
    )
    optimizer = build_optimizer(model, "adamw", settings.rate, WEIGHT_DECAY)
    steps = settings.epochs * task.batches_per_epoch
    loop_settings = LoopSettings(
        budget=Budget(steps=steps),
        rate=settings.rate,
        schedule="linear",
        warmup=0.1,
        clip=CLIP,
        seed=seed,
        checkpoint_every=steps + 1,
        evaluations=1,
        label=f"{row.title}, seed {seed}",
    )
    folder.mkdir(parents=True, exist_ok=True)
    with RunLog(folder) as log:
        if not train(Training(task, optimizer, State(), loop_settings, engine, log)):
            raise KeyboardInterrupt
        scores = {split: _scores(task, data[split], names) for split in data if split != "train"}
        log.evaluate(steps, **{f"{s}_{n}": v for s in scores for n, v in scores[s].items()})
    return scores


def _scores(task: FrozenTagging, data: TaggedStates, names: tuple[str, ...]) -> dict[str, Any]:
    sentences = data.sentences
    assert sentences.tags is not None
    predicted = sentences.tags_of(task.classes(data), names)
    return tag_scores(sentences.tags, predicted, sentences.boundaries, sentences.scheme)


KIND = "features ner"


def feature_table(
    folder: Path,
    data: dict[str, Sentences],
    rows: Sequence[str],
    seeds: Sequence[int],
    settings: FrozenSettings,
    out: Path,
    record: dict[str, Any],
    command: Sequence[str] = (),
) -> dict[str, Any]:
    """Train `rows` with all `seeds` on the encoder in `folder`; what result.json holds then.

    `data` has "train", "dev" and perhaps "test"; `record` what else decides the figures, such as
    the hashes of the files. A training that `out` has already is not done again.

    Errors: ValueError for an unknown row, a model with too few layers or positions, an `out` of
    other settings, or one that another process writes; those of `featurise_sentences` and
    `word_states`.
    """
    config = read_config(folder)
    for name in rows:
        if name not in ROWS:
            raise ValueError(f"unknown row '{name}': known are {', '.join(ROWS)}")
    if config.num_layers < DEEPEST:
        raise ValueError(f"{folder}: {config.num_layers} layers, but Table 7 reads the last four")
    if settings.max_length > config.max_positions:
        raise ValueError(
            f"--max-length {settings.max_length}: the model knows {config.max_positions} positions"
        )
    engine = engines.choose_engine(settings.device, settings.precision, settings.threads)
    run = RunFolder(out)
    wanted = {**asdict(settings), **engine.settings(), "model": str(folder), **record}
    _goes_on(run, wanted)
    with run.held():
        if not _goes_on(run, wanted):  # again: another process may have been here meanwhile
            machine = engines.machine(engine, engines.measure_peak(engine))
            run.write_settings(describe(KIND, command, wanted, machine=machine))
        return _fill(run, folder, data, rows, seeds, settings, engine)


def _fill(
    run: RunFolder,
    folder: Path,
    data: dict[str, Sentences],
    rows: Sequence[str],
    seeds: Sequence[int],
    settings: FrozenSettings,
    engine: engines.Engine,
) -> dict[str, Any]:
    """Train what is missing; what result.json holds then."""
    out = run.path
    names = data["train"].labels()[1]  # also of types that begin behind the first sentences
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
    if todo:
        states = _states(folder, data, names, settings, engine, out / "states")
    for row, seed in todo:
        started = time.monotonic()
        scores = train_row(
            ROWS[row], states, names, settings, seed, engine, out / "rows" / row / str(seed)
        )
        figures = {split: scores[split]["entity_f1"] for split in scores}
        done = result["rows"].setdefault(
            row, {"paper_dev": round(ROWS[row].paper / 100, 4), "seeds": {}}
        )
        done["seeds"][str(seed)] = {**figures, "seconds": round(time.monotonic() - started, 1)}
        run.write_result(result)
        write_text(out / "table.md", "\n".join(table(result)) + "\n")
    return result


def _goes_on(run: RunFolder, wanted: dict[str, Any]) -> bool:
    """Whether `run` is one of these settings. Errors: ValueError when it is another run."""
    if run.kind() != KIND:
        run.check_free(KIND)
        return False
    stored = run.settings()["settings"]
    for name in wanted:
        if stored.get(name) != wanted[name]:
            raise ValueError(
                f"{run.path} was made with {name} = {stored.get(name)}, not {wanted[name]}: give"
                " the same settings to go on with it, or name another --out"
            )
    return True


def _states(
    folder: Path,
    data: dict[str, Sentences],
    names: tuple[str, ...],
    settings: FrozenSettings,
    engine: engines.Engine,
    stored: Path,
) -> dict[str, TaggedStates]:
    """The splits with their states; `names` are those of the classes."""
    layout = Layout(
        max_length=settings.max_length,
        document_context=settings.document_context,
        tagged_pieces=settings.tagged_pieces,
    )
    tokenizer = load_tokenizer(folder)
    encoder = load_model(folder, BareModel).model.encoder.to(engine.device)
    found = {}
    for split, sentences in data.items():
        labels, _ = sentences.labels(names)
        features = featurise_sentences(tokenizer, sentences, None, layout)
        with Progress(f"states of {split}", total=len(features), unit="rows") as bar:
            states = word_states(
                encoder, features, stored / f"{split}.npy", engine, on_batch=bar.update
            )
        found[split] = TaggedStates(sentences, labels, states)
    return found


def table(result: dict[str, Any]) -> Iterable[str]:
    """The rows in Markdown, in the order of the paper: entity F1 in percent, mean over the seeds
    and, of several, their standard deviation."""
    splits = [split for split in result["sentences"] if split != "train"]
    yield (
        "| features | "
        + " | ".join(f"{s} F1" for s in splits)
        + " | paper, BASE, dev | seeds | s |"
    )
    yield "|---|" + "---|" * (len(splits) + 3)
    for name, row in ROWS.items():
        if name not in result["rows"]:
            continue
        seeds = list(result["rows"][name]["seeds"].values())
        cells = [_mean([100 * seed[split] for seed in seeds]) for split in splits]
        cells += [f"{row.paper:.1f}", str(len(seeds))]
        cells.append(f"{np.mean([seed['seconds'] for seed in seeds]):.0f}")
        yield f"| {row.title} | {' | '.join(cells)} |"


def _mean(values: list[float]) -> str:
    spread = f" ± {np.std(values, ddof=1):.2f}" if len(values) > 1 else ""
    return f"{np.mean(values):.2f}{spread}"
