"""The machine of a run: device, precision, threads, memory, and its measured peak."""

from __future__ import annotations

import os
import platform
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bertsmith.base.processes import computing_threads, usable_cores
from bertsmith.model.kernels.quantized_linear import has_float8, has_int8, use_float8, use_int8
from bertsmith.training.ranks import SINGLE_PROCESS, Ranks
from bertsmith.training.settings import AUTO_INT8, LEAST_GAIN

# float8 and int8 are for the encoder's layers, int8 for the masked-LM loss, too; all else bf16.
PRECISIONS = {"float32": torch.float32, **dict.fromkeys(("bf16", "float8", "int8"), torch.bfloat16)}
AUTO = ("auto", AUTO_INT8)  # resolved when a run starts, and kept by it
FEW_THREADS = 4  # that a product of 1024 x 1024 keeps busy


@dataclass(frozen=True)
class MatmulTimes:
    """Seconds a core for a layer's matrix products, forward and backward, while all cores work."""

    tokens: int
    """Tokens a core: about those of the run, fewer for a large model."""
    bf16: float
    int8: float
    """With the scales of inputs, weights and gradients."""
    predictions: int = 0
    """Masked positions a core, of whose loss a layer's share is in the seconds."""
    source: str = ""
    """Where they are kept, for the log."""

    @property
    def faster(self) -> str:
        """
        >>> MatmulTimes(64, bf16=1.0, int8=0.9).faster, MatmulTimes(64, 1.0, 0.91).faster
        ('int8', 'bf16')
        """
        return "int8" if self.int8 <= (1 - LEAST_GAIN) * self.bf16 else "bf16"

    def record(self) -> dict[str, Any]:
        """For run.json and `doctor --json`."""
        times = {name: float(f"{1e3 * getattr(self, name):.3g}") for name in ("bf16", "int8")}
        return {"taken": self.faster, "tokens": self.tokens, "milliseconds": times}

    def line(self) -> str:
        """
        >>> MatmulTimes(2048, bf16=0.0102, int8=0.0081).line()
        'int8: the products of a layer take 8.1 ms in int8, 10.2 ms in bf16 (2,048 tokens a core)'
        """
        source = f"; {self.source}" if self.source else ""
        loss = ", with its share of the loss," if self.predictions else ""
        return (
            f"{self.faster}: the products of a layer{loss} take {1e3 * self.int8:.3g} ms in int8, "
            f"{1e3 * self.bf16:.3g} ms in bf16 ({self.tokens:,} tokens a core){source}"
        )


@dataclass(frozen=True)
class Engine:
    """Device and precision of a run: chosen once, stored in it, used again on a resume."""

    device: torch.device
    precision: str
    """"float32"; "bf16": bf16 matrix products, float32 master weights; "float8": the same with the
    encoder's layers in float8; "int8": the same in int8, and the masked-LM loss, on a CPU."""
    threads: int
    ranks: Ranks = SINGLE_PROCESS
    matmul_times: MatmulTimes | None = None
    """The measurement by which "auto-int8" chose the precision."""

    @property
    def workers(self) -> int:
        """Replicas of a step: one a core on a CPU, one on a GPU or of sharded weights."""
        return self.threads if self.device.type == "cpu" and not self.ranks.shard else 1

    @property
    def static_shapes(self) -> bool:
        """True if all batches should have the same shapes, for a GPU's compiled step."""
        return self.device.type == "cuda"

    @property
    def reason(self) -> str | None:
        """The reason for the precision, if it was measured, for the log."""
        return self.matmul_times.line() if self.matmul_times else None

    def prepare(self, model: torch.nn.Module) -> None:
        """Change how the model computes, not its parameters, where the precision asks for it."""
        if self.precision == "float8":
            use_float8(model)
        elif self.precision == "int8":
            use_int8(model)

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The autocast type; None: matrix products are in the weights' type."""
        return None if self.precision == "float32" else PRECISIONS[self.precision]

    def autocast(self, cache: bool = False) -> AbstractContextManager[Any]:
        """`cache`: keep the casts of weights, for all threads; in training each is used once."""
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, self.autocast_dtype, cache_enabled=cache)

    def tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)

    def staged(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The arrays in pinned memory for a GPU, whose copies then make nobody wait."""
        if self.device.type != "cuda":
            return arrays
        return {
            name: torch.from_numpy(np.ascontiguousarray(array)).pin_memory().numpy()
            for name, array in arrays.items()
        }

    def settings(self) -> dict[str, Any]:
        """The choices as a run stores them; each rank has a device number of its own."""
        device = str(self.device) if self.ranks.size == 1 else self.device.type
        return {"device": device, "precision": self.precision, "threads": self.threads}


def choose_engine(
    device: str = "auto",
    precision: str = "auto",
    threads: int | None = None,
    ranks: Ranks = SINGLE_PROCESS,
) -> Engine:
    """Fix device, precision and threads of this process, which shares its machine with `ranks`.

    "auto" takes a GPU when there is one, and bf16 where the hardware multiplies it; "auto-int8" is
    "auto" until the run's own matrix products are measured (loop/matmul_times.py).

    Errors: ValueError for what this machine does not have, or for more threads than cores (two
    spinning threads on one core make a step several times slower).
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(
            f"`device={device!r}`: this PyTorch sees no CUDA device; use `device='cpu'`"
        )
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"`device={device!r}`: use cpu, cuda or cuda:N") from error
    count = torch.cuda.device_count()
    if chosen.type not in ("cpu", "cuda") or (chosen.index or 0) >= max(1, count):
        known = ", ".join(["cpu", *(f"cuda:{k}" for k in range(count))])
        raise ValueError(f"`device={device!r}`: bertsmith computes on these here: {known}")
    chosen = ranks.device(chosen)
    # pages of 2 MB for large tensors, where a command has not given its whole heap such pages
    # (docs/design/speed.md); PyTorch reads this at the first tensor; a user's own setting stands
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    if precision in AUTO:
        precision = "bf16" if has_bf16(chosen) else "float32"
    if precision not in PRECISIONS:
        known = ", ".join((*AUTO, *PRECISIONS))
        raise ValueError(f"`precision={precision!r}`: known are {known}")
    if precision == "bf16" and chosen.type == "cuda" and not has_bf16(chosen):
        raise ValueError(f"`precision='bf16'`: {chosen} has no bf16 products; use float32")
    if precision == "float8" and not has_float8(chosen):
        raise ValueError(f"`precision='float8'`: {chosen} has no float8 products; use bf16")
    if precision == "int8" and not has_int8(chosen):
        raise ValueError(
            f"`precision='int8'`: {chosen} has no AVX-512 VNNI and bf16; use bf16 or float32"
        )
    cores = max(1, usable_cores() // ranks.local_size)
    if threads is not None and not 1 <= threads <= cores:
        shared = f" for {ranks.local_size} ranks" if ranks.local_size > 1 else ""
        raise ValueError(
            f"`threads={threads}`: this machine has {usable_cores()} cores{shared};"
            f" give 1 to {cores}"
        )
    if threads is None:  # not torch.get_num_threads(): an earlier run of the process has set that
        threads = cores if ranks.size > 1 else computing_threads()
    torch.set_num_threads(threads)
    return Engine(chosen, precision, threads, ranks)


def has_bf16(device: torch.device) -> bool:
    """True if the device multiplies bf16 matrices in hardware."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)[0] >= 8
    return bool(torch.cpu._is_avx512_bf16_supported())


def measure_peak(engine: Engine, size: int | None = None, seconds: float | None = None) -> float:
    """Best rate (operations a second) of a square matrix product that fills the device.

    In the engine's precision, in bf16 for int8 and float8. Elements are random: a GPU multiplies
    zeros and ones with less power, and faster than anything real.
    """
    on_cuda = engine.device.type == "cuda"
    size = size or (8192 if on_cuda else 1024 if engine.threads <= FEW_THREADS else 2048)
    seconds = (0.25 if on_cuda else 0.1) if seconds is None else seconds
    dtype = PRECISIONS[engine.precision]
    generator = torch.Generator(engine.device).manual_seed(0)
    left = torch.randn(size, size, dtype=dtype, device=engine.device, generator=generator)
    best, stop = float("inf"), 0.0
    while best == float("inf") or time.perf_counter() < stop:
        started = time.perf_counter()
        torch.matmul(left, left)
        if on_cuda:
            torch.cuda.synchronize(engine.device)
        if stop:  # the first one loads what computes it
            best = min(best, time.perf_counter() - started)
        else:
            stop = time.perf_counter() + seconds
    return 2.0 * size**3 / best


def machine(engine: Engine, peak: float) -> dict[str, Any]:
    """The machine for run.json; `peak` is the sum over the ranks."""
    return {
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **engine.settings(),
        "ranks": engine.ranks.size,
        "peak_tflops": round(peak / 1e12, 3),
    }


def cpu_name() -> str:
    """The processor's name, or the architecture where the system does not tell.

    Family and model tell apart generations that share a name on virtual machines; one may be twice
    as fast as another.
    """
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    fields = {name.strip(): value.strip() for name, _, value in (x.partition(":") for x in lines)}
    name = fields.get("model name")
    if name and "cpu family" in fields:
        return f"{name} (family {fields['cpu family']}, model {fields['model']})"
    return name or platform.processor() or platform.machine()
