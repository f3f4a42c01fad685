"""BERT and the systems before and beside it in one table (paper sections 3.1 and 5.1, Table 5).

Every system is pre-trained on the same text and fine-tuned on the same tasks with the same seeds.
A masked language model predicts 15% of the tokens that it reads, the others all of them; so there
are two regimes. At equal tokens every system reads what BERT reads. At equal predicted positions
the others read 15% of that, and BERT is the same model in both. ELMo reads the same text as words.

    OUT/vocab store pretrain/SYSTEM-REGIME finetune/SYSTEM-REGIME/TASK/SEED     cells, done once
    OUT/log.jsonl result.json table.md                                          what came out
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch

from bertsmith.base.files import atomic_folder, read_json, write_json, write_text
from bertsmith.base.settings import nearest, to_mapping
from bertsmith.checkpoints.model_folder import family_class
from bertsmith.checkpoints.run_folder import RESULT_FILE, RunFolder, describe
from bertsmith.corpus.build.build import build_store
from bertsmith.corpus.build.settings import BuildSettings
from bertsmith.experiments.comparison_page import REGIMES, SURE, SYSTEMS, TOLERANCE, System, page
from bertsmith.experiments.lineage.elmo import pretrain_elmo
from bertsmith.experiments.lineage.elmo_text import ElmoText
from bertsmith.experiments.lineage.settings import ElmoSettings
from bertsmith.experiments.settings import ComparisonSettings
from bertsmith.model.config import ModelConfig, config_for, elmo_config, layers_and_hidden
from bertsmith.model.heads import SequenceClassifier
from bertsmith.model.initialization import WithoutInitialization
from bertsmith.tasks.bootstrap import Score, dev_metrics, paired_bootstrap
from bertsmith.tasks.task import find_task
from bertsmith.text.readers.documents import read_documents
from bertsmith.text.tokenizer.normalize import GOOGLE_CASED
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.text.vocabulary.train import train_vocabulary
from bertsmith.training.finetuning.request import parse_seeds
from bertsmith.training.finetuning.run import SCORES_FILE, train_seeds
from bertsmith.training.finetuning.settings import FinetuneSettings, Provenance
from bertsmith.training.finetuning.task_types import TASK_TYPES
from bertsmith.training.finetuning.task_types.base import read_data
from bertsmith.training.finetuning.trainer import InitialModel, Trainer
from bertsmith.training.pretraining.run import pretrain

KIND = "lineage compare"  # of the run
FREE = ("tasks", "systems", "seeds", "workers", "device", "precision", "threads", "out")
FOLDERS = {  # of a task below DATA, the first that is there
    "sst2": ("SST-2", "glue/SST-2"),
    "mrpc": ("MRPC", "glue/MRPC"),
    "qnli": ("QNLI", "glue/QNLI"),
    "ner": ("conll2003", "ner"),
    "squad1": ("squad/v1.1", "squad", "squad1"),
}
PREDICTED = 0.15  # of the tokens that an MLM reads
RESAMPLES = 2000
SUBSET_SEED = 0


PRETRAININGS: dict[str, dict[str, Any]] = {  # ELMo's is its own
    "bert": {"objective": "mlm"},
    "gpt": {"objective": "ltr", "architecture": "gpt"},
    "ltr": {"objective": "ltr"},
    "ltr+rtl": {"objective": "ltr+rtl"},
}


def compare_lineage(settings: ComparisonSettings, command: Sequence[str] = ()) -> dict[str, Any]:
    """Compute every cell that is not there yet, then the table; returns what result.json holds.

    Errors: ValueError for an unknown task or system, a task without a folder, or a comparison of
    other settings in `out`; KeyboardInterrupt when a signal asked to stop.
    """
    settings = settings.filled()
    for name in settings.systems:
        if name not in SYSTEMS:
            raise ValueError(f"`systems`: unknown '{name}': {nearest(name, SYSTEMS)}")
    folders = {name: task_folder(settings.data, name) for name in settings.tasks}
    comparison = Comparison(settings, folders, parse_seeds(settings.seeds))
    run = RunFolder(settings.out)
    plain = to_mapping(settings)
    run.is_begun(KIND, {name: value for name, value in plain.items() if name not in FREE})
    with run.locked():
        run.write_settings(describe(KIND, command, plain))
        comparison.compute()
        result = comparison.result()
        run.write_result(result)
        write_text(settings.out / "table.md", "\n".join(page(result)) + "\n")
    return result


def task_folder(data: Path, task: str) -> Path:
    """The task's folder below `data`. Errors: ValueError where there is none."""
    if task not in FOLDERS:
        raise ValueError(f"`tasks`: unknown '{task}': {nearest(task, FOLDERS)}")
    for name in FOLDERS[task]:
        if (data / name).is_dir():
            return data / name
    raise ValueError(f"{data}: no folder of {task}: {' or '.join(FOLDERS[task])}")


def parameters(config: ModelConfig) -> int:
    """Parameters of a classifier of this configuration; nothing is allocated."""
    kind = family_class(SequenceClassifier, config, Path(config.family))
    with torch.device("meta"), WithoutInitialization():
        model = kind(config, 2)
    return sum(weight.numel() for weight in model.parameters())


def matched_sizes(size: str, vocab_size: int) -> dict[str, str]:
    """Sizes of all pre-trainings, with as many parameters in a classifier as a BERT of `size`.

    Two directions have as many layers as possible within 10%. ELMo's vectors are as wide as BERT's
    and its cells as many as fit: it has no table of words.

    >>> matched_sizes("4x256", 8000)["ltr+rtl"]
    '4x192'
    """
    layers, hidden = layers_and_hidden(size)
    wanted = parameters(config_for(size, vocab_size))

    def distance(config: ModelConfig) -> float:
        return abs(parameters(config) / wanted - 1)

    found = []
    for depth in range(1, layers + 1):
        for width in range(64, hidden + 1, 64):
            shape = f"{depth}x{width}"
            off = distance(config_for(shape, vocab_size, causal=True, directions=2))
            found.append((off > TOLERANCE, -depth, off, shape))
    elmo = (f"{hidden // 2}x{cells}" for cells in range(16, 64 * hidden, 16))
    sizes = dict.fromkeys(("bert", "gpt", "ltr"), size) | {"ltr+rtl": min(found)[-1]}
    return sizes | {"elmo": nearest_size(elmo, lambda one: parameters(elmo_config(one)), wanted)}


def nearest_size(sizes: Iterator[str], count: Callable[[str], int], wanted: int) -> str:
    """The size whose count is nearest, of growing ones."""
    before = next(sizes)
    for size in sizes:
        if count(size) >= wanted:
            return min(before, size, key=lambda one: abs(count(one) - wanted))
        before = size
    return before


@dataclass(frozen=True)
class Comparison:
    """The cells of a comparison, and what they came to."""

    settings: ComparisonSettings
    folders: Mapping[str, Path]
    seeds: Sequence[int]

    def compute(self) -> None:
        """Pre-train and fine-tune whatever is not done."""
        # a mistake in them ends it before hours are spent
        data = {task: self._task_data(task) for task in self.settings.tasks}
        for regime in REGIMES:
            for name in self.settings.systems:
                self._pretrain(SYSTEMS[name].pretraining, regime)
        for task in self.settings.tasks:
            for regime in REGIMES:
                for name in self.settings.systems:
                    self._finetune(name, regime, task, data[task])

    # --- pre-training

    @cached_property
    def sizes(self) -> dict[str, str]:
        size, pieces = self.settings.size, self.settings.vocab_size
        assert size and pieces, "filled"
        return matched_sizes(size, pieces)

    @cached_property
    def text(self) -> dict[str, int]:
        """Pieces and words, with ends of sentences, of the text; its store is there then."""
        settings, known = self.settings, self.settings.out / "text.json"
        if known.exists():
            return read_json(known)
        vocabulary, pieces = settings.out / "vocab", settings.vocab_size
        assert pieces, "filled"
        if not vocabulary.exists():
            documents = read_documents(settings.text)
            trained = train_vocabulary(documents, pieces, GOOGLE_CASED, workers=settings.workers)
            with atomic_folder(vocabulary) as temporary:
                Tokenizer(trained, GOOGLE_CASED).save(temporary)
        tokenizer = Tokenizer.from_pretrained(vocabulary)
        build = BuildSettings(workers=settings.workers)
        splits = build_store(settings.text, tokenizer, settings.out / "store", build)["splits"]
        words = ElmoText.read(settings.text)
        counts = {
            "pieces": sum(split["tokens"] for split in splits.values()),
            "words": len(words.tokens) + len(words.boundaries) - 1,
        }
        write_json(known, counts)
        return counts

    def pretrained(self, name: str, regime: str) -> Path:
        """The folder of a pre-training; BERT's is the same in both regimes."""
        return self.settings.out / "pretrain" / f"{name}-{'tokens' if name == 'bert' else regime}"

    def _pretrain(self, name: str, regime: str) -> None:
        settings, folder = self.settings, self.pretrained(name, regime)
        if (folder / RESULT_FILE).exists():
            return
        started, text = time.monotonic(), self.text
        assert settings.tokens, "filled"
        tokens = settings.tokens
        if regime == "predictions" and name != "bert":
            tokens = round(PREDICTED * tokens)
        machine = {n: getattr(settings, n) for n in ("device", "precision", "threads")}
        if name == "elmo":
            words = max(1, round(tokens * text["words"] / text["pieces"]))
            asked = ElmoSettings(
                text=settings.text,
                out=folder,
                size=self.sizes[name],
                words=words,
                **machine,
            )
            pretrain_elmo(asked)
        else:
            result = pretrain(
                settings.out / "store",
                folder,
                resume=folder.exists(),
                size=self.sizes[name],
                tokens=tokens,
                batch_size=settings.batch_size,
                max_length=settings.max_length,
                num_evals=2,
                checkpoint_every=200,
                loggers=(),
                **PRETRAININGS[name],
                **machine,
            )
            if not result.finished:
                raise KeyboardInterrupt
        self._log(f"pretrain {folder.name}", started)

    # --- fine-tuning

    def _recipe(self, system: System, task: str) -> FinetuneSettings:
        settings = self.settings
        windows = {"doc_stride": settings.max_length // 2} if task == "squad1" else {}
        return FinetuneSettings(
            epochs=settings.epochs,
            max_length=settings.max_length,
            keep="last",  # nothing is chosen on dev, where all is measured
            evals_per_epoch=0,
            max_retries=0,
            device=settings.device,
            precision=settings.precision,
            threads=settings.threads,
            **windows,
            **system.finetuning,
        )

    def _task_data(self, name: str) -> tuple[Any, Any, dict[str, Any]]:
        """Train and dev, as many as asked for, and the files."""
        task, settings = find_task(name), self.settings
        task_type = TASK_TYPES[task.task_type]
        train, dev, files = read_data(task_type, task, self.folders[name], None)
        first = next(iter(dev.values()))
        parts = []
        for part, most in ((train, settings.train_examples), (first, settings.dev_examples)):
            assert most, "filled"
            if len(part) > most:
                _, part = task_type.split_dev(part, most / len(part), SUBSET_SEED)
            parts.append(part)
        return parts[0], parts[1], files

    def cell(self, name: str, regime: str, task: str, seed: int) -> Path:
        """The run directory of a fine-tuning; BERT's is the same in both regimes."""
        own = "tokens" if SYSTEMS[name].pretraining == "bert" else regime
        return self.settings.out / "finetune" / f"{name}-{own}" / task / str(seed)

    def _finetune(
        self, name: str, regime: str, task: str, data: tuple[Any, Any, dict[str, Any]]
    ) -> None:
        cells = {seed: self.cell(name, regime, task, seed) for seed in self.seeds}
        left = [seed for seed, cell in cells.items() if not (cell / RESULT_FILE).exists()]
        system, (train, dev, files) = SYSTEMS[name], data
        if left:
            start = InitialModel(self.pretrained(system.pretraining, regime))
            recipe = self._recipe(system, task)
            trainer = Trainer.prepare(start, find_task(task), train, {"dev": dev}, recipe)
            for seed in left:
                started = time.monotonic()
                train_seeds(trainer, cells[seed], recipe, [seed], Provenance(data=files))
                self._log(" ".join(cells[seed].parts[-4:]), started)
        for cell in cells.values():  # the answers are enough: the models would be gigabytes
            (cell / "model.safetensors").unlink(missing_ok=True)

    def _log(self, cell: str, started: float) -> None:
        line = {"cell": cell, "seconds": round(time.monotonic() - started, 1)}
        print(f"{line['cell']}: {line['seconds']} s", file=sys.stderr, flush=True)
        with (self.settings.out / "log.jsonl").open("a", encoding="utf-8") as log:
            log.write(json.dumps(line) + "\n")

    # --- results

    def result(self) -> dict[str, Any]:
        """Sizes and costs, figures of all cells, and every ordering with its tests."""
        names = self.settings.systems
        pretraining = {
            regime: {name: self._cost(SYSTEMS[name].pretraining, regime) for name in names}
            for regime in REGIMES
        }
        cells = {
            regime: {
                name: {task: self._figures(name, regime, task) for task in self.settings.tasks}
                for name in names
            }
            for regime in REGIMES
        }
        orderings = {
            regime: [
                self._ordering(regime, cells[regime], first, second)
                for first, second in combinations(names, 2)
            ]
            for regime in REGIMES
        }
        return {
            "settings": to_mapping(self.settings),
            "sizes": self.sizes,
            "pretraining": pretraining,
            "cells": cells,
            "orderings": orderings,
        }

    def _cost(self, name: str, regime: str) -> dict[str, Any]:
        result = RunFolder(self.pretrained(name, regime)).result()
        keys = "steps", "tokens", "flops", "seconds", "held_out"  # the last where text is held out
        return {key: result[key] for key in keys if key in result}

    def _figures(self, name: str, regime: str, task: str) -> dict[str, Any]:
        runs = {seed: RunFolder(self.cell(name, regime, task, seed)) for seed in self.seeds}
        results = {seed: run.result() for seed, run in runs.items()}
        first = next(iter(results.values()))
        metric = first["main_metric"]
        values = {str(seed): result["metrics"][metric] for seed, result in results.items()}
        return {
            "metric": metric,
            "seeds": values,
            "mean": mean(values.values()),
            "std": stdev(values.values()) if len(values) > 1 else None,
            "flops": mean(result["flops"] for result in results.values()),
            "parameters": next(iter(runs.values())).settings()["parameters"],
            "dev_examples": first["dev_examples"],
        }

    def _ordering(
        self, regime: str, cells: dict[str, Any], first: str, second: str
    ) -> dict[str, Any]:
        """First minus second of each task, and how sure it is."""
        tasks = {}
        for task in self.settings.tasks:
            metric = cells[first][task]["metric"]
            scores = [self._score(name, regime, task, metric) for name in (second, first)]
            number = cells[first][task]["dev_examples"]
            found = paired_bootstrap({metric: (scores[0], scores[1])}, number, RESAMPLES, 0)
            sides = [list(cells[name][task]["seeds"].values()) for name in (first, second)]
            difference, p_seeds = found[metric]["difference"], paired_p(*sides)
            p_examples = found[metric]["p"]
            tasks[task] = {
                "difference": difference,
                "interval": found[metric]["interval"],
                "p_examples": p_examples,
                "p_seeds": p_seeds,
                "is_sure": p_examples < SURE and p_seeds is not None and p_seeds < SURE,
            }
        means = [[cells[name][task]["mean"] for task in tasks] for name in (first, second)]
        return {"systems": [first, second], "tasks": tasks, "p_tasks": paired_p(*means)}

    def _score(self, name: str, regime: str, task: str, metric: str) -> Score:
        """The mean of the seeds' metric, of all resamples of the dev examples."""
        scores = []
        for seed in self.seeds:
            dev = read_json(self.cell(name, regime, task, seed) / SCORES_FILE)
            scores.append(dev_metrics(dev)[0][metric])
        return lambda weights: np.mean([score(weights) for score in scores], axis=0)


def paired_p(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Two-sided p of Student's paired t; None of fewer than three pairs.

    >>> round(paired_p([1.0, 2.0, 3.0], [0.0, 1.5, 1.0]), 3)
    0.118
    """
    if len(first) < 3:
        return None
    from scipy import stats  # of the extra `train`

    differences = [a - b for a, b in zip(first, second, strict=True)]
    if len(set(differences)) == 1:  # t is infinite, or 0 / 0
        return 0.0 if differences[0] else 1.0
    found: Any = stats.ttest_1samp(differences, 0)
    return float(found.pvalue)
