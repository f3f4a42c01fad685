"""One system of benchmarks/pretrain.py in a process of its own: steps on command.

    python benchmarks/pretrain_systems.py SYSTEM SIZE LENGTH STORE

It prints a line of JSON when it is ready ({"tokens": a step, "operations": a step}), then reads a
number of steps from a line of its input, does them, and prints {"seconds", "memory_mb"}.
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bertsmith.base.processes import keep_freed_memory, usable_cores
from bertsmith.corpus.build.build import build_store
from bertsmith.corpus.examples.stream import Position, PretrainingStream
from bertsmith.corpus.store.store import TokenStore
from bertsmith.model.config import config_for
from bertsmith.model.heads import PreTrainingModel
from bertsmith.model.initialization import initialize
from bertsmith.text.readers.documents import Document
from bertsmith.text.tokenizer.tokenizer import Tokenizer
from bertsmith.text.tokenizer.wordpiece import SPECIAL, Vocabulary
from bertsmith.training.engine import choose_engine, has_bf16
from bertsmith.training.loop.matmul_times import with_faster_matmul
from bertsmith.training.loop.schedule import Budget
from bertsmith.training.loop.step import Stepper
from bertsmith.training.loop.task import LoopSettings, Training, TrainingState
from bertsmith.training.optimizers import build_optimizer
from bertsmith.training.pretraining.settings import PretrainSettings, read_recipe
from bertsmith.training.pretraining.task import Pretraining, rows_per_forward
from bertsmith.training.settings import AUTO_INT8

PIECES, BATCHES, RATE, CLIP = 30522, 4, 1e-4, 1.0
ROWS = {("base", 128): 8, ("base", 512): 2}  # else 4,096 tokens
MASKED = {"dropout": 0.0, "bf16": True, "masked_head": True}  # bf16 where the processor has it
SYSTEMS = {  # name: settings; "bertsmith" systems differ in their recipe, the others in the library
    "bertsmith, fast": {"dropout": 0.0, "precision": "auto-int8"},
    "bertsmith, fast, without int8": {"dropout": 0.0},
    "bertsmith, paper": {"dropout": 0.1, "optimizer": "paper-adam", "activation": "gelu_tanh"},
    "bertsmith, the recipe fast": {"recipe": "fast"},
    "transformers, as shipped": {"dropout": 0.1},
    "transformers, as shipped, dropout 0": {"dropout": 0.0},
    "transformers, compiled": {"dropout": 0.1, "bf16": True, "compiled": True},
    "transformers, compiled, dropout 0": {"dropout": 0.0, "bf16": True, "compiled": True},
    "transformers, masked head, dropout 0": MASKED,
    "transformers, masked head, kept memory, dropout 0": MASKED | {"kept": True},
    "transformers, masked head, kept memory, compiled, dropout 0": MASKED
    | {"kept": True, "compiled": True},
}
PAIRS: Any = {"nsp_sampling": "paper", "short_seq_prob": 0.1}  # of all but the recipe


def make_rows(size: str, length: int) -> int:
    return ROWS.get((size, length), 4096 // length)


def make_store(folder: Path) -> None:
    """A store of made-up words, each one a piece: speed does not depend on what they mean."""
    tokenizer = Tokenizer(Vocabulary([*SPECIAL, *(f"w{n}" for n in range(PIECES - len(SPECIAL)))]))
    random = np.random.default_rng(1)
    documents = [
        Document("made", n, [" ".join(f"w{w}" for w in random.integers(0, 30000, 20)) + "."] * 40)
        for n in range(60)
    ]
    build_store([], tokenizer, folder, documents=documents)


def open_stream(folder: Path, settings: PretrainSettings) -> PretrainingStream:
    vocabulary = Tokenizer.from_pretrained(folder).vocabulary
    split = TokenStore.open(folder).train
    return PretrainingStream(split, vocabulary, settings.examples(settings.max_length), seed=1)


def ours(
    size: str, length: int, folder: Path, options: dict[str, Any]
) -> tuple[Callable[[int], None], dict[str, float]]:
    """The step of `bertsmith pretrain`; without a recipe on the paper's rows, as the peers."""
    keep_freed_memory()
    rows = make_rows(size, length)
    changes: dict[str, Any] = {"size": size, "batch_size": rows, "max_length": length, "steps": 1}
    if "recipe" in options:
        recipe = dataclasses.replace(read_recipe(options["recipe"]), optimizer="adamw")  # as peers
    else:
        # as the peers
        recipe = PretrainSettings(bag_of_words=0.0, optimizer="adamw", **PAIRS)
        changes |= {"dropout": options["dropout"], "attention_dropout": options["dropout"]}
        changes |= {name: options[name] for name in ("optimizer", "activation") if name in options}
        changes["precision"] = options.get("precision", "auto")
    settings = dataclasses.replace(recipe, **changes)
    engine = choose_engine("cpu", settings.precision)
    config = config_for(
        size,
        PIECES,
        dropout=settings.dropout,
        attention_dropout=settings.attention_dropout,
        activation=settings.activation,
        pre_norm=settings.layer_norm == "pre",
        gated=settings.glu,
    )
    if settings.precision == AUTO_INT8:
        (phase,) = settings.phases()
        rows_at_once = rows_per_forward(settings, phase, engine, config)
        predictions = rows_at_once * settings.examples(length).num_predictions
        engine = with_faster_matmul(engine, config, rows_at_once * length, predictions)
    model = initialize(PreTrainingModel(config), 0.02, torch.Generator().manual_seed(1))
    task = Pretraining(model, open_stream(folder, settings), None, settings, engine)
    optimizer = build_optimizer(model, settings.optimizer, RATE, 0.01)
    loop = LoopSettings(Budget(steps=1), RATE, "linear", 0.1, CLIP, seed=1)
    batches = [task.batch(Position(0, k * rows))[0] for k in range(BATCHES)]
    engine.prepare(model)
    run = Training(task, optimizer, TrainingState(), loop, engine)
    stepper = Stepper(run)

    def step(number: int) -> None:
        run.state.step = number
        stepper.step(batches[number % BATCHES], RATE)

    return step, {
        "tokens": float(np.mean([batch.tokens for batch in batches])),
        "operations": float(np.mean([task.flops(batch) for batch in batches])),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


def theirs(
    size: str, length: int, folder: Path, options: dict[str, Any]
) -> tuple[Callable[[int], None], dict[str, float]]:
    """transformers' model and loss, torch's fused AdamW, the paper's rows, the same clipping."""
    if options.get("kept"):
        keep_freed_memory()
        os.environ["THP_MEM_ALLOC_ENABLE"] = "1"  # as `choose_engine` does
    import transformers

    torch.set_num_threads(usable_cores())
    is_bf16 = bool(options.get("bf16")) and has_bf16(torch.device("cpu"))
    shape = config_for(size, PIECES)
    config = transformers.BertConfig(
        vocab_size=PIECES,
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        intermediate_size=shape.intermediate_size,
        hidden_dropout_prob=options["dropout"],
        attention_probs_dropout_prob=options["dropout"],
    )
    model = transformers.BertForPreTraining(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01, fused=True)
    settings = PretrainSettings(max_length=length, steps=1, **PAIRS)
    stream = open_stream(folder, settings)
    batches = [their_batch(stream, k, make_rows(size, length)) for k in range(BATCHES)]
    loss_of = masked_head_loss if options.get("masked_head") else whole_loss
    forward: Any = torch.compile(loss_of) if options.get("compiled") else loss_of

    def step(number: int) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=is_bf16):
            loss = forward(model, batches[number % BATCHES])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()

    tokens = np.mean([int(batch["attention_mask"].sum()) for batch in batches])
    return step, {"tokens": float(tokens)}


def whole_loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """As shipped: logits at every position."""
    others = ("positions", "labels_there")
    return model(**{name: part for name, part in batch.items() if name not in others}).loss


def masked_head_loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """transformers' modules, the masked-LM head at the masked positions only."""
    inputs = {name: batch[name] for name in ("input_ids", "token_type_ids", "attention_mask")}
    output = model.bert(**inputs)
    hidden, positions = output.last_hidden_state, batch["positions"]
    chosen = hidden.gather(1, positions[:, :, None].expand(-1, -1, hidden.shape[2])).flatten(0, 1)
    logits = model.cls.predictions(chosen)
    following = model.cls.seq_relationship(output.pooler_output)
    cross_entropy = torch.nn.functional.cross_entropy
    return cross_entropy(logits.float(), batch["labels_there"].flatten()) + cross_entropy(
        following.float(), batch["next_sentence_label"]
    )


def their_batch(stream: PretrainingStream, number: int, rows: int) -> dict[str, torch.Tensor]:
    batch, _ = stream.batch(Position(0, number * rows), rows)
    labels = np.full(batch.input_ids.shape, -100, np.int64)
    row, slot = np.nonzero(batch.masked_weights)
    labels[row, batch.masked_positions[row, slot]] = batch.masked_labels[row, slot]
    length = batch.input_ids.shape[1]
    arrays = {
        "input_ids": batch.input_ids.astype(np.int64),
        "token_type_ids": batch.token_types.astype(np.int64),
        "attention_mask": (np.arange(length) < batch.lengths[:, None]).astype(np.int64),
        "labels": labels,
        # the places to predict, as many in every row, and -100 where a row has fewer
        "positions": batch.masked_positions.astype(np.int64),
        "labels_there": np.where(batch.masked_weights > 0, batch.masked_labels, -100).astype(
            np.int64
        ),
        "next_sentence_label": batch.next_labels,
    }
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def main() -> None:
    system, size, length, store = sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
    build = ours if system.startswith("bertsmith") else theirs
    step, facts = build(size, length, store, SYSTEMS[system])
    started = time.perf_counter()
    step(0)
    facts["first_step_seconds"] = round(time.perf_counter() - started, 2)
    step(1)
    print(json.dumps(facts), flush=True)
    number = 2
    for line in sys.stdin:
        started = time.perf_counter()
        for _ in range(int(line)):
            step(number)
            number += 1
        seconds = time.perf_counter() - started
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        print(json.dumps({"seconds": seconds, "memory_mb": memory}), flush=True)


if __name__ == "__main__":
    main()
