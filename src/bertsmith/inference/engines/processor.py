"""Engine, device, precision and threads that answer. PyTorch is imported only to ask a GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from bertsmith.base.processes import computing_threads
from bertsmith.model.kernels.llvm.blocks import cpu_features

if TYPE_CHECKING:
    from bertsmith.training.engine import Engine

DEVICES = Path("/dev")
ENGINES = {  # and their precisions; those that can do a thing are tried in this order
    "bertsmith": ("float32", "bf16", "int8"),
    "pytorch": ("float32", "bf16"),
    "onnx": ("float32", "int8"),
    "openvino": ("float32", "bf16", "int8"),
}
PRECISIONS = "float32", "bf16", "int8"  # the exact one first
GPU_FILES = "nvidia*", "nvhost*", "kfd", "dxg"  # of the drivers of GPUs that PyTorch knows as cuda


@dataclass(frozen=True)
class Processor:
    """Engine, device, precision and threads of a model that answers."""

    device: str
    """"cpu", "cuda" or "cuda:1"."""
    precision: str
    """"float32", "bf16" or "int8"; "auto" until a `Runner` has it."""
    threads: int
    engine: str = "auto"
    """One of `ENGINES`; "auto" until a `Runner` has it."""

    @property
    def is_cpu(self) -> bool:
        return self.device.startswith("cpu")

    def of_torch(self) -> Engine:
        """The same for PyTorch."""
        from bertsmith.training.engine import choose_engine  # imports torch

        return choose_engine(self.device, self.precision, self.threads)

    def has_bf16(self) -> bool:
        """True if the device multiplies bf16 matrices in hardware."""
        if self.is_cpu:
            return "avx512bf16" in cpu_features()
        from bertsmith.training.engine import has_bf16  # imports torch

        return has_bf16(self.of_torch().device)

    def options(self) -> list[Processor]:
        """All that "auto" stands for, the most exact first."""
        return [
            replace(self, engine=engine, precision=precision)
            for precision in PRECISIONS
            for engine, own in ENGINES.items()
            if self.engine in ("auto", engine) and self.precision in ("auto", precision)
            if precision in own
        ]


def choose_processor(device: str, precision: str, engine: str = "auto") -> Processor:
    """The processor of a device, "auto", "cpu", "cuda" or "cuda:1".

    Errors: ValueError for a device or precision that this machine or engine does not have.
    """
    if engine not in ("auto", *ENGINES):
        raise ValueError(f"`engine={engine!r}`: known are auto, {', '.join(ENGINES)}")
    known = "auto", *ENGINES.get(engine, PRECISIONS)
    if precision not in known:
        of = "" if engine == "auto" else f" of `engine={engine!r}`"
        raise ValueError(f"`precision={precision!r}`: known are {', '.join(known)}{of}")
    if device == "auto" and engine not in ("auto", "pytorch"):
        device = "cpu"
    has_gpu = any(True for pattern in GPU_FILES for _ in DEVICES.glob(pattern))
    if device == "cpu" or device == "auto" and not has_gpu:
        return Processor("cpu", precision, computing_threads(), engine)
    from bertsmith.training.engine import choose_engine  # imports torch

    found = choose_engine(device, "bf16" if precision == "bf16" else "float32")
    return Processor(str(found.device), precision, found.threads, engine)
