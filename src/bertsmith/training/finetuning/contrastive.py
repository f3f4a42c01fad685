"""Sentence vectors trained from pairs that belong together, the rest of the batch being negatives.

Multiple negatives ranking loss (Henderson et al. 2017, arXiv 1705.00652; with cosines, Gao et al.
2021, arXiv 2104.08821): of a group of G pairs (a_k, b_k), a_k must find b_k among b_1 ... b_G by
softmax over scale * cos(a_k, b_j).

A group is one micro-batch of the loop: the cosines of a pair with all others must be computed
where all of them are. A step holds one group or more, which do not see each other, and the cores
compute them side by side; that the group has a size of its own keeps the result independent of
how many cores there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bertsmith.base.files import write_json
from bertsmith.base.settings import to_mapping
from bertsmith.checkpoints.model_folder import load_model, save_model
from bertsmith.checkpoints.reading import load_tokenizer
from bertsmith.checkpoints.run_folder import RunFolder, describe
from bertsmith.checkpoints.stored import weight_files
from bertsmith.corpus.examples.stream import Position
from bertsmith.model.config import training_flops
from bertsmith.model.heads import BareModel
from bertsmith.tasks.examples import check_texts
from bertsmith.tasks.features import Features, training_batches
from bertsmith.tasks.labels import Cells, parse_labels
from bertsmith.tasks.metrics import compute_metrics
from bertsmith.tasks.task import own_task
from bertsmith.tasks.vectors import check_pool, check_prompt, cosines, text_features
from bertsmith.text.readers.tables import digest, read_columns
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.training.engine import Engine, choose_engine, machine, measure_peak
from bertsmith.training.finetuning.fit import Epochs, fit
from bertsmith.training.finetuning.hidden_states import pooled, sentence_vectors
from bertsmith.training.finetuning.settings import ContrastiveSettings
from bertsmith.training.loop.schedule import Budget
from bertsmith.training.loop.task import LoopSettings, StepBatch
from bertsmith.training.optimizers import build_optimizer

KIND = "contrastive"
METRICS = ("spearman", "pearson")


@dataclass(frozen=True)
class Pairs:
    """N pairs of texts: alike ones for training, or a dev set with a similarity for each."""

    firsts: list[str]
    seconds: list[str]
    scores: np.ndarray | None  # float32 [N]
    source: str

    def __len__(self) -> int:
        return len(self.firsts)

    def behind(self, prompt: str) -> Pairs:
        """The same with a prompt before every text."""
        firsts, seconds = ([prompt + text for text in of] for of in (self.firsts, self.seconds))
        return replace(self, firsts=firsts, seconds=seconds)


@dataclass(frozen=True)
class Kept:
    """Parts of the start's way to its vectors that stay; pooling and length are settings."""

    prompts: Mapping[str, str] = field(default_factory=dict)
    """Prompts by name."""
    default_prompt: str | None = None
    """The name of the one before every text, in training too."""
    normalize: bool = False
    """Vectors have length 1."""


def read_pairs(path: Path, text: str, text_pair: str, score: str | None = None) -> Pairs:
    """Read pairs from the columns of a csv, tsv, jsonl or parquet file, with scores if named.

    Errors: ValueError, one line with file and line, for a missing column, an empty text, a score
    that is no finite number, a column named twice.
    """
    task = own_task("regress", text, text_pair, "" if score is None else score)
    task = replace(task, name="pairs")  # else messages would name settings of finetune
    wanted = {text: "`text`", text_pair: "`text_pair`"}
    if score is not None:
        wanted[score] = "`score`"
    columns, lines = read_columns(path, wanted)
    firsts, seconds = (check_texts(columns[name], name, path, lines) for name in (text, text_pair))
    scores = None
    if score is not None:
        cells = Cells(columns[score], lines, score, str(path), False, None)
        scores, _ = parse_labels(cells, task, ())
    return Pairs(firsts, seconds, scores, str(path))


@dataclass(frozen=True)
class PairFeatures:
    """N pairs: row k is the first text of pair k, row N + k its second text."""

    rows: Features  # 2 N
    texts: np.ndarray  # int64 [2 N], the number of the row's text among the distinct ones
    scores: np.ndarray | None  # float32 [N], of a dev set

    def __len__(self) -> int:
        return len(self.texts) // 2

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of the longer text of each pair, int64 [N]."""
        return self.rows.lengths.reshape(2, -1).max(axis=0)

    @classmethod
    def of(cls, tokenizer: Tokenizer, pairs: Pairs, max_length: int) -> PairFeatures:
        texts = [*pairs.firsts, *pairs.seconds]
        numbers: dict[str, int] = {}
        distinct = np.array([numbers.setdefault(text.strip(), len(numbers)) for text in texts])
        return cls(text_features(tokenizer, texts, max_length), distinct, pairs.scores)


def ranking_loss(
    firsts_GH: Tensor, seconds_GH: Tensor, texts_2G: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """(Loss summed over a group of pairs, how many first texts are nearest to their own second).

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


def with_company(batches: list[np.ndarray]) -> list[np.ndarray]:
    """The batches; a pair that was left over for one alone, without a negative, is in another.

    >>> with_company([np.array([3]), np.array([0, 2]), np.array([1, 4])])
    [array([0, 2, 3]), array([1, 4])]
    """
    alone = [batch for batch in batches if len(batch) == 1]
    first, *others = [batch for batch in batches if len(batch) > 1]
    return [np.concatenate([first, *alone]), *others]


@dataclass(eq=False)
class Contrastive:
    """The loop's task."""

    model: BareModel
    pairs: PairFeatures
    dev: PairFeatures | None
    engine: Engine
    settings: ContrastiveSettings

    def __post_init__(self) -> None:
        how = self.pairs.lengths, self.settings.batch_size, self.settings.seed
        self.batches = Epochs(lambda number: with_company(training_batches(*how, number)))

    def advance(self, position: Position) -> Position:
        return self.batches.advance(position)

    def batch(self, position: Position) -> tuple[StepBatch, Position]:
        pairs = self.batches[position]
        groups = []
        count = min(-(-len(pairs) // self.settings.negatives), len(pairs) // 2)
        for part in np.array_split(pairs, count):
            chosen = np.concatenate([part, part + len(self.pairs)])
            ids, types, lengths = self.pairs.rows.padded(chosen, self.model.config.pad_id)
            texts = self.pairs.texts[chosen]
            groups.append({"ids": ids, "types": types, "lengths": lengths, "texts": texts})
        tokens = sum(int(group["lengths"].sum()) for group in groups)
        return StepBatch(groups, {"pairs": len(pairs)}, tokens), self.advance(position)

    def loss(
        self, model: BareModel, micro: dict[str, np.ndarray], counts: dict[str, int]
    ) -> tuple[Tensor, dict[str, Tensor | float]]:
        batch = {name: self.engine.tensor(array) for name, array in micro.items()}
        hidden_BSH = model.encoder(batch["ids"], batch["types"], batch["lengths"])
        assert isinstance(hidden_BSH, Tensor)
        vectors_BH = pooled(hidden_BSH.float(), batch["lengths"], self.settings.pool)
        firsts, seconds = vectors_BH.chunk(2)
        loss, correct = ranking_loss(firsts, seconds, batch["texts"], self.settings.scale)
        return loss / counts["pairs"], {"right": correct, "pairs": float(len(firsts))}

    def metrics(self, window: dict[str, float]) -> dict[str, float]:
        return {"accuracy": window["right"] / window["pairs"]}

    def flops(self, batch: StepBatch) -> float:
        config = self.model.config
        shapes = [group["ids"].shape for group in batch.micro_batches]
        return sum(training_flops(config, rows, size, size, 0) for rows, size in shapes)

    def evaluate(self) -> dict[str, float]:
        """Correlation of the cosines with the scores of dev."""
        if self.dev is None:
            return {}
        assert self.dev.scores is not None
        encoder, pool = self.model.encoder, self.settings.pool
        vectors = sentence_vectors(encoder, self.dev.rows, self.engine, pool)
        return compute_metrics(METRICS, cosines(*np.split(vectors, 2)), self.dev.scores, 0)


def train_sentence_vectors(
    start: Path,
    pairs: Pairs,
    dev: Pairs | None,
    out: Path,
    settings: ContrastiveSettings,
    command: Sequence[str] = (),
    kept: Kept = Kept(),
) -> dict[str, Any]:
    """Train the encoder of the folder `start` on pairs; `out` gets the model, its log and result.

    The model is that of the last step. `dev` is scored before, after each epoch and at the end.

    Errors: ValueError for a folder in use, a length the model does not have or that the prompt
    fills, fewer than two pairs, and as `check_pool`; those of `fit`.
    """
    run = RunFolder(out)
    run.check_free(KIND)
    if len(pairs) < 2:
        raise ValueError(f"{pairs.source}: {len(pairs)} pair: negatives need 2 or more")
    loaded = load_model(start, BareModel, dropout=settings.dropout)
    model, positions = loaded.model, loaded.model.config.max_positions
    if not 3 <= settings.max_length <= positions:
        raise ValueError(
            f"`max_length={settings.max_length}`: the model reads 3 to {positions} tokens"
        )
    check_pool(settings.pool, model.config.causal)
    engine = choose_engine(settings.device, settings.precision, settings.threads)
    tokenizer = load_tokenizer(start)
    prompt, length = kept.prompts.get(kept.default_prompt or "", ""), settings.max_length
    check_prompt(prompt, len(tokenizer.encode_batch([prompt], offsets=False).ids), length)
    rows = PairFeatures.of(tokenizer, pairs.behind(prompt), length)
    scored = None if dev is None else PairFeatures.of(tokenizer, dev.behind(prompt), length)
    task = Contrastive(model.to(engine.device), rows, scored, engine, settings)
    peak = measure_peak(engine)
    described = to_mapping(settings) | engine.settings() | _described(start, pairs, dev)
    with run.locked():
        run.check_free(KIND)  # again: another process may have been here meanwhile
        run.write_settings(describe(KIND, command, described, model, machine=machine(engine, peak)))
        loop = LoopSettings.of(
            settings,
            budget=Budget(steps=settings.epochs * task.batches.per_epoch),
            schedule="linear",
            num_evals=settings.epochs,
            peak=peak,
            label="embed train",
        )
        before = task.evaluate()
        optimizer = build_optimizer(model, "adamw", settings.learning_rate, settings.weight_decay)
        after = fit(task, optimizer, loop, engine, run.path)
        write_pooling(run.path, settings, model.config.hidden_size, kept)
        save_model(model, tokenizer, run.path, exclude=loaded.missing)
        result = {
            "metrics": after,
            "metrics_before": before,
            "main_metric": METRICS[0],
            "train_pairs": len(pairs),
            "dev_pairs": 0 if dev is None else len(dev),
        }
        run.write_result(result)
        return result


def write_pooling(
    folder: Path, settings: ContrastiveSettings, hidden_size: int, kept: Kept = Kept()
) -> None:
    """Write the files by which sentence-transformers and `embed` make a folder's vectors.

    The names are its old ones, which all its versions and other servers read.
    """
    parts = [("Transformer", ""), ("Pooling", "1_Pooling")]
    parts += [("Normalize", "2_Normalize")] * kept.normalize
    modules = [
        {"idx": k, "name": str(k), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for k, (kind, path) in enumerate(parts)
    ]
    pooling = {
        "word_embedding_dimension": hidden_size,
        "pooling_mode_cls_token": settings.pool == "cls",
        "pooling_mode_mean_tokens": settings.pool == "mean",
        "pooling_mode_max_tokens": False,
        "pooling_mode_mean_sqrt_len_tokens": False,
    }
    prompts = {
        "prompts": dict(kept.prompts),
        "default_prompt_name": kept.default_prompt,
        "similarity_fn_name": "cosine",
    }
    length = {"max_seq_length": settings.max_length, "do_lower_case": False}
    write_json(folder / "1_Pooling" / "config.json", pooling)
    write_json(folder / "sentence_bert_config.json", length)
    write_json(folder / "config_sentence_transformers.json", prompts)
    write_json(folder / "modules.json", modules)


def _described(start: Path, pairs: Pairs, dev: Pairs | None) -> dict[str, Any]:
    """The files that were read, for run.json."""
    sources = {"train": pairs.source} | ({} if dev is None else {"dev": dev.source})
    return {
        "model": str(start),
        "data": pairs.source,
        "dev": sources.get("dev"),
        "data_sha256": {name: digest(Path(source)) for name, source in sources.items()},
        "model_sha256": [digest(path) for path in weight_files(start)],
    }
