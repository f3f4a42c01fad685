"""A model's first weights: random ones as in the paper, and a local start for small budgets.

From random weights attention is uniform, and a small model spends its first thousands of steps on
token counts alone, until some head has found its neighbours, one position at a time. The local
start gives it these: positions are sinusoids (Vaswani et al. 2017, section 3.5), so that "one to
the left" is the same rotation everywhere, and each head's queries are rotated by a distance of its
own: both ways, or to the left where a causal model sees nothing else. Every second head, of four or
more, looks for pieces like its own instead, which is how two texts are compared. Values pass
through attention scaled but unchanged: it gathers a mean of the tokens' vectors. Position 0 has no
sinusoid, so that [CLS] gathers from all over its row. All of it stays trainable.

Letters as in encoder.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bertsmith.model.encoder import Encoder, Layer
from bertsmith.model.recurrent import LSTM

Module = TypeVar("Module", bound=nn.Module)
CHUNK = 1 << 17  # numbers drawn at a time, which stay in the processor's cache
# scores before the softmax:
NEIGHBOUR_SCORE = 5.76  # of the neighbour, which gets about half of the attention
EQUAL_SCORE = 13.0  # of two equal pieces; 4 and 25 do not compare as well


class WithoutInitialization(TorchFunctionMode):
    """Leaves new modules unfilled, for `initialize` or a checkpoint to fill them."""

    # also on "meta", where random numbers would import torch's compiler
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", "") == "torch.nn.init":
            return None
        return func(*args, **(kwargs or {}))


def initialize(model: Module, std: float, generator: torch.Generator) -> Module:
    """Fill a model in place: weights truncated normal (cut at 2 std), biases 0, LayerNorm 1 and 0.

    As google-research/bert modeling.py; an LSTM's weights have the deviation of PyTorch's, 1 /
    sqrt(3 H), since with a small `std` hardly anything would pass its gates. Each weight has a
    generator of its own, seeded by `generator`, so that the numbers do not depend on the threads.
    All is on the CPU.
    """
    weights, stds, of_lstm = [], [], dict[nn.Module, float]()
    for module in model.modules():
        if isinstance(module, LSTM):  # comes before its parts
            own = 1 / math.sqrt(3 * module.state.in_features)
            of_lstm |= {module.inputs: own, module.state: own}
        elif isinstance(module, (nn.Linear, nn.Embedding)):
            weights.append(module.weight)
            stds.append(of_lstm.get(module, std))
        elif isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
    seeds = torch.randint(1 << 62, (len(weights),), generator=generator).tolist()
    threads = torch.get_num_threads()
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        list(pool.map(_truncated_normal, weights, seeds, stds))
    torch.set_num_threads(threads)  # threads that start later have the number that was set last
    return model


@torch.inference_mode()  # which lets any tensor be filled, also one made in inference mode
def _truncated_normal(weight: Tensor, seed: int, std: float) -> None:
    # PyTorch's `trunc_normal_` draws the whole tensor again for the numbers outside
    generator = torch.Generator().manual_seed(seed)
    for flat in weight.view(-1).split(CHUNK):
        flat.normal_(0.0, std, generator=generator)
        outside = (flat.abs() > 2 * std).nonzero().squeeze(1)
        while len(outside):
            drawn = torch.empty(len(outside)).normal_(0.0, std, generator=generator)
            flat[outside] = drawn
            outside = outside[drawn.abs() > 2 * std]


def local_start(encoder: Encoder, std: float, special_ids: Sequence[int] = ()) -> None:
    """Change an initialized encoder in place; `std` is that of its embedding tables.

    Heads with even numbers look at their neighbours, and read the dimensions that hold positions.
    The others look for pieces like their own, wherever they stand, and read dimensions without
    positions, where the segments are: so a model compares two texts before it has learned to.
    `special_ids`, pieces that are no words, have nothing there, so that they gather all of the row.
    A layer of fewer than four heads needs them all for its neighbours, and so does a causal model:
    the piece that it predicts next has no equal.
    """
    config = encoder.config
    pairs, heads = config.hidden_size // 2, config.num_heads
    matching = [] if config.causal or heads < 4 else list(range(1, heads, 2))
    neighbours = [head for head in range(heads) if head not in matching]
    # evenly between 0 and pi: positions are nearly orthogonal
    frequencies = math.pi * (torch.arange(pairs) + 0.5) / pairs
    owner = torch.arange(pairs) % heads  # the head that reads a pair of dimensions
    matched_H = torch.isin(owner, torch.tensor(matching)).repeat_interleave(2)
    # A layer's attention adds to a token its own vector times gain: after all layers a quarter of
    # its square is kept. With gain 1 in four layers nothing was learned (docs/design/lab.md).
    gain = min(1.0, math.sqrt(4 ** (1 / config.num_layers) - 1))
    size = config.hidden_size // heads
    # a model without segments has a score a third higher
    equal = scale_for(EQUAL_SCORE, size)
    with torch.no_grad():
        angles = torch.arange(config.max_positions)[:, None] * frequencies
        table = encoder.embeddings.position.weight
        table[:, 0::2] = math.sqrt(2) * std * angles.sin()
        table[:, 1::2] = math.sqrt(2) * std * angles.cos()
        table[0] = 0.0
        table[:, matched_H] = 0.0
        for piece in special_ids if matching else ():
            encoder.embeddings.token.weight[piece, matched_H] = 0.0
        # what half a row shares would turn its queries away from the neighbour, and the others to
        # their own text: the former have no segments, the latter pass them on and do not read them
        unread = torch.zeros(0, int(matched_H.sum()))
        if isinstance(segments := encoder.embeddings.segment, nn.Embedding):
            segments.weight[:, ~matched_H] = 0.0
            unread = orthonormal(segments.weight[:, matched_H].T).T
        for number, layer in enumerate(encoder.layers):
            assert isinstance(layer, Layer)
            query, key, value = layer.qkv.weight.chunk(3)
            value_basis = orthonormal(value)
            value.copy_(gain**0.5 * value_basis)
            layer.attention_output.weight.copy_(gain**0.5 * value_basis.T)
            basis = orthonormal(key[: int(matched_H.sum()), matched_H])
            basis -= basis @ unread.T @ unread
            for place, head in enumerate(matching):
                rows = slice(head * size, (head + 1) * size)
                query[rows] = 0.0
                query[rows, matched_H] = equal * basis[place * size : (place + 1) * size]
                key[rows] = query[rows]
            for place, head in enumerate(neighbours):
                index = number * len(neighbours) + place
                distance = (index // 2 + 1) * (1 if index % 2 else -1)  # -1, +1, -2, +2, ...
                if config.causal:
                    distance = -index - 1
                rows = slice(head * size, (head + 1) * size)
                read = torch.arange(size // 2) * heads + head
                query[rows], key[rows] = rotated_head(read, frequencies, distance)
            if number == 0 and not isinstance(encoder.embeddings.norm, nn.LayerNorm):
                # a GPT's first layer reads sums of two tables of `std`, which nothing normalizes
                query /= math.sqrt(2) * std
                key /= math.sqrt(2) * std


def orthonormal(weight: Tensor) -> Tensor:
    """Orthonormal columns that span those of `weight`: of a square one rows, too."""
    basis, _ = torch.linalg.qr(weight.double())  # float64, to round alike on all processors
    return basis.float()


def rotated_head(read: Tensor, frequencies: Tensor, distance: int) -> tuple[Tensor, Tensor]:
    """Query and key weights [D, H] of a head that looks `distance` positions to the right.

    `read` are its D / 2 pairs of dimensions. The key of position j is (sin wj, cos wj), the query
    of position i that of i + distance.

    >>> frequencies = math.pi * (torch.arange(4) + 0.5) / 4
    >>> query, key = rotated_head(torch.arange(4), frequencies, 2)
    >>> angles = torch.arange(6)[:, None] * frequencies
    >>> positions = torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1)  # [6, H]
    >>> ((positions @ query.T) @ (positions @ key.T).T).argmax(dim=1)[:4].tolist()
    [2, 3, 4, 5]
    """
    pairs = torch.arange(len(read))
    sines, cosines = 2 * read, 2 * read + 1  # columns
    angle = frequencies[read] * distance
    query = torch.zeros(2 * len(read), 2 * len(frequencies))
    key = torch.zeros_like(query)
    query[2 * pairs, sines], query[2 * pairs, cosines] = angle.cos(), angle.sin()
    query[2 * pairs + 1, cosines], query[2 * pairs + 1, sines] = angle.cos(), -angle.sin()
    key[2 * pairs, sines] = key[2 * pairs + 1, cosines] = 1.0
    scale = scale_for(NEIGHBOUR_SCORE, len(query))
    return scale * query, scale * key


def scale_for(score: float, head_size: int) -> float:
    """The scale of queries and keys that gives a score, in a head of any size.

    A match scores scale^2 x (head_size / 2) / sqrt(head_size): half of the square of a vector is
    its piece's, half its position's and its segment's.

    >>> scale_for(5.76, 64), round(scale_for(5.76, 32), 3)
    (1.2, 1.427)
    """
    return math.sqrt(score / (head_size / 2) * math.sqrt(head_size))
