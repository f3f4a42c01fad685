"""The page of benchmarks/inference.py, and what it says of the machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from bertsmith.base.processes import usable_cores
from bertsmith.model.kernels.llvm.blocks import cpu_features
from bertsmith.training.engine import cpu_name

FLAGS = ("avx2", "avx512f", "avxvnni", "avx512vnni", "avx512bf16", "amx-int8", "amx-bf16")
MODES = ("offline", "batch 32", "batch 8", "batch 1")
OURS = {  # beside which precisions
    "bertsmith, int8": ("int8", "bf16"),
    "bertsmith, bf16": ("bf16",),
    "bertsmith, float32": ("float32",),
}
SIZE, SECONDS = 1024, 0.08  # of a product, and of measuring it


def kind_of_processor() -> str:
    """The name of the file of results: what this processor multiplies integers with."""
    has = cpu_features()
    if "amx-int8" in has:
        return "amx"
    if "avx512f" in has:
        return "avx512-vnni" if "avx512vnni" in has else "avx512"
    return "avx2-vnni" if "avxvnni" in has else "avx2" if "avx2" in has else "other"


def about_machine() -> dict[str, Any]:
    """Name, cores and flags of the processor."""
    flags = [flag for flag in FLAGS if flag in cpu_features()]
    return {"cpu": cpu_name(), "cores": usable_cores(), "flags": flags, "torch": torch.__version__}


def measured_peaks(threads: int) -> dict[str, float]:
    """Operations a second of torch's best square product, by precision; int8 is oneDNN's."""
    torch.set_num_threads(threads)
    random = torch.Generator().manual_seed(0)
    x = torch.randn(SIZE, SIZE, generator=random)
    half, has_bf16 = x.bfloat16(), bool({"avx512bf16", "amx-bf16"} & cpu_features())
    rows = torch.randint(0, 255, (SIZE, SIZE), dtype=torch.uint8, generator=random)
    weights = torch.randint(-127, 127, (SIZE, SIZE), dtype=torch.int8, generator=random)
    onednn: Any = torch.ops.onednn
    packed = onednn.qlinear_prepack(weights, [SIZE, SIZE])
    scales, zeros = torch.ones(SIZE), torch.zeros(SIZE, dtype=torch.int32)

    def int8() -> object:
        ends = (None, 1.0, 0, torch.float32, "none", [], "")
        return onednn.qlinear_pointwise(rows, 1.0, 0, packed, scales, zeros, *ends)

    products: dict[str, Callable[[], object]] = {
        "float32": lambda: x @ x,
        "bf16": lambda: half @ half if has_bf16 else x @ x,  # without it engines take float32
        "int8": int8,
    }
    return {name: 2.0 * SIZE**3 / best_seconds(product) for name, product in products.items()}


def best_seconds(product: Callable[[], object]) -> float:
    product()
    best, stop = float("inf"), time.perf_counter() + SECONDS
    while best == float("inf") or time.perf_counter() < stop:
        started = time.perf_counter()
        product()
        best = min(best, time.perf_counter() - started)
    return best


def table(results: list[dict[str, Any]]) -> str:
    text = (
        "# Vectors of texts on a CPU: bertsmith beside its peers\n\n"
        "What is compared and what the columns mean is at the top of `benchmarks/inference.py`. "
        "Texts a second by mode; milliseconds are p50 / p99.\n"
    )
    for result in results:
        about, peaks = result["machine"], result["peaks"]
        rates = ", ".join(f"{name} {rate / 1e9:,.0f}" for name, rate in peaks.items())
        text += (
            f"\n## {result['model']}, {result['texts']}: {result['count']} texts, "
            f"{result['tokens'] / result['count']:.1f} tokens each\n\n"
            f"`{result['command']}`, {result['date']}, {about['cpu']}, {about['cores']} cores "
            f"({', '.join(about['flags'])}), torch {about['torch']}. "
            f"Peaks, GOP/s: {rates}. Cosine to {result['reference']}.\n\n"
            f"{systems_table(result['systems'])}\n{ratios(result['systems'])}"
        )
        text += "".join(f"- Left out: {name}: {why}\n" for name, why in result["left_out"].items())
    return text


def systems_table(systems: dict[str, Any]) -> str:
    """Quickest first."""
    names = ["system", "version", *MODES, "share of peak", "batch 1, ms", "unseen, ms"]
    names += ["memory, MB", "load, s", "cosine, mean (least)", "turns"]
    text = f"| {' | '.join(names)} |\n|{'---|' * len(names)}\n"
    order = sorted(systems, key=lambda name: -systems[name]["texts_per_second"]["offline"])
    for name in order:
        row = systems[name]
        cells = [name, row["version"]]
        cells += [f"{row['texts_per_second'][mode]:,.0f}" for mode in MODES]
        cells += [f"{row['share_of_peak']:.0%}"]
        cells += ["{:.2f} / {:.2f}".format(*row[of]) for of in ("batch_1_ms", "unseen_ms")]
        cells += [f"{row['memory_mb']:,}", f"{row['load_seconds']:.1f}"]
        cells += ["{:.5f} ({:.5f})".format(*row["cosine"]) if "cosine" in row else ""]
        text += f"| {' | '.join([*cells, str(len(row['turns']['offline']))])} |\n"
    return text


def ratios(systems: dict[str, Any]) -> str:
    """A line on ours beside the quickest peer of like precision, by mode."""
    text = ""
    for ours, precisions in OURS.items():
        peers = [
            name
            for name, row in systems.items()
            if row["precision"] in precisions and not name.startswith("bertsmith")
        ]
        if ours not in systems or not peers:
            continue
        parts = []
        for mode in MODES:
            best = max(peers, key=lambda name: systems[name]["texts_per_second"][mode])
            parts.append(f"{mode} **{ratio(systems, ours, best, mode):.2f}x** of {best}")
        text += f"- {ours}, and the quickest of {' and '.join(precisions)}: {'; '.join(parts)}.\n"
    return text


def ratio(systems: dict[str, Any], name: str, other: str, mode: str) -> float:
    """The median of the ratios of the turns that both had."""
    one, two = systems[name]["turns"][mode], systems[other]["turns"][mode]
    return median(one[turn] / two[turn] for turn in one.keys() & two.keys())
