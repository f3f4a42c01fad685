"""AdamW over a stretch of one tensor in one pass: gradients of replicas added, clipped, applied.

With two replicas in bf16 PyTorch's operators move 76 bytes for each weight in a step: casts of
weights and gradients 24, the sum 12, norm and clipping 12, AdamW 28. Here it is 34: norm 4, the
rest 30, in blocks that stay in the core's cache; the weight's bf16 copy is made on the way.

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
def adamw_stretch(gradients, start, stop, weight, first, second, copy, factors):
    """Move the elements start..stop of a weight (float32), its moments and its bf16 copy.

    With g = clip x the added gradients, m and v the moments `first` and `second`:

        m = beta1 m + rest1 g;  v = beta2 v + rest2 g^2
        w = decay w - size m / (root sqrt(v) + eps)

    The factors are float32, in the order below. A copy of length 0 is none.
    """
    clip, beta1, rest1, beta2, rest2 = factors[0], factors[1], factors[2], factors[3], factors[4]
    decay, size, root, eps = factors[5], factors[6], factors[7], factors[8]
    sums = np.empty(BLOCK, np.float32)
    for begin in range(start, stop, BLOCK):
        end = min(begin + BLOCK, stop)
        block = sums[: end - begin]
        add_block(gradients, begin, block)
        w, m, v = weight[begin:end], first[begin:end], second[begin:end]
        for place in range(len(block)):
            g = block[place] * clip
            m[place] = beta1 * m[place] + rest1 * g
            v[place] = beta2 * v[place] + rest2 * (g * g)
            # np.divide: the plain sign looks for zeros, one by one
            step = np.divide(size * m[place], root * np.sqrt(v[place]) + eps)
            w[place] = decay * w[place] - step
        if len(copy):
            narrow = copy[begin:end]
            for place in range(len(block)):
                narrow[place] = store(w[place], narrow[place])
