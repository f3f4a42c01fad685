"""The optimizers by name, which weights they decay, and their state as named tensors."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, _foreach_add_, _foreach_mul_, _foreach_norm, nn  # pyright: ignore
from torch.optim import AdamW, Optimizer
from torch.optim.adamw import adamw

from bertsmith.training.ranks import like

LAYER = re.compile(r"encoder\.(?:left\.|right\.)?layers\.(\d+)\.")
OPTIMIZERS = ("adamw", "paper-adam", "lamb", "muon")
BETAS, EPS = (0.9, 0.999), 1e-6  # the paper's
READER_RATE = 10.0  # of a BiLSTM that begins at random weights over a model that does not
MOMENTUM = 0.95  # of Muon
MUON_RATE = 2.0  # times that of AdamW
SETTLED_STEP = 1e9  # beta ** SETTLED_STEP is 0, and float32 cannot count on from here


class Eager(Optimizer):
    """An optimizer that does not load PyTorch's compiler, a second and a half of a command's start.

    PyTorch wraps these two to keep its compiler out of them, and loads it for that at first call.
    """

    add_param_group = getattr(Optimizer.add_param_group, "__wrapped__", Optimizer.add_param_group)
    zero_grad = getattr(Optimizer.zero_grad, "__wrapped__", Optimizer.zero_grad)


class EagerAdamW(Eager, AdamW):
    """AdamW, as the above."""


class PaperAdam(EagerAdamW):
    """Adam without bias correction, decay decoupled: google-research/bert optimization.py.

    m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;  w = w - rate (m / (sqrt(v) + eps) + decay w)

    This is AdamW late in training, when 1 - b1^t and 1 - b2^t have become 1: its step count begins
    there.
    """

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, fused=True, **settings)
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight] = first_state(weight, SETTLED_STEP)


class Lamb(Optimizer):
    """LAMB: Adam's step, scaled tensor by tensor to the norm of the weights.

    You et al. 2019 (arXiv 1904.00962), algorithm 2. With r = m' / (sqrt(v') + eps), Adam's
    bias-corrected step, and u = r + decay w:

        w = w - rate (||w|| / ||u||) u

    The ratio is 1 where either norm is 0. Groups with `adapted` False take Adam's step.
    """

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, {**settings, "adapted": True})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if not weights:
                continue
            if not group["adapted"]:
                adam_step(self, weights, weights, group)
                continue
            # Adam's step of size 1 away from zero is -r
            updates = [torch.zeros_like(weight) for weight in weights]
            adam_step(self, weights, updates, {**group, "lr": 1.0, "weight_decay": 0.0})
            _foreach_add_(updates, weights, alpha=-group["weight_decay"])
            weight_norm = torch.stack(_foreach_norm(weights))
            update_norm = torch.stack(_foreach_norm(updates))
            defined = (weight_norm > 0) & (update_norm > 0)
            ratio = torch.where(defined, weight_norm / update_norm, 1.0)
            _foreach_mul_(updates, list((group["lr"] * ratio).unbind()))
            _foreach_add_(weights, updates)


class Muon(Eager):
    """Muon for the groups with `orthogonal` True, AdamW for the others.

    Muon (Jordan 2024, kellerjordan.github.io/posts/muon) moves a matrix by its momentum made
    orthogonal; the step is scaled to the size of AdamW's (Liu et al. 2025, arXiv 2502.16982). With
    gradient g and O the `orthogonalized` matrix:

        b = 0.95 b + g
        w = (1 - rate decay) w - 0.2 rate sqrt(longer side) O(g + 0.95 b)

    The products of O are in the type `products`, by default that of the weights. PyTorch's own are
    in bf16 everywhere: for a layer of mini 0.3 of float32's time on a CPU with tiles for it,
    fifteen times as long on one without instructions for it.
    """

    def __init__(self, params: Any, products: torch.dtype | None, **settings: Any) -> None:
        super().__init__(params, {**settings, "orthogonal": False})
        self.products = products

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for move in self.moves():
            move()

    def moves(self) -> list[Callable[[], None]]:
        """The parts of a step; several threads may take them, in any order."""
        parts = []
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if group["orthogonal"]:
                parts += [partial(self._move_matrix, weight, group) for weight in weights]
            elif weights:
                parts.append(partial(adam_step, self, weights, weights, group))
        return parts

    @torch.no_grad()
    def _move_matrix(self, weight: Tensor, group: dict[str, Any]) -> None:
        state, gradient = self.state[weight], weight.grad
        if not state:
            state["momentum"] = torch.zeros_like(weight)
        momentum = state["momentum"].mul_(MOMENTUM).add_(gradient)
        decay, size = muon_factors(weight.shape, group)
        weight.mul_(decay)
        ahead = (gradient + MOMENTUM * momentum).to(self.products or weight.dtype)
        weight.sub_(orthogonalized(ahead).to(weight) * size)


def muon_factors(shape: torch.Size, group: dict[str, Any]) -> tuple[float, float]:
    """A step of Muon multiplies a matrix by the first and subtracts the second times O."""
    return 1 - group["lr"] * group["weight_decay"], 0.2 * group["lr"] * max(shape) ** 0.5


def orthogonalized(matrix: Tensor) -> Tensor:
    """U V^T, roughly, of a matrix U S V^T [M, K]: large singular values become 0.7 to 1.2.

    Newton-Schulz iterations of Jordan's polynomial, 3.4445 s - 4.775 s^3 + 2.0315 s^5, on S divided
    by its norm; those near 0 grow 41 times. With three tiny learned as much in 336 steps as with
    Jordan's five (docs/design/lab.md).

    >>> found = orthogonalized(torch.diag(torch.tensor([5.0, 3.0, 0.01])))
    >>> [round(value, 2) for value in found.diag().tolist()]
    [0.91, 0.79, 0.07]
    """
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.mT if is_tall else matrix  # [short, long]
    x = x / x.norm().clamp(min=1e-7)
    first, third, fifth = 3.4445, -4.775, 2.0315  # of the polynomial
    for _ in range(3):
        gram = x @ x.mT
        factor = torch.addmm(gram, gram, gram, beta=third, alpha=fifth)
        x = torch.addmm(x, factor, x, beta=first)
    return x.mT if is_tall else x


@torch.no_grad()
def adam_step(
    optimizer: Optimizer, weights: list[Tensor], moved: list[Tensor], group: dict[str, Any]
) -> None:
    """Move the tensors `moved` by AdamW's step for the gradients of `weights`."""
    for weight in weights:
        if not optimizer.state[weight]:
            optimizer.state[weight] = first_state(weight, 0.0)
    states = [optimizer.state[weight] for weight in weights]
    adamw(
        moved,
        [weight.grad for weight in weights if weight.grad is not None],
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [],
        [state["step"] for state in states],
        fused=True,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


def choose_optimizer(hidden_size: int, step_tokens: int) -> str:
    """muon, where its products are at most a quarter of a step's operations; else adamw.

    They are 168 H^3 operations a layer, and training is 72 H^2 a token.

    >>> [choose_optimizer(hidden_size, 32 * 128) for hidden_size in (128, 256, 768)]
    ['muon', 'muon', 'adamw']
    """
    return "muon" if 168 * hidden_size <= 72 * step_tokens / 4 else "adamw"


def build_optimizer(
    model: nn.Module,
    kind: str,
    learning_rate: float,
    weight_decay: float,
    layer_decay: float = 1.0,
    reader_rate: float = 1.0,
    products: torch.dtype | None = None,
) -> Optimizer:
    """An optimizer for the model's parameters, which must be on their device already.

    kind "adamw": bias-corrected; "paper-adam": without the correction; "lamb": for batches of
    thousands of rows; "muon": the layers' matrices by Muon, at twice the rate, all else by AdamW.
    The first two take a `layer_decay` and a `reader_rate` (`layer_groups`); Muon multiplies in the
    type `products`, by default the weights'. A group's "rate_scale" is for the loop, which sets the
    rates.

    Errors: ValueError for an unknown kind.
    """
    settings: Any = {"lr": learning_rate, "betas": BETAS, "eps": EPS, "weight_decay": weight_decay}
    decayed, plain = parameter_groups(model, weight_decay)
    if kind in ("adamw", "paper-adam"):
        groups = [decayed, plain]
        if (layer_decay, reader_rate) != (1.0, 1.0):
            groups = layer_groups(groups, model, layer_decay, reader_rate)
        if kind == "adamw":
            return EagerAdamW(groups, fused=True, **settings)
        return PaperAdam(groups, **settings)
    if kind == "lamb":
        return Lamb([decayed, {**plain, "adapted": False}], **settings)
    if kind == "muon":
        matrices = {
            id(weight)
            for name, weight in model.named_parameters()
            if ".layers." in f".{name}" and weight.ndim == 2
        }
        inner = [weight for weight in decayed["params"] if id(weight) in matrices]
        outer = [weight for weight in decayed["params"] if id(weight) not in matrices]
        groups = [
            # tables at twice AdamW's rate, too, cost comparisons of two texts (docs/design/lab.md)
            {**decayed, "params": inner, "orthogonal": True, "rate_scale": MUON_RATE},
            {**decayed, "params": outer},
            plain,
        ]
        return Muon(groups, products, **settings)
    raise ValueError(f"optimizer '{kind}': known are {', '.join(OPTIMIZERS)}")


def layer_groups(
    groups: list[dict[str, Any]], model: nn.Module, layer_decay: float, reader_rate: float = 1.0
) -> list[dict[str, Any]]:
    """Split the groups by depth, each with its fraction of the learning rate as "rate_scale".

    The head and the pooler have the full rate, each encoder layer `layer_decay` times that of the
    layer above, the embeddings come below the first (Howard and Ruder 2018, arXiv 1801.06146; for
    BERT: Sun et al. 2019, arXiv 1905.05583). A BiLSTM below the head has `reader_rate` times it.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    numbers = [int(match[1]) for name in names.values() if (match := LAYER.match(name))]
    top = max(numbers) + 1

    def scale(parameter: Tensor) -> float:
        name = names[id(parameter)]
        if match := LAYER.match(name):
            return layer_decay ** (top - int(match[1]))
        if name.startswith("reader."):
            return reader_rate
        return layer_decay ** (top + 1) if ".embeddings." in name else 1.0

    split = []
    for group in groups:
        by_scale: dict[float, list[Tensor]] = {}
        for parameter in group["params"]:
            by_scale.setdefault(scale(parameter), []).append(parameter)
        split += [
            {**group, "params": params, "rate_scale": of_rate}
            for of_rate, params in sorted(by_scale.items(), reverse=True)
        ]
    return split


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Decayed and not: biases and LayerNorm are exempt, embeddings are not (paper A.2)."""
    decayed, plain = [], []
    for name, parameter in model.named_parameters():
        exempt = name.endswith("bias") or ".norm." in name or "_norm." in name
        (plain if exempt else decayed).append(parameter)
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]


def state_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """The optimizer's state by name: "exp_avg:encoder.layers.0.qkv.weight", ..."""
    return {
        f"{kind}:{name}": value
        for name, parameter in model.named_parameters()
        for kind, value in optimizer.state.get(parameter, {}).items()
    }


def load_state_tensors(model: nn.Module, optimizer: Optimizer, tensors: dict[str, Tensor]) -> None:
    """Restore the state of `state_tensors`.

    Errors: ValueError for a tensor of no parameter, of another shape, or not finite.
    """
    parameters = dict(model.named_parameters())
    for key, value in tensors.items():
        kind, name = key.split(":", 1)
        if name not in parameters or (kind != "step" and value.shape != parameters[name].shape):
            raise ValueError(
                f"the optimizer state holds '{key}' of shape {tuple(value.shape)}, "
                "which does not fit this model: the checkpoint is of another size"
            )
        if not value.isfinite().all():
            raise ValueError(
                f"the optimizer state '{key}' holds NaN or infinity: remove this checkpoint's "
                "folder to go on from the one before"
            )
        weight = parameters[name]
        placed = value.to(weight.device) if kind == "step" else like(weight, value)
        optimizer.state[weight][kind] = placed.clone()


def first_state(weight: Tensor, step: float) -> dict[str, Tensor]:
    """A tensor's state as PyTorch's fused AdamW keeps it."""
    return {
        "step": torch.tensor(step, dtype=torch.float32, device=weight.device),
        "exp_avg": torch.zeros_like(weight),
        "exp_avg_sq": torch.zeros_like(weight),
    }
