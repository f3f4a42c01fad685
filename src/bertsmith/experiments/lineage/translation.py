"""Training of a translation model: pairs of sentences in, a run directory out, resumable.

All systems with a network train here, by the loop that trains BERT; they differ in `NETWORKS`. The
word-for-word baseline has no network and no loop (word_for_word.py).

    RUN/run.json result.json log.jsonl      what was asked for, what came out, the way there
    RUN/model.safetensors                   the mean of the best measured weights
    RUN/vocab/, or source/ and target/      the vocabulary, or one of each language
    RUN/checkpoints/                        a stopped run goes on from here

Letters: B rows, S source positions, T target positions, N target pieces of a batch, H hidden size,
V pieces of the target's vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bertsmith.base.files import remove_folder
from bertsmith.base.settings import group_values, to_mapping
from bertsmith.checkpoints.run_folder import RESULT_FILE, RunFolder, describe
from bertsmith.checkpoints.stored import WEIGHTS
from bertsmith.checkpoints.tensors import write_tensors
from bertsmith.corpus.examples.stream import Position
from bertsmith.experiments.lineage import bleu
from bertsmith.experiments.lineage.attention import AttentionConfig, AttentionTranslator
from bertsmith.experiments.lineage.pairs import (
    JOINT,
    SOURCE,
    TARGET,
    Languages,
    PairRows,
    Pairs,
    TokenBatches,
    encode,
    fingerprint,
    read_splits,
)
from bertsmith.experiments.lineage.rnn import RNNConfig, rnn
from bertsmith.experiments.lineage.settings import (
    AttentionShape,
    RNNShape,
    TransformerShape,
    TranslationSettings,
)
from bertsmith.experiments.lineage.transformer import Transformer, TransformerConfig
from bertsmith.model.kernels.masked_lm_loss import masked_lm_loss
from bertsmith.training.checkpointing import SeedCheckpoint
from bertsmith.training.engine import Engine, choose_engine, machine, measure_peak
from bertsmith.training.finetuning.fit import fit
from bertsmith.training.loop.task import LoopSettings, StepBatch, TrainingState
from bertsmith.training.optimizers import build_optimizer
from bertsmith.training.replicas import TOKENS_AT_ONCE, computed

# system: its shape, the shape with vocabularies, the model of that
NETWORKS: dict[str, tuple[type, type, Callable[[Any], Any]]] = {
    "rnn": (RNNShape, RNNConfig, rnn),
    "attention": (AttentionShape, AttentionConfig, AttentionTranslator),
    "transformer": (TransformerShape, TransformerConfig, Transformer),
}
KIND = "lineage {system}"  # of run.json
ADAM_EPS = 1e-9  # Vaswani et al. 2017, section 5.3
EVALUATED_PAIR = 0.3  # time to measure a pair, as a fraction of training on it
FREE = {"out", "data", "threads", "device", "steps", "tokens", "minutes", "checkpoint_every"}


def new_model(settings: TranslationSettings, languages: Languages) -> Any:
    """The untrained network of a system, a function of the seed."""
    shape, config, network = NETWORKS[settings.system]
    made = config(
        **vars(group_values(settings, shape)),
        source_vocab_size=len(languages.source),
        target_vocab_size=len(languages.target),
        shared=languages.joint,
    )
    return network(made).initialize(torch.Generator().manual_seed(settings.seed))


def translation_sums(
    model: Any, batch: Mapping[str, Tensor], smoothing: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss to differentiate, negative log-likelihood in nats, how many pieces have the highest
    logit), each summed over the N target pieces.

    The target distribution has 1 - smoothing at the piece and shares out the rest among all V
    (Szegedy et al. 2016; Vaswani et al. 2017, section 5.4). With logits z its cross-entropy is that
    of the piece plus smoothing x (z_piece - mean z), and the mean logit is the product with the
    mean row of the output matrix: the logits need not be kept.
    """
    memory = model.encode(batch["source"], batch["source_lengths"])
    hidden_BTH = model.decode(memory, batch["target_in"])
    real_BT = batch["target_out"] != 0
    hidden_NH, labels_N = hidden_BTH[real_BT], batch["target_out"][real_BT]
    table_VH, bias_V = model.output_weight, model.output_bias
    likelihood, right = masked_lm_loss(hidden_NH, table_VH, bias_V, labels_N)
    loss = likelihood
    if smoothing:
        above_mean_NH = table_VH[labels_N] - table_VH.mean(dim=0)
        gap_N = (hidden_NH.float() * above_mean_NH).sum(dim=1) + bias_V[labels_N] - bias_V.mean()
        loss = likelihood + smoothing * gap_N.sum()
    return loss, likelihood.detach(), right


@dataclass
class BestWeights:
    """The measured weights with the lowest loss on dev, at most `count`; the best first."""

    count: int
    losses: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    weights: list[dict[str, Tensor]] = field(default_factory=list)

    def offer(self, step: int, loss: float, model: nn.Module) -> None:
        """Keep a copy of the model's weights if they are among the best."""
        place = int(np.searchsorted(self.losses, loss, side="right"))
        if place < self.count and step not in self.steps:
            copies = {name: value.detach().clone() for name, value in model.state_dict().items()}
            for kept, new in ((self.losses, loss), (self.steps, step), (self.weights, copies)):
                kept.insert(place, new)  # type: ignore[attr-defined]
                del kept[self.count :]

    def mean(self, count: int) -> dict[str, Tensor]:
        """The mean of the best `count` (checkpoint averaging, Vaswani et al. 2017, section 6.1)."""
        kept = self.weights[:count]
        return {name: torch.stack([one[name] for one in kept]).mean(dim=0) for name in kept[0]}

    def stored(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """(Plain values, tensors) for a checkpoint."""
        tensors = {
            f"{place}.{name}": value
            for place, weights in enumerate(self.weights)
            for name, value in weights.items()
        }
        return {"losses": self.losses, "steps": self.steps}, tensors

    def resume(self, tensors: Mapping[str, Tensor], losses: list[float], steps: list[int]) -> None:
        """Take up what `stored` gave."""
        self.losses, self.steps = list(losses), list(steps)
        self.weights = [{} for _ in losses]
        for key, value in tensors.items():
            place, name = key.split(".", 1)
            self.weights[int(place)][name] = value.clone()


@dataclass(eq=False)
class Translation:
    """The loop's task."""

    model: nn.Module
    train: PairRows
    dev: PairRows
    settings: TranslationSettings
    engine: Engine
    state: TrainingState
    best: BestWeights

    def __post_init__(self) -> None:
        settings = self.settings
        self.batches = TokenBatches(self.train.lengths, settings.batch_tokens, settings.seed)
        named = [(name, weight.numel()) for name, weight in self.model.named_parameters()]
        self._encoder = sum(size for name, size in named if name.startswith("encoder"))
        # lookups cost nothing, and the output's matrix is counted by itself
        apart = {part.weight for part in self.model.modules() if isinstance(part, nn.Embedding)}
        output: Any = self.model.output_weight
        tables = sum(weight.numel() for weight in apart | {output})
        self._decoder = sum(size for _, size in named) - self._encoder - tables

    def advance(self, position: Position) -> Position:
        return self.batches.advance(position)

    def batch(self, position: Position) -> tuple[StepBatch, Position]:
        rows = self.batches[position]
        workers = min(self.engine.workers, len(rows))
        # every so-manieth row of those in order of length: equal work for all
        micro = [self.train.batch(rows[worker::workers]) for worker in range(workers)]
        targets = sum(int((part["target_out"] != 0).sum()) for part in micro)
        return StepBatch(micro, {"targets": targets}, targets), self.advance(position)

    def loss(
        self, model: nn.Module, micro: dict[str, np.ndarray], counts: dict[str, int]
    ) -> tuple[Tensor, dict[str, Tensor | float]]:
        batch = {name: self.engine.tensor(array) for name, array in micro.items()}
        loss, nll, right = translation_sums(model, batch, self.settings.label_smoothing)
        targets = float((micro["target_out"] != 0).sum())
        sums = {"nll": nll, "right": right, "targets": targets}
        sizes = micro["source"].size, micro["target_out"].size
        slots = {"source_slots": float(sizes[0]), "target_slots": float(sizes[1])}
        return loss / counts["targets"], {**sums, **slots}

    def metrics(self, window: dict[str, float]) -> dict[str, float]:
        return {
            "nll": window["nll"] / window["targets"],
            "accuracy": window["right"] / window["targets"],
            "padding_ratio": 1 - window["targets"] / window["target_slots"],
        }

    def flops(self, batch: StepBatch) -> float:
        """6 x weights x positions, padding included; attention's own products are left out."""
        found = 0.0
        for micro in batch.micro_batches:
            found += self._encoder * micro["source"].size
            found += self._decoder * micro["target_out"].size
            table: Any = self.model.output_weight
            found += table.numel() * float((micro["target_out"] != 0).sum())
        return 6.0 * found

    def evaluate(self) -> dict[str, float]:
        """Negative log-likelihood of dev, without dropout and smoothing."""
        figures = likelihood(self.model, self.dev, self.engine)
        self.best.offer(self.state.step, figures["nll"], self.model)
        return {"minutes": round(self.state.seconds / 60, 3), **figures}


def likelihood(model: nn.Module, pairs: PairRows, engine: Engine) -> dict[str, float]:
    """Mean over all target pieces: nats, perplexity, and how many have the highest logit."""

    def sums(rows: np.ndarray) -> tuple[float, int, int]:
        micro = pairs.batch(rows)
        batch = {name: engine.tensor(array) for name, array in micro.items()}
        _, nll, right = translation_sums(model, batch)
        return float(nll), int(right), int((micro["target_out"] != 0).sum())

    training = model.training
    model.eval()
    batches = TokenBatches(pairs.lengths, TOKENS_AT_ONCE, seed=0)
    groups = [batches[Position(0, index)] for index in range(batches.per_epoch)]
    totals = np.sum([*computed(engine, sums, groups)], axis=0)
    model.train(training)
    nll = totals[0] / totals[2]
    return {"nll": nll, "perplexity": float(np.exp(nll)), "accuracy": totals[1] / totals[2]}


def train_translation(settings: TranslationSettings, command: Sequence[str] = ()) -> dict[str, Any]:
    """Train a system as the settings say: the content of result.json.

    The same call goes on with a stopped run, bit for bit where the budget is not in minutes.

    Errors: ValueError for data or settings that do not fit, or a run of others in the folder;
    KeyboardInterrupt when a signal asked to stop; FloatingPointError for a step that is not finite.
    """
    bleu.check_language(settings.target)
    run = RunFolder(settings.out, writes=(JOINT, SOURCE, TARGET, "checkpoints"))
    engine = choose_engine(settings.device, settings.precision, settings.threads)
    kind, described = KIND.format(system=settings.system), to_mapping(settings)
    if run.is_begun(kind, described, FREE) and (run.path / RESULT_FILE).exists():
        run.check_free(kind)
    splits = read_splits(settings.data, settings.source, settings.target, ("train", "dev"))
    data_sha256 = fingerprint(splits["train"], splits["dev"])
    with run.locked():
        peak = measure_peak(engine)
        begun = run.is_begun(kind, described, FREE)  # again: another may have been here meanwhile
        if begun and run.settings().get("data_sha256") != data_sha256:
            raise ValueError(
                f"{run.path} was not begun with the data that {settings.data} holds now: give the"
                " same data to go on with it, or name another `out`"
            )
        saved = begun and Languages.are_in(run.path)
        if saved:
            languages = Languages.open(run.path)
        else:
            languages = Languages.train(splits["train"], settings.vocab_size, not settings.separate)
        task = _task(settings, splits, languages, engine)  # what it refuses occupies no folder
        if not begun:
            facts = {"machine": machine(engine, peak), "data_sha256": data_sha256}
            run.write_settings(describe(kind, command, described, task.model, **facts))
        elif changed := _changes(run, described):
            print(f"{run.path}: {changed} from now on", file=sys.stderr)
            run.write_settings({**run.settings(), "settings": described})
        if not saved:
            languages.save(run.path)
        ceiling = bleu.ceiling(splits["dev"].target, languages.target, settings.target)
        print(
            f"{settings.data}: {len(splits['train']):,} pairs; the references of dev, through this "
            f"vocabulary and back, have BLEU {ceiling['bleu']['score']:.1f}",
            file=sys.stderr,
        )
        return _train(task, run, peak)


def _changes(run: RunFolder, described: Mapping[str, Any]) -> str:
    """The settings that a run goes on with and did not have: "steps 100 -> 200"."""
    stored = run.settings()["settings"]
    pairs = [(name, stored.get(name), value) for name, value in described.items()]
    return ", ".join(f"{name} {old} -> {new}" for name, old, new in pairs if old != new)


def _task(
    settings: TranslationSettings,
    splits: Mapping[str, Pairs],
    languages: Languages,
    engine: Engine,
) -> Translation:
    train, dev = (encode(splits[name], languages, settings.max_length) for name in ("train", "dev"))
    model = new_model(settings, languages).to(engine.device)
    best = BestWeights(settings.average)
    return Translation(model, train, dev, settings, engine, TrainingState(), best)


def _train(task: Translation, run: RunFolder, peak: float) -> dict[str, Any]:
    model, dev, best = task.model, task.dev, task.best
    settings, engine = task.settings, task.engine
    optimizer = build_optimizer(model, "adamw", settings.learning_rate, settings.weight_decay)
    for group in optimizer.param_groups:
        group["betas"], group["eps"] = (0.9, settings.beta2), ADAM_EPS
    checkpoint = SeedCheckpoint.newest(run.checkpoints)
    if checkpoint:
        checkpoint.restore(model, optimizer, best.resume)
        task.state = checkpoint.state
    state = task.state
    loop = LoopSettings.of(
        settings,
        budget=settings.budget(),
        evaluation_steps=EVALUATED_PAIR * len(dev) / len(task.train) * task.batches.per_epoch,
        peak=peak,
        label=settings.system,
    )

    def save(state: TrainingState) -> None:
        stored = best.stored()
        SeedCheckpoint.write(run.checkpoints, model, optimizer, state, *stored)

    last = fit(task, optimizer, loop, engine, run.path, state, save)
    means = []
    for count in range(1, len(best.weights) + 1):  # early weights may pull a mean down
        model.load_state_dict(best.mean(count))
        means.append(likelihood(model, dev, engine))
    count = int(np.argmin([figures["nll"] for figures in means])) + 1
    model.load_state_dict(best.mean(count))
    write_tensors(run.path / WEIGHTS, model.state_dict())
    result = {
        "steps": state.step,
        "tokens": state.tokens,
        "seconds": round(state.seconds, 1),
        "epochs": round(state.step / task.batches.per_epoch, 2),
        "averaged_steps": best.steps[:count],
        "dev": means[count - 1],
        "dev_last": last,
    }
    run.write_result(result)
    remove_folder(run.checkpoints)  # several times the model's size, and a finished run is final
    return result
