"""Settings of a fine-tuning, a feature-based tagger and a training of sentence vectors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from bertsmith.base.settings import (
    Advanced,
    Alias,
    Count,
    Fraction,
    Hidden,
    NotNegative,
    Positive,
    PositiveFraction,
    Seed,
    Weight,
    check_bounds,
    group_values,
)
from bertsmith.model.config import ModelConfig
from bertsmith.tasks.task import EncodingSettings
from bertsmith.training.settings import AUTO_INT8, Machine, Optimization

EPOCHS, MIN_STEPS, MAX_EPOCHS = 3, 500, 20  # the last two of the epochs chosen for little data
BASE_RATE, BASE_WIDTH = 5e-5, 768
GPT_LM_WEIGHT = 0.5  # lambda of Radford et al. 2018, section 4.1
FROZEN_EPOCHS, FROZEN_RATE = 10, 1e-3  # of an LSTM that begins at random weights
FROZEN_DROPOUT = 0.1  # of the head over layers that never learn
DROPOUTS = "dropout", "attention_dropout"
OF_LAYERS = "int8", "float8"  # precisions in which an encoder's layers learn; all else is bf16


@dataclass(frozen=True)
class Provenance:
    """Origin of a run, for its run.json: the command, and the files that were read."""

    command: Sequence[str] = ()
    data: Mapping[str, Any] = field(default_factory=dict)


UNKNOWN = Provenance()


class Seeds(NamedTuple):
    """Seeds of the new weights, the order of the examples, and dropout."""

    init: int
    order: int
    dropout: int


@dataclass(frozen=True)
class FinetuneOptimization(Optimization):
    """The optimization of all trainings; what is 0 is chosen by the data and the model."""

    title = "optimization"

    epochs: Annotated[int, NotNegative] = 0
    """Passes over the data; 0: three (with --freeze-encoder ten), on little data as many as make
    500 steps, at most 20."""
    batch_size: Annotated[int, NotNegative] = 0
    """Examples in a step; 0: 32, of tags 8 rows, which hold several sentences each."""
    learning_rate: Annotated[float, NotNegative, Alias("--lr")] = 0.0
    """Peak learning rate; 0: 5e-5 at base's width of 768, in proportion more for narrower ones;
    with --freeze-encoder 1e-3."""
    dropout: Annotated[float | None, Fraction] = None
    """Default: the model's own, 0.1 of published ones, 0 of those of `pretrain`."""
    layer_decay: Annotated[float, PositiveFraction, Advanced] = 1.0
    """Each layer's rate is this times that of the layer above it; the head has the full rate."""
    schedule: Literal["linear", "paper"] = "linear"
    """linear: up to the peak, down to 0; paper: google-research/bert's, dropping after warm-up."""
    optimizer: Literal["adamw", "paper-adam"] = "adamw"
    """adamw: with bias correction, stable on small sets; paper-adam: without."""
    attention_dropout: Annotated[float | None, Fraction, Advanced] = None
    """Dropout on attention probabilities; default: the model's own."""


@dataclass(frozen=True)
class ModelSettings:
    """Parts of the model that start from fresh weights, or do not learn."""

    reinit_layers: Annotated[int, NotNegative, Advanced] = 0
    """So many top layers (and the pooler) start from random weights."""
    bilstm: Annotated[bool, Advanced] = False
    """A new BiLSTM of the model's width reads its states, and the head reads the BiLSTM's."""
    freeze_encoder: bool = False
    """tag: the model's weights stay; a two-layer LSTM learns to read its last four layers."""


@dataclass(frozen=True)
class LossSettings:
    """The loss."""

    class_weights: Literal["none", "balanced"] = "none"
    """balanced: every class counts alike, however rare; of labels, those with and without."""
    focal_gamma: Annotated[float, NotNegative, Advanced] = 0.0
    """gamma of the focal loss: what is already right counts less; 0: plain loss."""
    temperature: Annotated[float, Positive, Advanced] = 1.0
    """--teacher: what both models' logits are divided by; scores have none."""
    distillation_weight: Annotated[float, Weight, Advanced] = 1.0
    """--teacher: weight of its answers in the loss; the labels have the rest."""
    lm_weight: Annotated[float | None, NotNegative, Advanced] = None
    """A GPT: weight of the loss of the next token beside the task's; default: 0.5."""


@dataclass(frozen=True)
class EvaluationSettings:
    """Measurements on dev, and the weights that are kept."""

    metric: str = ""
    """What decides on dev which weights and which seed are kept; default: the task's first."""
    tune_thresholds: bool = False
    """Two classes or labels: search on dev how probable one must be to be the answer."""
    evals_per_epoch: Annotated[int, NotNegative] = 1
    """Dev evaluations an epoch; 0: one at the end."""
    keep: Annotated[Literal["best", "last"], Advanced] = "best"
    """The weights of the evaluation that is best on dev, or those at the end."""
    early_stopping_patience: Annotated[int, NotNegative] = 0
    """Stop after so many evaluations without a gain; 0: never."""
    max_retries: Annotated[int, NotNegative, Advanced] = 2
    """How often a collapsed run (one answer for all, or the loss of guessing) is made again."""
    checkpoint_every: Annotated[int, Count, Advanced] = 1000
    """Steps between checkpoints, from which the same command goes on after an interruption."""


@dataclass(frozen=True)
class SeedSettings:
    """Seeds of a study that parts what they decide."""

    init_seed: Annotated[int | None, Seed, Advanced] = None
    """Seed of the new weights where it is not that of the run."""
    order_seed: Annotated[int | None, Seed, Advanced] = None
    """Seed of the order of the examples where it is not that of the run."""
    dropout_seed: Annotated[int | None, Seed, Advanced] = None
    """Seed of dropout where it is not that of the run."""


@dataclass(frozen=True)
class FinetuneMachine(Machine):
    """The machine of all trainings, with int8."""

    title = "machine"

    precision: str = AUTO_INT8
    """float32, bf16, int8; auto: bf16 where the hardware multiplies it; auto-int8: int8 where that
    is a tenth faster."""


@dataclass(frozen=True)
class FinetuneSettings(
    FinetuneOptimization,
    EncodingSettings,
    LossSettings,
    EvaluationSettings,
    ModelSettings,
    SeedSettings,
    FinetuneMachine,
):
    """All that decides the result of a fine-tuning, but for data and seed."""

    max_length: int = 0
    """Tokens of a row; 0: 128, of questions 384, of tags 256, or what the model can read."""

    def __post_init__(self) -> None:
        super().__post_init__()  # the bounds of all fields
        if self.freeze_encoder and (self.reinit_layers or self.layer_decay != 1):
            raise ValueError(
                "`freeze_encoder`: the model's layers do not learn: leave `reinit_layers` and "
                "`layer_decay` out"
            )
        if self.freeze_encoder and self.bilstm:
            raise ValueError("`freeze_encoder` has an LSTM of its own: leave `bilstm` out")
        if self.freeze_encoder and self.lm_weight:
            raise ValueError("`freeze_encoder`: no layer learns words: leave `lm_weight` out")
        if self.freeze_encoder and self.precision in OF_LAYERS:
            raise ValueError(
                f"`precision={self.precision!r}` is for layers that learn: with `freeze_encoder` "
                "use bf16, or leave it out"
            )
        if self.early_stopping_patience and not self.evals_per_epoch:
            raise ValueError(
                "`early_stopping_patience` compares evaluations: leave `evals_per_epoch=0` out"
            )
        if self.early_stopping_patience and self.keep == "last":
            raise ValueError(
                "`early_stopping_patience` keeps the weights best on dev: leave `keep='last'` out"
            )

    def with_defaults(
        self, examples: int, config: ModelConfig, default_batch: int
    ) -> FinetuneSettings:
        """Fill in batch, epochs, rate and dropout where they are left open, by data and model.

        Little data collapses for want of steps (Mosbach et al. 2021, arXiv 2006.04884), and small
        models want higher rates (Turc et al. 2019, arXiv 1908.08962). A model that was pre-trained
        without dropout learns a task better without it, too (docs/design/lab.md, 29 November 2026).

        >>> from bertsmith.model.config import config_for
        >>> config = config_for("6x384", vocab_size=30_522)
        >>> chosen = FinetuneSettings().with_defaults(2490, config, default_batch=32)
        >>> chosen.batch_size, chosen.epochs, chosen.learning_rate, chosen.dropout
        (32, 7, 0.0001, 0.1)
        """
        batch = self.batch_size or default_batch
        steps = max(1, math.ceil(examples / batch))  # of an epoch
        epochs, rate = EPOCHS, BASE_RATE * BASE_WIDTH / config.one_direction.hidden_size
        own: dict[str, float] = {name: getattr(config, name) for name in DROPOUTS}
        if self.freeze_encoder or config.is_frozen:
            epochs, rate, own = FROZEN_EPOCHS, FROZEN_RATE, {"dropout": FROZEN_DROPOUT}
        epochs = min(max(epochs, math.ceil(MIN_STEPS / steps)), MAX_EPOCHS)
        epochs, rate = self.epochs or epochs, self.learning_rate or rate
        dropout = {name: value for name, value in own.items() if getattr(self, name) is None}
        return replace(self, batch_size=batch, epochs=epochs, learning_rate=rate, **dropout)

    def part_seeds(self, seed: int) -> Seeds:
        """The seeds of the parts of the run with this one.

        >>> FinetuneSettings(order_seed=7).part_seeds(1)
        Seeds(init=1, order=7, dropout=1)
        """
        own = (self.init_seed, self.order_seed, self.dropout_seed)
        return Seeds(*(seed if value is None else value for value in own))

    def encoding(self, default_length: int, positions: int, scale: int = 1) -> EncodingSettings:
        """The encoding of rows for a model of so many positions; `scale`: its `length_scale`.

        Errors: ValueError when max_length is more than that.
        """
        if self.max_length > positions:
            raise ValueError(
                f"`max_length={self.max_length}`: the model knows {positions} positions: read "
                "longer texts with `long_texts='windows'` or head-tail (contexts of questions and "
                "tagged sentences are read whole anyway), or lengthen the model by "
                "`bertsmith extend-positions`"
            )
        chosen = group_values(self, EncodingSettings)
        chosen = replace(chosen, max_length=self.max_length or min(default_length, positions))
        return chosen.scaled(scale)


@dataclass(frozen=True)
class Row:
    """A row of Table 7: the layers that the tagger reads of a word's L + 1 (0: the embeddings)."""

    title: str  # as in the paper's table
    layers: slice
    mixed: bool  # a learned weighted sum; else side by side
    paper: float  # dev F1 of BERT-BASE


ROWS = {
    "embeddings": Row("Embeddings", slice(0, 1), False, 91.0),
    "second-to-last": Row("Second-to-Last Hidden", slice(-2, -1), False, 95.6),
    "last": Row("Last Hidden", slice(-1, None), False, 94.9),
    "sum-last-four": Row("Weighted Sum Last Four Hidden", slice(-4, None), True, 95.9),
    "concat-last-four": Row("Concat Last Four Hidden", slice(-4, None), False, 96.1),
    "sum-all": Row("Weighted Sum All Layers", slice(1, None), True, 95.5),
}
DEEPEST = 4  # hidden layers that a row needs


@dataclass(frozen=True)
class FrozenSettings(Machine):
    """Details that the paper leaves open about its tagger, and how much data it gets."""

    sentences: Annotated[int, NotNegative] = 3000
    """The first so many sentences of the training set; 0: all of them."""
    epochs: Annotated[int, Count, Advanced] = 10
    """An LSTM that begins at random weights needs more than fine-tuning does."""
    batch_size: Annotated[int, Count, Advanced] = 32
    """Sentences in a step."""
    learning_rate: Annotated[float, Positive, Alias("--lr"), Advanced] = 2e-3
    """Peak learning rate; it falls to 0."""
    dropout: Annotated[float, Fraction, Advanced] = 0.3
    """On the input of each LSTM layer and on the output of the last."""
    hidden_size: Annotated[int, Count, Advanced] = 768
    """Of each direction of the LSTM; the paper's."""
    max_length: Annotated[int, Advanced] = 256
    """Tokens of a row in which the encoder reads a sentence and what stands around it."""
    tokens_per_window: Annotated[int, NotNegative, Advanced] = 128
    """A row reads neighbouring sentences up to so many tokens, half a row at most; 0: one."""
    document_context: Annotated[bool, Advanced] = True
    """Fill each row with what stands around its sentences in the document."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.precision in OF_LAYERS:
            raise ValueError(
                f"`precision={self.precision!r}` is for layers that learn, and these do not: use "
                "bf16, or leave it out"
            )


@dataclass(frozen=True, kw_only=True)
class ContrastiveSettings(Machine, Optimization):
    """All that decides the result of training sentence vectors, but for the data."""

    epochs: Annotated[int, Count] = 1
    batch_size: int = 64
    """Pairs in a step."""
    negatives: Annotated[int, Advanced] = 32
    """Pairs that are each other's negatives; a batch is one group or more, one a core."""
    dropout: Annotated[float, Fraction] = 0.1
    """Dropout on hidden outputs; the paper has 0.1."""
    scale: Annotated[float, Positive, Advanced] = 20.0
    """What cosines are multiplied with before the softmax: 1 / temperature."""
    pool: Literal["mean", "cls"] = "mean"
    """Mean of the tokens, or the vector at [CLS]. A model trained for similarity keeps its own."""
    learning_rate: Annotated[float, Positive, Alias("--lr")] = 5e-5
    """Peak learning rate."""
    max_length: int = 128
    """Tokens of a text; longer ones are cut. A model trained for similarity keeps its own."""
    seed: Annotated[int, Seed] = 1

    def __post_init__(self) -> None:
        batch, group = self.batch_size, self.negatives
        if group < 2 or batch < group or batch % group:
            raise ValueError(
                f"`batch_size={batch}`, `negatives={group}`: a group of negatives has 2 pairs or "
                "more, and a batch is one group or several"
            )
        check_bounds(self)


@dataclass(frozen=True, kw_only=True)
class PairRequest(ContrastiveSettings):
    """All that a training of sentence vectors is asked for: `bertsmith embed train`."""

    title = "dev set"

    model: str
    """A run, a Hugging Face folder or hub name."""
    data: Path
    """csv, tsv, jsonl or parquet file of pairs."""
    text: str
    """Column of the first text."""
    text_pair: str
    """Column of the second text."""
    out: Path
    """Run directory to write."""
    dev: Path | None = None
    """File of pairs under the same columns, with a similarity each."""
    score: str | None = None
    """Its column of the similarity. Default: score."""
    given: Annotated[tuple[str, ...], Hidden] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dev is None and self.score is not None:
            raise ValueError(f"`score={self.score!r}`: only with `dev`")
