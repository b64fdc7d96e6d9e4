"""What a model needs to be tried."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

BATCH, LENGTH, VOCAB = 6, 8, 64


class Model(NamedTuple):
    """One model: small, of random weights, in training mode, with its dropout."""

    name: str
    make: Callable[[], torch.nn.Module]
    # (the module or its pure function, *inputs) -> the loss
    loss: Callable[..., torch.Tensor]
    inputs: Callable[[], tuple[torch.Tensor, ...]]
    dtype: torch.dtype = torch.float64


def tokens() -> tuple[torch.Tensor, ...]:
    """Numbers of words (BATCH, LENGTH)."""
    return (torch.randint(3, VOCAB, (BATCH, LENGTH)),)


def images() -> tuple[torch.Tensor, ...]:
    """(pictures (BATCH, 3, 32, 32), their classes (BATCH,))"""
    return torch.rand(BATCH, 3, 32, 32), torch.randint(3, (BATCH,))


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy over all but the last dim."""
    return torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


def classified(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The loss of a classifier that returns logits."""
    return cross_entropy(model(x), y)
