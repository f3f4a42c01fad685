"""The memory of a pre-training step, needed and available.

`step_memory` counts the tensors that the code keeps. It must follow model/, and
tests/training/test_memory.py fails when it does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from bertsmith.model.config import ModelConfig
from bertsmith.model.heads import PreTrainingModel
from bertsmith.model.kernels.masked_lm_loss import BLOCK, CUDA_BLOCK, INT8_LOGITS

MOMENTS = {"adamw": 2, "paper-adam": 2, "lamb": 2, "muon": 1}  # running means of a layer's matrix
FUSED = ("adamw", "paper-adam", "muon")  # loop/update.py adds gradients where they are used
FLOAT = 4  # bytes
SPARE = 32 << 20  # bytes of workspaces and of the heap's end, measured on small models
UNUSABLE = 0.1  # of the heap: freed blocks that fit no request; 6 to 12% were measured


@dataclass(frozen=True)
class StepShape:
    """Sizes of a pre-training step, and how it is computed."""

    batch_size: int
    micro_batch_size: int
    """Rows computed at once by one worker."""
    length: int
    predictions: int
    """Masked positions of a row."""
    precision: str = "float32"
    optimizer: str = "adamw"
    device: str = "cpu"
    workers: int = 1
    """Replicas, each with its own gradients."""
    activation_checkpointing: bool = False


@dataclass(frozen=True)
class Memory:
    """Bytes; not all are needed at once, `peak` is the fullest moment of a step."""

    weights: int
    """With the bf16 copies that replicas share on a CPU."""
    gradients: int
    optimizer: int
    activations: int
    """Kept for the backward pass, with copies of weights: int8, and bf16 on a GPU."""
    peak: int


def parameters(config: ModelConfig) -> int:
    """Parameters with both pre-training heads; the tied table counts once."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in PreTrainingModel(config).parameters())


def step_memory(config: ModelConfig, shape: StepShape) -> Memory:
    """Memory of a step besides the program itself (some 0.3 GB with its libraries).

    The fullest moment is when the backward pass begins, when it ends, or when the weights move.
    """
    weights = FLOAT * parameters(config)
    if config.directions == 2:  # as one of twice as many layers, that predicts twice
        config = replace(config.one_direction, num_layers=2 * config.num_layers)
        shape = replace(shape, predictions=2 * shape.predictions)
    number = FLOAT if shape.precision == "float32" else 2  # float8 and int8 keep no more than bf16
    table = config.vocab_size * config.hidden_size
    wide = (3 if config.gated else 2) * config.intermediate_size
    layer = config.hidden_size * (4 * config.hidden_size + wide)  # numbers in its matrices
    matrices = FLOAT * config.num_layers * layer
    moments = 2 * weights - (2 - MOMENTS[shape.optimizer]) * matrices
    shared = number < FLOAT and shape.device == "cpu"
    narrow = (matrices + FLOAT * table) // 2 if shared else 0  # bytes of the copies in replicas.py
    full, last = _kept_by_layer(config, shape)
    if shape.activation_checkpointing:  # the inputs, and one layer computed again
        kept = config.num_layers * shape.length * config.hidden_size + full
    else:
        kept = (config.num_layers - 1) * full + last
    kept += shape.predictions * 5 * config.hidden_size  # in the masked-LM head
    embedded = FLOAT * shape.length * config.hidden_size
    copies = 0 if number == FLOAT or shared else matrices // 2
    if shape.precision == "int8":  # of weights, which the backward pass reads again
        copies = matrices // FLOAT // (config.num_layers if shape.activation_checkpointing else 1)
    activations = shape.workers * (shape.micro_batch_size * (number * kept + embedded) + copies)
    # a worker with several micro-batches goes forward while it holds gradients, added in float32
    several = shape.workers * shape.micro_batch_size < shape.batch_size
    gradients = shape.workers * (weights if several else weights - narrow)
    masked = shape.micro_batch_size * shape.predictions
    if shape.device == "cpu":  # logits: of all positions in int8, else a block; AMX does without
        whole = shape.precision == "int8" and masked * config.vocab_size <= INT8_LOGITS
        at_once = masked if whole else min(BLOCK, masked)
        head = number * at_once * config.vocab_size
    else:  # a block of logits, and at most four of its steps to their gradient in float32
        head = min(CUDA_BLOCK, masked) * config.vocab_size * (number + 4 * FLOAT)
    of_table = table * (number if shared else FLOAT)  # the gradient, before it is added
    turn = max(head, shape.micro_batch_size * number * full) + of_table
    begin = activations + shape.workers * turn + several * gradients
    end = gradients + shape.workers * of_table
    update = weights if shape.optimizer == "lamb" else 0
    if shared and shape.optimizer not in FUSED:  # the sum of the gradients in float32
        update += weights
    peak = weights + narrow + moments + max(begin, end, gradients + update)
    if shape.device == "cpu":
        peak = round((1 + UNUSABLE) * peak) + SPARE
    return Memory(weights + narrow, gradients, moments, activations, peak)


def available_memory(
    system: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Bytes that this process may still take, in its container; None without /proc/meminfo."""
    file = system / "meminfo"
    if not file.exists():
        return None
    fields = dict(line.split(":", 1) for line in file.read_text(encoding="ascii").splitlines())
    free = 1024 * int(fields["MemAvailable"].split()[0])
    return min([free, *_group_limits(system, groups)])


def _kept_by_layer(config: ModelConfig, shape: StepShape) -> tuple[int, int]:
    """Numbers a row that (a layer, the last layer) keeps for the backward pass.

    At each position: input, query, key, value, context, the inputs of both norms and the first
    one's output (8 H), the feed-forward before and after the activation (2 F; gated 4 F), and on a
    CPU the probabilities of each head. The last layer keeps input, key and value where nothing is
    predicted.
    """
    size, length, inner = config.hidden_size, shape.length, config.intermediate_size
    inner *= 4 if config.gated else 2
    probabilities = config.num_heads * length if shape.device == "cpu" else 0
    full = length * (8 * size + inner + probabilities)
    read = shape.predictions + 1  # [CLS] too
    return full, length * 3 * size + read * (6 * size + inner + probabilities)


def _group_limits(system: Path, groups: Path) -> Iterator[int]:
    """Bytes left by each control group of the process, up to the root."""
    file = system / "self" / "cgroup"
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        _, controllers, name = line.split(":", 2)
        if controllers == "":  # version 2
            root, limit, usage, files = groups, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, files = groups / "memory", "total_inactive_file"
            limit, usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        folder = root / name.strip("/")
        while folder.is_relative_to(root):
            most = (folder / limit).read_text().strip() if (folder / limit).exists() else "max"
            if most != "max":
                stat = (folder / "memory.stat").read_text().splitlines()
                # cached pages of files go when memory is short
                reusable = next(int(s.split()[1]) for s in stat if s.split()[0] == files)
                yield int(most) - int((folder / usage).read_text()) + reusable
            folder = folder.parent
