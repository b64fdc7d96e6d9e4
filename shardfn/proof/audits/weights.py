"""Means of means: losses of parts that are averaged as if the parts were of one size."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .causes import Axis
from .observed import Loss

SAFETY = 32  # roundings of a loss


def mean_of_means(
    ranks: Sequence[Sequence[Loss]],
    rows: Sequence[Sequence[int]],
    alone: Sequence[Loss],
    axes: Sequence[Axis],
    eps: float = 0.0,
) -> str | None:
    """Say whether the loss of one device is the mean of the ranks' losses by other weights than
    equal ones.

    Args:
        ranks: the losses of each rank.
        rows: the batch sizes of the calls of each rank.
        alone: the losses of one device.
        axes: the groups of ranks.
        eps: the relative distance that rounding may make, if it is large.

    Returns:
        The axis and the weights; None where the mean with equal weights is right, too.
    """
    if not alone:
        return None
    wanted = mean([float(x.value.value) for x in alone], [x.count or 1.0 for x in alone])
    eps = max(SAFETY * torch.finfo(alone[0].value.value.dtype).eps, eps)
    bound = eps * max(abs(wanted), 1e-30)
    for axis in axes:
        group = axis.groups[0]
        losses = [x for r in group for x in ranks[r]]
        values = [float(x.value.value) for x in losses]
        sources = [[x.count for x in losses], [float(n) for r in group for n in rows[r]]]
        for weights in sources:
            known = [w for w in weights if w is not None]
            if len(known) != len(values) or len({*known}) < 2:
                continue
            for scale in {1, len(values) // len(group), len(values), len(group)}:
                means = mean(values, known), mean(values)
                apart = [abs(x * scale - wanted) for x in means]
                if apart[0] <= bound and apart[1] > 4 * max(bound, apart[0]):
                    return (
                        f"a mean of means: the losses of the ranks of {axis.name} need the weights "
                        f"{written(known)}"
                    )
    return None


def mean(values: Sequence[float], weights: Sequence[float] | None = None) -> float:
    """Return the mean of numbers, with equal weights if none are given."""
    weights = weights or [1.0] * len(values)
    return sum(w * x for w, x in zip(weights, values, strict=True)) / sum(weights)


def written(weights: Sequence[float]) -> str:
    """Write weights as small whole numbers where they are such."""
    if all(w == int(w) for w in weights):
        shared = math.gcd(*(int(w) for w in weights))
        return ", ".join(str(int(w) // shared) for w in weights)
    return ", ".join(f"{w:.4g}" for w in weights)
