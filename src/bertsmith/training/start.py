"""The model that a pre-training run starts from: fresh, another model's, or its own checkpoint."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bertsmith.checkpoints.folder import folder_tensors, load_model
from bertsmith.checkpoints.model_config import read_config
from bertsmith.checkpoints.names import hugging_face_names
from bertsmith.model.encoder import ModelConfig
from bertsmith.model.heads import PreTrainingModel
from bertsmith.model.initial_weights import WithoutInitialization, initialize
from bertsmith.model.local_start import local_start
from bertsmith.model.sizes import config_for
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.training.objectives import PAIR_NAMES
from bertsmith.training.pretrain_settings import SHAPE, PretrainSettings
from bertsmith.training.pretraining import PAIR_HEAD, Pretraining


def check_shape(given: Collection[str], init: Path | None) -> None:
    """Refuse to be given a shape beside a model to go on from, which has its own."""
    fixed = SHAPE & set(given)
    if init is not None and fixed:
        names = ", ".join(sorted(fixed))
        raise ValueError(f"{names}: fixed by the model that --init goes on from; leave it out")


def model_config(
    tokenizer: Tokenizer, settings: PretrainSettings, folder: Path | None
) -> ModelConfig:
    """The configuration of the model of `folder`, or of a fresh one of the recipe.

    Errors: ValueError when the folder's model has another tokenizer, fewer rows than that has
    pieces (compiled kernels do not look), too few positions, or one segment for pairs.
    """
    longest = settings.phases()[-1].length
    changes: dict[str, Any] = {
        "dropout": settings.dropout,
        "attention_dropout": settings.attention_dropout,
        "causal": settings.objective == "ltr",
    }
    if folder is not None:
        _check_tokenizer(Tokenizer.from_pretrained(folder), tokenizer, folder)
        config = replace(read_config(folder), **changes)
        if len(tokenizer.vocabulary) > config.vocab_size:
            raise ValueError(
                f"{folder}: a tokenizer of {len(tokenizer.vocabulary):,} pieces for a model of "
                f"{config.vocab_size:,}: use the tokenizer that the model was trained with"
            )
        if settings.objective in PAIR_NAMES and config.type_vocab_size < 2:
            raise ValueError(
                f"{folder}: its type_vocab_size of {config.type_vocab_size} tells no second text "
                f"from a first: objective {settings.objective} needs two: use --objective mlm"
            )
        if longest > config.max_positions:
            name = "length" if settings.second_length is None else "second_length"
            raise ValueError(
                f"{name} = {longest}: {folder} knows {config.max_positions} positions: lower it, "
                "lengthen the model by `bertsmith extend-positions`, or start a new one without "
                "--init"
            )
        return config
    config = config_for(
        settings.size,
        len(tokenizer.vocabulary),
        max_positions=max(512, longest),
        activation=settings.activation,
        pre_norm=settings.norm == "pre",
        gated=settings.gated,
        pad_id=tokenizer.vocabulary.pad_id,
        **changes,
    )
    std = settings.initializer_range or 1 / math.sqrt(3 * config.hidden_size)
    return replace(config, initializer_range=std)


def start_model(
    tokenizer: Tokenizer,
    settings: PretrainSettings,
    folder: Path | None,
    counts: np.ndarray | None = None,
) -> PreTrainingModel:
    """The model of `folder` (a checkpoint, or what --init names), or fresh weights.

    `counts` [V] are the corpus' pieces: the bias of a local start's masked-LM head is the log of
    their shares, or the first hundreds of steps would bend all layers towards token counts.

    Errors: ValueError as `model_config`; for a weight that is not finite, with its tensor's name.
    """
    config = model_config(tokenizer, settings, folder)
    generator = torch.Generator().manual_seed(settings.seed)
    if folder is not None:
        changes = {
            name: getattr(config, name) for name in ("dropout", "attention_dropout", "causal")
        }
        loaded = load_model(folder, PreTrainingModel, generator=generator, **changes)
        model = loaded.model
        if any(name.startswith("mlm.") for name in loaded.missing):
            what = "no masked-LM head there; it starts from random weights"
            print(f"{folder}: {what}", file=sys.stderr)
    else:
        with WithoutInitialization():
            model = PreTrainingModel(config)
        initialize(model, config.initializer_range, generator)
        if settings.start == "local":
            local_start(model.encoder, config.initializer_range)
            if counts is not None:
                log_shares = np.log((counts + 1) / (counts + 1).sum())
                model.mlm.bias.data.copy_(torch.from_numpy(log_shares))
    model.encoder.checkpoint_activations = settings.checkpoint_activations
    return model


def untrained(task: Pretraining, origin: Path | None) -> list[str]:
    """The weights that would look trained in a file, and are not.

    Those of the pairs' head that neither this objective trains nor the model of `origin` had.
    """
    if task.settings.objective in PAIR_NAMES:
        return []
    there = folder_tensors(origin).keys() if origin else set()
    head = (name for name in task.model.state_dict() if name.startswith(PAIR_HEAD))
    return [name for name in head if not there >= set(hugging_face_names(name))]


def _check_tokenizer(theirs: Tokenizer, tokenizer: Tokenizer, folder: Path) -> None:
    """The model of `folder` was trained with the store's tokenizer."""
    if theirs.fingerprint == tokenizer.fingerprint:
        return
    sizes = len(theirs.vocabulary), len(tokenizer.vocabulary)
    what = f"vocabulary ({sizes[0]:,} pieces) than the store ({sizes[1]:,})"
    if theirs.vocabulary.fingerprint == tokenizer.vocabulary.fingerprint:
        what = f"normalization ({theirs.normalization}) than the store ({tokenizer.normalization})"
    raise ValueError(
        f"{folder} has another {what}: build it with `bertsmith corpus ... --vocab {folder}`"
    )
