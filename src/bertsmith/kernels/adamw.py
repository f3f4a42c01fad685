"""AdamW over a stretch of one tensor in one pass: add the gradients of several replicas, clip, move.

PyTorch's operators would read or write each number of a weight 19 times for that, with two
replicas; a step of a large model on a CPU spends a quarter of its time so. Here it is 10 times, in
a block that stays in the core's cache, and the weight's bf16 copy is made on the way.

Gradients are a tuple of flat arrays, all float32 or all bf16, of which the sum is meant.
"""

from __future__ import annotations

import numpy as np

from bertsmith.kernels.numbers import load, store, vectorised

BLOCK = 2048  # numbers that are added before they are used
NO_COPY = np.zeros(0, np.uint16)


@vectorised
def add_block(gradients, start, total):
    """total = the sum of the gradients from `start` on."""
    first = gradients[0][start : start + len(total)]
    for place in range(len(total)):
        total[place] = load(first[place])
    for number in range(1, len(gradients)):
        other = gradients[number][start : start + len(total)]
        for place in range(len(total)):
            total[place] += load(other[place])


@vectorised
def sum_of_squares(gradients, start, stop):
    """Of the elements start..stop of the added gradients."""
    sums = np.empty(BLOCK, np.float32)
    whole = 0.0
    for begin in range(start, stop, BLOCK):
        block = sums[: min(BLOCK, stop - begin)]
        add_block(gradients, begin, block)
        part = np.float32(0)
        for place in range(len(block)):
            part += block[place] * block[place]
        whole += part
    return whole


@vectorised
def adamw_stretch(
    gradients, start, stop, factor, weight, first, second, copy, decay, beta1, beta2, size, root, eps
):
    """Move the elements start..stop of a weight (float32), its moments and its bf16 copy.

    With g = factor x the added gradients, m and v the moments `first` and `second`:

        m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
        w = decay w - size m / (root sqrt(v) + eps)

    All factors are float32. A copy of length 0 is none.
    """
    rest1, rest2 = np.float32(1) - beta1, np.float32(1) - beta2
    sums = np.empty(BLOCK, np.float32)
    for begin in range(start, stop, BLOCK):
        end = min(begin + BLOCK, stop)
        block = sums[: end - begin]
        add_block(gradients, begin, block)
        w, m, v = weight[begin:end], first[begin:end], second[begin:end]
        for place in range(len(block)):
            g = block[place] * factor
            m[place] = beta1 * m[place] + rest1 * g
            v[place] = beta2 * v[place] + rest2 * (g * g)
            step = np.divide(size * m[place], root * np.sqrt(v[place]) + eps)
            w[place] = decay * w[place] - step
        if len(copy):
            narrow = copy[begin:end]
            for place in range(len(block)):
                narrow[place] = store(w[place], narrow[place])
