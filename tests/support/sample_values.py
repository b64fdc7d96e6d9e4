"""Random values of a kind, from one generator, for sample calls."""

from __future__ import annotations

from typing import Any

import torch

Sample = tuple[tuple[Any, ...], dict[str, Any]]
G = torch.Generator()


def call(*args: Any, **kwargs: Any) -> Sample:
    return args, kwargs


def f(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=G, dtype=torch.float64)


def positive(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=G, dtype=torch.float64) + 0.1


def i(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=G)


def b(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=G) > 0.5
