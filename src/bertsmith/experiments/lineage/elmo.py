"""ELMo's pre-training: a language model from the left and one from the right (Peters et al. 2018).

Cased text is cut into sentences and words. A word goes in as its bytes; what is predicted is its
number by falling count, or `<UNK>`. By itself each sentence is read alone, from a state of zeros.
As released, sentences of an epoch are one stream for each direction, in an order of its own, read
in windows of 20 words, and the state is carried from window to window.

Letters: B rows, S steps, V words of the softmax, P projected size, C cells, M samples.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bertsmith.base.files import atomic_folder, remove_folder, write_text
from bertsmith.base.settings import to_mapping
from bertsmith.checkpoints.model_folder import save_model
from bertsmith.checkpoints.run_folder import RunFolder, describe
from bertsmith.corpus.examples.stream import Position
from bertsmith.experiments.lineage.elmo_text import (
    DIRECTIONS,
    UNKNOWN,
    ElmoText,
    SentenceStream,
    Streams,
    WindowStream,
    is_held_out,
)
from bertsmith.experiments.lineage.settings import ElmoSettings
from bertsmith.model.config import ElmoConfig, elmo_config
from bertsmith.model.elmo import ElmoLM, LSTMState
from bertsmith.model.kernels.masked_lm_loss import masked_lm_loss
from bertsmith.text.tokenizer.characters import CharacterTokenizer
from bertsmith.training.checkpointing import SeedCheckpoint, checkpoints_in
from bertsmith.training.engine import Engine, choose_engine, machine, measure_peak
from bertsmith.training.finetuning.fit import fit
from bertsmith.training.loop.task import LoopSettings, StepBatch, TrainingState
from bertsmith.training.optimizers import build_optimizer
from bertsmith.training.replicas import computed

KIND = "lineage elmo"  # of the run
# of the settings of a run that goes on; what is in the files is compared by `text_sha256`
FREE = ("device", "precision", "threads", "checkpoint_every", "out", "text")
EVALUATED = 64  # sentences at once


class Samples(NamedTuple):
    """M different words drawn from TensorFlow's log-uniform distribution over V."""

    words: np.ndarray  # int64 [M]
    tries: int


def draw_samples(count: int, num_words: int, random: np.random.Generator) -> Samples:
    """Draw until there are so many different ones: P(k) = log((k + 2) / (k + 1)) / log(V + 1)."""
    drawn = np.empty(0, np.int64)
    while True:
        powers = random.random(2 * count) * math.log(num_words + 1)
        drawn = np.append(drawn, np.exp(powers).astype(np.int64) - 1)
        words, firsts = np.unique(drawn.clip(0, num_words - 1), return_index=True)
        if len(words) >= count:
            order = np.sort(firsts)[:count]
            return Samples(drawn[order].clip(0, num_words - 1), int(order[-1]) + 1)


def expected_count(words: Tensor, tries: float, num_words: int) -> Tensor:
    """The expected count of words among the samples of so many tries, float32.

    >>> round(expected_count(torch.tensor([0]), 1, 3).item(), 3)  # log 2 / log 4
    0.5
    """
    numbers = words.float()
    probabilities = ((numbers + 2) / (numbers + 1)).log() / math.log(num_words + 1)
    return -torch.expm1(tries * torch.log1p(-probabilities))


def sampled_loss(
    hidden_NP: Tensor, output: torch.nn.Linear, labels_N: Tensor, words_M: Tensor, tries: float
) -> Tensor:
    """Summed cross-entropy of the right word among the samples (Jean et al. 2015, arXiv 1412.2007).

    Logits are less the logarithm of how often a word is expected; a sample that is the right word
    does not count.
    """
    size = output.out_features
    chosen = torch.cat([labels_N, words_M])
    # one lookup: its gradient is as large as the table
    weights, biases = F.embedding(chosen, output.weight), output.bias[chosen]
    biases = biases - expected_count(chosen, tries, size).log()
    count = len(labels_N)
    right_N = (hidden_NP * weights[:count]).sum(dim=1).float() + biases[:count]
    others_NM = F.linear(hidden_NP, weights[count:]).float() + biases[count:]
    others_NM = others_NM.masked_fill(labels_N[:, None] == words_M, -torch.inf)
    logits_NX = torch.cat([right_N[:, None], others_NM], dim=1)
    return (logits_NX.logsumexp(dim=1) - right_N).sum()


def flops_a_word(config: ElmoConfig, num_words: int) -> float:
    """FLOPs of training on a word: 6 x the weights of the LSTMs, and of both directions' softmax
    over so many words.

    >>> flops_a_word(elmo_config("64x256"), 20_000) / 1e6
    18.92352
    """
    cells, size = config.intermediate_size, config.projection_size
    lstm = 4 * cells * (2 * size + 1) + cells * size
    return 6.0 * 2 * (config.num_layers * lstm + num_words * size)


@dataclass(eq=False)
class ElmoTraining:
    """The loop's task: the mean of both directions' losses."""

    model: ElmoLM
    text: ElmoText
    stream: SentenceStream | WindowStream
    held_out: np.ndarray
    settings: ElmoSettings
    engine: Engine

    def __post_init__(self) -> None:
        if self.settings.stateful:
            config, rows = self.model.config, self.settings.batch_size
            # a step reads those of one half and writes the other's: passes that are made again,
            # as those before the first step are, read what they read the first time
            size = config.projection_size + config.intermediate_size
            shape = 2, len(DIRECTIONS), config.num_layers, rows, size
            self.model.register_buffer("carried", torch.zeros(shape, device=self.engine.device))

    def advance(self, position: Position) -> Position:
        return self.stream.advance(position)

    def batch(self, position: Position) -> tuple[StepBatch, Position]:
        found = self.stream.at(position)
        rows = len(found.inputs["ahead"])
        step = position.epoch * self.stream.per_epoch + position.index
        parts = np.array_split(np.arange(rows), min(self.engine.workers, rows))
        micros = [self._micro(found, part) for part in parts]
        for number, (micro, part) in enumerate(zip(micros, parts, strict=True)):
            micro["carried"] = np.array([step % 2, part[0], part[-1] + 1])
            if self.settings.softmax == "sampled":
                random = np.random.default_rng([self.settings.seed, step, number])
                drawn = draw_samples(self.settings.samples, self.settings.vocab_size, random)
                micro["samples"], micro["tries"] = drawn.words, np.array(drawn.tries)
        words = sum(int((micro["ahead_labels"] >= 0).sum()) for micro in micros)
        return StepBatch(micros, {"words": words}, words), self.advance(position)

    def _micro(self, found: Streams, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Some rows, with the bytes of their words once, and labels within the vocabulary."""
        inputs = [found.inputs[name][rows] for name in DIRECTIONS]
        types, numbers = np.unique(np.stack(inputs), return_inverse=True)
        micro = {"characters": self.text.characters[types].astype(np.int64)}
        for name, own in zip(DIRECTIONS, numbers.reshape(2, *inputs[0].shape), strict=True):
            labels = found.labels[name][rows]
            micro[name] = own.T
            micro[f"{name}_labels"] = np.where(labels < self.settings.vocab_size, labels, UNKNOWN).T
        return {name: np.ascontiguousarray(array) for name, array in micro.items()}

    def loss(
        self, model: ElmoLM, micro: dict[str, np.ndarray], counts: dict[str, int]
    ) -> tuple[Tensor, dict[str, Tensor | float]]:
        batch = {name: self.engine.tensor(array) for name, array in micro.items()}
        sums: dict[str, Tensor | float] = {"words": float((micro["ahead_labels"] >= 0).sum())}
        vectors = model.encoder.embeddings(batch["characters"])
        total: Tensor | float = 0.0
        for number, name in enumerate(DIRECTIONS):
            half, begin, end = map(int, micro["carried"])
            states = model.encoder.zeros(name, end - begin)
            if self.settings.stateful:
                states = self._carried(number, half, slice(begin, end))
            x_SBP = F.embedding(batch[name], vectors)
            outputs, ended = model.encoder.read(name, x_SBP, states)
            if self.settings.stateful:
                self._carry(number, 1 - half, slice(begin, end), ended)
            labels = batch[f"{name}_labels"]
            hidden_NP = model.encoder.dropout(outputs[-1])[labels >= 0]
            labels_N = labels[labels >= 0]
            if self.settings.softmax == "full" or not torch.is_grad_enabled():
                table, bias = model.output.weight, model.output.bias
                loss, _ = masked_lm_loss(hidden_NP, table, bias, labels_N)
            else:
                tries = float(micro["tries"])
                loss = sampled_loss(hidden_NP, model.output, labels_N, batch["samples"], tries)
            sums[f"{name}_loss"] = loss.detach()
            total = total + loss
        assert isinstance(total, Tensor)
        return total / (2 * counts["words"]), sums

    def _carried(self, direction: int, half: int, rows: slice) -> list[LSTMState]:
        size = self.model.config.projection_size
        # a copy: the other half is written while this one is still needed for gradients
        layers = self.model.get_buffer("carried")[half, direction, :, rows].clone()
        return [LSTMState(layer[:, :size], layer[:, size:]) for layer in layers]

    def _carry(self, direction: int, half: int, rows: slice, states: list[LSTMState]) -> None:
        with torch.no_grad():
            carried = self.model.get_buffer("carried")[half, direction, :, rows]
            carried.copy_(torch.stack([torch.cat(state, dim=1) for state in states]))

    def metrics(self, window: dict[str, float]) -> dict[str, float]:
        return {f"{name}_loss": window[f"{name}_loss"] / window["words"] for name in DIRECTIONS}

    def flops(self, batch: StepBatch) -> float:
        is_sampled = self.settings.softmax == "sampled"
        words = self.settings.samples if is_sampled else self.settings.vocab_size
        return batch.tokens * flops_a_word(self.model.config, words)

    def evaluate(self) -> dict[str, float]:
        """Perplexity of held-out sentences by the full softmax, each read alone."""
        alone = SentenceStream(self.text, self.held_out, EVALUATED, 0)
        order = np.argsort(-np.diff(self.text.boundaries)[self.held_out], kind="stable")
        parts = np.split(self.held_out[order], range(EVALUATED, len(order), EVALUATED))
        plain = replace(self, settings=replace(self.settings, stateful=False))
        self.model.eval()

        def compute(sentences: np.ndarray) -> dict[str, float]:
            micro = self._micro(alone.of(sentences), np.arange(len(sentences)))
            micro["carried"] = np.array([0, 0, len(sentences)])
            _, sums = plain.loss(self.model, micro, {"words": 1})
            return {name: float(value) for name, value in sums.items()}

        found = list(computed(self.engine, compute, parts))
        self.model.train()
        totals = {name: sum(sums[name] for sums in found) for name in found[0]}
        losses = [totals[f"{name}_loss"] / totals["words"] for name in DIRECTIONS]
        names = ("perplexity", *(f"{name}_perplexity" for name in DIRECTIONS))
        return dict(zip(names, map(math.exp, (sum(losses) / 2, *losses)), strict=True))


def pretrain_elmo(settings: ElmoSettings, command: Sequence[str] = ()) -> dict[str, Any]:
    """Train an ELMo into the folder `out`, which then is a model; returns what result.json holds.

    A run that was stopped goes on by the same call from its last checkpoint, with the numbers that
    it would have had, the carried state among them.

    Errors: ValueError for a run of other settings or another text in `out`, and for no text;
    KeyboardInterrupt when a signal asked to stop; FloatingPointError for a step that is not finite.
    """
    run = RunFolder(settings.out, writes=("model", "words.txt", "checkpoint-*"))
    run.check_free(KIND)  # before the text is read
    engine = choose_engine(settings.device, settings.precision, settings.threads)
    text = ElmoText.read(settings.text)
    held_out = is_held_out(len(text.boundaries) - 1)
    if not held_out.any():
        raise ValueError(f"{settings.text[0]}: a single sentence: one is held out, give more text")
    settings = replace(settings, vocab_size=min(settings.vocab_size, len(text.names)))
    chosen = np.flatnonzero(~held_out)
    kind = WindowStream if settings.stateful else SentenceStream
    stream = kind(text, chosen, settings.batch_size, settings.seed)
    config = replace(elmo_config(settings.size), dropout=settings.dropout)
    generator = torch.Generator().manual_seed(settings.seed)
    model = ElmoLM(config, settings.vocab_size).initialize(generator).to(engine.device)
    task = ElmoTraining(model, text, stream, np.flatnonzero(held_out), settings, engine)
    optimizer = build_optimizer(model, "adamw", settings.learning_rate, 0.0)
    with run.locked():
        run.check_free(KIND)
        peak = measure_peak(engine)
        plain = to_mapping(settings) | {"text_sha256": text.fingerprint()}
        if not run.is_begun(KIND, plain, FREE):
            about = machine(engine, peak)
            run.write_settings(describe(KIND, command, plain, model, machine=about))
        checkpoint = SeedCheckpoint.newest(run.path)
        state = checkpoint.state if checkpoint else TrainingState()
        if checkpoint:
            checkpoint.restore(model, optimizer, lambda *_: None)
            print(f"{run.path}: going on from step {state.step:,}", file=sys.stderr)
        known = f"{len(text.tokens):,} words, {len(text.names):,} different"
        unknown = float((text.tokens >= settings.vocab_size).mean())
        print(f"elmo: {known}; {unknown:.1%} of them are <UNK> to the softmax", file=sys.stderr)

        def save(state: TrainingState) -> None:
            SeedCheckpoint.write(run.path, model, optimizer, state, {}, {})

        loop = LoopSettings.of(
            settings, budget=settings.budget(), schedule="linear", peak=peak, label="elmo"
        )
        figures = fit(task, optimizer, loop, engine, run.path, state, save)
        model_folder = run.path / "model"
        with atomic_folder(model_folder) as temporary:
            exclude = ["carried"] if settings.stateful else []
            save_model(model, CharacterTokenizer(), temporary, exclude=exclude)
            write_text(temporary / "words.txt", "\n".join(text.names[: settings.vocab_size]) + "\n")
        run.publish(model_folder)
        result = {"steps": state.step, "tokens": state.tokens, "flops": state.flops}
        result |= {"seconds": round(state.seconds, 1), "held_out": figures}
        run.write_result(result)
        for folder in (model_folder, *checkpoints_in(run.path)):
            remove_folder(folder)
    return result
