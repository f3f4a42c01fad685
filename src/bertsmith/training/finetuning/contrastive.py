"""Training sentence vectors from pairs that belong together, with the batch as what does not.

Multiple negatives ranking loss (Henderson et al. 2017, arXiv 1705.00652; with cosines, Gao et al.
2021, arXiv 2104.08821): of a group of G pairs (a_k, b_k), a_k must find b_k among b_1 ... b_G by
softmax over scale * cos(a_k, b_j).

A group is one micro-batch of the loop: the cosines of a pair with all others must be computed
where all of them are. A step holds one group or more, which do not see each other, and the cores
compute them side by side; that the group has a size of its own keeps the result independent of
how many cores there are.

A run that trains sentence vectors: pairs in, a model folder out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bertsmith.base.settings import to_mapping
from bertsmith.checkpoints.model_folder import load_model, load_tokenizer, save_model
from bertsmith.checkpoints.run_folder import RunFolder, describe
from bertsmith.checkpoints.tensors import weight_files
from bertsmith.corpus.examples.stream import Position
from bertsmith.model.config import training_operations
from bertsmith.model.heads import BareModel
from bertsmith.tasks.examples import check_texts
from bertsmith.tasks.features import Features, training_batches
from bertsmith.tasks.labels import Cells, parse_labels
from bertsmith.tasks.metrics import compute_metrics
from bertsmith.tasks.task import own_task
from bertsmith.text.readers.tables import digest, read_columns
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.training.engine import Engine, choose_engine, machine, measure_peak
from bertsmith.training.finetuning.hidden_states import (
    Pool,
    check_pool,
    cosines,
    pooled,
    sentence_vectors,
    text_features,
)
from bertsmith.training.finetuning.settings import ContrastiveSettings
from bertsmith.training.loop.log import RunLog
from bertsmith.training.loop.loop import train
from bertsmith.training.loop.schedule import Budget
from bertsmith.training.loop.task import LoopSettings, State, StepBatch, Training
from bertsmith.training.optimizers import build_optimizer


@dataclass(frozen=True)
class PairFeatures:
    """N pairs: row k is the first text of pair k, row N + k its second text."""

    rows: Features  # 2 N
    texts: np.ndarray  # int64 [2 N], the number of the row's text among the distinct ones

    def __len__(self) -> int:
        return len(self.texts) // 2

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, firsts: Sequence[str], seconds: Sequence[str], max_length: int
    ) -> PairFeatures:
        texts = [*firsts, *seconds]
        numbers: dict[str, int] = {}
        distinct = np.array([numbers.setdefault(text.strip(), len(numbers)) for text in texts])
        return cls(text_features(tokenizer, texts, max_length), distinct)


def ranking_loss(
    firsts_GH: Tensor, seconds_GH: Tensor, texts_2G: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """(loss summed over a group of pairs, how many first texts are nearest to their own second).

    texts_2G: numbers of the texts. A second text is no negative where it, or a text it is paired
    with, is also the first text's own: data with several partners a text would else teach that
    they are unlike.
    """
    scores_GG = scale * F.normalize(firsts_GH, dim=1) @ F.normalize(seconds_GH, dim=1).T
    first, second = texts_2G.chunk(2)
    own = torch.arange(len(first), device=first.device)
    alike_GG = (first[:, None] == first) | (second[:, None] == second) | (first[:, None] == second)
    alike_GG[own, own] = False
    scores_GG = scores_GG.masked_fill(alike_GG, -torch.inf)
    loss = F.cross_entropy(scores_GG, own, reduction="sum")
    return loss, (scores_GG.argmax(dim=1) == own).sum()


class Contrastive:
    """The loop's task. A position's index counts batches, not pairs."""

    def __init__(
        self,
        model: BareModel,
        pairs: PairFeatures,
        engine: Engine,
        evaluate: Callable[[], dict[str, float]],
        *,
        batch: int,
        group: int,
        scale: float,
        pool: Pool,
        seed: int,
    ) -> None:
        self.model, self.pairs, self.engine, self.evaluate = model, pairs, engine, evaluate
        self.batch_size, self.group, self.scale, self.seed = batch, group, scale, seed
        self.pool: Pool = pool
        self.batches_per_epoch = len(self._batches(0))
        self._batches = functools.lru_cache(maxsize=2)(self._batches)

    def _batches(self, epoch: int) -> list[np.ndarray]:
        lengths = self.pairs.rows.lengths.reshape(2, -1).max(axis=0)
        return training_batches(lengths, self.batch_size, self.seed, epoch)

    def batch(self, position: Position) -> tuple[StepBatch, Position]:
        pairs = self._batches(position.epoch)[position.index]
        groups = []
        for part in np.array_split(pairs, -(-len(pairs) // self.group)):
            chosen = np.concatenate([part, part + len(self.pairs)])
            ids, types, lengths = self.pairs.rows.padded(chosen, self.model.config.pad_id)
            arrays = {"ids": ids, "types": types, "lengths": lengths}
            groups.append({**arrays, "texts": self.pairs.texts[chosen]})
        tokens = sum(int(group["lengths"].sum()) for group in groups)
        return StepBatch(groups, {"pairs": len(pairs)}, tokens), self.advance(position)

    def advance(self, position: Position) -> Position:
        if position.index + 1 < self.batches_per_epoch:
            return Position(position.epoch, position.index + 1)
        return Position(position.epoch + 1, 0)

    def loss(
        self, model: BareModel, micro: dict[str, np.ndarray], counts: dict[str, int]
    ) -> tuple[Tensor, dict[str, Tensor | float]]:
        tensor = self.engine.tensor
        lengths = tensor(micro["lengths"])
        hidden_BSH = model.encoder(tensor(micro["ids"]), tensor(micro["types"]), lengths)
        assert isinstance(hidden_BSH, Tensor)
        vectors_BH = pooled(hidden_BSH.float(), lengths, self.pool)
        firsts, seconds = vectors_BH.chunk(2)
        loss, right = ranking_loss(firsts, seconds, tensor(micro["texts"]), self.scale)
        return loss / counts["pairs"], {"right": right, "pairs": float(len(firsts))}

    def figures(self, window: dict[str, float]) -> dict[str, float]:
        return {"accuracy": window["right"] / window["pairs"]}

    def operations(self, batch: StepBatch) -> float:
        config = self.model.config
        shapes = [group["ids"].shape for group in batch.micro_batches]
        return sum(training_operations(config, rows, size, size, 0) for rows, size in shapes)


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
    described = {
        **to_mapping(settings),
        **engine.settings(),
        "model": str(start),
        **_files(pairs, dev),
        "model_sha256": [digest(path) for path in weight_files(start)],
    }
    facts = {"machine": machine(engine, peak)}
    run.write_settings(describe(KIND, command, described, loaded.model, **facts))
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
        label="embed train",
    )
    with RunLog(out) as log:
        training = Training(task, optimizer, State(), loop_settings, task.engine, log)
        if not train(training):
            raise KeyboardInterrupt
        figures = task.evaluate()
        log.evaluate(steps, **figures)
    return figures
