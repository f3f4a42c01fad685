"""What a fine-tuning run starts from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bertsmith.checkpoints.folder import load_model
from bertsmith.checkpoints.model_config import label_names as stored_names
from bertsmith.checkpoints.model_config import read_config, read_extra_config
from bertsmith.finetuning.finetune_settings import FinetuneSettings
from bertsmith.finetuning.score_scale import ScoreScale
from bertsmith.model.heads import TaskModel
from bertsmith.model.initial_weights import initialize
from bertsmith.tasks.table import TASKS


@dataclass(frozen=True)
class Start:
    """A model folder, with its weights or for its shape alone."""

    folder: Path
    from_scratch: bool = False
    """True: the folder's shape and vocabulary with fresh random weights, for comparison."""

    def model(
        self,
        head: type[TaskModel],
        num_outputs: int,
        settings: FinetuneSettings,
        seed: int,
        label_names: Sequence[str] = (),
        scale: ScoreScale | None = None,
        task: str | None = None,
    ) -> TaskModel:
        """The model before its first step; fresh weights are a function of the seed.

        The head of an earlier fine-tuning is kept where it is of the same kind and classes, and not
        of another published data set than `task`: half of GLUE calls its classes 0 and 1. With a
        `scale` the model gives scores in that.

        Errors: ValueError when more layers are to be fresh than there are.
        """
        generator = torch.Generator().manual_seed(seed)
        changes: dict[str, Any] = {
            "dropout": settings.dropout,
            "attention_dropout": settings.attention_dropout,
        }
        config = replace(read_config(self.folder), **changes)
        if settings.reinit_layers > config.num_layers:
            raise ValueError(
                f"--reinit-layers {settings.reinit_layers}: the model has {config.num_layers}"
            )
        if self.from_scratch:
            model = head(config, num_outputs)
            return initialize(model, config.initializer_range, generator)
        # of other classes a head with as many outputs would be a wrong start
        same_classes = not label_names or (
            list(label_names) == stored_names(self.folder) and self._is_about(task)
        )
        loaded = load_model(
            self.folder,
            head,
            num_outputs=num_outputs,
            keep_head=same_classes,
            generator=generator,
            **changes,
        )
        model = loaded.model
        if scale and "classifier.weight" not in loaded.missing:
            scale.to_standardised(model)
        fresh = list(model.encoder.layers[config.num_layers - settings.reinit_layers :])
        if fresh and (pooler := getattr(model, "pooler", None)):
            fresh.append(pooler)
        for module in fresh:
            initialize(module, config.initializer_range, generator)
        return model

    def _is_about(self, task: str | None) -> bool:
        """Whether equal classes mean the same: own files name theirs, GLUE numbers them."""
        earlier = read_extra_config(self.folder).get("task")
        return earlier == task or not {earlier, task} <= TASKS.keys()
