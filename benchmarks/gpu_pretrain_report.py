"""The record of benchmarks/gpu_pretrain.py as Markdown, beside the bars it should reach."""

from __future__ import annotations

from typing import Any

from gpu_pretrain_systems import COMPILED, EAGER, OURS

RATIO_BARS = {EAGER: 3.0, COMPILED: 1.5}
BARS = {  # case: (figure of our system, what it should reach)
    "base-128-fast": ("share_of_peak", 0.55),
    "base-512-fast": ("sequences_per_second", 1300),
    "large-128-fast": ("sequences_per_second", 1900),
}
NO_PEERS = "transformers is not installed: its systems are left out"


def markdown(record: dict[str, Any]) -> str:
    """All results of the record; a bar that is missed says so."""
    version = record["transformers"]
    text = (
        "# Pre-training on a GPU: bertsmith beside transformers\n\n"
        f"The last of its commands: `{record['command']}`, {record['date']}, {record['device']}, "
        f"torch {record['torch']}, Python {record['python']}, "
        f"{f'transformers {version}' if version else NO_PEERS}. What the cases are is at the top "
        "of `benchmarks/gpu_pretrain.py`. Medians of rounds in which the systems take turns; "
        "ratios are medians of the rounds' ratios of times to our step's. Aims for one "
        "H200: base at 128 >= 55% of the peak, at 512 >= 1,300 sequences/s, large at 128 >= 1,900; "
        ">= 3x transformers eager, >= 1.5x compiled.\n"
    )
    for name, result in record["results"].items():
        if "milliseconds" in result:
            text += "\n" + _attention(name, result)
        elif "systems" in result:
            text += "\n" + _case(name, result)
    return text


def _case(name: str, result: dict[str, Any]) -> str:
    systems = result["systems"]
    text = f"## {name}, {result['rows']} rows a step\n\n"
    if "peak_tflops" in result:
        text += f"Peak {result['peak_tflops']:,.1f} TFLOP/s."
    if not result["rounds"]:
        text += " Cut off before the rounds: one turn of each; the next call measures it again."
    text += (
        "\n\n| system | sequences/s | tokens/s | share of peak | time to ours | memory, GB "
        "| first step, s |\n|---|---|---|---|---|---|---|\n"
    )
    for system, found in systems.items():
        if "error" in found:
            text += f"| {system} | {_line(found['error'])} | | | | | |\n"
            continue
        text += (
            f"| {system} | {found['sequences_per_second']:,.0f} | {found['tokens_per_second']:,} "
            f"| {found['share_of_peak']:.1%} | {_ratio(system, result['ratio'])} "
            f"| {found.get('memory_gb', 'not measured')} | {found['first_step_s']} |\n"
        )
    if name in BARS and "error" not in systems.get(OURS, {"error": ""}):
        figure, bar = BARS[name]
        text += f"\nBar: {figure} >= {bar:,}{_verdict(systems[OURS][figure], bar)}.\n"
    return text + _profile(result.get("profile", []))


def _ratio(system: str, ratios: dict[str, float]) -> str:
    if system == OURS:
        return "1"
    if system not in ratios:
        return "not measured"
    return f"{ratios[system]:.2f}x" + _verdict(ratios[system], RATIO_BARS.get(system))


def _profile(profile: Any) -> str:
    if "error" in profile:
        return f"\nNo profile: {_line(profile['error'])}\n"
    text = ""
    for number, row in enumerate(profile):
        if number == 0:
            text += "\n| kernel | ms a step | share |\n|---|---|---|\n"
        text += f"| `{_line(row['kernel'])[:100]}` | {row['ms_per_step']} | {row['share']:.1%} |\n"
    return text


def _attention(name: str, result: dict[str, Any]) -> str:
    text = (
        f"## {name}: {result['rows']} rows of {result['length']}, 12 heads of 64\n\n"
        "| kernel | forward and backward, ms |\n|---|---|\n"
    )
    for kernel, found in result["milliseconds"].items():
        text += f"| {kernel} | {found if isinstance(found, float) else _line(found['error'])} |\n"
    return text


def _line(text: str) -> str:
    """The first line, as a table's cell."""
    return text.strip().split("\n")[0].replace("|", "/")[:300]


def _verdict(value: float, bar: float | None) -> str:
    if bar is None:
        return ""
    return " (reached)" if value >= bar else f" (missed: {bar:,})"
