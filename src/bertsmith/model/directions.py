"""Left-to-right and right-to-left encoders side by side, as in ELMo (paper section 5.1).

Two causal encoders, of which the second reads each row backwards. They share the token table (and
in pre-training the output layer), as in Peters et al. 2018, and nothing else: no state of one
depends on a token that only the other sees. A token's state is [left; right], H in all.

Letters as in encoder.py.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bertsmith.model.config import ModelConfig
from bertsmith.model.encoder import Encoder
from bertsmith.model.variants import at_columns, reversal, row_lengths


class TokenTable(nn.Module):
    """The token embedding of both directions, where an `Encoder` has its own."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocab_size, config.table_size)


class TwoDirections(nn.Module):
    """Token ids in, [left; right] of each position out; in place of an `Encoder`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = TokenTable(config)
        self.left, self.right = Encoder(config.one_direction), Encoder(config.one_direction)
        for encoder in (self.left, self.right):
            encoder.embeddings.register_module("token", nn.Identity())  # it is given vectors

    def forward(
        self,
        ids_BS: Tensor,
        types_BS: Tensor | None = None,
        lengths_B: Tensor | None = None,
        read_BQ: Tensor | None = None,
        all_layers: bool = False,
    ) -> Tensor | list[Tensor]:
        """Hidden states [B, S, H] as of an `Encoder`, also of `all_layers`.

        `read_BQ` asks for [B, Q, H] after so many tokens were read besides the first: at n - 1 a
        row of n tokens gives the left's state of its last token and the right's of its first.
        """
        if types_BS is None:
            types_BS = torch.zeros_like(ids_BS)
        backwards_BS = reversal(row_lengths(ids_BS, lengths_B), ids_BS.shape[1])
        x_BSH = self.embeddings.token(ids_BS)
        how = lengths_B, read_BQ, all_layers
        left = self.left(x_BSH, types_BS, *how)
        right = self.right(at_columns(x_BSH, backwards_BS), types_BS.gather(1, backwards_BS), *how)
        if read_BQ is not None:
            return torch.cat([left, right], dim=2)
        pairs = zip(left, right, strict=True) if all_layers else [(left, right)]
        states = [torch.cat([one, at_columns(other, backwards_BS)], dim=2) for one, other in pairs]
        return states if all_layers else states[0]


AnyEncoder = Encoder | TwoDirections


def encoder_for(config: ModelConfig) -> AnyEncoder:
    """The encoder of a configuration, without weights that mean anything."""
    return TwoDirections(config) if config.directions == 2 else Encoder(config)


def encoders(encoder: AnyEncoder) -> list[Encoder]:
    """The encoder of each direction; one without directions is its own."""
    return [encoder.left, encoder.right] if isinstance(encoder, TwoDirections) else [encoder]


def ends(states_BSH: Tensor, lengths_B: Tensor) -> Tensor:
    """The halves of [left; right] where each has read the whole row: [B, H].

    >>> states = torch.tensor([[[1.0, 2.0], [3.0, 4.0], [0.0, 0.0]]])
    >>> ends(states, torch.tensor([2])).tolist()
    [[3.0, 2.0]]
    """
    left_BSG, right_BSG = states_BSH.chunk(2, dim=2)
    left_B1G = at_columns(left_BSG, lengths_B[:, None] - 1)
    return torch.cat([left_B1G[:, 0], right_BSG[:, 0]], dim=1)


def around(states_BSH: Tensor) -> Tensor:
    """The states beside each token, which predict it: at p those for the token p + 1.

    They are the left's of p and the right's of p + 2; [left; right] of p: [B, S, H] -> [B, S, H].

    >>> states = torch.tensor([[[1.0, -1.0], [2.0, -2.0], [3.0, -3.0]]])
    >>> around(states)[0, 0].tolist()  # of the second token, from its neighbours
    [1.0, -3.0]
    """
    left_BSG, right_BSG = states_BSH.chunk(2, dim=2)
    return torch.cat([left_BSG, right_BSG.roll(-2, dims=1)], dim=2)
