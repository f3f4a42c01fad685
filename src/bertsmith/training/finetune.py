"""Fine-tuning a classifier: one model and labelled files in, a run directory out (paper A.3)."""

from __future__ import annotations

import itertools
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bertsmith.checkpoints.folder import load_model, save_model
from bertsmith.checkpoints.model_config import read_config
from bertsmith.checkpoints.run import RunFolder
from bertsmith.config import to_mapping
from bertsmith.files import write_json
from bertsmith.model.encoder import initialize
from bertsmith.model.heads import SequenceClassifier
from bertsmith.tasks.features import Features, featurise
from bertsmith.tasks.metrics import compute_metrics, confusion_matrix
from bertsmith.tasks.reading import Examples
from bertsmith.tasks.table import Task
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.training import engine as engines
from bertsmith.training.classification import Classification
from bertsmith.training.finetune_settings import FinetuneSettings
from bertsmith.training.loop import LoopSettings, State, train
from bertsmith.training.optimizers import build_optimizer
from bertsmith.training.run_log import RunLog
from bertsmith.training.schedule import Budget

# the exhaustive search of the paper's A.3
PAPER_SWEEP = {"batch": (16, 32), "rate": (5e-5, 3e-5, 2e-5), "epochs": (2, 3, 4)}
SHOWN_EXAMPLES = 40  # wrong and uncertain examples kept for the report


@dataclass(frozen=True)
class Start:
    """What a fine-tuning run starts from."""

    folder: Path
    from_scratch: bool = False
    """True: the folder's shape and vocabulary with fresh random weights, for comparison."""

    def model(self, num_labels: int, settings: FinetuneSettings, seed: int) -> SequenceClassifier:
        """The classifier before its first step; fresh weights are a function of the seed."""
        generator = torch.Generator().manual_seed(seed)
        changes: dict[str, Any] = {
            "dropout": settings.dropout,
            "attention_dropout": settings.attention_dropout,
        }
        if self.from_scratch:
            config = replace(read_config(self.folder), **changes)
            model = SequenceClassifier(config, num_labels)
            return initialize(model, config.initializer_range, generator)
        return load_model(
            self.folder, SequenceClassifier, num_labels=num_labels, generator=generator, **changes
        ).model


@dataclass(frozen=True)
class Job:
    """What all trainings of one run share: the start and the data, already tokenised."""

    start: Start
    task: Task
    tokenizer: Tokenizer
    train_examples: Examples
    dev_examples: Examples
    train: Features
    dev: Features

    @classmethod
    def prepare(
        cls, start: Start, task: Task, train: Examples, dev: Examples, max_length: int
    ) -> Job:
        """Errors: ValueError when max_length is more than the model knows."""
        positions = read_config(start.folder).max_positions
        if max_length > positions:
            raise ValueError(f"--max-length {max_length}: the model knows {positions} positions")
        tokenizer = Tokenizer.from_pretrained(start.folder)
        features = [featurise(tokenizer, examples, max_length) for examples in (train, dev)]
        return cls(start, task, tokenizer, train, dev, *features)

    def run(
        self,
        settings: FinetuneSettings,
        seed: int,
        folder: Path,
        label: str = "finetune",
        peak: float = 0.0,
    ) -> Classification:
        """Train with one seed; the log is in `folder`. The trained model is in what is returned.

        Errors: KeyboardInterrupt when a signal asked to stop; FloatingPointError for a step that
        is not finite.
        """
        engine = engines.choose_engine(settings.device, settings.precision, settings.threads)
        model = self.start.model(len(self.train_examples.label_names), settings, seed)
        metrics, batch = self.task.metrics, settings.batch
        task = Classification(
            model.to(engine.device), self.train, self.dev, metrics, batch, seed, engine
        )
        optimizer = build_optimizer(model, settings.optimizer, settings.rate, settings.weight_decay)
        steps = settings.epochs * task.batches_per_epoch
        loop_settings = LoopSettings(
            budget=Budget(steps=steps),
            rate=settings.rate,
            schedule=settings.schedule,
            warmup=settings.warmup,
            clip=settings.clip,
            seed=seed,
            checkpoint_every=steps + 1,
            evaluations=settings.epochs,
            peak=peak,
            label=label,
        )
        folder.mkdir(parents=True, exist_ok=True)
        log = RunLog(folder)
        try:
            state = State()
            if not train(task, optimizer, state, loop_settings, engine, log, lambda _: None):
                raise KeyboardInterrupt
            log.evaluate(state.step, **task.evaluate())
        finally:
            log.close()
        return task


def finetune(
    job: Job,
    out: Path,
    settings: FinetuneSettings,
    seeds: Sequence[int],
    *,
    sweep: bool = False,
    command: Sequence[str] = (),
    data: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Fine-tune once a seed; `out` holds the model that is best on dev, and every seed's figures.

    With `sweep` the paper's grid is searched first, with the first seed, and the best setting used.

    Errors: ValueError when `out` holds a run already.
    """
    check_out(out)
    run = RunFolder(out)
    engine = engines.choose_engine(settings.device, settings.precision, settings.threads)
    peak = engines.measure_peak(engine)
    searched: list[dict[str, Any]] = []
    if sweep:
        settings, searched = _paper_sweep(job, settings, seeds[0], out / "sweep")
    record = _record(job, settings, seeds, command, data or {})
    run.write_settings({**record, "machine": engines.machine(engine, peak)})
    figures: dict[str, dict[str, float]] = {}
    best_seed, best_scores, best_model = None, np.empty(0), None
    for seed in seeds:
        folder = out / "seeds" / str(seed)
        trained = job.run(settings, seed, folder, f"finetune seed {seed}", peak)
        scores = trained.scores(job.dev)
        figures[str(seed)] = _metrics(job, scores)
        write_json(folder / "result.json", {"metrics": figures[str(seed)]})
        _warn_of_collapse(scores, seed, settings.epochs * trained.batches_per_epoch)
        metric = job.task.main_metric
        if best_seed is None or figures[str(seed)][metric] > figures[str(best_seed)][metric]:
            best_seed, best_scores, best_model = seed, scores, trained.model
    assert best_model is not None
    extra = {"task": job.task.name, "max_length": settings.max_length}
    names = job.train_examples.label_names
    save_model(best_model, job.tokenizer, out, label_names=names, extra_config=extra)
    shutil.copyfile(out / "seeds" / str(best_seed) / "log.jsonl", out / "log.jsonl")
    labels = _dev_labels(job)
    result = {
        "metrics": figures[str(best_seed)],
        "main_metric": job.task.main_metric,
        "labels": list(names),
        "confusion": confusion_matrix(best_scores.argmax(1), labels, len(names)).tolist(),
        "seeds": figures,
        "best_seed": best_seed,
        "train_examples": len(job.train_examples),
        "dev_examples": len(job.dev_examples),
        "examples": telling_examples(job.dev_examples, best_scores),
        **({"sweep": searched} if sweep else {}),
    }
    run.write_result(result)
    return result


def check_out(out: Path) -> None:
    """Refuse a folder that holds a run or model; an unfinished fine-tuning is begun again.

    Errors: ValueError that names the folder.
    """
    run = RunFolder(out)
    unfinished = run.kind() == "finetune" and not (out / "result.json").exists()
    if run.exists() and not unfinished:
        raise ValueError(f"{out} holds a run already: name another --out")


def _warn_of_collapse(scores: np.ndarray, seed: int, steps: int) -> None:
    if len(scores) > 1 and len(np.unique(scores.argmax(axis=1))) == 1:
        print(
            f"warning: seed {seed} gives every dev example the same label after {steps:,} steps: "
            "raise --epochs if these are few, else lower --rate or try another seed",
            file=sys.stderr,
        )


def _record(
    job: Job,
    settings: FinetuneSettings,
    seeds: Sequence[int],
    command: Sequence[str],
    data: dict[str, str],
) -> dict[str, Any]:
    engine = engines.choose_engine(settings.device, settings.precision, settings.threads)
    model = job.start.model(len(job.train_examples.label_names), settings, seeds[0])
    return {
        "kind": "finetune",
        "command": list(command),
        "settings": {
            **to_mapping(settings),
            **engine.settings(),
            "task": job.task.name,
            "text": job.task.text,
            "text_pair": job.task.text_pair,
            "label": job.task.label,
            "separator": job.task.separator,
            "options": list(job.task.options),
            "model": os.fspath(job.start.folder),
            "from_scratch": job.start.from_scratch,
            "seeds": list(seeds),
            **data,
        },
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


def _paper_sweep(
    job: Job, settings: FinetuneSettings, seed: int, folder: Path
) -> tuple[FinetuneSettings, list[dict[str, Any]]]:
    """Try every setting of the paper's grid; the best on dev (ties: the first)."""
    grid = list(itertools.product(*PAPER_SWEEP.values()))
    tried = []
    for number, values in enumerate(grid, start=1):
        chosen = dict(zip(PAPER_SWEEP, values, strict=True))
        label = f"sweep {number}/{len(grid)}"
        trained = job.run(replace(settings, **chosen), seed, folder / str(number), label)
        tried.append({**chosen, **trained.evaluate()})
    best = max(tried, key=lambda row: row[job.task.main_metric])
    return replace(settings, **{name: best[name] for name in PAPER_SWEEP}), tried


def _metrics(job: Job, scores: np.ndarray) -> dict[str, float]:
    return compute_metrics(job.task.metrics, scores.argmax(1), _dev_labels(job), scores.shape[1])


def _dev_labels(job: Job) -> np.ndarray:
    assert job.dev.labels is not None
    return job.dev.labels


def telling_examples(examples: Examples, scores: np.ndarray) -> list[dict[str, Any]]:
    """The examples a person should read: confidently wrong first, then the least certain ones."""
    assert examples.labels is not None
    shifted = np.exp(scores - scores.max(axis=1, keepdims=True))
    probabilities = shifted / shifted.sum(axis=1, keepdims=True)
    predicted = probabilities.argmax(axis=1)
    certain = probabilities.max(axis=1)
    wrong = np.flatnonzero(predicted != examples.labels)
    wrong = wrong[np.argsort(-certain[wrong], kind="stable")][: SHOWN_EXAMPLES // 2]
    unsure = np.argsort(certain, kind="stable")[: SHOWN_EXAMPLES // 2]
    chosen = list(dict.fromkeys([*wrong.tolist(), *unsure.tolist()]))
    return [
        {
            "text": examples.texts[k],
            **({"pair": examples.pairs[k]} if examples.pairs else {}),
            "label": examples.label_names[examples.labels[k]],
            "predicted": examples.label_names[predicted[k]],
            "probability": round(float(certain[k]), 4),
        }
        for k in chosen
    ]
