"""The training step as one pure function, and the loop around it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import shardfn as sf
from shardfn_demo import adamw, gpt

BATCH, STEPS, LR = 8, 40, 1e-3

Batches = Iterator[tuple[Tensor, Tensor]]
Step = Callable[..., tuple[Any, Any, Any]]


def plain_value_and_grad(fn: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Any]]:
    """`value_and_grad` in plain torch, for the single-device run."""

    def value_and_grad(*args: Any) -> tuple[Tensor, Any]:
        grads, value = torch.func.grad_and_value(fn)(*args)
        return value, grads

    return value_and_grad


def step(
    config: gpt.Config, lr: float = LR, value_and_grad: Callable[..., Any] = sf.bucketed_grad
) -> Step:
    """One training step of the model.

    Args:
        config: the model's sizes.
        lr: learning rate.
        value_and_grad: the transform to differentiate with.

    Returns:
        A pure function (params, state, x, y) -> (params, state, loss) of global tensors.

    Example:
        >>> import torch
        >>> config = gpt.Config(width=8, heads=2, layers=1)
        >>> params = gpt.init(config)
        >>> tokens = torch.zeros(2, 4, dtype=torch.int64)
        >>> params, state, loss = step(config)(params, adamw.init(params), tokens, tokens)
        >>> state["step"].item()
        1.0
    """
    loss_and_grads = value_and_grad(
        functools.partial(gpt.loss_fn, heads=config.heads, dropout=config.dropout)
    )

    def train_step(params: Any, state: Any, x: Tensor, y: Tensor) -> tuple[Any, Any, Tensor]:
        loss, grads = loss_and_grads(params, x, y)
        params, state = adamw.update(params, grads, state, lr=lr)
        return params, state, loss

    return train_step


def train(
    step_fn: Step,
    params: Any,
    state: Any,
    batches: Batches,
    *,
    steps: int = STEPS,
    progress: Callable[[float], object] | None = None,
) -> list[float]:
    """Run a step over the first batches, feeding its results back in.

    Args:
        step_fn: what `step` returns, sharded or not.
        params: the first parameters.
        state: the first optimizer state.
        batches: an iterator of (x, y).
        steps: how many to take.
        progress: told the loss after each step.

    Returns:
        The loss of each step.
    """
    losses = []
    for _ in range(steps):
        params, state, loss = step_fn(params, state, *next(batches))
        losses.append(float(sf.full(loss)))
        if progress is not None:
            progress(losses[-1])
    return losses
