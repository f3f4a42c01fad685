"""The processor that answers: device, precision, threads. PyTorch is imported only to ask a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bertsmith.base.processes import computing_threads
from bertsmith.model.kernels.blocks import cpu_features

if TYPE_CHECKING:
    from bertsmith.training.engine import Engine

DEVICES = Path("/dev")
GPU_FILES = "nvidia*", "nvhost*", "kfd", "dxg"  # of the drivers of GPUs that PyTorch knows as cuda


@dataclass(frozen=True)
class Processor:
    """Device, precision and threads of a model that answers."""

    device: str
    """"cpu", "cuda" or "cuda:1"."""
    precision: str
    """"float32", "bf16" or "int8"."""
    threads: int

    @property
    def is_cpu(self) -> bool:
        return self.device.startswith("cpu")

    def engine(self) -> Engine:
        """The same for PyTorch."""
        from bertsmith.training.engine import choose_engine  # imports torch

        return choose_engine(self.device, self.precision, self.threads)

    def has_bf16(self) -> bool:
        """True if the device multiplies bf16 matrices in hardware."""
        if self.is_cpu:
            return "avx512bf16" in cpu_features()
        from bertsmith.training.engine import has_bf16  # imports torch

        return has_bf16(self.engine().device)


def choose_processor(device: str, precision: str) -> Processor:
    """The processor of a device, "auto", "cpu", "cuda" or "cuda:1".

    Errors: ValueError for a device or precision that this machine does not have.
    """
    has_gpu = any(True for pattern in GPU_FILES for _ in DEVICES.glob(pattern))
    if precision == "float32" and (device == "cpu" or device == "auto" and not has_gpu):
        return Processor("cpu", precision, computing_threads())
    from bertsmith.training.engine import choose_engine  # imports torch

    engine = choose_engine(device, precision)
    return Processor(str(engine.device), engine.precision, engine.threads)
