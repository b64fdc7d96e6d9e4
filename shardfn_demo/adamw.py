"""AdamW as two pure functions over trees of tensors."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import shardfn as sf

State = dict[str, Any]


def init(params: Any) -> State:
    """The optimizer's state before the first step.

    Args:
        params: a tree of tensors.

    Returns:
        `step`, the steps taken, 0-d float32 (its dtype is the precision of the bias
        corrections); `m` and `v`, zeros in the structure of `params`.

    Example:
        >>> state = init({"w": torch.ones(2)})
        >>> state["step"].item(), state["m"]["w"].tolist()
        (0.0, [0.0, 0.0])
    """
    return {
        "step": torch.zeros(()),
        "m": sf.tree_map(torch.zeros_like, params),
        "v": sf.tree_map(torch.zeros_like, params),
    }


def update(
    params: Any,
    grads: Any,
    state: State,
    *,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> tuple[Any, State]:
    """One step of Adam with decoupled weight decay.

    Args:
        params: a tree of tensors.
        grads: a tree of the same structure.
        state: the state from `init` or the last `update`.
        lr: learning rate.
        betas: decay of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: the fraction of a weight that is subtracted at each step, times `lr`.

    Returns:
        New params and new state.

    Source: Loshchilov & Hutter 2019, "Decoupled Weight Decay Regularization", arXiv:1711.05101,
    algorithm 2.

    Example:
        >>> params = {"w": torch.tensor([1.0])}
        >>> params, state = update(
        ...     params, {"w": torch.tensor([5.0])}, init(params), lr=0.1, weight_decay=0.0
        ... )
        >>> round(params["w"].item(), 4)  # the first step is lr long, whatever the gradient
        0.9
    """
    step = state["step"] + 1
    m = moment(state["m"], grads, betas[0], power=1)
    v = moment(state["v"], grads, betas[1], power=2)
    c1, c2 = (correction(beta, step) for beta in betas)

    def moved(p: Tensor, m: Tensor, v: Tensor) -> Tensor:
        return p * (1 - lr * weight_decay) - lr * (m / c1) / ((v / c2).sqrt() + eps)

    return sf.tree_map(moved, params, m, v), {"step": step, "m": m, "v": v}


def moment(old: Any, grads: Any, beta: float, *, power: int) -> Any:
    """The running mean of a power of the gradients."""
    return sf.tree_map(lambda m, g: beta * m + (1 - beta) * g**power, old, grads)


def correction(beta: float, step: Tensor) -> Tensor:
    """1 - beta**step; by expm1, since in float32 the plain form loses four digits where beta is
    near 1.
    """
    return -torch.expm1(step * math.log(beta))
