"""The floating-point operations of a training step: the yardstick behind "share of peak"."""

from __future__ import annotations

from bertsmith.model.encoder import ModelConfig


def training_operations(
    config: ModelConfig, rows: int, length: int, outputs: int, predictions: int
) -> float:
    """Operations of matrix products, forward and backward, for `rows` rows of `length` tokens.

    6 x weights used x tokens (2 forward, 4 backward) plus the attention products. `outputs` is
    the number of positions in a row at which the last layer is computed, `predictions` the number
    at which the masked-LM head is (0: no such head). The poolers' few operations are left out.

    >>> tiny = ModelConfig(1000, hidden_size=128, num_layers=2, num_heads=2, intermediate_size=512)
    >>> training_operations(tiny, rows=1, length=128, outputs=128, predictions=0) / 1e6
    352.321536
    """
    size, wide = config.hidden_size, config.intermediate_size
    feed_forward = (3 if config.gated else 2) * size * wide
    per_query = 2 * size * size + feed_forward  # query, attention output, feed-forward
    per_key = 2 * size * size  # key and value
    weights = 0
    attention = 0
    for layer in range(config.num_layers):
        queries = outputs if layer == config.num_layers - 1 else length
        weights += queries * per_query + length * per_key
        attention += 2 * queries * length * size  # scores, and their product with the values
    weights += predictions * (size * size + size * config.vocab_size)
    return 6.0 * rows * (weights + attention)
