"""A run that trains sentence vectors: pairs in, a model folder out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bertsmith.checkpoints.folder import BareModel, load_model, load_tokenizer, save_model
from bertsmith.checkpoints.run import RunFolder
from bertsmith.checkpoints.tensors import weight_files
from bertsmith.config import to_mapping
from bertsmith.finetuning.contrastive import Contrastive, PairFeatures
from bertsmith.finetuning.contrastive_settings import ContrastiveSettings
from bertsmith.finetuning.sentence_vectors import check_pool, cosines, sentence_vectors
from bertsmith.tasks.labels import Cells, parse_labels
from bertsmith.tasks.metrics import compute_metrics
from bertsmith.tasks.reading import check_texts
from bertsmith.tasks.rows import digest, read_columns
from bertsmith.tasks.table import own_task
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.training.engine import Engine, choose_engine, machine, measure_peak
from bertsmith.training.loop import train
from bertsmith.training.optimizers import build_optimizer
from bertsmith.training.run_log import RunLog
from bertsmith.training.schedule import Budget
from bertsmith.training.task import LoopSettings, State

KIND = "contrastive"
METRICS = ("spearman", "pearson")


@dataclass(frozen=True)
class Pairs:
    """N pairs of texts; training reads them as alike, a dev set has a score for each."""

    firsts: list[str]
    seconds: list[str]
    scores: np.ndarray | None  # float32 [N]
    source: str

    def __len__(self) -> int:
        return len(self.firsts)


def read_pairs(path: Path, text: str, text_pair: str, score: str | None = None) -> Pairs:
    """Pairs out of the columns of a csv, tsv, jsonl or parquet file, with scores where named.

    Errors: ValueError, one line with file and line, for a missing column, an empty text, a score
    that is no finite number, a column named twice.
    """
    task = own_task("regress", text, text_pair, "" if score is None else score)
    task = replace(task, name="pairs")  # no task of finetune, of whose flags messages tell
    wanted = {text: "--text", text_pair: "--text-pair"}
    if score is not None:
        wanted[score] = "--score"
    columns, lines = read_columns(path, wanted)
    firsts, seconds = (check_texts(columns[name], name, path, lines) for name in (text, text_pair))
    scores = None
    if score is not None:
        cells = Cells(columns[score], lines, score, str(path), False, None)
        scores, _ = parse_labels(cells, task, ())
    return Pairs(firsts, seconds, scores, str(path))


def train_sentence_vectors(
    start: Path,
    pairs: Pairs,
    dev: Pairs | None,
    out: Path,
    settings: ContrastiveSettings,
    command: Sequence[str] = (),
) -> dict[str, Any]:
    """Train the encoder of the folder `start` on pairs; `out` gets the model, its log and result.

    The model is the one of the last step. `dev` is scored before and after, and after each epoch.

    Errors: ValueError for a folder in use, a length the model does not have, fewer than two pairs,
    and as `check_pool`;
    KeyboardInterrupt when a signal asked to stop; FloatingPointError for a step that is not finite.
    """
    run = RunFolder(out)
    run.check_free(KIND)
    if len(pairs) < 2:
        raise ValueError(f"{pairs.source}: {len(pairs)} pair: negatives need 2 or more")
    loaded = load_model(start, BareModel, dropout=settings.dropout)
    if not 3 <= settings.max_length <= loaded.model.config.max_positions:
        raise ValueError(
            f"--max-length {settings.max_length}: the model reads 3 to "
            f"{loaded.model.config.max_positions} tokens"
        )
    check_pool(settings.pool, loaded.model.config)
    engine = choose_engine(settings.device, settings.precision, settings.threads)
    tokenizer = load_tokenizer(start)
    task = _task(loaded.model.to(engine.device), tokenizer, pairs, dev, settings, engine)
    peak = measure_peak(engine)
    run.write_settings(
        {
            "kind": KIND,
            "command": list(command),
            "settings": {
                **to_mapping(settings),
                **engine.settings(),
                "model": str(start),
                **_files(pairs, dev),
                "model_sha256": [digest(path) for path in weight_files(start)],
            },
            "machine": machine(engine, peak),
            "parameters": sum(parameter.numel() for parameter in loaded.model.parameters()),
        }
    )
    before = task.evaluate()
    after = _train(task, settings, out, peak)
    extra = {"pool": settings.pool, "max_length": settings.max_length}
    save_model(
        loaded.model,
        tokenizer,
        out,
        extra_config={"trained_for": "similarity", **extra},
        leave_out=loaded.missing,
    )
    result = {
        "metrics": after,
        "metrics_before": before,
        "main_metric": METRICS[0],
        "train_pairs": len(pairs),
        "dev_pairs": 0 if dev is None else len(dev),
    }
    run.write_result(result)
    return result


def _files(pairs: Pairs, dev: Pairs | None) -> dict[str, Any]:
    """What was read, as `finetune` records it."""
    sources = {"train": pairs.source} | ({} if dev is None else {"dev": dev.source})
    hashes = {name: digest(Path(source)) for name, source in sources.items()}
    return {"data": pairs.source, "dev": sources.get("dev"), "data_sha256": hashes}


def _task(
    model: BareModel,
    tokenizer: Tokenizer,
    pairs: Pairs,
    dev: Pairs | None,
    settings: ContrastiveSettings,
    engine: Engine,
) -> Contrastive:
    features = PairFeatures.of(tokenizer, pairs.firsts, pairs.seconds, settings.max_length)
    scored = None
    if dev is not None:
        scored = PairFeatures.of(tokenizer, dev.firsts, dev.seconds, settings.max_length)

    def evaluate() -> dict[str, float]:
        if dev is None or scored is None:
            return {}
        assert dev.scores is not None
        vectors = sentence_vectors(model.encoder, scored.rows, engine, settings.pool)
        predicted = cosines(*np.split(vectors, 2))
        return compute_metrics(METRICS, predicted, dev.scores, 0)

    return Contrastive(
        model,
        features,
        engine,
        evaluate,
        batch=settings.batch,
        group=settings.group,
        scale=settings.scale,
        pool=settings.pool,
        seed=settings.seed,
    )


def _train(
    task: Contrastive, settings: ContrastiveSettings, out: Path, peak: float
) -> dict[str, float]:
    """Run the loop; the figures on dev at its end."""
    optimizer = build_optimizer(task.model, "adamw", settings.rate, settings.weight_decay)
    steps = settings.epochs * task.batches_per_epoch
    loop_settings = LoopSettings(
        budget=Budget(steps=steps),
        rate=settings.rate,
        schedule="linear",
        warmup=settings.warmup,
        clip=settings.clip,
        seed=settings.seed,
        checkpoint_every=steps + 1,
        evaluations=settings.epochs,
        peak=peak,
        label="embed-train",
    )
    log = RunLog(out)
    try:
        state = State()
        if not train(task, optimizer, state, loop_settings, task.engine, log, lambda _: None):
            raise KeyboardInterrupt
        figures = task.evaluate()
        log.evaluate(state.step, **figures)
    finally:
        log.close()
    return figures
