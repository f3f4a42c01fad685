"""Translation by two recurrent networks without attention: all of a source goes through one vector.

Two forms, of two papers. W, U, V, C, O are weights; biases are left out.

"gru": Cho et al. 2014 (arXiv 1406.1078v3, appendix A), h of a GRU (model/recurrent.py):
    encoder   h_j = GRU(x_j, h_(j-1)),  c = tanh(V h_S)
    decoder   h'_0 = tanh(V' c),  h'_i = GRU(W y_(i-1) + C c, h'_(i-1))
    output    t_i = max of pairs of O_h h'_i + O_y y_(i-1) + O_c c
The paper has 1,000 units, embeddings of 100 and 500 pairs, AdaDelta, phrases as data. Its decoder
resets after the product, U h' + C c; here C c is in the inputs of all gates, as in Bahdanau et al.

"lstm": Sutskever et al. 2014 (arXiv 1409.3215): layers of LSTMs (model/recurrent.py) over one
another; the decoder's begin at the encoder's last states and cells, the output is its top state.
The paper has 4 layers of 1,000 units, embeddings of 1,000, weights first uniform up to 0.08,
gradients clipped at 5, and reads the source reversed (section 3.3): a switch of its own here.

Given the target's words, the decoder runs over all steps in one call a layer.

Letters: B rows, S source positions, T target positions, E size of embeddings, H size of states,
L layers, G the gates of a GRU (3 H), V target vocabulary.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor, nn

from bertsmith.base.settings import check_bounds
from bertsmith.experiments.lineage.settings import RNNShape
from bertsmith.model.config import Size
from bertsmith.model.kernels.elementwise import Dropout
from bertsmith.model.recurrent import GRU, LSTM
from bertsmith.model.variants import reversal


@dataclass(frozen=True, kw_only=True)
class Tables:
    """Sizes of the vocabularies. Errors: ValueError for two that shall share a table."""

    source_vocab_size: Annotated[int, Size]
    target_vocab_size: Annotated[int, Size]
    shared: bool = True  # one vocabulary and one table for source, target and output

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.shared and self.source_vocab_size != self.target_vocab_size:
            sizes = f"{self.source_vocab_size} source and {self.target_vocab_size} target pieces"
            raise ValueError(f"{sizes} cannot share one table: make one joint vocabulary")


@dataclass(frozen=True, kw_only=True)
class RNNConfig(Tables, RNNShape):
    """The shape with its vocabularies."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.form == "lstm" and self.shared and self.embedding_size != self.hidden_size:
            raise ValueError(
                f"`embedding_size={self.embedding_size}` and `hidden_size={self.hidden_size}` with "
                "`form='lstm'`: make them equal, since one table serves for input and output, or "
                "give `separate=True`"
            )


class RecurrentTranslator(nn.Module):
    """The tables of tokens and the output layer; decoding, by steps and whole, with `run`."""

    def __init__(self, config: Any, output_size: int) -> None:
        super().__init__()
        self.config = config
        size, pieces = config.embedding_size, config.target_vocab_size
        self.source = nn.Embedding(config.source_vocab_size, size)
        self.target = None if config.shared else nn.Embedding(pieces, size)
        self.output = None if config.shared else nn.Linear(output_size, pieces, bias=False)
        self.output_bias = nn.Parameter(torch.zeros(pieces))
        self.dropout = Dropout(config.dropout)

    @property
    def output_weight(self) -> Tensor:
        """[V, size of the hidden states]."""
        return self.source.weight if self.output is None else self.output.weight

    def embed_target(self, target_BT: Tensor) -> Tensor:
        """[T, B, E]."""
        table = self.source if self.target is None else self.target
        return self.dropout(self.look_up(table, target_BT.t()))

    def look_up(self, table: nn.Embedding, ids: Tensor) -> Tensor:
        """Embeddings of tokens, times sqrt(E) as in the Transformer: the rows of a table that is
        also the output are too short to move a gate."""
        return table(ids) * math.sqrt(table.embedding_dim)

    @abstractmethod
    def encode(self, source_BS: Tensor, lengths_B: Tensor) -> Any:
        """The source as the decoder reads it: tensors whose first dimension is B."""

    @abstractmethod
    def start(self, memory: Any) -> Any:
        """The decoder's state before the first step: tensors whose first dimension is B."""

    @abstractmethod
    def run(self, memory: Any, target_BT: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Hidden states [B, T, .] before the output layer, and the state after the last step."""

    def decode(self, memory: Any, target_BT: Tensor) -> Tensor:
        """Hidden states [B, T, .] of [bos] y_1 .. y_(T-1); logits are these times the output."""
        return self.run(memory, target_BT, self.start(memory))[0]

    def step(self, memory: Any, state: Any, token_B: Tensor) -> tuple[Tensor, Any]:
        """Hidden states [B, .] and the next state."""
        hidden_BTE, state = self.run(memory, token_B[:, None], state)
        return hidden_BTE[:, 0], state

    def alignments(self, memory: Any, target_BT: Tensor) -> Tensor | None:
        """None: nothing is attended to."""
        return None

    def initialize(self, generator: torch.Generator) -> RecurrentTranslator:
        """Recurrent weights orthogonal, as Bahdanau et al.; others keep the size of their input.

        The papers' own N(0, 0.01) for the rest learns little within few epochs. Forget gates of
        LSTMs begin open (bias 1).
        """
        square = partial(nn.init.orthogonal_, generator=generator)
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                std = module.embedding_dim**-0.5  # logits of a shared table begin near N(0, 1)
                nn.init.normal_(module.weight, 0.0, std, generator=generator)
            elif isinstance(module, nn.Linear):
                limit = math.sqrt(3 / module.in_features)
                nn.init.uniform_(module.weight, -limit, limit, generator=generator)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for module in self.modules():
            if isinstance(module, LSTM):
                size = module.state.in_features
                nn.init.ones_(module.inputs.bias[size : 2 * size])
                list(map(square, module.state.weight.split(size)))
            elif isinstance(module, GRU):
                list(map(square, (*module.gates.weight.chunk(2), module.new.weight)))
        nn.init.zeros_(self.output_bias)
        return self


class Readout(nn.Module):
    """The larger one of each pair of O_h h + O_y y + O_c c, and dropout (maxout)."""

    def __init__(self, config: Any, context_size: int) -> None:
        super().__init__()
        size = config.embedding_size
        self.state = nn.Linear(config.hidden_size, 2 * size)
        self.token = nn.Linear(size, 2 * size, bias=False)
        self.context = nn.Linear(context_size, 2 * size, bias=False)
        self.dropout = Dropout(config.dropout)

    def forward(self, h_TBH: Tensor, y_TBE: Tensor, context: Tensor) -> Tensor:
        """[B, T, E]; the context is that of every step or of all."""
        pairs = self.state(h_TBH) + self.token(y_TBE) + self.context(context)
        return self.dropout(torch.maximum(*pairs.chunk(2, dim=-1))).transpose(0, 1)


def rnn(config: RNNConfig) -> RecurrentTranslator:
    return {"gru": GRUTranslator, "lstm": LSTMTranslator}[config.form](config)


class StackedTranslator(RecurrentTranslator):
    """Layers over the source, and where its last word stands."""

    def words(self, source_BS: Tensor, lengths_B: Tensor) -> tuple[Tensor, Any]:
        """Embeddings [S, B, E] in the order of reading; the index of the last word's states."""
        if self.config.reversed_source:
            order_BS = reversal(lengths_B, source_BS.shape[1])
            source_BS = source_BS.gather(1, order_BS)
        rows_B = torch.arange(len(lengths_B), device=lengths_B.device)
        return self.dropout(self.look_up(self.source, source_BS.t())), (
            lengths_B.long() - 1,
            rows_B,
        )


class GRUTranslator(StackedTranslator):
    """Cho et al. 2014. Memory: the context c [B, H]; state: that of the decoder [B, L, H]."""

    def __init__(self, config: RNNConfig) -> None:
        super().__init__(config, config.embedding_size)
        size, layers = config.hidden_size, config.num_layers
        sizes = [config.embedding_size, *[size] * (layers - 1)]
        self.encoder = nn.ModuleList(GRU(wide, size, config.reset) for wide in sizes)
        self.decoder = nn.ModuleList(GRU(wide, size, config.reset) for wide in sizes)
        self.summary = nn.Linear(size, size)  # V
        self.starts = nn.Linear(size, layers * size)  # V'
        self.context = nn.Linear(size, 3 * size, bias=False)  # C
        self.readout = Readout(config, size)

    def encode(self, source_BS: Tensor, lengths_B: Tensor) -> Tensor:
        x_SBH, last = self.words(source_BS, lengths_B)
        for number, layer in enumerate(self.encoder):
            x_SBH = layer(self.dropout(x_SBH) if number else x_SBH)
        return self.summary(x_SBH[last]).tanh()

    def start(self, memory: Tensor) -> Tensor:
        return self.starts(memory).tanh().unflatten(1, (self.config.num_layers, -1))

    def run(self, memory: Tensor, target_BT: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        y_TBE = x_TBH = self.embed_target(target_BT)
        context_BG = self.context(memory)
        last = []
        for number, layer in enumerate(self.decoder):
            assert isinstance(layer, GRU)
            x_TBG = layer.inputs(self.dropout(x_TBH) if number else x_TBH)
            x_TBH = layer.run(x_TBG if number else x_TBG + context_BG, state[:, number])
            last.append(x_TBH[-1])
        return self.readout(x_TBH, y_TBE, memory), torch.stack(last, dim=1)


class LSTMState(NamedTuple):
    """States of all layers: the source as `LSTMTranslator` reads it, and its decoder's."""

    h_BLH: Tensor
    c_BLH: Tensor


class LSTMTranslator(StackedTranslator):
    """Sutskever et al. 2014."""

    def __init__(self, config: RNNConfig) -> None:
        super().__init__(config, config.hidden_size)
        size, layers = config.hidden_size, config.num_layers
        sizes = [config.embedding_size, *[size] * (layers - 1)]
        self.encoder = nn.ModuleList(LSTM(wide, size) for wide in sizes)
        self.decoder = nn.ModuleList(LSTM(wide, size) for wide in sizes)

    def encode(self, source_BS: Tensor, lengths_B: Tensor) -> LSTMState:
        x_SBE, last = self.words(source_BS, lengths_B)
        zeros_BLH = x_SBE.new_zeros(len(lengths_B), self.config.num_layers, self.config.hidden_size)
        return self._through(self.encoder, x_SBE, LSTMState(zeros_BLH, zeros_BLH), last)[1]

    def start(self, memory: LSTMState) -> LSTMState:
        return memory

    def run(
        self, memory: LSTMState, target_BT: Tensor, state: LSTMState
    ) -> tuple[Tensor, LSTMState]:
        x_TBH, state = self._through(self.decoder, self.embed_target(target_BT), state, -1)
        return self.dropout(x_TBH).transpose(0, 1), state

    def _through(
        self, layers: nn.ModuleList, x_SBI: Tensor, state: LSTMState, last: Any
    ) -> tuple[Tensor, LSTMState]:
        """The top states, and all layers' at the index `last`."""
        states, cells = [], []
        for number, layer in enumerate(layers):
            assert isinstance(layer, LSTM)
            before = state.h_BLH[:, number], state.c_BLH[:, number]
            x_SBI, cells_SBH = layer.run(self.dropout(x_SBI) if number else x_SBI, *before)
            states.append(x_SBI[last])
            cells.append(cells_SBH[last])
        return x_SBI, LSTMState(torch.stack(states, dim=1), torch.stack(cells, dim=1))
