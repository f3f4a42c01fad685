"""The pre-training task of the loop (paper section 3.1), and the model that a run starts from."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bertsmith.base.settings import from_mapping
from bertsmith.checkpoints.config_json import read_config
from bertsmith.checkpoints.model_folder import family_class, load_model
from bertsmith.checkpoints.names import hugging_face_names
from bertsmith.checkpoints.run_folder import SETTINGS_FILE
from bertsmith.checkpoints.stored import folder_tensors
from bertsmith.corpus.examples.mixture import Corpus, Stream, open_stream
from bertsmith.corpus.examples.rng import fold_in, seed_key
from bertsmith.corpus.examples.settings import NEXT_TOKEN, PAIR_NAMES
from bertsmith.corpus.examples.stream import NoPairs, Position
from bertsmith.corpus.store.store import TokenStore
from bertsmith.model.config import RELATIVES, ModelConfig, config_for, training_flops
from bertsmith.model.directions import encoders
from bertsmith.model.heads import PreTrainingModel
from bertsmith.model.initialization import WithoutInitialization, initialize, local_start
from bertsmith.model.kernels.masked_lm_loss import UNUSED
from bertsmith.model.kernels.unpadded import LEAST_LENGTH, has_row_attention
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.text.tokenizer.wordpiece import SPECIAL
from bertsmith.training.engine import Engine
from bertsmith.training.loop.task import StepBatch
from bertsmith.training.pretraining.evaluation import (
    eval_stream,
    evaluate_pretraining,
    num_rows,
    unigram_entropy,
)
from bertsmith.training.pretraining.objectives import (
    even_order,
    micro_arrays,
    named_figures,
    pretraining_sums,
)
from bertsmith.training.pretraining.settings import (
    Phase,
    PretrainSettings,
    default_micro_batch_size,
)


def model_config(
    tokenizer: Tokenizer, settings: PretrainSettings, folder: Path | None
) -> ModelConfig:
    """The configuration of the model in `folder`, or of a new one.

    Errors: ValueError when the folder's model is an ELMo, has another tokenizer, fewer rows than
    that has pieces (compiled kernels do not look), too few positions, or one segment for pairs; for
    another objective than its own with a relative of BERT; for ltr+rtl with a model of one
    direction, and for another objective with a model of two.
    """
    longest = settings.phases()[-1].length
    changes: dict[str, Any] = {
        "dropout": settings.dropout,
        "attention_dropout": settings.attention_dropout,
        "causal": settings.objective in NEXT_TOKEN,
        "bilstm": False,
    }
    directions = 2 if settings.objective == "ltr+rtl" else 1
    if folder is not None:
        config = read_config(folder)
        family_class(PreTrainingModel, config, folder)  # before a vocabulary is missed there
        _check_tokenizer(Tokenizer.from_pretrained(folder), tokenizer, folder)
        if len(tokenizer.vocabulary) > config.vocab_size:
            raise ValueError(
                f"{folder}: a tokenizer of {len(tokenizer.vocabulary):,} pieces for a model of "
                f"{config.vocab_size:,}: use the tokenizer that the model was trained with"
            )
        able = "ltr" if config.family == "gpt" else "mlm"
        if settings.objective != able and config.family in RELATIVES:
            raise ValueError(
                f"{folder}: {RELATIVES[config.family]} can learn only with `objective='{able}'`, "
                f"not with {settings.objective}"
            )
        if config.directions != directions:
            reads = {1: "in one direction, not in two", 2: "in two directions: use ltr+rtl"}
            raise ValueError(
                f"{folder}: `objective={settings.objective!r}`: it reads {reads[config.directions]}"
            )
        if settings.objective in PAIR_NAMES and config.type_vocab_size < 2:
            raise ValueError(
                f"{folder}: with its type_vocab_size of {config.type_vocab_size} it cannot read "
                f"second texts, but objective {settings.objective} needs two: use `objective='mlm'`"
            )
        if longest > config.max_positions:
            name = "max_length" if settings.phase2_length is None else "phase2_length"
            raise ValueError(
                f"{name} = {longest}: {folder} knows {config.max_positions} positions: lower it, "
                "use `bertsmith extend-positions`, or start a new model without `model`"
            )
        return replace(config, **changes)
    changes["activation"] = settings.activation
    if settings.architecture == "gpt":
        changes |= {"family": "gpt", "activation": "gelu_tanh", "type_vocab_size": 0}
        changes["layer_norm_eps"] = 1e-5
    config = config_for(
        settings.size,
        len(tokenizer.vocabulary),
        max_positions=max(512, longest),
        pre_norm=settings.layer_norm == "pre",
        gated=settings.glu,
        pad_id=tokenizer.vocabulary.pad_id,
        directions=directions,
        **changes,
    )
    std = settings.initializer_range or 1 / math.sqrt(3 * config.one_direction.hidden_size)
    return replace(config, initializer_range=std)


def start_model(
    tokenizer: Tokenizer,
    settings: PretrainSettings,
    folder: Path | None,
    counts: np.ndarray | None = None,
) -> PreTrainingModel:
    """The model in `folder` (a checkpoint, or the model to go on from), or a new one.

    `counts` [V] of the corpus' pieces: a local start sets the masked-LM bias to the log of their
    frequencies, or the first hundreds of steps would bend all layers towards token counts.

    Errors: ValueError as `model_config`; for a weight that is not finite, with its tensor's name.
    """
    config = model_config(tokenizer, settings, folder)
    generator = torch.Generator().manual_seed(settings.seed)
    if folder is not None:
        names = ("dropout", "attention_dropout", "causal", "bilstm")
        changes = {name: getattr(config, name) for name in names}
        loaded = load_model(folder, PreTrainingModel, generator=generator, **changes)
        model = loaded.model
        if any(name.startswith("mlm.") for name in loaded.missing):
            print(f"{folder}: no masked-LM head there; it starts at random", file=sys.stderr)
    else:
        with WithoutInitialization():
            model = PreTrainingModel(config)
        initialize(model, config.initializer_range, generator)
        if settings.init_scheme == "local":
            ids = tokenizer.vocabulary.ids
            special = [ids[piece] for piece in SPECIAL if piece in ids]
            for encoder in encoders(model.encoder):
                local_start(encoder, config.initializer_range, special)
            if counts is not None and config.family == "bert":  # a GPT has no such bias
                log_shares = np.log((counts + 1) / (counts + 1).sum())
                model.mlm.bias.data.copy_(torch.from_numpy(log_shares))
    for encoder in encoders(model.encoder):
        encoder.activation_checkpointing = settings.activation_checkpointing
    return model


def untrained(task: Pretraining, origin: Path | None) -> list[str]:
    """Weights that would look trained in a file: of the pairs' head, which neither this objective
    trains nor the model of `origin` had."""
    if task.settings.objective in PAIR_NAMES:
        return []
    there = folder_tensors(origin).keys() if origin else set()
    head = (name for name in task.model.state_dict() if name.startswith(PAIR_HEAD))
    return [name for name in head if not there >= set(hugging_face_names(name))]


def _check_tokenizer(theirs: Tokenizer, tokenizer: Tokenizer, folder: Path) -> None:
    """Errors: ValueError unless the model of `folder` was trained with the store's tokenizer."""
    if theirs.fingerprint == tokenizer.fingerprint:
        return
    sizes = len(theirs.vocabulary), len(tokenizer.vocabulary)
    what = f"vocabulary ({sizes[0]:,} pieces) than the store ({sizes[1]:,})"
    if theirs.vocabulary.fingerprint == tokenizer.vocabulary.fingerprint:
        what = f"normalization ({theirs.normalization}) than the store ({tokenizer.normalization})"
    raise ValueError(
        f"{folder} has another {what}: build it with `bertsmith corpus ... --vocab {folder}`"
    )


FEWEST_HELD_OUT = 2  # documents
PAIR_HEAD = ("pooler.", "nsp.")  # trained only by objectives with pairs


class Pretraining:
    """The loop's task: batches from the stream, the objective's loss, held-out figures."""

    compiled: Callable[..., Any] | None = None
    """Replaces the model's `losses` in training."""

    def __init__(
        self,
        model: PreTrainingModel,
        stream: Stream,
        held_out: Stream | None,
        settings: PretrainSettings,
        engine: Engine,
        phase: Phase | None = None,
    ) -> None:
        self.model, self.stream, self.held_out = model, stream, held_out
        if settings.objective not in PAIR_NAMES:  # else DDP would wait for their gradients
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(not name.startswith(PAIR_HEAD))
        self.settings, self.engine = settings, engine
        self.phase = phase or settings.phases()[0]
        of_batch = "batch_size" if self.phase.number == 1 else "phase2_batch_size"
        self._share = engine.ranks.share(self.phase.batch, of_batch)
        self.rows_per_forward = rows_per_forward(settings, self.phase, engine, model.config)
        # where padding is left out a core with longer rows would keep the others waiting; with
        # dropout, whose masks hang on a row's place, several ranks would train on other masks
        head_size = model.config.hidden_size // model.config.num_heads
        drops = settings.dropout or settings.attention_dropout
        short_ones = has_row_attention(engine.autocast_dtype, head_size) and not drops
        has_padding = engine.device.type == "cpu" and settings.objective not in NEXT_TOKEN
        is_left_out = has_padding and (short_ones or self.phase.length >= LEAST_LENGTH)
        self._deals_rows = is_left_out and self.rows_per_forward > 1

    def batch(self, position: Position) -> tuple[StepBatch, Position]:
        """This rank's rows of the batch, with their own counts and tokens."""
        rows, size, ranks = len(self._share), self.rows_per_forward, self.engine.ranks
        batch, _ = self.stream.batch(self.stream.advance(position, self._share.start), rows)
        objective, static = self.settings.objective, self.engine.static_shapes
        if self._deals_rows:
            batch = batch.in_order(even_order(batch.lengths, size))
        micro = [
            micro_arrays(batch, objective, start, start + size, static)
            for start in range(0, rows, size)
        ]
        counts = {"masked": int(batch.masked_weights.sum()), "rows": rows}
        if self.settings.bow_weight:
            words = batch.words(UNUSED)
            counts["words"] = int((words != UNUSED).sum())
            for part, start in zip(micro, range(0, rows, size), strict=True):
                part["words"] = words[start : start + size]
        most = -(-self.phase.batch // ranks.size)  # rows of a rank
        first = ranks.rank * -(-most // size)
        tokens = int(batch.lengths.sum())
        return StepBatch(micro, counts, tokens, first), self.advance(position)

    def advance(self, position: Position) -> Position:
        return self.stream.advance(position, self.phase.batch)

    def loss(
        self, model: PreTrainingModel, micro: dict[str, np.ndarray], counts: dict[str, int]
    ) -> tuple[Tensor, dict[str, Tensor | float]]:
        sums = pretraining_sums(model, micro, self.engine, self.compiled)
        loss: Any = sums["mlm_loss"] / counts["masked"]
        if "rtl_loss" in sums:
            loss = (loss + sums["rtl_loss"] / counts["masked"]) / 2
        if "nsp_loss" in sums:
            loss = loss + self.settings.nsp_weight * sums["nsp_loss"] / counts["rows"]
        if "bow_loss" in sums:
            loss = loss + self.settings.bow_weight * sums["bow_loss"] / counts["words"]
        assert isinstance(loss, Tensor)
        return loss, {**sums, "slots": float(micro["ids"].size)}

    def metrics(self, window: dict[str, float]) -> dict[str, float]:
        return {
            **self.phase_figure,
            **named_figures(self.settings.objective, window),
            "padding_ratio": 1.0 - window["tokens"] / window["slots"],
        }

    def flops(self, batch: StepBatch) -> float:
        rows, length = batch.counts["rows"], self.phase.length
        predictions = round(batch.counts["masked"] / rows)
        words = int(self.settings.bow_weight > 0)  # [CLS] is one more prediction
        outputs = predictions + max(words, self.settings.objective in PAIR_NAMES)
        if self.settings.objective in NEXT_TOKEN:
            outputs = length
        return training_flops(self.model.config, rows, length, outputs, predictions + words)

    def evaluate(self, rows: int | None = None) -> dict[str, float]:
        """Held-out figures of the first `rows` rows, by default as many as the settings say."""
        if self.held_out is None:
            return {}
        rows, batch = rows or self.settings.eval_rows, self.rows_per_forward
        figures = evaluate_pretraining(self.model, self.held_out, self.engine, rows, batch)
        return {**self.phase_figure, **figures}

    def out_of_memory(self, error: BaseException, sized: bool, begun: bool = False) -> str | None:
        """Settings that lower a step's memory, in one line; None for any other error.

        `sized`: the model's size is one of them; `begun`: a checkpoint fixes both size and length.
        """
        known = "DefaultCPUAllocator: can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED"
        is_known = any(sign in str(error) for sign in known)
        if not is_known and not isinstance(error, (MemoryError, torch.OutOfMemoryError)):
            return None
        rows, phase, settings = self.rows_per_forward, self.phase, self.settings
        length = "max_length" if phase.number == 1 else "phase2_length"
        first_rows = rows * phase.length // settings.max_length  # which the setting counts
        cures = [
            *([f"lower `micro_batch_size` (now {first_rows})"] if rows > 1 else []),
            *([] if begun else [f"lower `{length}` (now {phase.length})"]),
            *([] if settings.activation_checkpointing else ["add `activation_checkpointing=True`"]),
            *([f"take a smaller `size` (now {settings.size})"] if sized and not begun else []),
        ]
        *others, last = cures or ["no setting of this run lowers it"]
        return "out of memory: " + (f"{', '.join(others)}, or {last}" if others else last)

    @property
    def phase_figure(self) -> dict[str, float]:
        """The phase, for the log of a run that has two."""
        return {"phase": self.phase.number} if self.settings.phase2_length else {}


def pretraining_tasks(
    model: PreTrainingModel, store: Corpus, settings: PretrainSettings, engine: Engine
) -> list[Pretraining]:
    """A task for each phase, with its own stream in another order and with other masks."""
    vocabulary, lack = store.tokenizer.vocabulary, _lack_of_held_out(store, settings)
    if lack:
        print(f"no held-out figures: {lack}", file=sys.stderr)
    tasks = []
    for phase in settings.phases():
        seed = settings.seed
        if phase.number > 1:
            seed = int(fold_in(seed_key(seed), phase.number))
        stream = open_stream(store.train, vocabulary, settings.examples(phase.length), seed)
        held_out = None
        if not lack:
            held_out = eval_stream(store, vocabulary, phase.length, settings)
        tasks.append(Pretraining(model, stream, held_out, settings, engine, phase))
    return tasks


def _lack_of_held_out(store: Corpus, settings: PretrainSettings) -> str:
    """The reason why nothing can be measured on the text that is held out; empty without one."""
    number = store.held_out.num_documents
    if number < FEWEST_HELD_OUT:
        return (
            f"the store holds out {number} documents "
            f"({FEWEST_HELD_OUT} are needed): build one that holds out more"
        )
    if settings.objective == "mlm+sop":
        length = settings.phases()[0].length
        try:
            eval_stream(store, store.tokenizer.vocabulary, length, settings).examples_in_epoch(0)
        except NoPairs as error:
            return str(error)
    return ""


def evaluate_store(
    data: Path,
    model: PreTrainingModel,
    tokenizer: Tokenizer,
    folder: Path,
    stored: dict[str, Any],
    engine: Engine,
) -> tuple[dict[str, float], int]:
    """Figures on the held-out part of a store, and of how many rows.

    Rows and masks are those of the end of pre-training by the settings `stored` in the run.json of
    the model's `folder`. Errors: ValueError for no store, or one of another vocabulary.
    """
    store = TokenStore.open(data)
    store.check_tokenizer(tokenizer, folder)
    settings = from_mapping(PretrainSettings, stored, str(folder / SETTINGS_FILE))
    phase, config = settings.phases()[-1], model.config
    if config.causal:  # of a copy without run.json too
        settings = replace(settings, objective=NEXT_TOKEN[config.directions - 1])
    stream = eval_stream(store, tokenizer.vocabulary, phase.length, settings)
    rows = num_rows(stream, 4 * settings.eval_rows)
    at_once = rows_per_forward(settings, phase, engine, config)
    figures = evaluate_pretraining(model, stream, engine, rows, at_once)
    return figures | {"unigram_entropy": unigram_entropy(store, stream, rows)}, rows


def rows_per_forward(
    settings: PretrainSettings, phase: Phase, engine: Engine, config: ModelConfig
) -> int:
    """Rows of a micro-batch of each worker on each rank, as evenly as possible.

    A longer second phase has fewer, for the same memory.

    >>> import torch
    >>> recipe = PretrainSettings(batch_size=32, micro_batch_size=8, phase2_length=512)
    >>> from bertsmith.model.config import config_for
    >>> engine, mini = Engine(torch.device("cpu"), "float32", threads=1), config_for("mini", 8000)
    >>> [rows_per_forward(recipe, phase, engine, mini) for phase in recipe.phases()]
    [8, 2]
    """
    assert settings.micro_batch_size != "auto", "chosen before a run starts"
    workers = engine.workers * engine.ranks.size
    first = settings.micro_batch_size or settings.batch_size
    if settings.micro_batch_size is None and engine.device.type == "cpu":
        first = default_micro_batch_size(settings.max_length, config.num_layers, config.hidden_size)
    first = min(first, -(-settings.batch_size // workers))
    share = -(-phase.batch // workers)
    most = max(1, min(first * settings.max_length // phase.length, share))
    return -(-share // -(-share // most))
