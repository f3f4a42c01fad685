"""PyTorch's engine: models that ours cannot read, and GPUs."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bertsmith.base.terminal import OnBatch, ignore
from bertsmith.checkpoints.model_folder import CLASSES, load_model
from bertsmith.inference.engines.processor import Processor
from bertsmith.model.config import ModelConfig
from bertsmith.model.directions import encoders
from bertsmith.tasks.features import Features
from bertsmith.tasks.vectors import Pool
from bertsmith.text.tokenizer.rows import concatenated_ranges
from bertsmith.training.engine import Engine
from bertsmith.training.finetuning.hidden_states import head_outputs, sentence_vectors, states_at
from bertsmith.training.replicas import computed, row_batches

BATCH_TOKENS = 4096  # of states of all layers
MASKED_TOKENS = 1024  # each masked position among them costs a row of the vocabulary's size


@dataclass(frozen=True)
class TorchModel:
    """A folder's model, on its device, without dropout; its methods are those of `Runner`."""

    model: Any
    missing: list[str]
    """Our names of tensors that the folder lacks."""
    engine: Engine

    @classmethod
    def open(cls, folder: Path, kind: str, processor: Processor) -> TorchModel:
        """Errors: ValueError as `load_model`."""
        loaded, engine = load_model(folder, CLASSES[kind]), processor.of_torch()
        return cls(loaded.model.to(engine.device).eval(), loaded.missing, engine)

    def outputs(self, features: Features, on_batch: OnBatch = ignore) -> np.ndarray:
        return head_outputs(self.model, features, self.engine, on_batch)

    def vectors(
        self, features: Features, pool: Pool, skip: int = 0, on_batch: OnBatch = ignore
    ) -> np.ndarray:
        return sentence_vectors(self.model.encoder, features, self.engine, pool, on_batch, skip)

    def states_at(
        self,
        features: Features,
        places: np.ndarray,
        layers: Sequence[int],
        on_batch: OnBatch = ignore,
    ) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
        encoder, engine = self.model.encoder, self.engine
        batches = states_at(encoder, features, places, layers, engine, BATCH_TOKENS, on_batch)
        for taken, states in batches:
            yield taken, [layer.cpu().numpy() for layer in states]

    def piece_logits(
        self, features: Features, places: np.ndarray
    ) -> Iterator[tuple[int, np.ndarray]]:
        edges = np.searchsorted(places, features.boundaries)

        def logits_of(rows: np.ndarray) -> list[np.ndarray]:
            logits_NV = self._piece_logits(features, rows, places, edges).cpu().numpy()
            return np.split(logits_NV, np.cumsum(np.diff(edges)[rows])[:-1])

        batches = row_batches(self.engine, features.lengths, MASKED_TOKENS)
        for rows, found in zip(batches, computed(self.engine, logits_of, batches), strict=True):
            yield from zip(rows.tolist(), found, strict=True)

    def piece_log_probabilities(
        self, features: Features, places: np.ndarray, labels: np.ndarray, counts: np.ndarray
    ) -> np.ndarray:
        edges, firsts = np.searchsorted(places, features.boundaries), np.cumsum(counts) - counts
        result = np.empty(len(labels), np.float32)

        def compute(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            own = concatenated_ranges(edges[rows], np.diff(edges)[rows])
            taken = concatenated_ranges(firsts[own], counts[own])
            line = self.engine.tensor(np.repeat(np.arange(len(own)), counts[own]))
            logits_NV = self._piece_logits(features, rows, places, edges)
            picked = logits_NV[line, self.engine.tensor(labels[taken])]
            return taken, (picked - logits_NV.logsumexp(dim=1)[line]).cpu().numpy()

        batches = row_batches(self.engine, features.lengths, MASKED_TOKENS)
        for taken, found in computed(self.engine, compute, batches):
            result[taken] = found
        return result

    def _piece_logits(
        self, features: Features, rows: np.ndarray, places: np.ndarray, edges: np.ndarray
    ) -> Tensor:
        """[N, V] at the places of some rows; those of row r are places[edges[r]:edges[r + 1]]."""
        counts = np.diff(edges)[rows]
        is_asked = np.arange(counts.max()) < counts[:, None]
        wanted = np.zeros(is_asked.shape, np.int64)
        own = places[concatenated_ranges(edges[rows], counts)]
        wanted[is_asked] = own - np.repeat(features.boundaries[rows], counts)
        batch = *features.padded(rows, self.model.config.pad_id), wanted
        picks = np.flatnonzero(is_asked)
        return self.model(*map(self.engine.tensor, (*batch, picks))).mlm_logits.float()

    def gradient_times_input(self, row: Features, weights: np.ndarray) -> np.ndarray:
        """The first layer's input of each token, times the gradient there of outputs @ weights
        [K]: [T] of one row, in float32.

        That is after the embeddings' LayerNorm: before it the product is nearly nothing, since
        LayerNorm does not see the size of its input.
        """
        read = [one.embeddings for one in encoders(self.model.encoder)]
        with kept_outputs(read) as inputs:
            outputs_1K = self.model(*self._alone(row), None)
        explained = (outputs_1K @ torch.from_numpy(weights).to(outputs_1K.device)).sum()
        gradients = torch.autograd.grad(explained, inputs)
        own_T, *backwards = ((x * d).sum(2)[0] for x, d in zip(inputs, gradients, strict=True))
        for other_T in backwards:
            own_T = own_T + other_T.flip(0)
        return own_T.detach().cpu().numpy()

    def attention_probabilities(self, row: Features) -> list[np.ndarray]:
        """The weights of each layer, [A, T, T] of one row, in float32: again from queries and keys,
        for the kernels keep none. Of two directions the heads of the left stand first; what the
        right has read backwards stands in the row's own order."""
        encoder = self.model.encoder
        read = encoders(encoder)
        layers = [layer.get_submodule("qkv") for one in read for layer in one.layers]
        with torch.inference_mode(), kept_outputs(layers) as kept:
            encoder(*self._alone(row))
            found = [attention_weights(qkv_1TH[0], read[0].config) for qkv_1TH in kept]
        if len(read) == 1:
            return found
        half = len(found) // 2
        pairs = zip(found[:half], found[half:], strict=True)
        return [np.concatenate([left, right[:, ::-1, ::-1]]) for left, right in pairs]

    def _alone(self, row: Features) -> Iterator[Tensor]:
        """Ids and types [1, T] of one row on the model's device."""
        device = next(self.model.parameters()).device
        return (torch.from_numpy(part[None]).to(device) for part in (row.ids, row.token_types))


def attention_weights(qkv_TH: Tensor, config: ModelConfig) -> np.ndarray:
    """The weights [A, T, T] of a layer that reads one row, from its queries, keys and values."""
    heads = config.num_heads, -1
    q_TH, k_TH, _ = qkv_TH.chunk(3, dim=1)
    q_ATD, k_ATD = (x.unflatten(1, heads).transpose(0, 1) for x in (q_TH, k_TH))
    scores_ATT = q_ATD @ k_ATD.transpose(1, 2) / math.sqrt(q_ATD.shape[2])
    if config.causal:  # no key right of the query
        scores_ATT = scores_ATT + torch.full_like(scores_ATT[0], -torch.inf).triu(1)
    return scores_ATT.softmax(dim=2).cpu().numpy()


@contextmanager
def kept_outputs(modules: Iterable[nn.Module]) -> Iterator[list[Tensor]]:
    """Keep what the modules give this thread inside the block, in the order in which they run."""
    kept: list[Tensor] = []
    own = threading.get_ident()

    def keep(module: nn.Module, inputs: Any, output: Any) -> None:
        if threading.get_ident() == own:  # others may compute with the same modules
            kept.append(output)

    hooks = [module.register_forward_hook(keep) for module in modules]
    try:
        yield kept
    finally:
        for hook in hooks:
            hook.remove()
