"""The record of benchmarks/gpu_pretrain.py as Markdown, beside the bars it should reach."""

from __future__ import annotations

from typing import Any

from gpu_pretrain_systems import COMPILED, EAGER

RATIO_BARS = {EAGER: 3.0, COMPILED: 1.5}
BARS = {  # case: (figure of our system, what it should reach)
    "base-128-fast": ("share_of_peak", 0.55),
    "base-512-fast": ("sequences_per_second", 1300),
    "large-128-fast": ("sequences_per_second", 1900),
}


def markdown(record: dict[str, Any]) -> str:
    """All results of the record; a bar that is missed says so."""
    text = (
        "# Pre-training on a GPU: bertsmith beside transformers\n\n"
        f"`{record['command']}`, {record['date']}, {record['device']}, torch {record['torch']}, "
        f"Python {record['python']}. Medians of rounds in which the systems take turns; ratios are "
        "medians of the rounds' ratios of times to our step's. Bars of issue 4 for one H200: base "
        "at 128 >= 55% of the peak, at 512 >= 1,300 sequences/s, large at 128 >= 1,900; >= 3x "
        "transformers eager, >= 1.5x compiled.\n"
    )
    for name, result in record["results"].items():
        text += "\n" + (
            _attention(name, result) if "milliseconds" in result else _case(name, result)
        )
    return text


def _case(name: str, result: dict[str, Any]) -> str:
    systems = result["systems"]
    ours = next(iter(systems))
    text = (
        f"## {name}, {result['rows']} rows a step\n\nPeak {result['peak_tflops']:,.1f} TFLOP/s.\n\n"
        "| system | sequences/s | tokens/s | share of peak | time to ours | memory, GB "
        "| first step, s |\n|---|---|---|---|---|---|---|\n"
    )
    for system, found in systems.items():
        ratio = result["ratio"].get(system)
        shown = "1" if ratio is None else f"{ratio:.2f}x" + _verdict(ratio, RATIO_BARS.get(system))
        text += (
            f"| {system} | {found['sequences_per_second']:,.0f} | {found['tokens_per_second']:,} "
            f"| {found['share_of_peak']:.1%} | {shown} | {found.get('memory_gb', 'not measured')} "
            f"| {found['first_step_s']} |\n"
        )
    if name in BARS:
        figure, bar = BARS[name]
        text += f"\nBar: {figure} >= {bar:,}{_verdict(systems[ours][figure], bar)}.\n"
    for number, row in enumerate(result.get("profile", [])):
        if number == 0:
            text += "\n| kernel | ms a step | share |\n|---|---|---|\n"
        kernel = row["kernel"].replace("|", "/")[:100]
        text += f"| `{kernel}` | {row['ms_per_step']} | {row['share']:.1%} |\n"
    return text


def _attention(name: str, result: dict[str, Any]) -> str:
    rows = "".join(f"| {kernel} | {ms} |\n" for kernel, ms in result["milliseconds"].items())
    head = f"## {name}: {result['rows']} rows of {result['length']}, 12 heads of 64\n\n"
    return head + "| kernel | forward and backward, ms |\n|---|---|\n" + rows


def _verdict(value: float, bar: float | None) -> str:
    if bar is None:
        return ""
    return " (reached)" if value >= bar else f" (missed: {bar:,})"
