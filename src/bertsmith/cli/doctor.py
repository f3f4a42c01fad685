"""Check that this machine computes what it should, and measure how fast it multiplies.

A small encoder runs forward and backward on every device, in every precision and on every attention
path, and is compared with the same encoder in float64. Takes some ten seconds; the exit code is 1
when a comparison fails.

Examples:
    bertsmith doctor
    bertsmith doctor --json
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass
class Doctor:
    json: bool = False
    """Print one JSON object."""


def run_doctor(settings: Doctor) -> int:
    from bertsmith.training.doctor import examine

    found = examine()
    print(json.dumps(found, indent=2) if settings.json else described(found))
    return 0 if found["passed"] else 1


def described(found: dict[str, Any]) -> str:
    """The findings for people, one line each."""
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    lines = [
        f"versions   {versions}",
        f"system     {found['system']}",
        f"processor  {found['cpu']} ({', '.join(found['features']) or 'features unknown'})",
        f"cores      {found['cores']}, threads {found['threads']}, memory {found['memory_gb']} GB",
    ]
    lines += [f"device     {name}" for name in found["accelerators"]]
    lines += ["", "products of large square matrices:"]
    lines += [f"  {name:<16} {rate:>10,.1f} GFLOP/s" for name, rate in found["gigaflops"].items()]
    if times := found["products"]:
        took = ", ".join(f"{name} {took:g} ms" for name, took in times["milliseconds"].items())
        lines += [f"products of a layer of {times['size']}, {times['tokens']:,} tokens a core:"]
        lines += [f"  {took}: --precision auto-int8 takes {times['taken']} at this size"]
    lines += ["", "the same encoder against float64 (relative error):"]
    lines.append("  device  precision  attention   forward   gradient  tolerance")
    for check in found["checks"]:
        lines.append(
            f"  {check['device']:<8}{check['precision']:<11}{check['attention']:<10}"
            f"{shown(check['forward_error'])} {shown(check['gradient_error'])}"
            f"{shown(check['tolerance'])}  {'ok' if check['passed'] else 'FAILED'}"
        )
    lines += ["", *(f"warning: {note}" for note in found["warnings"])]
    failed = sum(not check["passed"] for check in found["checks"])
    verdict = f"{failed} failed: do not train on these" if failed else "passed"
    lines.append(f"{len(found['checks'])} checks, {verdict}")
    return "\n".join(lines)


def shown(error: float | None) -> str:
    """An error in ten columns; None was not a number.

    >>> shown(0.000012), shown(None)
    ('   1.2e-05', '       nan')
    """
    return f"{float('nan') if error is None else error:10.1e}"
