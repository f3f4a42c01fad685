"""Translation with additive attention (Bahdanau, Cho and Bengio 2015, arXiv 1409.0473).

W, U, V, C are weights; biases are left out; GRU as in model/recurrent.py:
    annotations  h_j: states of a GRU from the left and of one from the right, side by side
    keys         k_j = U_a h_j, once a sentence
    start        s_0 = tanh(W_s h_1), of the GRU from the right, which has read the whole source
    step         a_i = softmax over the real j of v . tanh(W_a s_(i-1) + k_j)
                 c_i = sum over j of a_ij h_j
                 s_i = GRU(W y_(i-1) + C c_i, s_(i-1))
    output       t_i = max of pairs of U_o s_(i-1) + V_o y_(i-1) + C_o c_i
The query and the output's state are s_(i-1), not s_i (appendix A.2.2). The paper's update gate
z is 1 - z here, which is the same function of weights with other signs. The paper has 1,000 units
a direction, embeddings of 620, 500 pairs, keys of 1,000; here keys are as long as states and the
pairs are as many as an embedding has numbers, so that one table can serve for all.

The loop over the target's words keeps what needs the state: the products of the words, the keys and
the outputs are each taken for all words at once (model/kernels/additive_attention.py).

Letters: as in rnn.py; A size of the keys (H).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from bertsmith.experiments.lineage.rnn import Readout, RecurrentTranslator, Tables
from bertsmith.experiments.lineage.settings import AttentionShape
from bertsmith.model.kernels.additive_attention import Source, Weights, attending_gru_steps
from bertsmith.model.recurrent import GRU, Bidirectional


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(Tables, AttentionShape):
    """The shape with its vocabularies."""


class Memory(NamedTuple):
    """The source as the decoder reads it."""

    keys_BSA: Tensor
    values_BSE: Tensor  # the annotations
    lengths_B: Tensor
    start_BH: Tensor


class AttentionTranslator(RecurrentTranslator):
    """Bahdanau et al. 2015."""

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__(config, config.embedding_size)
        size, embedding = config.hidden_size, config.embedding_size
        cell = partial(GRU, reset=config.reset)
        self.encoder = Bidirectional(cell, embedding, size, 1, config.dropout)
        self.decoder = cell(embedding, size)
        self.start_state = nn.Linear(size, size)  # W_s
        self.keys = nn.Linear(2 * size, size)  # U_a
        self.query = nn.Linear(size, size, bias=False)  # W_a
        self.score = nn.Parameter(torch.zeros(size))  # v
        self.context = nn.Linear(2 * size, 3 * size, bias=False)  # C
        self.readout = Readout(config, 2 * size)

    def encode(self, source_BS: Tensor, lengths_B: Tensor) -> Memory:
        lengths_B = lengths_B.long()
        h_BSH = self.encoder(self.look_up(self.source, source_BS), lengths_B)
        from_right_BH = h_BSH[:, 0, self.config.hidden_size :]
        return Memory(self.keys(h_BSH), h_BSH, lengths_B, self.start_state(from_right_BH).tanh())

    def start(self, memory: Memory) -> Tensor:
        return memory.start_BH

    def run(self, memory: Memory, target_BT: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        y_TBE = self.embed_target(target_BT)
        states, contexts_TBE, _ = self._attend(memory, y_TBE, state)
        return self.readout(states[:-1], y_TBE, contexts_TBE), states[-1]

    def alignments(self, memory: Memory, target_BT: Tensor) -> Tensor:
        """The a_ij, [B, T, S], float32; 0 at padding."""
        y_TBE = self.embed_target(target_BT)
        return self._attend(memory, y_TBE, self.start(memory))[2].transpose(0, 1)

    def _attend(self, memory: Memory, y_TBE: Tensor, h_BH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gru = self.decoder
        recurrent = gru.gates.weight, gru.new.weight, gru.new.bias
        weights = Weights(self.query.weight, self.score, self.context.weight, *recurrent)
        source = Source(*memory[:3])
        return attending_gru_steps(gru.inputs(y_TBE), h_BH, source, weights)

    def initialize(self, generator: torch.Generator) -> AttentionTranslator:
        """Draw as `RecurrentTranslator` does, and v such that scores begin near N(0, 1)."""
        super().initialize(generator)
        nn.init.normal_(self.score, 0.0, len(self.score) ** -0.5, generator=generator)
        return self
