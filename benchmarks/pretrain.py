"""Pre-training steps beside transformers' `BertForPreTraining`, on the same batches in one run.

    python benchmarks/pretrain.py [--rounds 7] [--sizes tiny mini] [--out benchmarks/results]

For every size and dropout three systems train on the same rows (batch 32, length 128, 30,522
pieces): transformers as shipped (float32, eager), transformers with bf16 autocast, and the step of
`bertsmith pretrain` (but for its setting of glibc's memory, which in a shared process would serve
all three). The systems take turns inside every round, with a matrix product
between them that tells how fast the machine is at that moment; medians and ratios are reported.
The peak is the best bf16 (float32 where there is none) 2048-cubed product of the run; operations
are 6 x weights used x tokens + attention, the masked-LM head at masked positions only.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import numpy as np
import torch
import transformers

from bertsmith.corpus.build import build_store
from bertsmith.corpus.store import TokenStore
from bertsmith.corpus.stream import Position, PretrainingStream
from bertsmith.files import write_json, write_text
from bertsmith.model.encoder import initialize
from bertsmith.model.heads import PreTrainingModel
from bertsmith.model.sizes import config_for
from bertsmith.text.readers import Document
from bertsmith.text.vocabulary import SPECIAL, Vocabulary
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.training.engine import Engine, choose_engine, machine, measure_peak
from bertsmith.training.loop import LoopSettings, State, optimizer_step
from bertsmith.training.optimizers import build_optimizer
from bertsmith.training.pretrain_settings import PretrainSettings
from bertsmith.training.pretraining import Pretraining, example_settings
from bertsmith.training.schedule import Budget

PIECES, BATCH, LENGTH, BATCHES = 30522, 32, 128, 4
RATE, CLIP = 1e-4, 1.0
OURS, SHIPPED, BF16 = "bertsmith", "transformers, as shipped", "transformers, bf16"


def made_stream(folder: Path, settings: PretrainSettings) -> PretrainingStream:
    """A store of made-up words, each one a piece: speed does not depend on what they mean."""
    tokenizer = Tokenizer(Vocabulary([*SPECIAL, *(f"w{n}" for n in range(PIECES - len(SPECIAL)))]))
    if not (folder / "manifest.json").exists():
        random = np.random.default_rng(1)
        documents = [
            Document(
                "made", n, [" ".join(f"w{w}" for w in random.integers(0, 30000, 20)) + "."] * 40
            )
            for n in range(60)
        ]
        build_store([], tokenizer, folder, documents=documents)
    split = TokenStore.open(folder).train
    return PretrainingStream(split, tokenizer.vocabulary, example_settings(settings), seed=1)


def our_step(task: Pretraining, engine: Engine) -> Callable[[int], None]:
    model = task.model
    optimizer = build_optimizer(model, "adamw", RATE, 0.01)
    settings = LoopSettings(Budget(steps=1), RATE, "linear", 0.1, CLIP, seed=1)
    batches = [task.batch(Position(0, k * BATCH))[0] for k in range(BATCHES)]
    model.train()

    def step(number: int) -> None:
        batch = batches[number % BATCHES]
        optimizer_step(task, optimizer, batch, RATE, settings, engine, State(step=number), False)

    return step


def their_step(task: Pretraining, dropout: float, precision: str) -> Callable[[int], None]:
    """transformers' own model and loss, torch's fused AdamW, the same rows and clipping."""
    ours = task.model.config
    config = transformers.BertConfig(
        vocab_size=ours.vocab_size,
        hidden_size=ours.hidden_size,
        num_hidden_layers=ours.num_layers,
        num_attention_heads=ours.num_heads,
        intermediate_size=ours.intermediate_size,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    model = transformers.BertForPreTraining(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01, fused=True)
    batches = [their_batch(task.stream, k) for k in range(BATCHES)]

    def step(number: int) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = model(**batches[number % BATCHES]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return step


def their_batch(stream: PretrainingStream, number: int) -> dict[str, torch.Tensor]:
    batch, _ = stream.batch(Position(0, number * BATCH), BATCH)
    labels = np.full(batch.input_ids.shape, -100, np.int64)
    rows, slots = np.nonzero(batch.masked_weights)
    labels[rows, batch.masked_positions[rows, slots]] = batch.masked_labels[rows, slots]
    arrays = {
        "input_ids": batch.input_ids.astype(np.int64),
        "token_type_ids": batch.token_types.astype(np.int64),
        "attention_mask": (np.arange(LENGTH) < batch.lengths[:, None]).astype(np.int64),
        "labels": labels,
        "next_sentence_label": batch.next_labels,
    }
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def compare(folder: Path, size: str, dropout: float, rounds: int, engine: Engine) -> dict:
    """Median tokens/s of each system (padding not counted), their ratios, share of the peak."""
    settings = PretrainSettings(size=size, batch=BATCH, length=LENGTH, steps=1)
    stream = made_stream(folder, settings)
    config = config_for(size, PIECES, dropout=dropout, attention_dropout=dropout)
    model = initialize(PreTrainingModel(config), 0.02, torch.Generator().manual_seed(1))
    task = Pretraining(model, stream, None, replace(settings, dropout=dropout), engine)
    tokens = [task.batch(Position(0, k * BATCH))[0].tokens for k in range(BATCHES)]
    systems = {
        OURS: our_step(task, engine),
        SHIPPED: their_step(task, dropout, "float32"),
        BF16: their_step(task, dropout, "bf16"),
    }
    rates: dict[str, list[float]] = {name: [] for name in systems}
    peak = 0.0
    for number in range(-1, rounds):  # round -1 warms up
        for name, step in systems.items():
            peak = max(peak, measure_peak(engine, seconds=0.1))
            started = time.perf_counter()
            for k in range(BATCHES):
                step(k)
            if number >= 0:
                rates[name].append(sum(tokens) / (time.perf_counter() - started))
    operations = task.operations(task.batch(Position(0, 0))[0]) / tokens[0]
    rows = {name: round(median(values), 1) for name, values in rates.items()}
    ratios = {
        name: round(median(a / b for a, b in zip(rates[OURS], rates[name], strict=True)), 2)
        for name in (SHIPPED, BF16)
    }
    return {
        "size": size,
        "dropout": dropout,
        "tokens_per_second": rows,
        "all_rounds": {name: [round(v) for v in values] for name, values in rates.items()},
        "ratio": ratios,
        "peak_gflops": round(peak / 1e9, 1),
        "share_of_peak": round(rows[OURS] * operations / peak, 3),
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def table(record: dict) -> str:
    head = (
        "| size | dropout | bertsmith tokens/s | transformers, as shipped | ratio "
        "| transformers, bf16 | ratio | share of peak |\n|---|---|---|---|---|---|---|---|\n"
    )
    rows = "".join(
        f"| {r['size']} | {r['dropout']} | {r['tokens_per_second'][OURS]:,.0f} "
        f"| {r['tokens_per_second'][SHIPPED]:,.0f} | **{r['ratio'][SHIPPED]:.1f}x** "
        f"| {r['tokens_per_second'][BF16]:,.0f} | {r['ratio'][BF16]:.1f}x "
        f"| {r['share_of_peak']:.0%} of {r['peak_gflops']:,.0f} GFLOP/s |\n"
        for r in record["results"]
    )
    about = record["machine"]
    return (
        "# Pre-training step: bertsmith beside transformers\n\n"
        f"`{record['command']}`, {record['date']}, {about['cpu']}, {about['threads']} threads, "
        f"torch {about['torch']}, transformers {record['transformers']}; batch {BATCH} x {LENGTH}, "
        f"{PIECES:,} pieces. Forward, backward, clipping and AdamW on the same rows; padding is "
        f"not counted. Medians of {record['rounds']} rounds in which the systems take turns; "
        "ratios are medians of the rounds' ratios.\n\n" + head + rows
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sizes", nargs="+", default=["tiny", "mini"])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    engine = choose_engine("cpu")
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for size in arguments.sizes:
            for dropout in (0.1, 0.0):
                results.append(
                    compare(Path(folder) / "store", size, dropout, arguments.rounds, engine)
                )
                print(results[-1], file=sys.stderr, flush=True)
    record = {
        "command": " ".join(["python benchmarks/pretrain.py", *sys.argv[1:]]),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(engine, max(r["peak_gflops"] for r in results) * 1e9),
        "transformers": transformers.__version__,
        "rounds": arguments.rounds,
        "results": results,
    }
    write_json(arguments.out / "pretrain.json", record)
    write_text(arguments.out / "pretrain.md", table(record))
    print(table(record))


if __name__ == "__main__":
    main()
