"""The steps of an attending GRU against their equations in NumPy, and against float64."""

import numpy as np
import pytest
import torch

from bertsmith.model.kernels.additive_attention import Source, Weights, attending_gru_steps

from .harness import assert_as_float64, assert_near, run

LENGTHS = torch.tensor([5, 1, 7])
B, T, S, H, A, E = 3, 4, 7, 10, 24, 12
SIZES = [(T, B, 3 * H), (B, H), (B, S, A), (B, S, E), (A, H), (A,), (3 * H, E), (2 * H, H), (H, H)]


def tensors(reset, steps=T):
    generator = torch.Generator().manual_seed(steps)
    sizes = [(steps, *SIZES[0][1:]), *SIZES[1:], *([(H,)] if reset == "after" else [])]
    return [0.5 * torch.randn(size, generator=generator) for size in sizes]


def steps_of(x, h, keys, values, query, score, context, gates, new, bias=None):
    source = Source(keys, values, LENGTHS)
    return attending_gru_steps(x, h, source, Weights(query, score, context, gates, new, bias))


def states_and_contexts(*parts):
    states, contexts, _ = steps_of(*parts)
    return torch.cat([states.flatten(), contexts.flatten()])


def by_hand(x, h, keys, values, query, score, context, gates, new, bias=None):
    """A row and a position at a time."""
    states, contexts, shares = [h], [], []
    for x_t in x:
        rows = []
        for b, count in enumerate(LENGTHS.tolist()):
            e = [score @ np.tanh(query @ h[b] + keys[b, j]) for j in range(count)]
            a = np.exp(e) / np.exp(e).sum()
            c = sum(a[j] * values[b, j] for j in range(count))
            p, q, d = np.split(x_t[b] + context @ c, 3)
            r, z = (1 / (1 + np.exp(-v)) for v in np.split(np.r_[p, q] + gates @ h[b], 2))
            inner = new @ (r * h[b]) if bias is None else r * (new @ h[b] + bias)
            state = z * h[b] + (1 - z) * np.tanh(d + inner)
            rows.append((state, c, np.pad(a, (0, S - count))))
        for kept, part in zip((states, contexts, shares), zip(*rows, strict=True), strict=True):
            kept.append(np.stack(part))
        h = states[-1]
    return [torch.tensor(np.stack(part)).float() for part in (states, contexts, shares)]


@pytest.mark.parametrize("reset", ["before", "after"])
@pytest.mark.parametrize("steps", [1, T])
def test_the_equations(reset, steps):
    parts = tensors(reset, steps)
    wanted = by_hand(*(part.double().numpy() for part in parts))
    for precision in (torch.float32, torch.float64):  # the compiled passes, PyTorch's operators
        found = [part.float() for part in steps_of(*(part.to(precision) for part in parts))]
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("reset", ["before", "after"])
def test_gradients_are_those_of_float64(reset):
    parts = tensors(reset)
    above = torch.randn((T + 1) * B * H + T * B * E, generator=torch.Generator().manual_seed(1))
    assert_as_float64(1e-5, states_and_contexts, states_and_contexts, parts, above)


def test_gradients_of_the_operators_by_differences():
    parts = [part.double().requires_grad_() for part in tensors("before", 2)]
    assert torch.autograd.gradcheck(states_and_contexts, parts, fast_mode=True)


def test_bf16_is_near_float32():
    parts = tensors("before")
    above = torch.randn((T + 1) * B * H + T * B * E, generator=torch.Generator().manual_seed(1))

    def low(x, h, keys, values, *weights):
        x, keys, values = (part.bfloat16() for part in (x, keys, values))
        return states_and_contexts(x, h, keys, values, *weights).float()

    # bf16 keeps 8 bits, and errors go through four steps
    assert_near(run(low, parts, above), run(states_and_contexts, parts, above), 0.03)


def test_what_is_padding_changes_nothing():
    parts, is_real = tensors("before"), torch.arange(S) < LENGTHS[:, None]
    wanted = states_and_contexts(*parts)
    parts[2:4] = (part.masked_fill(~is_real[..., None], 9.0) for part in parts[2:4])
    assert torch.equal(states_and_contexts(*parts), wanted)
