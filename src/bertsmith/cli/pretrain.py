"""Pre-train a BERT on a token store.

Examples:
  bertsmith pretrain --corpus store --out run --minutes 10
  bertsmith pretrain --corpus store --out run --size mini --steps 20000 --batch 64
  bertsmith pretrain --corpus store --out run --config configs/paper.toml
  bertsmith pretrain --corpus store --out run --minutes 20 --resume     go on, to 20 minutes in all

A recipe is a TOML file of the settings below; a flag overrules it. Exactly one budget is needed.
SIGTERM and Ctrl-C save a checkpoint and leave; --resume goes on from the newest one.
"""

from __future__ import annotations

import dataclasses
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from bertsmith.config import read_toml
from bertsmith.training.pretrain_settings import BUDGETS, PretrainSettings


@dataclass(frozen=True, kw_only=True)
class Pretrain(PretrainSettings):
    corpus: Path
    """Token store made by `bertsmith corpus`."""
    out: Path
    """Run directory to write."""
    config: Path | None = None
    """Recipe, a TOML file."""
    init: str | None = None
    """Model to go on from: a run, a Hugging Face folder or hub name. Its shape is kept."""
    resume: bool = False
    """Go on from the newest checkpoint of --out; start when there is none."""
    given: Annotated[tuple[str, ...], tyro.conf.Suppress] = ()


def run(settings: Pretrain) -> int:
    recipe, given = _recipe(settings)
    from bertsmith.checkpoints.open import open_model_folder
    from bertsmith.training.pretrain import pretrain

    result = pretrain(
        settings.corpus,
        settings.out,
        recipe,
        init=open_model_folder(settings.init) if settings.init else None,
        resume=settings.resume,
        given=given,
        command=["bertsmith", *sys.argv[1:]],
    )
    if result is None:
        print(f"stopped and saved; add --resume to go on with {settings.out}", file=sys.stderr)
        return 1
    print(f"{settings.out}: {result['steps']:,} steps, {result['tokens']:,} tokens")
    if "held_out" in result:
        held_out = result["held_out"]
        print(
            f"held-out: MLM loss {held_out['mlm_loss']:.3f} nats "
            f"(unigram entropy {held_out['unigram_entropy']:.3f}), "
            f"MLM accuracy {held_out['mlm_accuracy']:.1%}, NSP accuracy "
            f"{held_out['nsp_accuracy']:.1%}"
        )
    return 0


def _recipe(settings: Pretrain) -> tuple[PretrainSettings, set[str]]:
    """Defaults <- TOML <- flags, and the names that one of the two gave."""
    names = {field.name for field in dataclasses.fields(PretrainSettings)}
    flags = {name: getattr(settings, name) for name in settings.given if name in names}
    recipe, given = PretrainSettings(), set(flags)
    if settings.config is not None:
        recipe = read_toml(PretrainSettings, settings.config)
        given |= tomllib.loads(settings.config.read_text(encoding="utf-8")).keys()
    if flags.keys() & set(BUDGETS):  # a budget on the command line replaces the recipe's
        recipe = dataclasses.replace(recipe, **dict.fromkeys(BUDGETS))
    return dataclasses.replace(recipe, **flags), given
