"""The command pretrain."""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

from bertsmith.base.settings import Hidden, Metavar, parse_duration
from bertsmith.cli.outputs import after_pretraining
from bertsmith.corpus.examples.settings import NEXT_TOKEN
from bertsmith.training.pretraining.settings import (
    PretrainSettings,
    Recipe,
    make_recipe,
)

MODES = ("resume", "dry_run", "replay")  # one at most
# "Temporary failure; try again" in sysexits.h. torchrun tries again at once, which is right where
# another machine's torchrun was stopped, but not after a time limit: there the code is 0.
STOPPED = 75


@dataclass(frozen=True, kw_only=True)
class Pretrain(PretrainSettings):
    """Pre-train a BERT on a token store.

    Examples:
      bertsmith pretrain --corpus store --out run --minutes 10
      bertsmith pretrain --corpus store --out run --config fast --size mini --minutes 60
      bertsmith pretrain --corpus books=0.7 s3://bucket/news=0.3 --out run --minutes 60
      bertsmith pretrain --corpus store --config paper --dry-run          what would it take here?
      bertsmith pretrain --corpus store --out run --config continue --model MODEL --minutes 60
      bertsmith pretrain --corpus store --out run --objective ltr --steps 20000 --batch-size 64
      bertsmith pretrain --corpus store --out run --minutes 20 --resume   on, to 20 minutes in all
      bertsmith pretrain --corpus store --out run --steps 900000 --resume --time-limit 23:50:00
      bertsmith pretrain --corpus store --out run --replay                which row was not finite?
      torchrun --standalone --nproc-per-node=gpu -m bertsmith pretrain --corpus store --out run ...

    A recipe is a TOML file of the settings below, or the name of one that comes along (fast, paper,
    continue); a flag overrules it. Exactly one budget is needed. SIGTERM, Ctrl-C and --time-limit
    save a checkpoint and leave with exit code 75; --resume goes on from the newest one that is
    whole. Started by torchrun, its processes train together: docs/how-to/many-machines.md.
    """

    common = ("out", "config", "size", "minutes", "resume")
    arguments = {"recipe": "config"}

    corpus: Annotated[list[str], Metavar("STORE...")]
    """Token store made by `bertsmith corpus`, a folder or a URL; or several with the shares of
    their rows: books=0.7 news=0.3."""
    out: Path | None = None
    """Run directory to write; needed but for --dry-run."""
    config: Path | None = None
    """Recipe: fast, paper, continue, or a TOML file."""
    model: str | None = None
    """Model to go on from: a run, a Hugging Face folder or hub name. Its shape is kept,
    whatever a recipe says."""
    resume: bool = False
    """Go on from the newest whole checkpoint of --out; start when there is none."""
    time_limit: str | None = None
    """Save and leave after this time, to go on with --resume: minutes, H:M:S or D-H:M:S as for
    Slurm. What a checkpoint takes comes on top."""
    dry_run: bool = False
    """Print memory, operations, tokens and hours; train and write nothing."""
    replay: bool = False
    """Do the batch at which --out stands again, row by row, and tell what is not finite."""
    json: bool = False
    """Print one JSON object: the result, or what --dry-run or --replay found."""
    given: Annotated[tuple[str, ...], Hidden] = ()

    def __post_init__(self) -> None:
        """Flags alone are no recipe: they are checked once they are in one."""


def run_pretrain(settings: Pretrain) -> int:
    recipe = _recipe(settings)
    began = settings.out is not None and (settings.out / "run.json").exists()
    goes_on = settings.model or (settings.resume and began) or settings.replay
    if str(settings.config) == "continue" and not goes_on:
        raise ValueError("--config continue goes on from a model: name it with --model MODEL")
    modes = [f"--{n.replace('_', '-')}" for n in MODES if getattr(settings, n)]
    if len(modes) > 1:
        raise ValueError(f"{' and '.join(modes)}: give one of them")
    if settings.dry_run:
        return _dry_run(settings, recipe)
    if settings.out is None:
        raise ValueError("missing --out")
    if settings.replay:
        return _replay(settings, settings.out, recipe)
    return _pretrain(settings, settings.out, recipe)


def _recipe(settings: Pretrain) -> Recipe:
    names = {field.name for field in fields(PretrainSettings)}
    flags = {n: getattr(settings, n) for n in settings.given if n in names}
    return make_recipe(settings.config, flags, settings.model)


def _pretrain(settings: Pretrain, out: Path, recipe: Recipe) -> int:
    from bertsmith.cli.outputs import check_folder

    if int(os.environ.get("RANK", 0)) == 0:  # no other process of torchrun writes
        check_folder(out)
    from bertsmith.training.pretraining.evaluation import describe_evaluation
    from bertsmith.training.pretraining.run import pretrain
    from bertsmith.training.ranks import rank_zero_output

    with rank_zero_output():
        result = pretrain(
            settings.corpus,
            out,
            recipe,
            model=settings.model,
            resume=settings.resume,
            time_limit=parse_duration(settings.time_limit) if settings.time_limit else math.inf,
            command=["bertsmith", *sys.argv[1:]],
        )
        if not result.finished:
            print(f"stopped and saved; add --resume to go on with {out}", file=sys.stderr)
            return 0 if settings.time_limit and "TORCHELASTIC_RUN_ID" in os.environ else STOPPED
        if settings.json:
            print(json.dumps(result.to_dict(), allow_nan=False))
            return 0
        print(f"{out}: {result.steps:,} steps, {result.tokens:,} tokens")
        if result.eval_metrics:
            print(describe_evaluation(result.eval_metrics))
        print(after_pretraining(out, result.objective not in NEXT_TOKEN))
        return 0


def _dry_run(settings: Pretrain, recipe: Recipe) -> int:
    from bertsmith.training.pretraining.estimate import duration
    from bertsmith.training.pretraining.trial import dry_run

    estimates, rule = dry_run(settings.corpus, recipe, settings.model)
    if settings.json:
        phases = [estimate.mapping() for estimate in estimates]
        print(json.dumps({"rows": rule, "phases": phases}))
        return 0
    if rule:
        print(f"rows     {rule}")
    for number, estimate in enumerate(estimates, 1):
        if len(estimates) > 1:
            print(f"{'' if number == 1 else chr(10)}phase {number}")
        print(estimate.text())
    if len(estimates) > 1:
        hours = sum(estimate.hours for estimate in estimates)
        tokens = sum(estimate.tokens for estimate in estimates)
        print(f"\ntogether {tokens:,} tokens, {duration(hours)}")
    return 0


def _replay(settings: Pretrain, out: Path, recipe: Recipe) -> int:
    """1 when something was not finite."""
    from bertsmith.training.pretraining.diagnostics import replay

    found = replay(settings.corpus, out, recipe)
    print(json.dumps(found.mapping()) if settings.json else found.text())
    return 1 if found.faults else 0
