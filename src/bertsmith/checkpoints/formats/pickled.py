"""pytorch_model.bin: weights that PyTorch pickled, read without running anything of the file.

A pickle names functions, and Python calls them while it reads. PyTorch's own reader
(`weights_only=True`) knows the few that make tensors, and refuses another before it is called.
"""

from __future__ import annotations

import errno
import re
import struct
import zipfile
from pathlib import Path
from pickle import UnpicklingError

import torch
from torch import Tensor

REMEDY = "take the model as safetensors"
DAMAGED = (  # of a reader that believes the file's every word
    *(UnpicklingError, zipfile.BadZipFile, struct.error, EOFError, UnicodeDecodeError),
    *(RuntimeError, LookupError, ValueError, TypeError, AttributeError, AssertionError),
    OSError,  # EINVAL of a jump to before the file
)


def read_pickled(file: Path) -> dict[str, Tensor]:
    """The tensors of a file, mapped where PyTorch can (not the format before version 1.6).

    Errors: ValueError for a pickle that asks for more than tensors, and for a damaged file.
    """
    is_archive = zipfile.is_zipfile(file)
    try:
        if is_archive:
            _check_archive(file)
        stored = torch.load(file, map_location="cpu", weights_only=True, mmap=is_archive)
    except DAMAGED as error:
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise
        if asked := re.search(r"GLOBAL ([\w.]+)", str(error)):
            raise ValueError(
                f"{file}: it asks Python for '{asked[1]}', which weights have no need of; nothing "
                f"of it was run: {REMEDY}, from somebody you trust"
            ) from error
        # PyTorch's words on a pickle advise to open it without the check
        reason = "" if isinstance(error, UnpicklingError) else str(error).partition("\n")[0]
        damaged = f"{file}: truncated or damaged ({reason or 'no pickle of tensors'})"
        raise ValueError(f"{damaged}: copy or download it again") from error
    if not isinstance(stored, dict) or not all(map(_is_plain, stored.items())):
        raise ValueError(f"{file}: not a table of plain tensors by name: {REMEDY}")
    return {name: tensor.detach() for name, tensor in stored.items()}  # some are parameters


def _check_archive(file: Path) -> None:
    """PyTorch stores tensors as they are: what is packed could unfold beyond all memory."""
    with zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
            if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > entry.compress_size:
                raise ValueError(f"'{entry.filename}' is compressed")


def _is_plain(item: tuple[object, object]) -> bool:
    name, tensor = item
    if not isinstance(name, str) or not isinstance(tensor, Tensor):
        return False
    return tensor.layout == torch.strided and tensor.device.type == "cpu"
