"""Commands: pretrain, finetune."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

from bertsmith.base.settings import Hidden, Metavar, Positional, parse_duration
from bertsmith.base.terminal import MANY_CASES, counted
from bertsmith.cli.outputs import after_finetuning, after_pretraining, check_folder
from bertsmith.corpus.examples.settings import NEXT_TOKEN
from bertsmith.training.finetuning.request import (
    Request,
    check_flags,
    find_task_type,
    unread_settings,
)
from bertsmith.training.pretraining.settings import (
    PretrainSettings,
    Recipe,
    make_recipe,
)

# one at most, with the flags that it does not read
MODES = {"resume": (), "dry_run": ("time_limit",), "replay": ("time_limit", "model")}
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
    limit = math.inf if settings.time_limit is None else parse_duration(settings.time_limit)
    modes = [name for name in MODES if getattr(settings, name)]
    if len(modes) > 1:
        raise ValueError(f"{' and '.join(f'`{name}`' for name in modes)}: give one of them")
    for mode in modes:
        for name in MODES[mode]:
            if getattr(settings, name) is not None:
                raise ValueError(f"`{name}` has no effect with `{mode}`: leave it out")
    recipe = _recipe(settings)
    began = settings.out is not None and (settings.out / "run.json").exists()
    goes_on = settings.model or (settings.resume and began) or settings.replay
    if str(settings.config) == "continue" and not goes_on:
        raise ValueError("--config continue goes on from a model: name it with --model MODEL")
    if settings.dry_run:
        return _dry_run(settings, recipe)
    if settings.out is None:
        raise ValueError("missing --out")
    if settings.replay:
        return _replay(settings, settings.out, recipe)
    return _pretrain(settings, settings.out, recipe, limit)


def _recipe(settings: Pretrain) -> Recipe:
    names = {field.name for field in fields(PretrainSettings)}
    flags = {n: getattr(settings, n) for n in settings.given if n in names}
    return make_recipe(settings.config, flags, settings.model)


def _pretrain(settings: Pretrain, out: Path, recipe: Recipe, limit: float) -> int:
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
            time_limit=limit,
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


@dataclass(frozen=True, kw_only=True)
class Finetune(Request):
    """Train a model for a task on top of a pre-trained one.

    Examples:
      bertsmith finetune sst2 --model run --data glue/SST-2 --out sst2
      bertsmith finetune mrpc --model run --data glue/MRPC --out mrpc --seeds 1..5
      bertsmith finetune classify --model run --data mail.csv --text body --label queue --out mail
      bertsmith finetune multilabel --model run --data films.csv --text plot --label genre --out o
      bertsmith finetune ner --model run --data conll2003 --out ner
      bertsmith finetune squad2 --model run --data squad --out squad
      bertsmith finetune rte --model run --data glue/RTE --out rte --sweep paper --seeds 1..5
      bertsmith finetune sst2 --model small --data glue/SST-2 --out small-sst2 --teacher sst2

    TASK is a data set (cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte, wnli, squad1, squad2, swag,
    hellaswag, codah, ner: docs/reference/tasks.md), or what your own files are about: classify (a
    class), regress (a number), multilabel (any number of labels), choice (one of several options),
    tag (a tag a word), answer (questions about texts). --data is a training file, or a folder with
    train and dev files. Without a dev file a tenth is split off, at least one of each class. A run
    that was stopped goes on by the same command.
    """

    common = ("seeds", "epochs", "dev", "from_scratch")

    task: Annotated[str, Positional]
    given: Annotated[tuple[str, ...], Hidden] = ()

    @classmethod
    def check_first(cls, words: Sequence[str]) -> None:
        """Refuse a misspelt TASK before anything else. Errors: ValueError."""
        if words and not words[0].startswith("-"):
            find_task_type(words[0])

    @classmethod
    def not_read(cls, words: Sequence[str]) -> set[str]:
        """Flags without effect on the TASK among the words."""
        return set() if not words or words[0].startswith("-") else unread_settings(words[0])


def run_finetune(settings: Finetune) -> int:
    check_flags(settings)
    check_folder(settings.out)
    from bertsmith.experiments.finetuning import run_request

    result, recipe = run_request(settings, ["bertsmith", *sys.argv[1:]])
    show(result["seeds"], result["dev_examples"])
    if result["restarts"]:
        print(restarts_line(result["restarts"]))
    is_last = recipe.keep == "last" and len(result["seeds"]) == 1
    print(
        f"{settings.out}: the model of seed {result['best_seed']} after step "
        f"{result['best_step']:,} of {result['steps']:,}, "
        f"{'its last' if is_last else 'the best on dev'}"
    )
    print(after_finetuning(settings.out, find_task_type(settings.task)))
    return 0


def show(seeds: Mapping[str, Mapping[str, float]], num_dev: int) -> None:
    """Print a line a seed, and one for all; with the number of dev examples where it is small."""
    beside = f" ({counted(num_dev, 'dev example')})" if num_dev < MANY_CASES else ""
    for seed, figures in seeds.items():
        metrics = ", ".join(f"{name} {value:.4f}" for name, value in figures.items())
        print(f"seed {seed}: {metrics}{beside}")
    if len(seeds) > 1:
        print(f"{seeds_line(list(seeds.values()))}{beside}")


def restarts_line(restarts: Sequence[Mapping[str, object]]) -> str:
    """The seeds whose trainings collapsed.

    >>> restarts_line([{"seed": 1}, {"seed": 3}])
    'collapsed (the report says how): seeds 1, 3'
    """
    return (
        f"collapsed (the report says how): seeds {', '.join(str(row['seed']) for row in restarts)}"
    )


def seeds_line(figures: Sequence[Mapping[str, float]]) -> str:
    """Mean, standard deviation and Student's 95% interval of the mean of each metric.

    Two seeds have a mean only: an interval of theirs is 13 times as wide as their distance.

    >>> seeds_line([{"accuracy": 0.8}, {"accuracy": 0.9}, {"accuracy": 0.85}])
    'mean of 3 seeds: accuracy 0.8500 +- 0.0500 (95% interval 0.7258 to 0.9742)'
    >>> seeds_line([{"accuracy": 0.8}, {"accuracy": 0.9}])
    'mean of 2 seeds: accuracy 0.8500'
    """
    from bertsmith.reports.finetuning import FEWEST_SEEDS, student_interval
    from bertsmith.reports.runs import mean_and_std

    words = []
    for name in figures[0]:
        values = [seed[name] for seed in figures]
        mean, deviation = mean_and_std(values)
        words.append(f"{name} {mean:.4f}")
        if len(values) >= FEWEST_SEEDS:
            low, high = student_interval(name, values)
            words[-1] += f" +- {deviation:.4f} (95% interval {low:.4f} to {high:.4f})"
    return f"mean of {len(figures)} seeds: " + ", ".join(words)
