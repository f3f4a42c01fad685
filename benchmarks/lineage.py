"""Training of the translators before BERT beside what people train them with, in turns in one run.

    python benchmarks/lineage.py [--data DATA] [--parts translators layers] [--turns 7]
        [--seconds 20]

DATA is a folder as `bertsmith lineage` reads it, such as Multi30k; without it sentences are made up
whose lengths are like those of Multi30k, of a vocabulary as large. All systems read the same pairs
in the same pieces, and have one vocabulary for both languages.

Every system (benchmarks/lineage_systems.py) is a process of its own, which waits while another one
trains; a turn is whole steps for about `--seconds`: the batch, both passes, clipping, optimizer.
Rates are target tokens a second, padding not counted. Nobody measures on dev meanwhile.

    bertsmith              `bertsmith lineage rnn`, `attention`, `transformer` with their defaults,
                           but for batches of 2,048 tokens: a replica a core, label smoothing
    tutorials' loop        after what bentrevett/pytorch-seq2seq describes: a Python step for every
                           target token, 128 sentences as they come, Adam, float32; of our sizes.
                           All tokens are given (there half are the model's own, which is slower)
    transformers, Marian   MarianMTModel as shipped: 128 sentences as they come, its loss, AdamW,
                           float32; of our sizes
    torch, nn.Transformer  our batches, sorted by length, with label smoothing, fused Adam, in bf16
                           where the processor multiplies it; of our sizes

The peers split every operator over all cores. "Layers" are one recurrent layer forwards and
backwards in the same precision, on every core rows of its own, PyTorch's unpacked, which is its
fastest way, and freed memory is kept for both; rates are positions a second. Medians of turns;
ratios are medians of their ratios.
"""

from __future__ import annotations

import argparse
import shlex
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bertsmith.base.files import read_json, write_json, write_text
from bertsmith.base.processes import usable_cores
from bertsmith.experiments.lineage.pairs import (
    Language,
    Languages,
    Pairs,
    encode,
    read_splits,
)
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.text.tokenizer.wordpiece import SPECIAL, Vocabulary
from inference_report import about_machine, kind_of_processor, measured_peaks
from lineage_systems import BUILDERS, LAYER_SIZES, LAYERS, save_rows
from pretrain import System

PIECES, LONGEST = 4000, 100  # the defaults of `bertsmith lineage`
PARTS = {
    "translators": [[name for name in BUILDERS if name.rpartition(", ")[0] not in LAYERS]],
    "layers": [[f"{name}, {size}" for name in LAYERS] for size in LAYER_SIZES],
}
BARS = [  # ours, theirs, how many times as fast we want to be
    ("bertsmith, rnn", "tutorials' loop, rnn", 4.0),
    ("bertsmith, attention", "tutorials' loop, attention", 4.0),
    ("bertsmith, transformer", "transformers, Marian", 4.0),
    ("bertsmith, transformer", "torch, nn.Transformer", 1.5),
    *((f"LSTM, {size}", f"nn.LSTM, {size}", 1.0) for size in LAYER_SIZES),
    *((f"GRU, reset after, {size}", f"nn.GRU, {size}", 1.0) for size in LAYER_SIZES),
    *((f"GRU, reset before, {size}", f"nn.GRU, {size}", 1.0) for size in LAYER_SIZES),
]


def made_up(count: int = 20_000) -> Pairs:
    """Sentences of random words, each one a piece; lengths as the pieces of Multi30k's."""
    random = np.random.default_rng(1)
    source = random.lognormal(np.log(15), 0.31, count)
    target = source * random.lognormal(0.03, 0.17, count)
    sides = [
        [
            " ".join(f"w{w}" for w in random.integers(0, PIECES - len(SPECIAL), length))
            for length in lengths
        ]
        for lengths in (np.clip(side, 3, 60).astype(int) for side in (source, target))
    ]
    return Pairs(*sides, "made up")


def prepare(data: tuple[Path, str, str] | None, folder: Path) -> dict[str, Any]:
    """Write the pieces and the vocabulary for the systems; how much there is."""
    if data:
        pairs = read_splits(*data, needed=["train"])["train"]
        languages = Languages.train(pairs, PIECES)
    else:
        pairs = made_up()
        words = (f"w{n}" for n in range(PIECES - len(SPECIAL)))
        both = Language(Tokenizer(Vocabulary([*SPECIAL, *words])))
        languages = Languages(both, both)
    rows = encode(pairs, languages, LONGEST)
    languages.save(folder)
    save_rows(rows, folder)
    lengths = rows.source.lengths, rows.target.lengths - 1
    pieces = [round(float(one.mean()), 1) for one in lengths]
    return {"pairs": len(rows), "pieces": pieces, "vocabulary": len(languages.target)}


def take_turns(names: list[str], folder: Path, turns: int, seconds: float) -> dict[str, Any]:
    """The rates of systems that train one after the other, again and again."""
    systems: list[System] = []
    rows: dict[str, Any] = {}
    for name in names:
        system = System(name, "lineage_systems.py", folder)
        rows[name] = {**system.answer(), "turns": []}  # ready before the next one starts
        systems.append(system)
    for _ in range(turns):
        for system in systems:
            found = system.ask(seconds)
            row = rows[system.name]
            row["turns"].append(round(found["amount"] / found["seconds"], 1))
            row["memory_mb"] = found["memory_mb"]
    for system in systems:
        system.close()
    return rows


def table(record: dict[str, Any]) -> str:
    text = (
        "# Training of the translators before BERT\n\n"
        "What is compared and what the columns mean is at the top of `benchmarks/lineage.py`.\n"
    )
    for part, result in record.items():
        about, data = result["machine"], result["data"]
        text += (
            f"\n## {part.capitalize()}\n\n`{result['command']}`, {result['date']}, {about['cpu']}, "
            f"{about['cores']} cores ({', '.join(about['flags'])}), torch {about['torch']}, "
            f"transformers {result['transformers']}. Best products: float32 "
            f"{result['peaks']['float32'] / 1e9:,.0f}, bf16 {result['peaks']['bf16'] / 1e9:,.0f} "
            "GOP/s."
        )
        if part == "translators":
            source, target = data["pieces"]
            text += (
                f" {data['pairs']:,} pairs of {source} and {target} of {data['vocabulary']:,} "
                "pieces in the mean."
            )
        text += "\n\n| system | precision | parameters, M | tokens/s | memory, MB |\n"
        text += "|---|---|---|---|---|\n"
        for name, row in result["systems"].items():
            text += (
                f"| {name} | {row['precision']} | {row['parameters'] / 1e6:.2f} "
                f"| {median(row['turns']):,.0f} | {row['memory_mb']:,} |\n"
            )
        text += f"\n{ratios(result['systems'])}"
    return text


def ratios(systems: dict[str, Any]) -> str:
    """A line of each pair that is to be compared."""
    text = ""
    for ours, theirs, bar in BARS:
        if ours in systems and theirs in systems:
            both = zip(systems[ours]["turns"], systems[theirs]["turns"], strict=True)
            found = sorted(one / other for one, other in both)
            text += (
                f"- {ours} / {theirs}: **{median(found):.2f}x** (turns {found[0]:.2f} to "
                f"{found[-1]:.2f}; wanted {bar:.1f}x)\n"
            )
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, help="folder of pairs; else they are made up")
    parser.add_argument("--source", default="en")
    parser.add_argument("--target", default="de")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=20.0, help="of a turn")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "lineage")
    arguments = parser.parse_args()
    import transformers

    path = arguments.out / f"{kind_of_processor()}.json"
    record = read_json(path) if path.exists() else {}
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        pairs = arguments.data and (arguments.data, arguments.source, arguments.target)
        data = prepare(pairs, folder)
        for part in arguments.parts:
            systems: dict[str, Any] = {}
            for names in PARTS[part]:
                systems |= take_turns(names, folder, arguments.turns, arguments.seconds)
            record[part] = {
                "command": command_of(arguments),
                "date": datetime.now(UTC).date().isoformat(),
                "machine": about_machine(),
                "transformers": transformers.__version__,
                "peaks": measured_peaks(usable_cores()),
                "data": data,
                "systems": systems,
            }
            write_json(path, record)
            write_text(path.with_suffix(".md"), table(record))
            print(table({part: record[part]}), flush=True)


def command_of(arguments: argparse.Namespace) -> str:
    """The command, without the paths of this machine."""
    words = ["--data=DATA", "--source", arguments.source, "--target", arguments.target]
    words = words if arguments.data else []
    words += ["--parts", *arguments.parts, f"--turns={arguments.turns}"]
    words += [f"--seconds={arguments.seconds:g}"]
    return f"python benchmarks/lineage.py {shlex.join(words)}"


if __name__ == "__main__":
    main()
