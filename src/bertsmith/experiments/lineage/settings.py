"""The settings of the systems before BERT, light enough for `--help`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from bertsmith.base.settings import (
    Advanced,
    Alias,
    Bounds,
    Count,
    Fraction,
    Hidden,
    Metavar,
    NotNegative,
    Positive,
    Seed,
    check_bounds,
)
from bertsmith.model.config import elmo_config
from bertsmith.training.loop.schedule import Budget
from bertsmith.training.settings import Machine, Optimization

NO_WORDS = 3  # numbers of ELMo's softmax that are borders of a sentence or <UNK>
# more is of no use, and no float holds what comes of huge numbers
Penalty = Bounds("must be in [0, 10]", minimum=0, maximum=10)
Ratio = Bounds("must be in [0, 100]", minimum=0, maximum=100)


@dataclass(frozen=True, kw_only=True)
class PairData:
    """Sentences and their translations."""

    title = "data"

    data: Path
    """Folder of train, dev and perhaps test files, such as train.en and train.de, or a tsv or jsonl
    file with a column a language; also packed (.gz)."""
    source: str
    """Language to translate from: the ending of its files, or its column."""
    target: str
    """Language to translate to."""


@dataclass(frozen=True, kw_only=True)
class WordForWordSettings(PairData):
    system: ClassVar[str] = "word-for-word"

    out: Path
    """Run directory to write."""
    iterations: Annotated[int, Count] = 10
    """Rounds of EM."""

    def __post_init__(self) -> None:
        check_bounds(self)


@dataclass(frozen=True, kw_only=True)
class Vocabularies:
    """The pieces that a model reads and writes; they are cased."""

    vocab_size: Annotated[int, Count] = 4000
    """Pieces of a vocabulary."""
    separate: bool = False
    """A vocabulary for each language, in place of one for both."""
    max_length: Annotated[int, Count] = 100
    """Pieces of a sentence; longer ones of the training data are left out."""


@dataclass(frozen=True, kw_only=True)
class TranslationOptimization(Optimization):
    """Budget, batches, loss and optimizer."""

    title = "training"

    steps: int | None = None
    """Budget in optimizer steps."""
    tokens: int | None = None
    """Budget in target pieces."""
    minutes: float | None = None
    """Budget in minutes of this machine."""
    batch_tokens: Annotated[int, Count] = 640
    """Target pieces of a batch, with padding. Small batches learn most in a short time; a GPU and
    much data want more of them."""
    learning_rate: Annotated[float, Positive, Alias("--lr")] = 2e-3  # pyright: ignore
    """Peak learning rate."""
    warmup_ratio: Annotated[float, Fraction] = 0.03
    """Share of the steps in which the rate rises."""
    schedule: Literal["inverse-sqrt", "linear", "cosine", "constant"] = "linear"
    """How the rate goes on from the peak: with the root of the progress, to 0 in a line or along a
    cosine, or not at all."""
    weight_decay: Annotated[float, NotNegative] = 0.0
    beta2: Annotated[float, Fraction, Advanced] = 0.98
    """Adam's memory of squared gradients."""
    label_smoothing: Annotated[float, Fraction] = 0.1
    """Probability that the target shares out among all pieces."""
    num_evals: Annotated[int, Count] = 20
    """Measurements on dev over the budget."""
    average: Annotated[int, Count] = 5
    """Measured weights with the lowest loss, at most, whose mean is the model."""
    checkpoint_every: Annotated[int, Count, Advanced] = 500
    """Steps between two checkpoints."""
    seed: Annotated[int, Seed] = 1


@dataclass(frozen=True, kw_only=True)
class TranslationSettings(PairData, Vocabularies, TranslationOptimization, Machine):
    """Everything that decides what a translation model is and learns."""

    system: ClassVar[str]
    common = ("minutes",)
    arguments = {"size": "vocab_size"}  # of the library's `train_vocabulary`

    out: Path
    """Run directory to write; a stopped run goes on by the same command."""

    def __post_init__(self) -> None:
        check_bounds(self)
        self.budget()

    def budget(self) -> Budget:
        """Errors: ValueError unless exactly one of steps, tokens and minutes is given."""
        return Budget(self.steps, self.tokens, self.minutes)


@dataclass(frozen=True, kw_only=True)
class RecurrentShape:
    """Sizes, form and dropout of a recurrent translator."""

    title = "network"

    embedding_size: Annotated[int, Count] = 256
    """Numbers of a piece."""
    reset: Literal["before", "after"] = "before"
    """A GRU's reset gate comes before the product with the state, as in the papers, or after it, as
    in PyTorch."""
    dropout: Annotated[float, Fraction] = 0.2
    """Dropout on embeddings, between layers and before the output."""


@dataclass(frozen=True, kw_only=True)
class RNNShape(RecurrentShape):
    """The network of an encoder-decoder without attention (rnn.py)."""

    form: Literal["gru", "lstm"] = "gru"
    """gru: Cho et al. 2014, the context at every step; lstm: Sutskever et al. 2014, layers of LSTMs
    that go on from the encoder's."""
    hidden_size: Annotated[int, Count] = 512
    """Numbers of a state."""
    num_layers: Annotated[int, Count] = 1
    """LSTMs or GRUs over one another; Sutskever et al. have 4, Cho et al. 1."""
    reversed_source: bool = False
    """Read the source from its end, as Sutskever et al. do."""


@dataclass(frozen=True, kw_only=True)
class AttentionShape(RecurrentShape):
    """The network of Bahdanau et al. 2015 (attention.py)."""

    hidden_size: Annotated[int, Count] = 384
    """Numbers of a state, of the decoder and of each direction of the encoder."""


@dataclass(frozen=True, kw_only=True)
class TransformerShape:
    """The network of Vaswani et al. 2017 (transformer.py)."""

    title = "network"

    hidden_size: Annotated[int, Count] = 256
    """Numbers of a position."""
    num_layers: Annotated[int, Count] = 3
    """Layers of the encoder, and as many of the decoder; the paper has 6."""
    num_heads: Annotated[int, Count] = 4
    """Attention heads."""
    intermediate_size: Annotated[int, Count] = 512
    """Numbers inside a feed-forward layer."""
    layer_norm: Literal["pre", "post"] = "pre"
    """LayerNorm before each sublayer, as the authors' tensor2tensor has it, or behind its residual,
    as the paper has it, which learns more slowly at first."""
    dropout: Annotated[float, Fraction] = 0.1
    """Dropout on embeddings and each sublayer's output."""
    attention_dropout: Annotated[float, Fraction] = 0.1
    """Dropout on attention probabilities."""


@dataclass(frozen=True, kw_only=True)
class RNNSettings(RNNShape, TranslationSettings):
    system = "rnn"


@dataclass(frozen=True, kw_only=True)
class AttentionSettings(AttentionShape, TranslationSettings):
    system = "attention"


@dataclass(frozen=True, kw_only=True)
class TransformerSettings(TransformerShape, TranslationSettings):
    system = "transformer"

    learning_rate: Annotated[float, Positive, Alias("--lr")] = 1.5e-3  # pyright: ignore
    """Peak learning rate."""


SYSTEMS: dict[str, type[TranslationSettings]] = {
    kind.system: kind for kind in (RNNSettings, AttentionSettings, TransformerSettings)
}


@dataclass(frozen=True, kw_only=True)
class DecodingSettings:
    """The search for the likeliest translation (decode.py)."""

    title = "search"

    beam: Annotated[int, Count] = 5
    """Hypotheses of a sentence at a time; 1: greedy search."""
    length_penalty: Annotated[float, Penalty] = 1.0
    """Power of the length by which log probabilities are divided; 0: not at all."""
    max_ratio: Annotated[float, Ratio] = 1.5
    """Longest translation, in pieces for each piece of the source ..."""
    max_extra: Annotated[int, Count] = 10
    """... and so many more."""
    n_best: Annotated[int, Count, Hidden] = 1
    """Hypotheses of each sentence that are wanted, at most `beam`."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.n_best > self.beam:
            raise ValueError(f"`n_best={self.n_best}`: a beam of {self.beam} has no more than that")

    def longest(self, source: int) -> int:
        """Pieces of a translation at most, its end included.

        >>> DecodingSettings(max_ratio=1.5, max_extra=2).longest(5)
        9
        """
        return int(self.max_ratio * source) + self.max_extra

    def score(self, log_prob: float, length: int) -> float:
        """A log probability divided by ((5 + length) / 6)^length_penalty.

        >>> DecodingSettings(length_penalty=1.0).score(-3.0, 7)
        -1.5
        """
        return log_prob / ((5 + length) / 6) ** self.length_penalty


@dataclass(frozen=True, kw_only=True)
class ElmoSettings(Machine):
    """All that decides a pre-training of ELMo (elmo.py)."""

    common = ("minutes",)

    text: Annotated[list[Path], Metavar("FILE...")]
    """Files or folders of cased text."""
    out: Path
    """Run directory to write."""
    size: str = "small"
    """small, medium, original, or PROJECTIONxCELLS such as 64x256."""
    minutes: float | None = None
    """Budget; or --steps, or --words."""
    steps: Annotated[int | None, Count] = None
    words: Annotated[int | None, Count] = None
    """Budget in words read, ends of sentences included."""
    vocab_size: Annotated[int, Count] = 20_000
    """Words that are predicted, the most frequent ones; all others are <UNK>."""
    softmax: Literal["full", "sampled"] = "full"
    """full: over all words; sampled: as released, over --samples of them, drawn log-uniformly."""
    samples: Annotated[int, Count, Advanced] = 8192
    """--softmax sampled: words that a step compares with."""
    stateful: bool = False
    """As released: windows of 20 words, with the state carried from each to the next."""
    batch_size: Annotated[int, Count] = 128
    """Sentences, or windows, in a step."""
    learning_rate: Annotated[float, Positive, Alias("--lr")] = 2e-3
    """Peak learning rate."""
    warmup_ratio: Annotated[float, Fraction, Advanced] = 0.05
    max_grad_norm: Annotated[float, Positive, Advanced] = 1.0
    dropout: Annotated[float, Fraction] = 0.1
    """On the input of every LSTM and on the last output."""
    checkpoint_every: Annotated[int, Count, Advanced] = 500
    """Steps between checkpoints, from which the same command goes on after an interruption."""
    seed: Annotated[int, Seed] = 1

    def __post_init__(self) -> None:
        check_bounds(self)
        elmo_config(self.size)
        self.budget()
        if self.vocab_size <= NO_WORDS:
            raise ValueError(f"`vocab_size={self.vocab_size}`: at least {NO_WORDS + 1}")
        if self.softmax == "sampled" and self.samples >= self.vocab_size:
            raise ValueError(
                f"`samples={self.samples}`: fewer than `vocab_size={self.vocab_size}`, or "
                "`softmax='full'`"
            )

    def budget(self) -> Budget:
        """Errors: ValueError for several budgets, or none."""
        try:
            return Budget(self.steps, self.words, self.minutes)
        except ValueError as error:  # ELMo's name for its tokens is `words`
            raise ValueError(str(error).replace("`tokens`", "`words`")) from error
