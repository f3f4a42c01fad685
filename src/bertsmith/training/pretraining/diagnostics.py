"""Warnings about a run's corpus and losses; `replay` of a batch that was not finite.

The paper's procedure makes three kinds of bad pairs: a random B from A's own document (after ten
tries, where documents are few); one that begins with the sentence which follows A (where sentences
repeat); and a true B that no longer touches A, as tokens at the seam were dropped to fit the row.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bertsmith.base.files import read_json
from bertsmith.base.jit import compiled
from bertsmith.base.settings import from_mapping
from bertsmith.checkpoints.run_folder import STATE_FILE, RunFolder
from bertsmith.corpus.examples.mixture import Corpus, Mixture, Sources
from bertsmith.corpus.examples.pairs import EpochPairs
from bertsmith.corpus.examples.rng import random_bits
from bertsmith.corpus.examples.stream import Position, PretrainingStream
from bertsmith.corpus.store.store import Section
from bertsmith.model.heads import PreTrainingModel
from bertsmith.model.kernels.elementwise import seed_dropout
from bertsmith.tasks.metrics import count_entropy
from bertsmith.training.engine import choose_engine
from bertsmith.training.loop.log import RunLog, plain
from bertsmith.training.loop.step import step_seed
from bertsmith.training.loop.task import TrainingState
from bertsmith.training.pretraining.resume import open_run_corpus, resumed_settings
from bertsmith.training.pretraining.settings import PretrainSettings, Recipe, make_recipe
from bertsmith.training.pretraining.task import Pretraining, pretraining_tasks, start_model

MAX_TOKENS = 1 << 24  # 32 MiB of ids are verified, hashed and sorted in a quarter of a second


def corpus_health(stream: PretrainingStream, rows: int = 4096) -> dict[str, float]:
    """Fractions of repeated text, and of wrong labels where there are next-sentence labels.

    duplicate_sentences   sentences that occurred before
    duplicate_tokens      tokens in such sentences: short ones repeat in any text
    nsp_...               see `label_noise`

    Bounded in time (some 0.3 s) and memory, whatever the size of the store.
    """
    health = duplicate_shares(stream.epoch(0).section)
    if stream.settings.objective == "mlm+nsp":
        health |= label_noise(stream, rows)
    return health


def label_noise(stream: PretrainingStream, rows: int, epoch: int = 0) -> dict[str, float]:
    """Bad pairs among `rows` of an epoch, spread evenly over the text.

    nsp_own_document   random Bs from A's own document
    nsp_true_next      random Bs whose first sentence equals the one that follows A
    nsp_cut_seam       true Bs that do not touch A
    nsp_label_noise    pairs with any of these faults
    """
    pairs = stream.epoch(epoch)
    assert isinstance(pairs, EpochPairs)
    numbers = np.linspace(0, len(pairs) - 1, min(rows, len(pairs))).astype(np.int64)
    segments = pairs.segments(numbers)
    is_random = segments["label"] == 1
    own = is_random & (segments["b_document"] == segments["a_document"])
    true_next = pairs.begins_like_the_true_one(segments)
    pairs.fit(segments)
    cut = ~is_random & (segments["a_stop"] != segments["b_start"])

    def fraction(faults: np.ndarray, of: np.ndarray) -> float:
        return float(faults.sum() / max(1, of.sum()))

    return {
        "nsp_own_document": fraction(own, is_random),
        "nsp_true_next": fraction(true_next, is_random),
        "nsp_cut_seam": fraction(cut, ~is_random),
        "nsp_label_noise": fraction(own | true_next | cut, np.ones_like(is_random)),
    }


def duplicate_shares(section: Section, max_tokens: int = MAX_TOKENS) -> dict[str, float]:
    """Repeated sentences and their tokens at the beginning of every shard, `max_tokens` in all.

    Lower bounds, where the text is longer.
    """
    a_shard = max_tokens // len(section.shards)
    hashes, lengths = [], []
    for shard in section.shards:
        count = int(np.searchsorted(shard.sentences, a_shard, side="right")) - 1
        bounds = shard.sentences[: count + 1]
        hashes.append(hash_sentences(shard.tokens.read(0, int(bounds[-1])), bounds))
        lengths.append(np.diff(bounds))
    all_lengths = np.concatenate(lengths)
    _, first = np.unique(np.concatenate(hashes), return_index=True)
    return {
        "duplicate_sentences": 1 - len(first) / max(1, len(all_lengths)),
        "duplicate_tokens": 1 - int(all_lengths[first].sum()) / max(1, int(all_lengths.sum())),
    }


@compiled
def hash_sentences(tokens, bounds):
    """uint64 [S] of tokens[bounds[s]:bounds[s + 1]]."""
    hashes = np.empty(len(bounds) - 1, np.uint64)
    for sentence in range(len(hashes)):
        value = np.uint64(0)
        for index in range(bounds[sentence], bounds[sentence + 1]):
            value = random_bits(value, tokens[index])
        hashes[sentence] = value
    return hashes


def mixture_line(corpus: Mixture, settings: PretrainSettings) -> str:
    """The stores of a mixture, and how often a budget in steps or tokens reads each."""
    tokens = budget_tokens(settings)
    parts = []
    for store, share in zip(corpus.stores, corpus.weights, strict=True):
        size = store.train.num_tokens
        times = f", read {tokens * share / size:.2g} times" if tokens else ""
        parts.append(f"{store.folder} {share:.1%} of the rows ({size:,} tokens{times})")
    return "mixture: " + "; ".join(parts)


def budget_tokens(settings: PretrainSettings) -> float | None:
    """Tokens of full rows in the budget; None for a budget in minutes.

    >>> budget_tokens(PretrainSettings(steps=100, batch_size=32, max_length=128))
    409600.0
    """
    if settings.tokens is not None:
        return float(settings.tokens)
    if settings.steps is None:
        return None
    tokens, started = 0.0, 0.0
    for phase in settings.phases():
        tokens += (phase.until - started) * settings.steps * phase.batch * phase.length
        started = phase.until
    return tokens


class RepeatWatch:
    """Logs when a store has been read completely: the first time, and whenever the number of times
    has doubled since `position`."""

    def __init__(self, corpus: Corpus, position: Position, log: RunLog) -> None:
        self._names = [str(store.folder) for store in corpus.stores]
        self._log, self._logged = log, self._epochs(position)

    def __call__(self, position: Position) -> None:
        for number, epoch in enumerate(self._epochs(position)):
            if epoch < self._logged[number]:  # another phase, which reads the text in its own order
                self._logged[number] = 0
            if epoch.bit_length() > self._logged[number].bit_length():
                times = "once" if epoch == 1 else f"{epoch} times"
                text = f"{self._names[number]}: read {times}, its rows begin again in another order"
                self._log.message(text)
                if len(self._names) > 1:
                    print(text, file=sys.stderr)
            self._logged[number] = epoch

    def _epochs(self, position: Position) -> list[int]:
        return [part.epoch for part in position.parts or [position] * len(self._names)]


# Nats. Models that knew counts alone ended within 0.03 of the unigram entropy (docs/design/lab.md),
# and a line of the log, ten steps of a hundred masks each, is exact to about 0.1.
NEAR_ENTROPY = 0.1
LOOK_AFTER = 0.25  # of the budget: before it a run of a minute sits there, and ends well
MANY_DUPLICATES = 0.1  # of the tokens; short sentences repeat in any text
MANY_WRONG_LABELS = 0.05  # of the random Bs: a model cannot get them right


def warn(text: str, log: RunLog) -> None:
    log.message(text)
    print(f"warning: {text}", file=sys.stderr)


def explain_losses(counts: np.ndarray) -> None:
    """Explain losses on stderr, before the first; `counts` of the pieces in the training text."""
    blind, entropy = math.log(len(counts)), count_entropy(counts)
    print(
        f"losses are in nats a token, less is better; a guess among {len(counts):,} pieces has "
        f"{blind:.2f}\nknowing only their counts has {entropy:.2f}, the unigram entropy of the "
        "training text",
        file=sys.stderr,
    )


class EntropyWatch:
    """Warns once when the training loss sits at the corpus' unigram entropy after warm-up, from a
    quarter of the budget on."""

    def __init__(self, store: Corpus, name: str, warmup: float, log: RunLog) -> None:
        self._entropy, self._log = count_entropy(store.unigram_counts), log
        self._name, self._from = name, max(warmup, LOOK_AFTER)
        self._warned = False

    def __call__(self, done: float, figures: dict[str, float]) -> None:
        loss = figures[f"{self._name}_loss"]
        near = abs(loss - self._entropy) <= NEAR_ENTROPY
        if self._warned or done < self._from or not near:
            return
        self._warned = True
        warn(
            f"after {done:.0%} of the budget the training {self._name.upper()} loss {loss:.2f} "
            f"still sits at the corpus' unigram entropy {self._entropy:.2f}: so far only "
            "frequencies were learned; a longer budget or another learning rate may be needed",
            self._log,
        )


def check_result(figures: dict[str, float], name: str, log: RunLog) -> None:
    """Warn of a held-out loss that is no better than the unigram entropy."""
    loss, entropy = figures[f"{name}_loss"], figures["unigram_entropy"]
    if loss < entropy - NEAR_ENTROPY:
        return
    if loss <= entropy + NEAR_ENTROPY:
        where, meaning = "at", "so far only frequencies were learned; train longer"
    else:
        where = "above"
        meaning = "worse than guessing by frequencies; train longer, or with another learning rate"
    text = f"held-out {name.upper()} loss {loss:.2f} is {where} the unigram entropy {entropy:.2f}"
    warn(f"{text}: {meaning}", log)


def check_corpus(stream: PretrainingStream, log: RunLog) -> dict[str, float]:
    """Log the fractions of `corpus_health`, and warn of high ones."""
    health = corpus_health(stream)
    listed = ", ".join(f"{name.replace('_', ' ')} {x:.1%}" for name, x in health.items())
    log.message(f"corpus: {listed}")
    if (duplicates := health["duplicate_tokens"]) > MANY_DUPLICATES:
        warn(
            f"{duplicates:.0%} of the tokens are in sentences that stood before: a model learns "
            "them by heart; remove copies and boilerplate from the text",
            log,
        )
    wrong = health.get("nsp_own_document", 0.0) + health.get("nsp_true_next", 0.0)
    if wrong > MANY_WRONG_LABELS:
        is_paper = stream.settings.nsp_sampling == "paper"
        hint = "use the clean sampling of next sentences" if is_paper else "add documents"
        warn(f"{wrong:.0%} of the random next sentences are no random ones: {hint}", log)
    return health


@dataclass(frozen=True)
class RowFault:
    """Values that are not finite in one row of a batch."""

    row: int
    position: Position
    loss: float
    module: str | None
    """The first module whose output is not finite, if any."""
    gradients: list[str]


@dataclass(frozen=True)
class Replay:
    """A batch of a run, computed again row by row."""

    step: int
    phase: int
    position: Position
    rows: int
    precision: str
    faults: list[RowFault]

    def mapping(self) -> dict[str, Any]:
        return plain(asdict(self))

    def text(self) -> str:
        where = f"phase {self.phase}, {self.position}"
        lines = [f"batch of step {self.step} ({where}) in {self.precision}:"]
        if not self.faults:
            lines[0] += f" all {self.rows} rows have finite losses, activations and gradients"
        for fault in self.faults:
            first = f"first not finite: {fault.module}" if fault.module else "activations finite"
            shown = ", ".join(fault.gradients[:3])
            more = f" and {len(fault.gradients) - 3} more" if len(fault.gradients) > 3 else ""
            lines.append(
                f"  row {fault.row} ({fault.position}): "
                f"loss {fault.loss:.4g}; {first}; gradients not finite: {shown or 'none'}{more}"
            )
        return "\n".join(lines)


def replay(
    corpus: Sources, out: Path, recipe: Recipe | PretrainSettings | Path | str | None = None
) -> Replay:
    """Compute a run's next batch again, a row at a time, in its own precision; write nothing.

    A run that met a loss or gradient that is not finite has saved its state before that step.
    Explicit settings replace the run's as on a resume: another precision, for one.

    Errors: ValueError for a folder without a pre-training run or a checkpoint, or another corpus.
    """
    run = RunFolder(out)
    checkpoint = run.latest_valid()[0] if run.kind() == "pretrain" else None
    if checkpoint is None:
        raise ValueError(f"{out}: no checkpoint of a pre-training run, so nothing to replay")
    store = open_run_corpus(run, corpus, resume=True)
    settings = resumed_settings(run, make_recipe(recipe, {}, None), store, None)
    engine = choose_engine(settings.device, settings.precision, settings.threads)
    state = from_mapping(TrainingState, read_json(checkpoint / STATE_FILE)["loop"], str(checkpoint))
    model = start_model(store.tokenizer, settings, checkpoint).to(engine.device)
    engine.prepare(model)
    phases = settings.phases()
    done = settings.budget().progress(state.step, state.tokens, state.seconds)
    if state.phase < len(phases) and done >= phases[state.phase - 1].until:  # saved at its end
        state.phase, state.position = state.phase + 1, Position()
    tasks = pretraining_tasks(model, store, replace(settings, micro_batch_size=1), engine)
    return Replay(
        step=state.step,
        phase=state.phase,
        position=state.position,
        rows=phases[state.phase - 1].batch,
        precision=engine.precision,
        faults=list(_faults(tasks[state.phase - 1], model.train(), state)),
    )


def _faults(task: Pretraining, model: PreTrainingModel, state: TrainingState) -> Iterator[RowFault]:
    batch, _ = task.batch(state.position)
    positions = task.stream.positions(state.position, task.phase.batch)
    seed = step_seed(task.settings.seed, state.step)
    for row, (micro, position) in enumerate(zip(batch.micro_batches, positions, strict=True)):
        torch.manual_seed(seed)
        seed_dropout(seed + row)
        model.zero_grad()
        with task.engine.autocast(), _modules_not_finite(model) as modules:
            loss, _ = task.loss(model, micro, batch.counts)
        loss.backward()
        gradients = [
            name
            for name, parameter in model.named_parameters()
            if parameter.grad is not None and not bool(parameter.grad.isfinite().all())
        ]
        if gradients or modules or not bool(loss.isfinite()):
            module = modules[0] if modules else None
            yield RowFault(row, position, loss.item(), module, gradients)


@contextmanager
def _modules_not_finite(model: nn.Module) -> Iterator[list[str]]:
    """Names of the modules whose output is not finite, in the order in which they end."""
    found: list[str] = []

    def look(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and not bool(output.isfinite().all()):
            found.append(name)

    modules = [(name, module) for name, module in model.named_modules() if name]
    handles = [module.register_forward_hook(partial(look, name)) for name, module in modules]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
