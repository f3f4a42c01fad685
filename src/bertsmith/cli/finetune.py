"""Train a classifier on top of a model.

Examples:
  bertsmith finetune sst2 --model run --data glue/SST-2 --out sst2
  bertsmith finetune mrpc --model run --data glue/MRPC --out mrpc --seeds 1..5
  bertsmith finetune classify --model run --data tickets.csv --text body --label queue --out tickets
  bertsmith finetune classify --model run --data pairs/ --text a --text-pair b --label same --out o

TASK is a data set (cola, sst2, mrpc, qqp, mnli, qnli, rte, wnli: docs/tasks.md) or `classify`
for your own csv, tsv, jsonl, parquet or arrow files. --data
is a training file, or a folder with train and dev files. Without a dev file a tenth is split off.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from bertsmith.training.finetune_settings import FinetuneSettings

DEV_SHARE, DEV_SEED = 0.1, 0  # of a training set that comes without a dev file


@dataclass(frozen=True, kw_only=True)
class Finetune(FinetuneSettings):
    task: tyro.conf.Positional[str]
    """A data set such as sst2, or classify for your own files."""
    model: str
    """A run, a Hugging Face folder or hub name."""
    data: Path
    """Training file, or folder with the data set's files."""
    dev: Path | None = None
    """Dev file."""
    out: Path
    """Run directory to write."""
    text: str = "text"
    """classify: column of the text."""
    text_pair: str | None = None
    """classify: column of the second text."""
    label: str = "label"
    """classify: column of the label."""
    seeds: str = "1"
    """Seeds, such as 1,2,3 or 1..5; the model kept is the best on dev."""
    sweep: Literal["paper"] | None = None
    """paper: first search batch x rate x epochs of the paper's A.3 (18 runs)."""
    from_scratch: bool = False
    """Same shape and vocabulary, random weights: what pre-training is worth."""
    given: Annotated[tuple[str, ...], tyro.conf.Suppress] = ()


def run(settings: Finetune) -> int:
    seeds = parse_seeds(settings.seeds)
    from bertsmith.checkpoints.open import open_model_folder
    from bertsmith.tasks.reading import find_file, read_examples, split_dev
    from bertsmith.tasks.summary import summarise
    from bertsmith.tasks.table import find_task, own_task
    from bertsmith.training.finetune import Job, Start, check_out, finetune

    fixed = {"batch", "rate", "epochs"} & set(settings.given)
    if settings.sweep and fixed:
        flags = ", ".join("--" + name for name in sorted(fixed))
        raise ValueError(f"{flags}: searched by --sweep paper; leave it out")
    start = Start(open_model_folder(settings.model), settings.from_scratch)
    check_out(settings.out)
    if settings.task == "classify":
        task = own_task("classify", settings.text, settings.text_pair, settings.label)
    else:
        task = find_task(settings.task)
        wrong = {"text", "text_pair", "label"} & set(settings.given)
        if wrong:
            flags = ", ".join("--" + name.replace("_", "-") for name in sorted(wrong))
            raise ValueError(f"{flags}: only for `classify`; task {task.name} knows its columns")
    if task.kind != "classify":
        raise ValueError(
            f"task {task.name}: its files are read (docs/tasks.md), but a model of kind "
            f"'{task.kind}' cannot be trained yet: use a task of classes"
        )
    train_file = find_file(task, settings.data, "train")
    assert train_file is not None
    train = read_examples(train_file, task)
    dev_file = settings.dev or find_file(task, settings.data, "dev")
    if dev_file is not None:
        dev = read_examples(dev_file, task, train.label_names)
    else:
        train, dev = split_dev(train, DEV_SHARE, DEV_SEED)
    print(summarise(train, dev), file=sys.stderr)
    recipe = {
        field.name: getattr(settings, field.name) for field in dataclasses.fields(FinetuneSettings)
    }
    result = finetune(
        Job.prepare(start, task, train, dev, settings.max_length),
        settings.out,
        FinetuneSettings(**recipe),
        seeds,
        sweep=settings.sweep is not None,
        command=["bertsmith", *sys.argv[1:]],
        data={"data": str(train_file), "dev": str(dev_file or f"{DEV_SHARE:.0%} of train")},
    )
    for seed, figures in result["seeds"].items():
        print(f"seed {seed}: " + ", ".join(f"{k} {v:.4f}" for k, v in figures.items()))
    print(f"{settings.out}: the model of seed {result['best_seed']}, the best on dev")
    return 0


def parse_seeds(text: str) -> list[int]:
    """Seeds as users write them.

    Errors: ValueError for anything else than numbers, and for a seed named twice.

    >>> parse_seeds("1,2,5"), parse_seeds("1..3")
    ([1, 2, 5], [1, 2, 3])
    """
    span = re.fullmatch(r"(\d+)\.\.(\d+)", text)
    if span:
        seeds = list(range(int(span[1]), int(span[2]) + 1))
    elif re.fullmatch(r"\d+(,\d+)*", text):
        seeds = [int(seed) for seed in text.split(",")]
    else:
        raise ValueError(f"--seeds {text}: write 1,2,3 or 1..3")
    if not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"--seeds {text}: no seed, or one named twice")
    return seeds
