"""One system of benchmarks/lineage.py in a process of its own: trains on command.

    python benchmarks/lineage_systems.py SYSTEM FOLDER

It prints a line of JSON when it is ready ({"parameters", "precision"}), then reads seconds from a
line of its input, trains for so long, and prints {"amount", "seconds", "memory_mb"}.

Letters as in experiments/lineage/translation.py; besides: E embedding size, A attention size.
"""

from __future__ import annotations

import copy
import json
import math
import resource
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bertsmith.base.processes import keep_freed_memory, usable_cores
from bertsmith.experiments.lineage.pairs import Languages, PairRows, Sentences, TokenBatches
from bertsmith.experiments.lineage.settings import (
    SYSTEMS,
    AttentionShape,
    RNNShape,
    TransformerShape,
)
from bertsmith.experiments.lineage.translation import BestWeights, Translation, new_model
from bertsmith.model.recurrent import GRU, LSTM
from bertsmith.training.engine import choose_engine, has_bf16
from bertsmith.training.loop.loop import prefetch
from bertsmith.training.loop.step import Stepper
from bertsmith.training.loop.task import LoopSettings, Training, TrainingState
from bertsmith.training.optimizers import build_optimizer
from bertsmith.training.replicas import use_one_thread

SENTENCES, RATE, CLIP, IGNORED = 128, 5e-4, 1.0, -100  # of the peers
BATCH_TOKENS = 2048  # some 128 sentences of Multi30k
LAYER_INPUTS, LAYER_ROWS, LAYER_STEPS = 256, 64, 14


class System(NamedTuple):
    """Something that trains."""

    step: Callable[[], float]  # one step: its amount, in target tokens or positions
    model: nn.Module
    precision: str


def save_rows(rows: PairRows, folder: Path) -> None:
    arrays = {f"{k}{n}": x for k, side in vars(rows).items() for n, x in side._asdict().items()}
    np.savez(folder / "rows.npz", **arrays)


def read_rows(folder: Path) -> PairRows:
    stored = np.load(folder / "rows.npz")
    source, target = (
        Sentences(*(stored[side + name] for name in Sentences._fields))
        for side in ("source", "target")
    )
    return PairRows(source, target)


def settings_of(system: str, folder: Path) -> Any:
    """The defaults of `bertsmith lineage SYSTEM`, but for batches as large as the peers'."""
    where = {"data": folder, "source": "", "target": "", "out": folder}
    return SYSTEMS[system](**where, minutes=30, batch_tokens=BATCH_TOKENS)


def ours(system: str, folder: Path) -> System:
    """The loop of `bertsmith lineage SYSTEM`."""
    keep_freed_memory()
    engine = choose_engine("cpu")
    settings = settings_of(system, folder)
    model = new_model(settings, Languages.open(folder))
    rows, state = read_rows(folder), TrainingState()
    task = Translation(model, rows, rows, settings, engine, state, BestWeights(1))
    optimizer = build_optimizer(model, "adamw", settings.learning_rate, settings.weight_decay)
    rates = settings.learning_rate, settings.schedule, settings.warmup_ratio
    loop = LoopSettings(settings.budget(), *rates, settings.max_grad_norm, settings.seed)
    engine.prepare(model)
    run = Training(task, optimizer, state, loop, engine)
    stepper, batches = Stepper(run), prefetch(run)

    def step() -> float:
        batch, following = next(batches)
        state.count(batch, following, stepper.step(batch, loop.learning_rate))
        return batch.tokens

    return System(step, model, engine.precision)


class Tutorial(nn.Module):
    """The RNN of the tutorials: a Python step for each target token.

    A step has a GRU of one position and the output layer, and with attention scores the source
    anew, keys included. All rows are as long as the longest of their batch.
    """

    def __init__(self, shape: RNNShape | AttentionShape, pieces: int) -> None:
        super().__init__()
        embedding, size = shape.embedding_size, shape.hidden_size
        self.attends = isinstance(shape, AttentionShape)
        context = 2 * size if self.attends else size
        self.source_table = nn.Embedding(pieces, embedding)
        self.target_table = nn.Embedding(pieces, embedding)
        self.encoder = nn.GRU(embedding, size, batch_first=True, bidirectional=self.attends)
        if self.attends:
            self.first_state = nn.Linear(context, size)
            self.energy, self.score = nn.Linear(size + context, size), nn.Linear(size, 1, False)
        self.decoder = nn.GRU(embedding + context, size, batch_first=True)
        self.output = nn.Linear(embedding + size + context, pieces)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, source_BS: Tensor, target_BT: Tensor) -> Tensor:
        """Logits [B, T, V], with the right piece before each given."""
        memory_BSE, last = self.encoder(self.dropout(self.source_table(source_BS)))
        state_BH = context_BE = last[-1]
        if self.attends:
            state_BH = self.first_state(torch.cat([last[0], last[1]], dim=1)).tanh()
        logits = []
        for piece_B in target_BT.unbind(dim=1):
            embedded_BE = self.dropout(self.target_table(piece_B))
            if self.attends:
                context_BE = self.attend(state_BH, memory_BSE)
            given_BE = torch.cat([embedded_BE, context_BE], dim=1)
            _, state = self.decoder(given_BE[:, None], state_BH[None])
            state_BH = state[0]
            logits.append(self.output(torch.cat([given_BE, state_BH], dim=1)))
        return torch.stack(logits, dim=1)

    def attend(self, state_BH: Tensor, memory_BSE: Tensor) -> Tensor:
        states_BSH = state_BH[:, None].expand(-1, memory_BSE.shape[1], -1)
        energy_BSA = self.energy(torch.cat([states_BSH, memory_BSE], dim=2)).tanh()
        weights_BS = self.score(energy_BSA).squeeze(2).softmax(dim=1)
        return torch.bmm(weights_BS[:, None], memory_BSE).squeeze(1)


class TorchTransformer(nn.Module):
    """`nn.Transformer` with one table for source, target and output."""

    def __init__(self, shape: TransformerShape, pieces: int) -> None:
        super().__init__()
        size, layers = shape.hidden_size, shape.num_layers
        sizes = size, shape.num_heads, layers, layers, shape.intermediate_size, shape.dropout
        is_first = shape.layer_norm == "pre"
        self.layers = nn.Transformer(*sizes, batch_first=True, norm_first=is_first)
        self.table = nn.Embedding(pieces, size)
        nn.init.normal_(self.table.weight, 0.0, size**-0.5)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, source_BS: Tensor, target_BT: Tensor) -> Tensor:
        """Logits [B, T, V], with the right piece before each given."""
        padding_BS, length = source_BS == 0, target_BT.shape[1]
        left_TT = torch.ones(length, length, dtype=torch.bool).triu(1)
        hidden_BTH = self.layers(
            self.embed(source_BS),
            self.embed(target_BT),
            tgt_mask=left_TT,
            tgt_is_causal=True,
            src_key_padding_mask=padding_BS,
            memory_key_padding_mask=padding_BS,
        )
        return F.linear(hidden_BTH, self.table.weight)

    def embed(self, ids_BT: Tensor) -> Tensor:
        size = self.table.embedding_dim
        waves = torch.exp(torch.arange(0, size, 2) * (-math.log(10_000) / size))
        angles = torch.arange(ids_BT.shape[1])[:, None] * waves
        positions_TH = torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1)
        return self.dropout(self.table(ids_BT) * size**0.5 + positions_TH)


def tutorial(system: str, folder: Path) -> System:
    """The tutorials' loop: Adam in float32, batches of so many sentences as they come."""
    torch.set_num_threads(usable_cores())
    model = Tutorial(settings_of(system, folder), pieces_of(folder))
    optimizer = torch.optim.Adam(model.parameters(), RATE)
    return System(steps(model, optimizer, unsorted(read_rows(folder)), loss_of), model, "float32")


def torch_transformer(system: str, folder: Path) -> System:
    """`nn.Transformer` at its best: the processor's precision, our batches, sorted by length."""
    torch.set_num_threads(usable_cores())
    settings = settings_of(system, folder)
    model, rows = TorchTransformer(settings, pieces_of(folder)), read_rows(folder)
    optimizer = torch.optim.Adam(model.parameters(), RATE, fused=True)
    loss = partial(loss_of, smoothing=settings.label_smoothing)
    narrow = has_bf16(torch.device("cpu"))
    step = steps(model, optimizer, sorted_batches(rows, settings.batch_tokens), loss, narrow)
    return System(step, model, "bf16" if narrow else "float32")


def marian(system: str, folder: Path) -> System:
    """transformers' model as shipped, with its own loss, and the Trainer's optimizer."""
    import transformers

    torch.set_num_threads(usable_cores())
    shape, languages = settings_of(system, folder), Languages.open(folder)
    layers, heads, width = shape.num_layers, shape.num_heads, shape.intermediate_size
    config = transformers.MarianConfig(
        vocab_size=len(languages.target),
        max_position_embeddings=128,
        d_model=shape.hidden_size,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=width,
        decoder_ffn_dim=width,
        dropout=shape.dropout,
        attention_dropout=shape.attention_dropout,
        activation_function="relu",
        scale_embedding=True,
        pad_token_id=0,
        decoder_start_token_id=0,
        eos_token_id=languages.target.eos,
        forced_eos_token_id=languages.target.eos,
    )
    model = transformers.MarianMTModel(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), RATE, fused=True)
    return System(steps(model, optimizer, unsorted(read_rows(folder)), own_loss), model, "float32")


def pieces_of(folder: Path) -> int:
    return len(Languages.open(folder).target)


Batch = dict[str, Tensor]


def unsorted(rows: PairRows) -> Iterator[Batch]:
    """Batches of shuffled sentences, without end."""
    random = np.random.default_rng(1)
    while True:
        order = random.permutation(len(rows))
        for start in range(0, len(rows), SENTENCES):
            yield tensors(rows, order[start : start + SENTENCES])


def sorted_batches(rows: PairRows, tokens: int) -> Iterator[Batch]:
    """Batches of sentences of about one length, without end."""
    batches, epoch = TokenBatches(rows.lengths, tokens, seed=1), 0
    while True:
        yield from (tensors(rows, chosen) for chosen in batches.epoch(epoch))
        epoch += 1


def tensors(rows: PairRows, chosen: np.ndarray) -> Batch:
    return {name: torch.from_numpy(array) for name, array in rows.batch(chosen).items()}


def loss_of(model: nn.Module, batch: Batch, smoothing: float = 0.0) -> Tensor:
    logits_NV = model(batch["source"], batch["target_in"]).flatten(0, 1)
    labels_N = batch["target_out"].flatten()
    return F.cross_entropy(logits_NV, labels_N, ignore_index=0, label_smoothing=smoothing)


def own_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The model's: it gets what `DataCollatorForSeq2Seq` makes."""
    source, labels = batch["source"], batch["target_out"]
    labels = labels.masked_fill(labels == 0, IGNORED)
    return model(input_ids=source, attention_mask=(source != 0).long(), labels=labels).loss


def steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[Batch],
    loss: Callable[[nn.Module, Batch], Tensor],
    narrow: bool = False,
) -> Callable[[], float]:
    """The usual loop of PyTorch: a step of it."""

    def step() -> float:
        batch = next(batches)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
            value = loss(model, batch)
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        value.item()  # for the log
        return float((batch["target_out"] != 0).sum())

    return step


def layer(make: Callable[[int, int], nn.Module], size: int, folder: Path) -> System:
    """A recurrent layer forwards and backwards, on every core rows of its own."""
    keep_freed_memory()
    model, cores = make(LAYER_INPUTS, size), usable_cores()
    replicas = [copy.deepcopy(model) for _ in range(cores)]
    pool = ThreadPoolExecutor(cores, initializer=use_one_thread)
    narrow = has_bf16(torch.device("cpu"))
    x_SBI = torch.randn(LAYER_STEPS, LAYER_ROWS, LAYER_INPUTS)

    def passes(replica: nn.Module) -> None:
        replica.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
            states = replica(x_SBI.detach().requires_grad_())
        (states[0] if isinstance(states, tuple) else states).sum().backward()

    def step() -> float:
        list(pool.map(passes, replicas))
        return float(cores * LAYER_STEPS * LAYER_ROWS)

    return System(step, model, "bf16" if narrow else "float32")


LAYERS: dict[str, Callable[[int, int], nn.Module]] = {
    "LSTM": LSTM,
    "nn.LSTM": nn.LSTM,
    "GRU, reset before": GRU,
    "GRU, reset after": partial(GRU, reset="after"),
    "nn.GRU": nn.GRU,
}
LAYER_SIZES = (256, 512)
BUILDERS: dict[str, Callable[[Path], System]] = {
    "bertsmith, rnn": partial(ours, "rnn"),
    "tutorials' loop, rnn": partial(tutorial, "rnn"),
    "bertsmith, attention": partial(ours, "attention"),
    "tutorials' loop, attention": partial(tutorial, "attention"),
    "bertsmith, transformer": partial(ours, "transformer"),
    "transformers, Marian": partial(marian, "transformer"),
    "torch, nn.Transformer": partial(torch_transformer, "transformer"),
    **{
        f"{name}, {size}": partial(layer, LAYERS[name], size)
        for size in LAYER_SIZES
        for name in LAYERS
    },
}


def train_for(seconds: float, step: Callable[[], float]) -> dict[str, float]:
    """Whole steps, until so many seconds have passed."""
    amount, started = 0.0, time.perf_counter()
    while True:
        amount += step()
        if (spent := time.perf_counter() - started) >= seconds:
            return {"amount": amount, "seconds": spent}


def main() -> None:
    torch.manual_seed(1)
    system = BUILDERS[sys.argv[1]](Path(sys.argv[2]))
    for _ in range(3):  # compile, and reserve memory
        system.step()
    parameters = sum(parameter.numel() for parameter in system.model.parameters())
    print(json.dumps({"parameters": parameters, "precision": system.precision}), flush=True)
    for line in sys.stdin:
        found = train_for(float(line), system.step)
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        print(json.dumps({**found, "memory_mb": memory}), flush=True)


if __name__ == "__main__":
    main()
