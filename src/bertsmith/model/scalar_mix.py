"""Layers weighted by learned numbers, for readers of a frozen encoder."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ScalarMix(nn.Module):
    """gamma * sum_k softmax(scores)_k * layer_k (Peters et al. 2018, ELMo, equation 1).

    It begins as the plain mean of the layers. The letter N stands for layers here.
    """

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.scores = nn.Parameter(torch.zeros(num_layers))  # [N], before the softmax
        self.gamma = nn.Parameter(torch.ones(()))

    def forward(self, layers_XNH: Tensor) -> Tensor:
        """[..., N, H] -> [..., H]; float16, as features are stored, is computed in float32."""
        weights_N = self.scores.softmax(dim=0)
        return self.gamma * torch.einsum("n,...nh->...h", weights_N, layers_XNH.to(weights_N.dtype))
