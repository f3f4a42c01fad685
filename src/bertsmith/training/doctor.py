"""A self-test of the machine: a small encoder, forward and backward, on every device, precision and
attention path, against the same encoder in float64 with plain attention.

It finds silently wrong results, as on consumer GPUs (pytorch/pytorch#82707, #109457) and in fused
attention (huggingface/transformers#35988), and more threads than cores.
"""

from __future__ import annotations

import copy
import os
import platform
import re
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bertsmith.base.processes import usable_cores
from bertsmith.model.config import ModelConfig, config_for
from bertsmith.model.encoder import Encoder
from bertsmith.model.initialization import initialize
from bertsmith.model.kernels.elementwise import without_kernels
from bertsmith.model.kernels.quantized_linear import has_int8
from bertsmith.training.engine import Engine, cpu_name, has_bf16, measure_peak
from bertsmith.training.loop.log import plain
from bertsmith.training.loop.matmul_times import measure_matmuls

ATTENTION = {
    "automatic": None,
    "plain": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
# Norm of the difference over the norm of the reference. A rounding to bf16 is off by up to 0.4%, a
# product of int8 by 0.8%, and a result here has passed through some ten of them.
TOLERANCE = {"float32": 1e-5, "bf16": 3e-2, "int8": 5e-2}
FEATURES = {  # of /proc/cpuinfo; the last three are Arm's
    *("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8"),
    *("bf16", "i8mm", "sve"),
}
TYPICAL_SIZE, TYPICAL_TOKENS = "base", 2048  # of a core, when int8 and bf16 are timed
BATCH, LENGTH = 8, 128
CONFIG = ModelConfig(
    vocab_size=1000, hidden_size=128, num_layers=2, num_heads=2, intermediate_size=512,
    dropout=0.0, attention_dropout=0.0,
)  # fmt: skip


@dataclass(frozen=True)
class Check:
    """One device, precision and attention path; errors relative to the float64 reference."""

    device: str
    precision: str
    attention: str
    forward_error: float
    gradient_error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """False also for an error that is NaN."""
        return self.forward_error <= self.tolerance and self.gradient_error <= self.tolerance


def examine() -> dict[str, Any]:
    """All findings of `bertsmith doctor` as JSON; an error that is NaN is null."""
    threads, cores = torch.get_num_threads(), usable_cores()
    checks, rates, times = [], {}, None
    for device in devices():
        for precision in ("float32", "bf16") if has_bf16(device) else ("float32",):
            engine = Engine(device, precision, threads)
            rates[f"{device} {precision}"] = round(measure_peak(engine) / 1e9, 1)
            checks += check_attention(engine)
        if has_int8(device):
            checks += check_attention(Engine(device, "int8", threads))
            config = config_for(TYPICAL_SIZE, CONFIG.vocab_size)
            times = measure_matmuls(config, TYPICAL_TOKENS, threads)
    crowd = (
        f"{threads} threads on {cores} cores crowd each other and cost several times the "
        f"speed: set OMP_NUM_THREADS={cores}"
    )
    info = Path("/proc/cpuinfo")
    words = info.read_text(encoding="utf-8").split() if info.exists() else []
    packages = ("torch", "numpy", "numba", "safetensors", "pyarrow")
    return {
        "versions": {
            "bertsmith": version("bertsmith"),
            "python": platform.python_version(),
            **{name: version(name) for name in packages},
        },
        "system": platform.platform(),
        "cpu": cpu_name(),
        "features": sorted(FEATURES.intersection(words)),
        "cores": cores,
        "threads": threads,
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "accelerators": [torch.cuda.get_device_name(d) for d in devices() if d.type == "cuda"],
        "gigaflops": rates,
        "matmul_times": {"size": TYPICAL_SIZE, **times.record()} if times else None,
        "checks": [plain(asdict(check) | {"passed": check.passed}) for check in checks],
        "warnings": [crowd] if threads > cores else [],
        "passed": all(check.passed for check in checks),
    }


def devices() -> list[torch.device]:
    found = [torch.device("cpu")]
    found += [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        found.append(torch.device("mps"))
    return found


def check_attention(engine: Engine) -> Iterator[Check]:
    """One check for each attention path of the device: the worst of its cases."""
    cases = [(padded, causal) for padded in (False, True) for causal in (False, True)]
    with only(SDPBackend.MATH):
        expected = {case: outcome(reference(case[1]), *inputs(case[0])) for case in cases}
    for attention, backend in ATTENTION.items():
        if engine.precision == "int8" and backend:
            continue  # its products are bf16 without the kernels
        errors = []
        for padded, causal in cases:
            model = copy.deepcopy(reference(causal)).float().to(engine.device)
            engine.prepare(model)
            arguments = [tensor.to(engine.device) for tensor in inputs(padded)]
            try:
                with only(backend), warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # torch explains each path it lacks
                    found = outcome(model, *arguments, autocast=engine.autocast())
            except RuntimeError as error:
                if re.search("No (viable backend|available kernel)", str(error)):
                    continue  # this path cannot do this case
                raise
            pairs = zip(found, expected[padded, causal], strict=True)
            errors.append([float((one - other).norm() / other.norm()) for one, other in pairs])
        if errors:
            forward, gradient = (max(column) for column in zip(*errors, strict=True))
            tolerance = TOLERANCE[engine.precision]
            names = (str(engine.device), engine.precision, attention)
            yield Check(*names, forward, gradient, tolerance)


@contextmanager
def only(backend: SDPBackend | None) -> Iterator[None]:
    """Attention takes one path of PyTorch's; None: training's own choice."""
    if backend is None:
        yield
        return
    with sdpa_kernel([backend]), without_kernels():
        yield


def reference(causal: bool) -> Encoder:
    """A float64 encoder on the CPU with weights large enough for sharp attention."""
    generator = torch.Generator().manual_seed(1)
    return initialize(Encoder(replace(CONFIG, causal=causal)), 0.1, generator).double()


def inputs(padded: bool) -> tuple[Tensor, Tensor]:
    """Token ids [B, S] and lengths [B]; every row is full unless `padded`."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(CONFIG.vocab_size, (BATCH, LENGTH), generator=generator)
    lengths = torch.full((BATCH,), LENGTH)
    if padded:
        lengths = torch.randint(1, LENGTH, (BATCH,), generator=generator)
    return ids, lengths


def outcome(
    model: Encoder,
    ids: Tensor,
    lengths: Tensor,
    autocast: AbstractContextManager[Any] | None = None,
) -> tuple[Tensor, Tensor]:
    """Hidden states at the real tokens, and the full gradient of a fixed weighting of them."""
    full = bool((lengths == LENGTH).all())
    with autocast or nullcontext():
        states = model(ids, lengths_B=None if full else lengths)
    assert isinstance(states, Tensor)
    real = (torch.arange(LENGTH, device=ids.device) < lengths[:, None])[:, :, None]
    states = states.where(real, states.new_zeros(()))
    generator = torch.Generator().manual_seed(3)
    weighting = torch.randn(states.shape, generator=generator, dtype=torch.float64)
    (states * weighting.to(states.device, states.dtype)).sum().backward()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return states.detach().cpu().double(), torch.cat(gradients).cpu().double()
