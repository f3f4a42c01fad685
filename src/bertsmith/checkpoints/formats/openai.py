"""The GPT of 2018 as OpenAI published it: one vector of numbers cut into files, and its shapes.

    params_shapes.json                        the shape of each tensor, in the order of the vector
    params_0.npy ... params_9.npy             float32, one after the other
    encoder_bpe_40000.json, vocab_40000.bpe   the pieces and their merges; see bytepair.py

The tensors get the names that Hugging Face gave them (`checkpoints/names.py`).
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np

SHAPES = "params_shapes.json"
SHARD = re.compile(r"params_(\d+)\.npy")
HEAD_SIZE = 64  # of the released model, whose files do not say how many heads it has
TABLES = ["positions_embed.weight", "tokens_embed.weight"]
LAYER = [
    *("attn.c_attn.weight", "attn.c_attn.bias", "attn.c_proj.weight", "attn.c_proj.bias"),
    *("ln_1.weight", "ln_1.bias"),
    *("mlp.c_fc.weight", "mlp.c_fc.bias", "mlp.c_proj.weight", "mlp.c_proj.bias"),
    *("ln_2.weight", "ln_2.bias"),
]


def openai_config(folder: Path) -> dict[str, Any]:
    """The sizes in `params_shapes.json` as the entries of a config.json. Errors: ValueError."""
    shapes = openai_shapes(folder)
    positions, size = shapes[TABLES[0]]
    return {
        "model_type": "openai-gpt",
        "architectures": ["OpenAIGPTLMHeadModel"],
        "vocab_size": shapes[TABLES[1]][0],
        "n_positions": positions,
        "n_embd": size,
        "n_layer": len(shapes) // len(LAYER),
        "n_head": max(1, size // HEAD_SIZE),
    }


def openai_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Hugging Face's name -> shape, in the order of the vector.

    Errors: ValueError for a file that is no list of the shapes of a GPT.
    """
    path = folder / SHAPES
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        shapes = [tuple(map(int, shape)) for shape in stored]
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: no list of shapes: copy or download it again") from error
    layers, over = divmod(len(shapes) - len(TABLES), len(LAYER))
    if layers < 1 or over or len(shapes[0]) != 2 or len(shapes[1]) != 2:
        raise ValueError(
            f"{path}: {len(shapes)} shapes: a GPT has two tables and {len(LAYER)} tensors a layer"
        )
    names = TABLES + [f"h.{n}.{name}" for n in range(layers) for name in LAYER]
    # a product's matrix is stored as a convolution of width 1
    flat = (shape[1:] if len(shape) == 3 and shape[0] == 1 else shape for shape in shapes)
    return dict(zip(names, flat, strict=True))


def openai_shards(folder: Path) -> list[Path]:
    """The files of numbers in their order. Errors: ValueError for a missing one."""
    numbers = {int(m[1]) for path in folder.iterdir() if (m := SHARD.fullmatch(path.name))}
    count = max(10, 1 + max(numbers, default=0))  # as published
    if missing := [f"params_{k}.npy" for k in range(count) if k not in numbers]:
        raise ValueError(f"{folder}: {', '.join(missing)} missing: copy the whole model")
    return [folder / f"params_{k}.npy" for k in range(count)]


def openai_tensors(folder: Path) -> dict[str, np.ndarray]:
    """Hugging Face's name -> float32 array, mapped where it lies in one file.

    Errors: ValueError for a damaged file, and for more or fewer numbers than the shapes have.
    """
    shapes, paths = openai_shapes(folder), openai_shards(folder)
    shards = [_mapped(path) for path in paths]
    edges = np.cumsum([0, *map(len, shards)])
    sizes = [math.prod(shape) for shape in shapes.values()]
    if sum(sizes) != edges[-1]:
        raise ValueError(
            f"{folder}: {edges[-1]:,} numbers in its params_*.npy, but {sum(sizes):,} by {SHAPES}: "
            "copy or download the model again"
        )
    tensors, begin = {}, 0
    for (name, shape), size in zip(shapes.items(), sizes, strict=True):
        spans = zip(shards, edges[:-1], edges[1:], strict=True)
        parts = [
            shard[max(begin - first, 0) : begin + size - first]
            for shard, first, after in spans
            if first < begin + size and begin < after
        ]
        flat = parts[0] if len(parts) == 1 else np.concatenate(parts)
        tensors[name] = flat.reshape(shape)
        begin += size
    return tensors


def _mapped(path: Path) -> np.ndarray:
    try:
        array = np.load(path, mmap_mode="c", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path}: truncated or damaged: copy or download it again") from error
    if array.ndim != 1 or array.dtype != np.float32:
        raise ValueError(f"{path}: {array.dtype} {list(array.shape)}: expected a vector of float32")
    return array
