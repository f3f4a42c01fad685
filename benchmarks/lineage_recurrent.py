"""Recurrent layers beside PyTorch's, and recurrent translators beside the tutorials' loop.

    python benchmarks/lineage_recurrent.py [--rows 64] [--words 14] [--pieces 6000] [--rounds 10]

Layers: forward and backward of one layer from 256 inputs. Two threads work side by side, with one
thread for each one's products, as replicas train. PyTorch's are unpacked, its fastest way on a CPU.

Translators: a whole step of training with Adam and clipping. The tutorials' model is written after
what bentrevett's notebooks and their copies do: the keys are computed again at every word, a GRU
runs a word at a time, the output layer reads state, context and word, and all logits are kept. All
of its words are given, where the tutorials take half from the model itself. "eager" is our model
with PyTorch's operators. All get rows of equal length.

Times are milliseconds of processor time of a thread, the least and the median of all rounds: rounds
of all systems follow one another, and neighbours on the machine disturb them less than seconds.
"""

from __future__ import annotations

import argparse
import copy
import threading
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bertsmith.experiments.lineage.attention import AttentionConfig, AttentionTranslator
from bertsmith.experiments.lineage.rnn import RecurrentTranslator, RNNConfig, rnn
from bertsmith.model.kernels.elementwise import without_kernels
from bertsmith.model.kernels.masked_lm_loss import masked_lm_loss
from bertsmith.model.recurrent import GRU, LSTM

INPUTS, HIDDEN_SIZES = 256, (256, 512)


class Tutorial(nn.Module):
    """Logits [T, B, V] of words, a word at a time."""

    def __init__(self, pieces: int, size: int) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(pieces, INPUTS), nn.Embedding(pieces, INPUTS)
        self.encoder = nn.GRU(INPUTS, size, bidirectional=True)
        self.start = nn.Linear(2 * size, size)
        self.energy, self.score = nn.Linear(3 * size, size), nn.Linear(size, 1, bias=False)
        self.decoder = nn.GRU(INPUTS + 2 * size, size)
        self.output = nn.Linear(3 * size + INPUTS, pieces)
        self.dropout = nn.Dropout(0.5)

    def forward(self, source_SB: Tensor, target_TB: Tensor) -> Tensor:
        annotations, last = self.encoder(self.dropout(self.source(source_SB)))
        annotations = annotations.transpose(0, 1)
        state = self.start(torch.cat([last[0], last[1]], dim=1)).tanh()
        logits = torch.zeros(*target_TB.shape, self.output.out_features)
        for number, word in enumerate(target_TB):
            embedded = self.dropout(self.target(word))
            repeated = state[:, None].repeat(1, len(source_SB), 1)
            energy = self.energy(torch.cat([repeated, annotations], dim=2)).tanh()
            share = self.score(energy)[:, :, 0].softmax(dim=1)
            context = (share[:, None] @ annotations)[:, 0]
            given = torch.cat([embedded, context], dim=1)
            states, last = self.decoder(given[None], state[None])
            state = last[0]
            logits[number] = self.output(torch.cat([states[0], context, embedded], dim=1))
        return logits


def time_layers(rows: int, words: int, rounds: int) -> None:
    for size in HIDDEN_SIZES:
        systems: dict[str, nn.Module] = {
            "nn.LSTM": nn.LSTM(INPUTS, size),
            "LSTM": LSTM(INPUTS, size),
            "nn.GRU": nn.GRU(INPUTS, size),
            "GRU, reset before": GRU(INPUTS, size),
            "GRU, reset after": GRU(INPUTS, size, "after"),
        }
        times: dict[str, list[float]] = {name: [] for name in systems}
        barrier = threading.Barrier(2)
        arguments = systems, (words, rows), barrier, rounds, times
        threads = [threading.Thread(target=replica, args=arguments) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(f"\n{rows} rows of {words} words, {INPUTS} inputs, {size} states")
        report(times)


def replica(
    systems: dict[str, nn.Module],
    shape: tuple[int, int],
    barrier: threading.Barrier,
    rounds: int,
    times: dict[str, list[float]],
) -> None:
    torch.set_num_threads(1)
    mine = copy.deepcopy(systems)
    x = torch.randn(*shape, INPUTS, requires_grad=True)
    for number in range(rounds + 1):  # the first is not counted
        for name, layer in mine.items():
            barrier.wait()
            started = time.thread_time()
            states = layer(x)
            states = states[0] if isinstance(states, tuple) else states
            states.sum().backward()
            if number:
                times[name].append(time.thread_time() - started)


def time_translators(rows: int, words: int, pieces: int, rounds: int) -> None:
    torch.set_num_threads(1)
    source, target, labels = torch.randint(1, pieces, (3, words, rows))
    lengths = torch.full((rows,), words)

    def loss(model: RecurrentTranslator) -> Tensor:
        hidden = model.decode(model.encode(source.t(), lengths), target.t()).flatten(0, 1)
        output = model.output_weight, model.output_bias
        return masked_lm_loss(hidden, *output, labels.t().flatten())[0] / labels.numel()

    def eager_loss(model: RecurrentTranslator) -> Tensor:
        with without_kernels():
            return loss(model)

    def tutorial_loss(model: nn.Module) -> Tensor:
        return F.cross_entropy(model(source, target).flatten(0, 1), labels.flatten())

    for size in HIDDEN_SIZES:
        generator = torch.Generator().manual_seed(1)
        sizes = {"embedding_size": INPUTS, "hidden_size": size}
        attention = AttentionTranslator(AttentionConfig(pieces, pieces, **sizes))
        plain = rnn(RNNConfig(pieces, pieces, **sizes)).initialize(generator)
        attention.initialize(generator)
        systems: dict[str, tuple[nn.Module, Callable]] = {
            "tutorial": (Tutorial(pieces, size), tutorial_loss),
            "attention, eager": (attention, eager_loss),
            "attention": (attention, loss),
            "without attention": (plain, loss),
        }
        times: dict[str, list[float]] = {name: [] for name in systems}
        adams = {name: torch.optim.Adam(m.parameters()) for name, (m, _) in systems.items()}
        for number in range(rounds + 1):
            for name, (model, function) in systems.items():
                started = time.thread_time()
                adams[name].zero_grad()
                function(model).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                adams[name].step()
                if number:
                    times[name].append(time.thread_time() - started)
        print(f"\n{rows} rows of {words} words each side, {pieces} pieces, {size} states")
        report(times)
        for name, (model, _) in systems.items():
            print(f"{name:20} {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters")


def report(times: dict[str, list[float]]) -> None:
    for name, spent in times.items():
        print(f"{name:20} least {1e3 * min(spent):7.1f} ms   median {1e3 * median(spent):7.1f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--words", type=int, default=14)
    parser.add_argument("--pieces", type=int, default=6000)
    parser.add_argument("--rounds", type=int, default=10)
    given = parser.parse_args()
    time_layers(given.rows, given.words, given.rounds)
    time_translators(given.rows, given.words, given.pieces, given.rounds)


if __name__ == "__main__":
    main()
