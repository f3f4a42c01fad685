"""A model folder's tensors on disk: by their files' headers, then as float32 arrays. No torch.

Only pickled weights are read by PyTorch, which is imported where a folder has no others.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from bertsmith.base.files import read_json_object
from bertsmith.checkpoints.formats.elmo import HDF5, OPTIONS, options_path, read_hdf5, weights_path
from bertsmith.checkpoints.formats.google import checkpoint_prefix, open_checkpoint
from bertsmith.checkpoints.formats.openai import SHAPES, openai_shards, openai_tensors
from bertsmith.checkpoints.formats.tensorflow_bundle import INDEX, IS_SHARD, Bundle
from bertsmith.checkpoints.names import (
    GLOBAL_STEP,
    GPT_MASK,
    KERNEL,
    SLOTS,
    TIED_MATRIX,
    TOKEN_EMBEDDING,
    canonical,
    conv1d_parts,
)

WEIGHTS, PICKLED = "model.safetensors", ".bin"
WEIGHT_FILES = WEIGHTS, f"pytorch_model{PICKLED}"  # in parts: beside an index of this name and:
INDEX_SUFFIX = ".index.json"
DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file, known by the file's header alone."""

    file: Path
    name: str
    shape: tuple[int, ...]  # as ours, whatever the file's
    source: Any = None
    """Where it is read: a `Bundle` of TensorFlow's, a mapped Tensor, an array, or (dtype, first
    byte, shape) in the file."""
    columns: slice | None = None
    """Of a matrix [inputs, outputs] of GPT's, or of its bias: these outputs are ours."""

    def array(self) -> np.ndarray:
        """Its numbers, float32, mapped from the file where they are that already.

        Errors: ValueError for what is no weight, NaN and infinity.
        """
        if isinstance(self.source, Bundle):
            array = bundle_array(self.source, self.name, self.name).astype(np.float32)
        elif isinstance(self.source, tuple):
            array = self._mapped(*self.source)
        elif isinstance(self.source, np.ndarray):
            array = self.source
        else:
            if not is_weight(self.source):
                raise no_weights(self, self.source.dtype)
            array = self.source.float().numpy()
        array = self.own_part(array)
        # NaN is both the smallest and the largest number; this reads once and writes nothing
        if array.size and not np.isfinite([array.min(), array.max()]).all():
            raise not_finite(self)
        return array

    def own_part(self, stored: Any) -> Any:
        """Our columns of a stored Tensor or array, turned, where it is of GPT's."""
        if self.columns is None:
            return stored
        part = stored[..., self.columns]
        return part.T if len(self.shape) == 2 else part

    def _mapped(self, dtype: str, first: int, shape: tuple[int, ...]) -> np.ndarray:
        if dtype not in DTYPES:
            raise no_weights(self, dtype)
        if 0 in shape:
            return np.empty(shape, np.float32)
        mapped = np.memmap(self.file, DTYPES[dtype], "c", first, shape)
        array = np.require(np.asarray(mapped), requirements="A")  # a map starts at any byte
        if dtype == "BF16":  # the upper half of a float32's bits
            return (array.astype(np.uint32) << 16).view(np.float32)
        return array.astype(np.float32, copy=False)


def is_weight(tensor: Any) -> bool:
    """True for a Tensor of 16 bits or more to a number; the codes of 8 are nothing without their
    scales, which stand in other tensors."""
    return tensor.is_floating_point() and tensor.element_size() > 1


def no_weights(tensor: StoredTensor, dtype: object) -> ValueError:
    """The error for a tensor of integers, or of another quantized model."""
    return ValueError(
        f"{tensor.file}: '{tensor.name}' holds {dtype} numbers, not weights: take the model as it "
        "was before it was quantized"
    )


def not_finite(tensor: StoredTensor) -> ValueError:
    """The error for a tensor with NaN or infinity in it."""
    return ValueError(
        f"{tensor.file}: '{tensor.name}' holds NaN or infinity: take an earlier checkpoint, or "
        "copy or download the model again"
    )


def bundle_array(bundle: Bundle, name: str, weight: str) -> np.ndarray:
    """A tensor of a checkpoint of TensorFlow's, turned as the weight it is or belongs to."""
    values = bundle.read(name)
    if values.dtype.kind != "f":
        raise ValueError(f"{bundle.index}: '{name}' holds {values.dtype} numbers, not weights")
    return np.ascontiguousarray(values.T if weight.endswith(KERNEL) else values)


def stored_tensors(file: Path) -> list[StoredTensor]:
    """A file's tensors by its header. Errors: ValueError for a damaged file; FileNotFoundError.

    Those of a checkpoint of Google's are in its index, without what belongs to its optimizer; those
    of OpenAI's files in their list of shapes.
    """
    if file.suffix == PICKLED:
        from bertsmith.checkpoints.formats.pickled import read_pickled  # imports torch

        tensors = read_pickled(file)
        return [StoredTensor(file, name, tuple(x.shape), x) for name, x in tensors.items()]
    if file.name.endswith(INDEX):
        bundle = open_checkpoint(file.with_name(file.name.removesuffix(INDEX)))
        return [
            StoredTensor(file, name, _turned(name, bundle.shape(name)), bundle)
            for name in bundle.names
            if name != GLOBAL_STEP and not name.endswith(tuple(SLOTS))
        ]
    if file.name == SHAPES:
        arrays = openai_tensors(file.parent).items()
        return [StoredTensor(file, name, array.shape, array) for name, array in arrays]
    if file.suffix == HDF5:
        options = options_path(file.parent)
        if options is None:
            raise ValueError(f"{file}: no {OPTIONS} beside it, which says the sizes: copy it, too")
        found = read_hdf5(file, options)
        return [StoredTensor(file, name, x.shape, x) for name, x in found.items()]
    if IS_SHARD.search(file.name) or file.suffix == ".npy":
        return []
    with opened(file, "np"):  # its reader checks the header, also beside the file's size
        pass
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(size))
    return [
        StoredTensor(
            *(file, name, tuple(entry["shape"])),
            (entry["dtype"], 8 + size + entry["data_offsets"][0], tuple(entry["shape"])),
        )
        for name, entry in header.items()
        if name != "__metadata__"
    ]


def _turned(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape[::-1] if name.endswith(KERNEL) else shape


@contextmanager
def opened(file: Path, framework: str) -> Iterator[safe_open]:
    """A safetensors file; framework "np" or "pt". Errors: ValueError for a damaged one."""
    try:
        with safe_open(file, framework=framework) as tensors:
            yield tensors
    except SafetensorError as error:
        damaged = f"{file}: truncated or damaged ({error}): copy or download it again"
        raise ValueError(damaged) from error


def weight_files(folder: Path) -> list[Path]:
    """The files with a folder's weights, safetensors before pickled ones, Google's and OpenAI's.

    Errors: ValueError if there are none.
    """
    for name in WEIGHT_FILES:
        if (folder / name).exists():
            return [folder / name]
        if (index := folder / f"{name}{INDEX_SUFFIX}").exists():
            return _shards(index)
    if hdf5 := weights_path(folder):
        return [hdf5]
    if prefix := checkpoint_prefix(folder):
        bundle = open_checkpoint(prefix)
        return [bundle.index, *bundle.shards()]
    if (folder / SHAPES).exists():
        return [folder / SHAPES, *openai_shards(folder)]
    raise ValueError(
        f"{folder}: no {' or '.join(WEIGHT_FILES)}, so not a folder with a model (or not downloaded"
        " whole, or with weights of another framework)"
    )


def _shards(index: Path) -> list[Path]:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index}: no weight_map with the names of the files")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name:
            raise ValueError(f"{index}: '{name}' is not the name of a file beside it")
        if not index.with_name(name).exists():
            raise ValueError(f"{index.with_name(name)}: missing, though {index.name} names it")
    return [index.with_name(name) for name in names]


def folder_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Canonical name -> tensor of a folder. Errors: as `weight_files`."""
    found: dict[str, StoredTensor] = {}
    for tensor in (tensor for file in weight_files(folder) for tensor in stored_tensors(file)):
        split = conv1d_parts(tensor.name, tensor.shape)
        if split is None and not GPT_MASK.search(tensor.name):
            found[canonical(tensor.name)] = tensor
        for name, columns in split or ():
            shape = columns.stop - columns.start, *tensor.shape[:-1]
            found[name] = replace(tensor, shape=shape, columns=columns)
    if TIED_MATRIX in found:  # some folders store the token embedding as this alone
        found.setdefault(TOKEN_EMBEDDING, found[TIED_MATRIX])
    return found
