"""Fine-tuning from files to a run directory, with all that may come before: a teacher, a sweep.

`finetune` is for Python, `run_request` is what the command calls.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from numbers import Integral
from pathlib import Path
from statistics import fmean
from typing import Any

from bertsmith.base.settings import checked, from_mapping
from bertsmith.checkpoints.config_json import read_config
from bertsmith.checkpoints.hub import open_model_folder
from bertsmith.checkpoints.run_folder import RunFolder
from bertsmith.checkpoints.stored import weight_files
from bertsmith.experiments.distillation import Teacher
from bertsmith.tasks.metrics import check_two_classes
from bertsmith.tasks.tagging.summary import case_warning
from bertsmith.text.readers.tables import digest
from bertsmith.training.engine import choose_engine
from bertsmith.training.finetuning.request import (
    Request,
    check_flags,
    check_folders,
    check_tokens_per_window,
    make_task,
    parse_seeds,
)
from bertsmith.training.finetuning.run import KIND, begun_settings, check_seeds, train_seeds
from bertsmith.training.finetuning.settings import FinetuneSettings, Provenance
from bertsmith.training.finetuning.sweep import sweep
from bertsmith.training.finetuning.task_types import TASK_TYPES
from bertsmith.training.finetuning.task_types.base import read_data
from bertsmith.training.finetuning.trainer import InitialModel, Trainer, with_metric

COLUMNS = ("text", "text_pair", "label")


@dataclass(frozen=True, repr=False)
class FinetuneResult:
    """A finished fine-tuning; the model of the best seed is in `folder`."""

    folder: Path
    seeds: dict[int, dict[str, float]]
    """Metrics on dev, by seed."""
    mean: dict[str, float]
    """Mean of each metric over the seeds."""
    best_seed: int
    main_metric: str
    dev_examples: int

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics on dev of the model in `folder`."""
        return self.seeds[self.best_seed]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self) | {"folder": str(self.folder), "metrics": self.metrics}

    def __repr__(self) -> str:
        value = self.metrics[self.main_metric]
        more = f", best of {len(self.seeds)} seeds" if len(self.seeds) > 1 else ""
        return f"FinetuneResult({str(self.folder)!r}: {self.main_metric} {value:.4f}{more})"


@checked(Request)
def finetune(
    task: str,
    *,
    data: str | Path,
    model: str | Path,
    out: str | Path,
    seeds: int | str | Iterable[int] = 1,
    **settings: Any,
) -> FinetuneResult:
    """Train a model for a task on top of a pre-trained one, as `bertsmith finetune` does.

        result = bertsmith.finetune("sst2", data="glue/SST-2", model="run", out="out", epochs=3)
        bertsmith.finetune("classify", data="mail.csv", model="run", out="mail", text="body",
                           label="queue", seeds=range(1, 6))

    `task` is a data set, or what your own files are about: classify, regress, multilabel, choice,
    tag, answer. `data` is a training file, or a folder with train and dev files; `model` a run, a
    Hugging Face folder or a hub name. `settings` are the fields of `Request`, such as
    `text_pair="premise"`: `bertsmith finetune --help-all` explains them. Called again it resumes.

    Errors: ValueError for anything that cannot be, before training where it can be known;
    KeyboardInterrupt when a signal asked to stop; FloatingPointError when no seed came to its end.
    """
    if not isinstance(seeds, int | str | Integral):
        seeds = ",".join(map(str, seeds))
    values = {"task": task, "data": data, "model": str(model), "out": out, "seeds": str(seeds)}
    with_given = {**values, **settings, "given": tuple(settings)}
    request = from_mapping(Request, with_given, "finetune()")
    check_flags(request)
    result, _ = run_request(request)
    by_seed = {int(seed): metrics for seed, metrics in result["seeds"].items()}
    names = next(iter(by_seed.values()))
    return FinetuneResult(
        Path(out),
        by_seed,
        {name: fmean(metrics[name] for metrics in by_seed.values()) for name in names},
        result["best_seed"],
        result["main_metric"],
        result["dev_examples"],
    )


def run_request(
    request: Request, command: Sequence[str] = ()
) -> tuple[dict[str, Any], FinetuneSettings]:
    """Fine-tune as asked for, after `check_flags`: (result.json, the settings, searched ones too).

    Errors: as `finetune`.
    """
    seeds = parse_seeds(request.seeds)
    recipe, search, out = request.recipe, request.search, request.out
    check_seeds(recipe, seeds)
    start = InitialModel(open_model_folder(request.model), request.from_scratch)
    run = RunFolder(out)
    run.check_free(KIND)
    check_folders(out, request.data)
    task = make_task(request)
    task_type = TASK_TYPES[task.task_type]
    # before much data is read
    engine = choose_engine(request.device, request.precision, request.threads)
    recipe.encoding(task_type.default_length, read_config(start.folder).max_positions)
    named = {name: getattr(request, name) for name in COLUMNS if name in request.given}
    train, dev, files = read_data(task_type, task, request.data, request.dev, named)
    if "tokens_per_window" in request.given:
        check_tokens_per_window(
            request.tokens_per_window, request.document_context, train, *dev.values()
        )
    names = task_type.label_names(train)
    task = with_metric(task, request.metric, names)
    is_tuned = request.tune_thresholds or "tune_thresholds" in search.space
    if task.task_type == "classify" and is_tuned:
        check_two_classes(names)
    if task.main_metric == "f1" and task.name == "classify" and request.positive is None:
        _tell(f"f1 is that of '{names[1]}', as no class is named as positive")
    _tell(task_type.summarize(train, next(iter(dev.values()))))
    outputs = None
    hashes = files["data_sha256"]
    if request.teacher is not None:
        folder, texts = open_model_folder(request.teacher), request.teacher_data
        train, outputs = Teacher.open(folder, task, names, engine).teach(train, texts)
        hashes["teacher"] = " ".join(map(digest, weight_files(folder)))
        files |= {"teacher": request.teacher, "teacher_data": str(texts or "")}
        if texts:
            hashes["teacher_data"] = digest(texts)
    trainer = Trainer.prepare(start, task, train, dev, recipe, outputs)
    trainer = replace(trainer, teacher_sha256=hashes.get("teacher", ""))
    _tell_what_is_lost(trainer)
    begun, searched = begun_settings(run), []
    recipe = trainer.with_faster_precision(recipe, begun)
    if search.space:
        recipe, searched = sweep(trainer, recipe, search, seeds[0], out / "sweep", begun)
    provenance = Provenance(command, files)
    return train_seeds(trainer, out, recipe, seeds, provenance, searched), recipe


def _tell_what_is_lost(trainer: Trainer) -> None:
    """Print how many texts are cut or cost several rows, and if capitals are not seen."""
    rows, encoding = trainer.train, trainer.model_task.encoding
    if note := rows.long_note(encoding):
        hint = f": {rows.long_hint(encoding)}" if rows.num_truncated else ""
        _tell(f"train: {note}{hint}")
    is_tag = trainer.task_type.name == "tag"
    if is_tag and (warning := case_warning(trainer.train_data, trainer.tokenizer.normalization)):
        _tell(warning)


def _tell(message: str) -> None:
    print(message, file=sys.stderr)
