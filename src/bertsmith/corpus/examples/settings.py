"""Settings of pre-training examples: the objective, its rows, its masks."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, get_args

NUM_SPECIAL = 3  # [CLS], [SEP], [SEP]
MIN_LENGTH = NUM_SPECIAL + 2  # one token of A and one of B

Objective = Literal["mlm+nsp", "mlm", "mlm+sop", "ltr"]
Masking = Literal["token", "word", "span"]
PairRule = Literal["paper", "clean"]
CHOICES = {"objective": Objective, "masking": Masking, "pairs": PairRule}
MASK_SETTINGS = ("mask_rate", "masking", "max_predictions", "mask_share", "keep_share")


@dataclass(frozen=True)
class ExampleSettings:
    """Pre-training examples; the defaults are the paper's (its section 3.1 and appendix A.2)."""

    length: int = 128
    """Tokens of a row, special ones included."""
    mask_rate: float = 0.15
    """Share of a row's tokens to predict."""
    short_rate: float = 0.1
    """Share of documents whose pass aims at a shorter length; rows without pairs are all full."""
    masking: Masking = "token"
    """The unit of masking: a token, all pieces of a word, or a span of words (SpanBERT)."""
    max_predictions: int | None = None
    """Most tokens to predict in a row; by default length x mask_rate, rounded."""
    mask_share: float = 0.8
    """Share of the chosen tokens that become [MASK]."""
    keep_share: float = 0.1
    """Share of the chosen tokens left as they are; the rest become random pieces."""
    objective: Objective = "mlm+nsp"
    """mlm+nsp: the paper's; mlm: full rows, no pairs (RoBERTa); mlm+sop: which of two segments
    comes first (ALBERT); ltr: the next token, left to right."""
    pairs: PairRule = "paper"
    """clean: a random B is of another document and does not begin like the true one, and a pair
    too long loses its outer ends only; paper: the original's procedure to the letter."""

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if getattr(self, name) not in get_args(choices):
                raise ValueError(
                    f"{name} = {getattr(self, name)!r}: expected one of "
                    f"{', '.join(get_args(choices))}"
                )
        if self.length < MIN_LENGTH:
            raise ValueError(f"length = {self.length}: a pair needs at least {MIN_LENGTH} tokens")
        if not 0 < self.mask_rate <= 1:
            raise ValueError(f"mask_rate = {self.mask_rate}: expected above 0, at most 1")
        if not 0 <= self.short_rate <= 1:
            raise ValueError(f"short_rate = {self.short_rate}: expected 0 to 1")
        if self.max_predictions is not None and self.max_predictions < 1:
            raise ValueError(f"max_predictions = {self.max_predictions}: expected at least 1")
        if min(self.mask_share, self.keep_share) < 0 or self.mask_share + self.keep_share > 1:
            raise ValueError(
                f"mask_share = {self.mask_share}, keep_share = {self.keep_share}: "
                "shares are at least 0 and at most 1 together"
            )
        defaults = {field.name: field.default for field in fields(self)}
        for name in MASK_SETTINGS:
            if self.objective == "ltr" and getattr(self, name) != defaults[name]:
                raise ValueError(
                    f"{name} = {getattr(self, name)}: the objective ltr masks nothing: "
                    f"leave {name} at its default ({defaults[name]}), or take another objective"
                )
        if self.pairs != "paper" and not self.has_pairs:
            raise ValueError(
                f"pairs = {self.pairs}: the objective {self.objective} has no pairs: leave pairs "
                "out, or take mlm+nsp or mlm+sop"
            )
        if self.short_rate != 0.1 and not self.has_pairs:
            raise ValueError(
                f"short_rate = {self.short_rate}: the objective {self.objective} fills its rows: "
                "leave short_rate out, or take mlm+nsp or mlm+sop"
            )
        if self.max_predictions is not None and self.max_predictions > self._most_predictions:
            raise ValueError(
                f"max_predictions = {self.max_predictions}: a row of length = {self.length} has "
                f"{self._most_predictions} tokens to predict: lower it or raise length"
            )

    @property
    def has_pairs(self) -> bool:
        """True if a row is two segments with a label, False if it is a run of text."""
        return self.objective in ("mlm+nsp", "mlm+sop")

    @property
    def num_predictions(self) -> int:
        """Width P of a batch's masked arrays.

        >>> ExampleSettings(length=128).num_predictions, ExampleSettings(512).num_predictions
        (19, 77)
        >>> ExampleSettings(length=128, objective="ltr").num_predictions
        127
        """
        if self.objective == "ltr":
            return self.length - 1
        count = self.max_predictions or max(1, round(self.length * self.mask_rate))
        return min(count, self._most_predictions)

    @property
    def _most_predictions(self) -> int:
        return self.length - NUM_SPECIAL
