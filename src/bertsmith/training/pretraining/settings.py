"""Settings of pre-training: dataclass <- TOML <- flags; the recipes (TOML) that come along."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from bertsmith.base.settings import (
    Advanced,
    Alias,
    Count,
    Fraction,
    NotNegative,
    Positive,
    Seed,
    check_bounds,
    nearest,
    read_toml,
    toml_values,
)
from bertsmith.corpus.examples.settings import (
    MASK_SETTINGS,
    NEXT_TOKEN,
    PAIR_NAMES,
    ExampleSettings,
    Masking,
    Objective,
    PairRule,
)
from bertsmith.training.loop.schedule import Budget, warmup_share
from bertsmith.training.settings import Machine, Optimization

BUDGETS = ("steps", "tokens", "minutes")  # a run has exactly one of them
WARMUPS = ("warmup_ratio", "warmup_steps")  # at most one of these
SECOND_PHASE = ("phase2_ratio", "phase2_batch_size")  # nothing without phase2_length
SHAPE = {
    "architecture",
    "size",
    "init_scheme",
    "activation",
    "initializer_range",
    "layer_norm",
    "glu",
}  # fixed by the model to go on from
MOST_EVALS, STEPS_AN_EVAL = 10, 10  # an evaluation takes the time of some 8 default steps
CORE_NUMBERS = 4096 * 12 * 768  # tokens x layers x hidden size: some 1.2 GB of activations in bf16
FOR_EXAMPLES = (  # in ExampleSettings under the same names
    "objective", "mlm_probability", "short_seq_prob", "masking", "mask_replace_prob",
    "random_replace_prob",
)  # fmt: skip


@dataclass(frozen=True)
class Phase:
    """A part of a run with rows of one length, up to a fraction `until` of the budget."""

    number: int
    """1 or 2."""
    length: int
    batch: int
    until: float


@dataclass(frozen=True)
class DataSettings:
    """Rows and what is predicted in them."""

    objective: Objective = "mlm+nsp"
    """mlm+nsp: the paper's; mlm: full rows, no pairs; mlm+sop: the order of two segments; ltr: the
    next token, left to right; ltr+rtl: two models of the size side by side, one in each direction,
    with one token table (as in ELMo)."""
    bag_of_words: Annotated[float | None, NotNegative, Advanced] = None
    """Weight of the loss of [CLS], which predicts the tokens of its row in no order, so that it
    carries the text early. Default: 1 with pairs, else 0; the paper has 0."""
    max_length: int = 128
    """Tokens in a row."""
    batch_size: Annotated[int, Count] = 32
    """Rows in a step."""
    phase2_length: int | None = None
    """Tokens in a row of the second phase; default: there is none."""
    phase2_ratio: Annotated[float, Advanced] = 0.1
    """Share of the budget that the second phase takes, the last one."""
    phase2_batch_size: Annotated[int | None, Count, Advanced] = None
    """Rows in a step of the second phase. Default: batch_size."""
    mlm_probability: float = 0.15
    """Share of the tokens to predict."""
    masking: Masking = "token"
    """Masked at once: a token, a whole word, a span of words."""
    max_predictions_per_seq: Annotated[int | None, Advanced] = None
    """Most tokens to predict in a row, in proportion more in the second phase. Default: max_length
    x mlm_probability."""
    mask_replace_prob: Annotated[float, Advanced] = 0.8
    """Share of the chosen tokens that become [MASK]."""
    random_replace_prob: Annotated[float, Advanced] = 0.1
    """Share of the chosen tokens that become random pieces; the rest are left as they are."""
    short_seq_prob: Annotated[float, Advanced] = 0.0
    """Share of document passes with shorter rows; the paper has 0.1."""
    nsp_sampling: PairRule | None = None
    """clean: the paper's pairs, but none misleading and in full rows. Default."""
    nsp_weight: Annotated[float, Positive, Advanced] = 0.1
    """Weight of the loss of next sentences, or of their order, beside that of masked tokens; the
    paper has 1, with which a short training learns less of words."""
    seed: Annotated[int, Seed] = 12345


@dataclass(frozen=True)
class ModelSettings:
    """A new model."""

    architecture: Annotated[Literal["bert", "gpt"], Advanced] = "bert"
    """gpt: that of Radford et al. 2018, with objective ltr."""
    size: str = "tiny"
    """tiny, mini, small, medium, base, large, LAYERSxHIDDEN such as 6x384, whose heads have 64
    numbers, or LAYERSxHIDDENxHEADS."""
    activation: Annotated[Literal["gelu", "gelu_tanh"], Advanced] = "gelu"
    """gelu_tanh: google-research/bert's approximation."""
    layer_norm: Annotated[Literal["post", "pre"], Advanced] = "post"
    """LayerNorm after each sublayer's residual, the paper's, or before each sublayer."""
    glu: Annotated[bool, Advanced] = False
    """GeGLU feed-forward, of about as many parameters."""
    init_scheme: Annotated[Literal["local", "paper"], Advanced] = "local"
    """local: heads start at their neighbours or, every second one of four or more that see both
    sides, at pieces like their own; paper: all weights at random."""
    initializer_range: Annotated[float | None, Positive, Advanced] = None
    """Standard deviation of the initial weights. Default: 1 / sqrt(3 H), 0.02 at base size."""


@dataclass(frozen=True)
class BudgetSettings:
    """Length of the training: one of three."""

    steps: int | None = None
    """Budget in optimizer steps."""
    tokens: int | None = None
    """Budget in tokens read."""
    minutes: float | None = None
    """Budget in minutes of this machine."""


@dataclass(frozen=True)
class PretrainOptimization(Optimization):
    """Pre-training's own defaults; the paper's dropout costs a short run more than it gives."""

    title = "optimization"

    learning_rate: Annotated[float | None, Positive, Alias("--lr")] = None
    """Peak learning rate. Default: 0.256 / hidden size, at most 2e-3, which is 1e-3 for mini and
    3.3e-4 for base; muon doubles it in the layers."""
    schedule: Literal["linear", "cosine", "constant", "paper"] = "linear"
    """How the rate goes on from the peak: to 0 in a line or along a cosine, not at all, or as in
    google-research/bert, with a drop after warm-up."""
    warmup_ratio: Annotated[float, Fraction] = 0.05
    """Share of the budget in which the rate rises."""
    warmup_steps: Annotated[int | None, Advanced] = None
    """The same in steps, for a budget in steps."""
    optimizer: Literal["auto", "adamw", "paper-adam", "lamb", "muon"] = "auto"
    """auto: muon, which learns more in a step, for a new, narrow model on a CPU, else adamw;
    paper-adam: no bias correction; lamb: batches of thousands of rows."""
    dropout: Annotated[float, Fraction] = 0.0
    """Dropout on hidden outputs; the paper has 0.1."""
    attention_dropout: Annotated[float, Fraction, Advanced] = 0.0
    """Dropout on attention probabilities; the paper has 0.1."""


@dataclass(frozen=True)
class LogSettings:
    """Measurements, log lines and checkpoints on the way."""

    title = "log and checkpoints"

    num_evals: Annotated[int | None, Count] = None
    """Held-out measurements. Default: 10, in a short budget one in 10 steps."""
    eval_rows: Annotated[int, Count, Advanced] = 512
    """Rows of a held-out measurement during the run; the last one reads four times as many."""
    checkpoint_every: Annotated[int, Count] = 1000
    """Steps between two checkpoints."""
    keep_checkpoints: Annotated[int, Count, Advanced] = 2
    """Newest checkpoints kept."""
    keep_steps: Annotated[tuple[int, ...], Count, Advanced] = ()
    """Steps with a checkpoint that is kept for good."""
    log_every: Annotated[int, Count, Advanced] = 10
    """Steps between two lines of the log."""
    loggers: tuple[str, ...] | None = None
    """Where the figures go besides log.jsonl: tensorboard, wandb, mlflow. Default: tensorboard,
    where it is installed."""


@dataclass(frozen=True)
class PretrainMachine(Machine):
    """Device and precision, and the parts of a step."""

    title = "machine"

    precision: str = "auto"
    """float32, bf16, float8 or int8 (matmuls of the encoder's layers, int8's also of the masked-LM
    loss, where the hardware has them), or auto: bf16 where it has that; auto-int8: int8 where its
    products are measured, once on a machine, to be a tenth faster, else as auto."""
    micro_batch_size: Annotated[int | Literal["auto"] | None, Count] = None
    """Rows computed at once; the gradients of a step's micro-batches are summed. auto: the largest
    that fits and pays. Default: each core's share of the batch, of a large model a part of it (32
    rows of 128 at base size); on a GPU the whole batch."""
    activation_checkpointing: Annotated[bool, Advanced] = False
    """Keep only each layer's input and compute the rest again: less memory, a third more time."""
    compile: Annotated[Literal["auto", "on", "off"], Advanced] = "auto"
    """Compile the step on a GPU; auto: where the run is long enough to pay for it."""
    num_workers: Annotated[int, Count, Advanced] = 1
    """Threads that make batches; changes nothing but the time."""
    shard: Annotated[bool, Advanced] = False
    """Of several ranks each keeps only its part of weights, gradients and optimizer (FSDP2)."""
    dist_timeout: Annotated[float, Positive, Advanced] = 600.0
    """Seconds that a rank waits for the others: to join, and at every step."""


@dataclass(frozen=True)
class PretrainSettings(
    DataSettings, ModelSettings, BudgetSettings, PretrainOptimization, LogSettings, PretrainMachine
):
    """Everything that decides what a pre-training run computes; defaults suit minutes to hours."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.architecture == "gpt" and self.objective != "ltr":
            raise ValueError(
                f"`objective={self.objective!r}`: a GPT reads from left to right: `objective='ltr'`"
            )
        if self.bag_of_words and self.objective in NEXT_TOKEN:
            raise ValueError(
                f"`bag_of_words`: with objective {self.objective} [CLS] does not see all other "
                "tokens: leave it out"
            )
        if self.nsp_weight != PretrainSettings.nsp_weight and self.objective not in PAIR_NAMES:
            raise ValueError(
                f"`nsp_weight={self.nsp_weight}`: objective {self.objective} has no pairs: leave "
                "it out"
            )
        if self.shard and self.optimizer in ("lamb", "muon"):
            raise ValueError(
                f"`shard=True`: {self.optimizer} needs whole matrices: use adamw or paper-adam, or "
                "leave `shard` out"
            )
        for name in SECOND_PHASE:
            value = getattr(self, name)
            if self.phase2_length is None and value != getattr(PretrainSettings, name):
                raise ValueError(
                    f"`{name}={value}`: there is no second phase: give `phase2_length`, or leave "
                    f"`{name}` out"
                )
        if self.phase2_length is not None and self.phase2_length <= self.max_length:
            raise ValueError(
                f"`phase2_length={self.phase2_length}`: must be above `max_length="
                f"{self.max_length}`; leave it out for rows of one length"
            )
        if not 0 < self.phase2_ratio < 1:
            raise ValueError(f"`phase2_ratio={self.phase2_ratio}`: must be above 0 and below 1")
        if isinstance(self.micro_batch_size, int) and self.batch_size % self.micro_batch_size:
            raise ValueError(
                f"`batch_size={self.batch_size}` is not a multiple of `micro_batch_size="
                f"{self.micro_batch_size}`"
            )
        if self.warmup_steps is not None and self.warmup_ratio != PretrainSettings.warmup_ratio:
            raise ValueError(
                f"`warmup_ratio={self.warmup_ratio}` and `warmup_steps={self.warmup_steps}`: "
                "give one of them"
            )
        for phase in self.phases():
            self.examples(phase.length)  # refuses what contradicts itself there

    def budget(self) -> Budget:
        """The budget. Errors: ValueError unless exactly one is given, longer than the warm-up."""
        budget = Budget(self.steps, self.tokens, self.minutes)
        warmup_share(budget, self.warmup_ratio, self.warmup_steps)
        return budget

    def phases(self) -> list[Phase]:
        """One or two.

        >>> settings = PretrainSettings(phase2_length=512, phase2_ratio=0.95)
        >>> [phase.until for phase in settings.phases()]
        [0.05, 1.0]
        """
        if self.phase2_length is None:
            return [Phase(1, self.max_length, self.batch_size, 1.0)]
        return [
            Phase(1, self.max_length, self.batch_size, round(1.0 - self.phase2_ratio, 9)),
            Phase(2, self.phase2_length, self.phase2_batch_size or self.batch_size, 1.0),
        ]

    def examples(self, length: int) -> ExampleSettings:
        """Settings of the rows of this length."""
        values = {name: getattr(self, name) for name in FOR_EXAMPLES}
        most = self.max_predictions_per_seq
        return ExampleSettings(
            length,
            max_predictions_per_seq=most and most * length // self.max_length,
            nsp_sampling=self.pair_rule,
            bare=self.architecture == "gpt",
            **values,
        )

    @property
    def evaluations(self) -> int:
        """`num_evals`, or its default for the budget.

        >>> [PretrainSettings(steps=steps).evaluations for steps in (5, 20, 1000)]
        [1, 2, 10]
        """
        steps = self.steps or (self.tokens or math.inf) / (self.batch_size * self.max_length)
        return self.num_evals or int(max(1, min(MOST_EVALS, steps / STEPS_AN_EVAL)))

    @property
    def bow_weight(self) -> float:
        """`bag_of_words`, or its default for the objective."""
        has_pairs = self.objective in PAIR_NAMES
        return float(has_pairs) if self.bag_of_words is None else self.bag_of_words

    @property
    def pair_rule(self) -> PairRule:
        """`nsp_sampling`, or its default for the objective."""
        return self.nsp_sampling or ("clean" if self.objective in PAIR_NAMES else "paper")


def default_micro_batch_size(length: int, layers: int, hidden: int) -> int:
    """The most rows that a core computes at once by default.

    >>> [default_micro_batch_size(128, *shape) for shape in ((12, 768), (4, 256))]
    [32, 288]
    """
    return max(1, CORE_NUMBERS // (length * layers * hidden))


RECIPES = Path(__file__).parent / "recipes"


def recipe_file(recipe: str | Path) -> Path:
    """The file of a recipe: a path, or the bare name of one that comes with the package.

    Errors: ValueError for an unknown name; it suggests the nearest.

    >>> recipe_file("paper").name, recipe_file("mine.toml").name
    ('paper.toml', 'mine.toml')
    """
    path = Path(recipe)
    if path.suffix or len(path.parts) != 1:
        return path
    known = sorted(file.stem for file in RECIPES.glob("*.toml"))
    if path.name not in known:
        raise ValueError(
            f"`recipe={str(path)!r}`: no such recipe: {nearest(path.name, known)} "
            "(the name of a file ends in .toml)"
        )
    return RECIPES / f"{path.name}.toml"


def read_recipe(recipe: str | Path) -> PretrainSettings:
    """The settings of a recipe. Errors: ValueError that names the file and the mistake in it."""
    return read_toml(PretrainSettings, recipe_file(recipe))


@dataclass(frozen=True)
class Recipe:
    """Settings, and the names of those that were chosen on purpose.

    A resume keeps the run's own settings, but for explicit ones.
    """

    settings: PretrainSettings
    explicit: frozenset[str] = frozenset()
    """Named by a recipe file, a flag or a keyword."""
    from_file: frozenset[str] = frozenset()
    """Explicit ones that only a recipe file names."""


def make_recipe(
    recipe: Recipe | PretrainSettings | Path | str | None,
    changes: dict[str, Any],
    base_model: object,
) -> Recipe:
    """Defaults <- recipe (a TOML file, the name of one, or settings) <- changes.

    Errors: ValueError for a wrong setting, or for a shape beside a base model, which has one.
    """
    fixed = SHAPE & changes.keys()
    if base_model and fixed:
        names = ", ".join(sorted(fixed))
        raise ValueError(f"{names}: fixed by `model`, from which this run begins; leave it out")
    if isinstance(recipe, Recipe):
        assert not changes, "they are in the recipe"
        return recipe
    settings = recipe if isinstance(recipe, PretrainSettings) else PretrainSettings()
    in_file, unused = set[str](), set[str]()
    if isinstance(recipe, str | Path):
        settings = read_recipe(recipe)
        unused = _unused(settings, changes, base_model) - changes.keys()
        in_file = toml_values(recipe_file(recipe)).keys() - unused - changes.keys()
    for alternatives in (BUDGETS, WARMUPS):  # one in `changes` replaces the recipe's
        if changes.keys() & set(alternatives):
            unused.update(alternatives)
    defaults = {name: getattr(PretrainSettings, name) for name in unused}
    settings = replace(settings, **defaults | changes)
    return Recipe(settings, frozenset(in_file | changes.keys()), frozenset(in_file))


def _unused(recipe: PretrainSettings, changes: dict[str, Any], base_model: object) -> set[str]:
    """Settings of a recipe that `changes` or a model to start from make meaningless."""
    unused = set(SHAPE) if base_model else set()
    if changes.get("objective") in ("mlm", *NEXT_TOKEN):
        unused |= {"nsp_sampling", "nsp_weight", "short_seq_prob"}
    if changes.get("objective") in NEXT_TOKEN:
        unused.update(MASK_SETTINGS)
    longer = recipe.phase2_length or math.inf
    if "phase2_length" not in changes and changes.get("max_length", recipe.max_length) >= longer:
        unused |= {"phase2_length", *SECOND_PHASE}
    micro_batch = recipe.micro_batch_size
    if isinstance(micro_batch, int) and changes.get("batch_size", recipe.batch_size) % micro_batch:
        unused.add("micro_batch_size")
    return unused
