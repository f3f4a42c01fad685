"""The faster of int8 and bf16 for a run's matrix products, measured once on a machine.

The CPU's instructions do not tell: rounding and packing may take longer than int8 saves. What was
measured is kept, so that the same training takes the same precision each time:

~/.cache/bertsmith/matmul_times/DIGEST.json      the seconds; see `with_faster_matmul`
"""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from dataclasses import asdict, replace
from hashlib import sha256
from typing import Any

import numba
import torch
from torch import nn

from bertsmith.base.files import kept_for_user
from bertsmith.base.jit import source_digest
from bertsmith.model.config import ModelConfig
from bertsmith.model.encoder import Layer
from bertsmith.model.kernels.fused_layers import without_bias
from bertsmith.model.kernels.llvm.blocks import LINE, cpu_features
from bertsmith.model.kernels.llvm.weight_gradient import PART
from bertsmith.model.kernels.masked_lm_loss import masked_lm_loss
from bertsmith.model.kernels.quantized_linear import has_int8
from bertsmith.training.engine import Engine, MatmulTimes, cpu_name
from bertsmith.training.replicas import Replicas

SECONDS, LEAST_TURNS = 1.0, 2
# of a turn and core at most, 50 to 110 ms: base's layer with 512 tokens, as a step of 1,024 has on
# two cores; with fewer, packing the weights would count for more than it does there
OPERATIONS = 22e9
NOISE = 1 << 16  # random numbers, which are repeated


def with_faster_matmul(
    engine: Engine, config: ModelConfig, tokens: int, predictions: int = 0
) -> Engine:
    """The engine of an "auto-int8" run, in the precision that is faster at rank 0.

    `tokens` are those of a core's forward pass, `predictions` its masked positions. Measured where
    no figures of these products, this processor and these versions are kept. Without int8 the
    engine stays as it is.
    """
    own = None
    if has_int8(engine.device) and config.hidden_size % LINE == 0:
        with torch.device("meta"):
            shapes = [part.weight.shape for part in _linears(Layer(config))]
        measured = measured_tokens(tokens, sum(shape.numel() for shape in shapes))
        tokens, predictions = measured, round(predictions * measured / tokens)
        programs = source_digest(__name__), torch.__version__, numba.__version__
        beside = engine.threads, engine.ranks.local_size  # cores that work at once
        machine = cpu_name(), sorted(cpu_features()), beside
        loss = (predictions, config.vocab_size, config.num_layers) if predictions else ()
        made_of = [tuple(shape) for shape in shapes], tokens, *loss, machine, programs
        digest = sha256(repr(made_of).encode()).hexdigest()

        def measure() -> dict[str, Any]:
            times = asdict(measure_matmuls(config, tokens, engine.threads, predictions))
            return {name: value for name, value in times.items() if name != "source"}

        kept, source = kept_for_user("matmul_times", digest, measure)
        own = kept | {"source": source}
    found = json.loads(engine.ranks.broadcast("matmul_times", json.dumps(own)))
    if own is None or found is None:
        return engine
    times = MatmulTimes(**found)
    return replace(engine, precision=times.faster, matmul_times=times)


def measured_tokens(tokens: int, numbers: int) -> int:
    """Tokens a core to measure a layer of so many weights with, rounded: about alike is one case.

    >>> mini, base = 12 * 256 * 256, 12 * 768 * 768
    >>> [measured_tokens(tokens, mini) for tokens in (5, 210, 2048)], measured_tokens(2048, base)
    ([64, 192, 2048], 512)
    """
    most = max(1, int(OPERATIONS / (6 * numbers)) // PART) * PART
    return max(LINE, round(min(tokens, most) / LINE) * LINE)


def measure_matmuls(
    config: ModelConfig, tokens: int, threads: int, predictions: int = 0
) -> MatmulTimes:
    """Time a layer of `config` in both precisions by turns for a second: the least of each.

    Each of `threads` cores computes `tokens` tokens, as in a step on a CPU, and the masked-LM loss
    of `predictions` positions, of which a layer bears its share. The first time on a machine
    kernels are compiled before.
    """
    engines = [Engine(torch.device("cpu"), name, threads) for name in ("bf16", "int8")]
    with ExitStack() as stack:
        runners = [_LayerMatmuls(config, engine) for engine in engines]
        for runner in runners:
            stack.enter_context(runner.replicas)
        for runner in runners:
            runner.seconds(tokens, predictions)  # compiles
        turns, stop = [], time.perf_counter() + SECONDS
        while len(turns) < LEAST_TURNS or time.perf_counter() < stop:
            turns.append([runner.seconds(tokens, predictions) for runner in runners])
    bf16, int8 = map(min, zip(*turns, strict=True))
    return MatmulTimes(tokens, bf16, int8, predictions)


class _LayerMatmuls:
    """An encoder layer's linear layers in every core's replica."""

    def __init__(self, config: ModelConfig, engine: Engine) -> None:
        model = nn.Module()
        model.layers = nn.ModuleList([Layer(config)])
        engine.prepare(model)
        self._engine, self.replicas, self._config = engine, Replicas(model, engine), config
        self._shapes = [part.weight.shape for part in _linears(self.replicas.models[0])]

    def seconds(self, tokens: int, predictions: int) -> float:
        """Time the three products of each linear layer, and its share of those of the loss.

        Returns the mean of the cores.
        """
        widest, config = max(max(shape) for shape in self._shapes), self._config
        table = config.vocab_size * config.hidden_size if predictions else 0
        noise = torch.randn(NOISE).bfloat16().repeat(-(-max(tokens * widest, table) // NOISE))

        def loss() -> float:
            started = time.thread_time()
            size = config.hidden_size
            hidden_NH = noise[: predictions * size].view(-1, size).requires_grad_()
            table_VH, bias_V = noise[:table].view(-1, size), torch.zeros(config.vocab_size)
            labels_N = torch.zeros(predictions, dtype=torch.int64)
            weights = hidden_NH, table_VH.requires_grad_(), bias_V.requires_grad_()
            int8 = self._engine.precision == "int8"
            masked_lm_loss(*weights, labels_N, int8=int8)[0].backward()
            return (time.thread_time() - started) / config.num_layers

        def passes(model: nn.Module) -> float:
            share = loss() if predictions else 0.0
            started = time.thread_time()  # without other processes
            for part in _linears(model):
                outputs, inputs = part.weight.shape
                x_NI = noise[: tokens * inputs].view(tokens, inputs).requires_grad_()
                with self._engine.autocast():
                    y_NO = without_bias(part, x_NI)
                y_NO.backward(noise[: tokens * outputs].view(tokens, outputs))
            return share + time.thread_time() - started

        # not by `map`, in which cores help each other
        times = self.replicas.each(passes, self.replicas.models)
        self.replicas.zero_grad()
        return sum(times) / len(times)


def _linears(model: nn.Module) -> list[nn.Linear]:
    return [part for part in model.modules() if isinstance(part, nn.Linear)]
