"""ELMo's bidirectional language model (Peters et al. 2018, arXiv 1802.05365).

A word's bytes go through filters of several widths, highways and a projection. Two stacks of LSTMs
read the words, one from the left and one from the right. They share the word's vector, and in
pre-training the softmax, and nothing else: neither sees what the other has read.

Letters: N words, K = 50 numbers of a word, E size of a byte's vector, F filters; T texts of W words
with both borders; P projected size, C cells, L layers; in an LSTM S steps of B rows, inputs I.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from bertsmith.model.config import ElmoConfig
from bertsmith.model.kernels.elementwise import Dropout
from bertsmith.model.kernels.recurrence import projected_lstm_steps
from bertsmith.model.variants import reversal

# numbers of what is no byte; a byte has its value + 1, and padding of rows 0
SENTENCE_BEGIN, SENTENCE_END, WORD_BEGIN, WORD_END, WORD_PAD = 257, 258, 259, 260, 261
MOST_BYTES = 48  # of a word; its two borders stand around them
WORD_NUMBERS = MOST_BYTES + 2
WORDS_AT_ONCE = 256  # through the filters without gradients: 50 MB at the original size


class TokenLayer(nn.Module):
    """The vector of a word from its bytes: [N, K] -> [N, P]."""

    def __init__(self, config: ElmoConfig) -> None:
        super().__init__()
        size, filters = config.table_size, sum(config.filters)
        self.token = nn.Embedding(config.vocab_size, size)
        self.convolutions = nn.ModuleList(
            nn.Linear(width * size, count) for width, count in enumerate(config.filters, start=1)
        )
        # the gate of what is transformed, then what is transformed
        self.highways = nn.ModuleList(
            nn.Linear(filters, 2 * filters) for _ in range(config.num_highways)
        )
        self.project = nn.Linear(filters, config.projection_size)

    def forward(self, words_NK: Tensor) -> Tensor:
        # all windows of padding alone are alike: one of them is enough
        ends = (words_NK == WORD_END).nonzero()[:, 1]
        longest = int(ends.max()) + 1 if len(ends) else 0
        words_NK = words_NK[:, : longest + len(self.convolutions)]
        if torch.is_grad_enabled():
            return self._vectors(words_NK)
        return torch.cat([self._vectors(part) for part in words_NK.split(WORDS_AT_ONCE)])

    def _vectors(self, words_NK: Tensor) -> Tensor:
        x_NKE = self.token(words_NK)
        found = []
        for width, convolution in enumerate(self.convolutions, start=1):
            windows = x_NKE.unfold(1, width, 1).transpose(2, 3).flatten(2)
            found.append(convolution(windows).max(dim=1).values)
        x_NF = torch.cat(found, dim=1).relu()
        for highway in self.highways:
            gate_NF, transformed_NF = highway(x_NF).chunk(2, dim=1)
            x_NF = torch.lerp(x_NF, transformed_NF.relu(), gate_NF.sigmoid())
        return self.project(x_NF)


class LSTMState(NamedTuple):
    """The state after a step: what an LSTM has put out, and its cells."""

    output_BP: Tensor
    cells_BC: Tensor


class ProjectedLSTM(nn.Module):
    """[S, B, I] -> [S, B, P]: an LSTM with projected outputs (Sak et al. 2014), clipped.

    With i, f, g, o = W x_s + U h_(s-1) + b in four parts, in PyTorch's order:
    c_s = clip(sigmoid(f + 1) c_(s-1) + sigmoid(i) tanh(g))
    h_s = clip(V sigmoid(o) tanh(c_s))
    The stored bias is without the 1.
    """

    def __init__(self, config: ElmoConfig) -> None:
        super().__init__()
        size, cells = config.projection_size, config.intermediate_size
        self.cell_clip, self.projection_clip = config.cell_clip, config.projection_clip
        self.inputs = nn.Linear(size, 4 * cells)
        self.state = nn.Linear(size, 4 * cells, bias=False)
        self.project = nn.Linear(cells, size, bias=False)

    def zeros(self, rows: int) -> LSTMState:
        """The state before the first step."""
        new = self.project.weight.new_zeros
        return LSTMState(new(rows, self.project.out_features), new(rows, self.project.in_features))

    def forward(
        self, x_SBI: Tensor, state: LSTMState, lengths_B: Tensor | None = None
    ) -> tuple[Tensor, LSTMState]:
        """Outputs, and the state after the last of each row's steps, without gradient."""
        weights = self.state.weight, self.project.weight
        clips = self.cell_clip, self.projection_clip
        outputs_SBP, cells_SBC = projected_lstm_steps(self.inputs(x_SBI), weights, state, clips)
        last_B = x_SBI.shape[1] * [-1] if lengths_B is None else lengths_B - 1
        rows_B = torch.arange(x_SBI.shape[1], device=x_SBI.device)
        last = LSTMState(outputs_SBP.detach()[last_B, rows_B].float(), cells_SBC[last_B, rows_B])
        return outputs_SBP, last


class Layer(nn.Module):
    """One layer: an LSTM from the left, and one from the right."""

    def __init__(self, config: ElmoConfig) -> None:
        super().__init__()
        self.ahead, self.back = ProjectedLSTM(config), ProjectedLSTM(config)


class Elmo(nn.Module):
    """The bidirectional language model without its softmax.

    `stateful` as released: a text begins in the state in which the one before it in the same row
    has ended, so that the same text has other vectors each time. Otherwise it begins in zeros.
    """

    def __init__(self, config: ElmoConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = TokenLayer(config)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.dropout = Dropout(config.dropout)
        self.stateful = False
        self._carried: dict[str, list[LSTMState]] = {}

    def forward(self, words_NK: Tensor, texts_TW: Tensor, lengths_T: Tensor) -> list[Tensor]:
        """The L + 1 layers [T, W, 2P] of texts, which name their words by number; what is after
        their lengths means nothing. Layer 0 is the word's vector, twice."""
        x_WTP = self.embeddings(words_NK)[texts_TW.t()]
        places_WT1 = reversal(lengths_T, len(x_WTP)).t()[:, :, None]

        def turned(x_WTP: Tensor) -> Tensor:
            return x_WTP.gather(0, places_WT1.expand_as(x_WTP))

        ahead = self._read("ahead", x_WTP, lengths_T)
        back = map(turned, self._read("back", turned(x_WTP), lengths_T))
        pairs = [(x_WTP, x_WTP), *zip(ahead, back, strict=True)]
        return [torch.cat(pair, dim=2).transpose(0, 1) for pair in pairs]

    def _read(self, direction: str, x_SBP: Tensor, lengths_B: Tensor) -> list[Tensor]:
        if not self.stateful:
            return self.read(direction, x_SBP, self.zeros(direction, x_SBP.shape[1]), lengths_B)[0]
        rows, carried = x_SBP.shape[1], self._carried.get(direction)
        states = self.zeros(direction, rows)
        for state, earlier in zip(states, carried or [], strict=False):
            for part, old in zip(state, earlier, strict=True):
                part[: len(old)] = old[:rows]
        outputs, ended = self.read(direction, x_SBP, states, lengths_B)
        if carried:  # rows that this batch does not have wait for one that has them
            ended = [
                LSTMState(*(torch.cat([new, old[rows:]]) for new, old in zip(*pair, strict=True)))
                for pair in zip(ended, carried, strict=True)
            ]
        self._carried[direction] = ended
        return outputs

    def zeros(self, direction: str, rows: int) -> list[LSTMState]:
        """The states of a direction before the first word."""
        return [getattr(layer, direction).zeros(rows) for layer in self.layers]

    def read(
        self,
        direction: str,
        x_SBP: Tensor,
        states: list[LSTMState],
        lengths_B: Tensor | None = None,
    ) -> tuple[list[Tensor], list[LSTMState]]:
        """Read word vectors in the order in which the direction "ahead" or "back" meets them.

        Returns its L outputs [S, B, P], and its states at the end.
        """
        outputs, ended = [], []
        for number, (layer, state) in enumerate(zip(self.layers, states, strict=True)):
            x_SBP = self.dropout(x_SBP)
            y_SBP, last = getattr(layer, direction)(x_SBP, state, lengths_B)
            x_SBP = y_SBP + x_SBP if number and self.config.skip_connections else y_SBP
            outputs.append(x_SBP)
            ended.append(last)
        return outputs, ended


class ElmoLM(nn.Module):
    """ELMo with the softmax over V words that its directions share, as it is trained."""

    def __init__(self, config: ElmoConfig, num_words: int) -> None:
        super().__init__()
        self.config = config
        self.encoder = Elmo(config)
        self.output = nn.Linear(config.projection_size, num_words)

    def initialize(self, generator: torch.Generator) -> ElmoLM:
        """Weights truncated normal by their inputs, biases 0, but for the highways' gates: at -2
        they begin by letting through (as released)."""
        with torch.no_grad():
            for module in self.modules():
                if isinstance(module, nn.Linear):
                    std = module.in_features**-0.5
                    nn.init.trunc_normal_(
                        module.weight, 0.0, std, -2 * std, 2 * std, generator=generator
                    )
                    if module.bias is not None:
                        module.bias.zero_()
            nn.init.uniform_(self.encoder.embeddings.token.weight, -1.0, 1.0, generator=generator)
            for highway in self.encoder.embeddings.highways:
                assert isinstance(highway, nn.Linear)
                highway.bias[: len(highway.bias) // 2] = -2.0
        return self
