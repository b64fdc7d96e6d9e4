"""Transforms of a function of one tensor, as functions of the same shape, so that they can be put
on top of each other: each takes `sf` or `torch.func`, whose names they share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import shardfn as sf

Shaped = Callable[[torch.Tensor], torch.Tensor]


def _squared(f: Shaped) -> Shaped:
    return lambda x: f(x).square().sum()


def _bucketed(m: Any, f: Shaped) -> Shaped:
    if m is not sf:
        return m.grad(_squared(f))
    return lambda x: sf.bucketed_grad(_squared(f))(x)[1]


SHAPED: dict[str, Callable[[Any, Shaped], Shaped]] = {
    "grad": lambda m, f: m.grad(_squared(f)),
    "bucketed_grad": _bucketed,
    "jvp": lambda m, f: lambda x: m.jvp(f, (x,), (x + 1,))[1],
    "vjp": lambda m, f: lambda x: m.vjp(f, x)[1](x + 1)[0],
    "vmap": lambda m, f: m.vmap(f, 1, 1),
    "jacrev": lambda m, f: lambda x: m.jacrev(f)(x).sum((0, 1)),
    "jacfwd": lambda m, f: lambda x: m.jacfwd(f)(x).sum((2, 3)),
}
