"""The command finetune."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from bertsmith.base.settings import Hidden, Positional
from bertsmith.base.terminal import MANY_CASES, counted
from bertsmith.cli.outputs import after_finetuning, check_folder
from bertsmith.training.finetuning.request import (
    Request,
    check_flags,
    find_task_type,
    unread_settings,
)


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
