"""Settings of pre-training examples: the objective, its rows, its masks."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Literal

from bertsmith.base.settings import Bounds, PositiveFraction, Weight, check_bounds

NUM_SPECIAL = 3  # [CLS], [SEP], [SEP]
MIN_LENGTH = NUM_SPECIAL + 2  # one token of A and one of B
PairLength = Bounds(f"a pair needs at least {MIN_LENGTH} tokens", minimum=MIN_LENGTH)

Objective = Literal["mlm+nsp", "mlm", "mlm+sop", "ltr", "ltr+rtl"]
PAIR_NAMES = {"mlm+nsp": "nsp", "mlm+sop": "sop"}  # objectives with pairs: of their figures
NEXT_TOKEN = ("ltr", "ltr+rtl")  # objectives that mask nothing and predict every token of a row
Masking = Literal["token", "word", "span"]
PairRule = Literal["paper", "clean"]
MASK_SETTINGS = (
    "mlm_probability",
    "masking",
    "max_predictions_per_seq",
    "mask_replace_prob",
    "random_replace_prob",
)


@dataclass(frozen=True)
class ExampleSettings:
    """Pre-training examples; the defaults are the paper's (its section 3.1 and appendix A.2), but
    for the shorter rows of a tenth of its documents."""

    max_length: Annotated[int, PairLength] = 128
    """Tokens of a row, special ones included."""
    mlm_probability: Annotated[float, PositiveFraction] = 0.15
    """Share of a row's tokens to predict."""
    short_seq_prob: Annotated[float, Weight] = 0.0
    """Share of documents whose pass aims at a shorter length; rows without pairs are all full."""
    masking: Masking = "token"
    """The unit of masking: a token, all pieces of a word, or a span of words (SpanBERT)."""
    max_predictions_per_seq: int | None = None
    """Most tokens to predict in a row; by default max_length x mlm_probability, rounded."""
    mask_replace_prob: float = 0.8
    """Share of the chosen tokens that become [MASK]."""
    random_replace_prob: float = 0.1
    """Share of the chosen tokens that become random pieces; the rest are left as they are."""
    objective: Objective = "mlm+nsp"
    """mlm+nsp: the paper's; mlm: full rows, no pairs (RoBERTa); mlm+sop: which of two segments
    comes first (ALBERT); ltr: the next token, left to right; ltr+rtl: also right to left (ELMo)."""
    nsp_sampling: PairRule = "paper"
    """clean: a random B is of another document and does not begin like the true one, a pair too
    long loses its outer ends only, and rows are full; paper: the original's procedure."""
    bare: bool = False
    """ltr: rows are text alone, without [CLS] and [SEP] around it (GPT)."""

    def __post_init__(self) -> None:
        check_bounds(self)
        masked, random = self.mask_replace_prob, self.random_replace_prob
        if min(masked, random) < 0 or masked + random > 1:
            raise ValueError(
                f"`mask_replace_prob={masked}`, `random_replace_prob={random}`: "
                "shares are at least 0 and at most 1 together"
            )
        unused: dict[str, str] = {}
        if self.objective != "ltr":
            unused["bare"] = "needs [CLS]"
        if self.objective in NEXT_TOKEN:
            unused |= dict.fromkeys(MASK_SETTINGS, "masks nothing")
        if not self.has_pairs:
            unused |= dict.fromkeys(("nsp_sampling", "short_seq_prob"), "has no pairs")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in unused and value != field.default:
                raise ValueError(
                    f"`{field.name}={value}`: the objective {self.objective} "
                    f"{unused[field.name]}: leave `{field.name}` out, or take another objective"
                )
        most, free = self.max_predictions_per_seq, self.max_length - NUM_SPECIAL
        if most is not None and not 1 <= most <= free:
            raise ValueError(
                f"`max_predictions_per_seq={most}`: a row of `max_length={self.max_length}` has "
                f"{free} tokens to predict: choose 1 to {free}, or raise it"
            )

    @property
    def has_pairs(self) -> bool:
        """True if a row is two segments with a label, False if it is a run of text."""
        return self.objective in PAIR_NAMES

    @property
    def num_predictions(self) -> int:
        """Width P of a batch's masked arrays.

        >>> ExampleSettings(max_length=128).num_predictions, ExampleSettings(512).num_predictions
        (19, 77)
        >>> ExampleSettings(max_length=128, objective="ltr").num_predictions
        127
        """
        if self.objective in NEXT_TOKEN:
            return self.max_length - 1
        share = max(1, round(self.max_length * self.mlm_probability))
        return min(self.max_predictions_per_seq or share, self.max_length - NUM_SPECIAL)
