"""Any model folder -> one clean Hugging Face folder, proved equal."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from bertsmith.checkpoints.copies import copy_similarity_training, whole_tokenizer
from bertsmith.checkpoints.folder import (
    beyond_transformers,
    folder_tensors,
    kind_of,
    load_model,
    save_model,
)
from bertsmith.checkpoints.model_config import (
    label_names,
    read_config,
    read_extra_config,
    read_stored_config,
)
from bertsmith.checkpoints.tensors import read_tensors
from bertsmith.files import atomic_folder
from bertsmith.model.heads import TaskModel


@dataclass(frozen=True)
class Converted:
    """What was written, and what the source had too little or too much of."""

    architecture: str
    num_tensors: int
    num_parameters: int
    missing: list[str]
    unused: list[str]


def convert(source: Path, destination: Path) -> Converted:
    """Write the model of folder `source` to the new folder `destination` and compare the two.

    Tensors that `source` lacks are not written. `destination` appears only when all others were
    found equal, bit by bit as float32.

    Errors: ValueError as `load_model` and `whole_tokenizer`, and for a model that
    transformers' BERT cannot compute; OSError from the disk.
    """
    kind = kind_of(source)
    if beyond := beyond_transformers(read_config(source), kind):
        raise ValueError(
            f"{source}: a model with {' and '.join(beyond)}, which transformers' BERT does not "
            "have: it stays a folder of bertsmith's own"
        )
    tokenizer = whole_tokenizer(source)
    loaded = load_model(source, kind)
    names = label_names(source)
    # an option's score is one output, whatever labels were left in its config.json
    fits = issubclass(kind, TaskModel) and len(names) == loaded.model.num_outputs
    with atomic_folder(destination) as temporary:
        copy_similarity_training(source, temporary)
        save_model(
            loaded.model,
            tokenizer,
            temporary,
            label_names=names if fits else None,
            extra_config=read_extra_config(source),
            problem_type=read_stored_config(source).get("problem_type"),
            leave_out=loaded.missing,
        )
        num_tensors, num_parameters = _compare(source, temporary)
        assert load_model(temporary, kind).missing == loaded.missing
        architecture = read_stored_config(temporary)["architectures"][0]
    return Converted(architecture, num_tensors, num_parameters, loaded.missing, loaded.unused)


def _compare(source: Path, written: Path) -> tuple[int, int]:
    """(tensors, numbers) of folder `written`, each equal bit by bit to the same of `source`."""
    before, after = folder_tensors(source), folder_tensors(written)
    num_parameters = 0
    for name in after:
        old, new = read_tensors([before[name], after[name]])
        if not torch.equal(old.float().view(torch.int32), new.view(torch.int32)):
            raise RuntimeError(f"'{name}' was written, but another value was read back")
        num_parameters += new.numel()
    return len(after), num_parameters
