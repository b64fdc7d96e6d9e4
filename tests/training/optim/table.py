"""Optimizers of torch with options, parameters and gradients for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

O = torch.optim
Tree = dict[str, Any]

# class -> options, a row each
TABLE: list[tuple[type[O.Optimizer], dict[str, Any]]] = [
    (O.SGD, {}),
    (O.SGD, {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01}),
    (O.SGD, {"momentum": 0.9, "nesterov": True, "maximize": True, "foreach": True}),
    (O.SGD, {"momentum": 0.9, "fused": True}),
    (O.Adam, {}),
    (O.Adam, {"amsgrad": True, "weight_decay": 0.1, "foreach": True}),
    (O.AdamW, {"maximize": True}),
    (O.AdamW, {"amsgrad": True, "betas": (0.8, 0.95)}),
    (O.AdamW, {"fused": True}),
    (O.Adagrad, {"initial_accumulator_value": 0.5, "lr_decay": 0.1}),
    (O.Adadelta, {"weight_decay": 0.1, "foreach": True}),
    (O.Adamax, {"weight_decay": 0.1}),
    (O.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    (O.RAdam, {"weight_decay": 0.1}),
    (O.RMSprop, {"centered": True, "momentum": 0.9}),
    (O.RMSprop, {"maximize": True}),
    (O.Rprop, {}),
    (O.ASGD, {"t0": 2, "lambd": 0.1}),
]
if hasattr(O, "Adafactor"):
    TABLE.append((O.Adafactor, {"weight_decay": 0.1}))
IDS = [f"{cls.__name__} {' '.join(options)}".strip() for cls, options in TABLE]
STEPS, LR = 6, 0.05


def tree(seed: int) -> Tree:
    """Tensors of 0 to 3 dims, with odd sizes, in nested containers."""
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return {"in": {"w": rand(5, 3), "b": rand(7)}, "out": [rand(2, 3, 2), rand()]}


def matrices(seed: int) -> Tree:
    """Matrices only."""
    generator = torch.Generator().manual_seed(seed)
    w, v = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in [(5, 3), (3, 7)]
    )
    return {"w": w, "v": v}


def flat(x: Any) -> list[Tensor]:
    """The tensors of a tree."""
    if isinstance(x, Tensor):
        return [x]
    return [y for child in (x.values() if isinstance(x, dict) else x) for y in flat(child)]


def torchs(
    cls: type[O.Optimizer], options: dict[str, Any], params: Any, grads: list[Any]
) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """(parameters, their states) after steps of torch's own optimizer."""
    own = [p.clone() for p in flat(params)]
    optimizer = cls(own, lr=LR, **options)  # type: ignore[call-arg]
    for tree_of_grads in grads:
        for p, g in zip(own, flat(tree_of_grads), strict=True):
            p.grad = g
        optimizer.step()
    return own, [dict(optimizer.state[p]) for p in own]


def largest(a: Any, b: Any) -> float:
    """The largest difference of two lists of tensors."""
    pairs = zip(flat(a), flat(b), strict=True)
    return max((float((1 * x - 1 * y).abs().max()) for x, y in pairs), default=0.0)
