"""The loader alone: tokens a second of one core, for every objective, masks and length.

    python benchmarks/loader.py STORE [--lengths 128 512] [--seconds 1] [--rounds 5]

STORE is a folder made by `bertsmith corpus`. Batches of 32 rows are made one after the other in
one thread, from the middle of an epoch on, checksums and masks included; a rate is the tokens of
the rows, without padding, over the processor time of the process. The systems take turns; medians
of the rounds. The epoch's plan is made before and shown on its own.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from bertsmith.base.files import write_json, write_text
from bertsmith.corpus.examples.settings import ExampleSettings
from bertsmith.corpus.examples.stream import Position, PretrainingStream
from bertsmith.corpus.store.store import TokenStore
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.training.engine import cpu_name

BATCH = 32
SETTINGS = {
    "mlm+nsp": {},
    "mlm+nsp, clean pairs": {"nsp_sampling": "clean"},
    "mlm+nsp, words, 30%": {"masking": "word", "mlm_probability": 0.3},
    "mlm": {"objective": "mlm"},
    "mlm, words, 30%": {"objective": "mlm", "masking": "word", "mlm_probability": 0.3},
    "mlm, spans, 30%": {"objective": "mlm", "masking": "span", "mlm_probability": 0.3},
    "mlm+sop": {"objective": "mlm+sop"},
    "ltr": {"objective": "ltr"},
}


class Run:
    """A stream read on and on."""

    def __init__(self, name: str, length: int, stream: PretrainingStream) -> None:
        self.name, self.length, self.stream = name, length, stream
        self.rates: list[float] = []
        started = time.process_time()
        self.position = Position(0, stream.examples_in_epoch(0) // 2)
        self.plan_seconds = time.process_time() - started
        stream.batch(self.position, BATCH)  # what is compiled at first use is compiled here

    def read(self, seconds: float) -> None:
        tokens, started = 0, time.process_time()
        while (spent := time.process_time() - started) < seconds:
            batch, self.position = self.stream.batch(self.position, BATCH)
            tokens += int(batch.lengths.sum())
        self.rates.append(tokens / spent)

    def result(self) -> dict:
        return {
            "name": self.name,
            "length": self.length,
            "tokens_per_second": round(median(self.rates)),
            "all_rounds": [round(rate) for rate in self.rates],
            "rows_in_epoch": self.stream.examples_in_epoch(0),
            "plan_seconds": round(self.plan_seconds, 4),
        }


def table(record: dict) -> str:
    rows = "".join(
        f"| {run['name']} | {run['length']} | **{run['tokens_per_second'] / 1e6:,.1f} M** "
        f"| {run['rows_in_epoch']:,} | {run['plan_seconds'] * 1e3:,.0f} ms |\n"
        for run in record["runs"]
    )
    return (
        "# Loader\n\n"
        f"`{record['command']}`, {record['date']}, {record['cpu']}, one thread; a store of "
        f"{record['tokens']:,} tokens in {record['documents']:,} documents; batches of {BATCH} "
        f"rows. Tokens without padding a second of processor time, medians of {record['rounds']} "
        "rounds.\n\n"
        "| objective | length | tokens/s of a core | rows in the epoch | plan of the epoch |\n"
        "|---|---|---|---|---|\n" + rows
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("store", metavar="STORE", type=Path)
    parser.add_argument("--lengths", nargs="+", type=int, default=[128, 512])
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    store = TokenStore.open(arguments.store)
    vocabulary = Tokenizer.from_pretrained(arguments.store).vocabulary
    runs = [
        Run(
            name,
            length,
            PretrainingStream(store.train, vocabulary, ExampleSettings(length, **settings), seed=1),
        )
        for name, settings in SETTINGS.items()
        for length in arguments.lengths
    ]
    for _ in range(arguments.rounds):
        for run in runs:
            run.read(arguments.seconds)
    record = {
        "command": " ".join(
            ["python benchmarks/loader.py", *(Path(word).name for word in sys.argv[1:])]
        ),
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "documents": store.train.num_documents,
        "tokens": store.train.num_tokens,
        "rounds": arguments.rounds,
        "runs": [run.result() for run in runs],
    }
    write_json(arguments.out / "loader.json", record)
    write_text(arguments.out / "loader.md", table(record))
    print(table(record))


if __name__ == "__main__":
    main()
