"""The detection of means of means, as the reason for a wrong sharded result."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch

from ... import _tree
from ...errors import ShardError
from ...mesh import make_mesh
from ...world import fake_world
from ..sharding._distribute import distribute, full
from ..sharding._shard import shard

Values = Sequence[torch.Tensor]
MOST_PARTS = 64  # the largest number in the weights that are written


def mean_of_means(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    axes: Mapping[str, int],
    specs: Any,
    got: Values,
    wanted: Values,
) -> str | None:
    """Say whether a sharded result is the mean of what the function gives for each rank's own
    arguments, where the plain result is their mean with other weights.

    Args:
        fn: the function.
        args: its arguments.
        axes: the sizes of the mesh axes.
        specs: the placements of the arguments.
        got: the sharded results.
        wanted: the plain ones.

    Returns:
        The axes and the weights; None where the results are no such means.
    """
    n = math.prod(axes.values())
    with fake_world(n):
        mesh = make_mesh(tuple(axes.values()), tuple(axes), device_type="cpu")
        placed = distribute(args, mesh, specs)
        own = [_tree.tree_map(lambda x, r=rank: _local(x, r), placed) for rank in range(n)]
    try:
        parts = torch.stack([_flat(of_one_rank(fn, axes, specs, x)) for x in own])  # (n, elements)
    except (ShardError, RuntimeError):  # a function that one rank's arguments do not fit
        return None
    sharded, plain = _flat(got), _flat(wanted)
    if parts.shape[1] != len(plain) or not torch.allclose(parts.mean(0), sharded, rtol=1e-4):
        return None
    ones = torch.ones(n, 1, dtype=parts.dtype)
    system = torch.cat([parts, ones], 1)
    weights = torch.linalg.lstsq(system.T, torch.cat([plain, ones[0]])[:, None]).solution[:, 0]
    is_mean = torch.allclose(weights @ parts, plain, rtol=1e-4) and bool((weights > -1e-4).all())
    if not is_mean:
        return None
    over = " x ".join(name for name, size in axes.items() if size > 1)
    is_known = int(torch.linalg.matrix_rank(system)) == n
    said = f": weights {written(weights.tolist())}" if is_known else ""
    return (
        f"a mean of means{said} over {over}, but the function on one device returns the mean of "
        "all elements"
    )


def of_one_rank(
    fn: Callable[..., Any], axes: Mapping[str, int], specs: Any, args: tuple[Any, ...]
) -> list[torch.Tensor]:
    """Run a function on a mesh of one rank."""
    with fake_world(1):
        mesh = make_mesh((1,) * len(axes), tuple(axes), device_type="cpu")
        return _tree.tensors(full(shard(fn, mesh, specs, backend="aten")(*args)))


def _local(x: Any, rank: int) -> Any:
    return x.to_local(rank=rank) if isinstance(x, torch.Tensor) else x


def _flat(values: Values) -> torch.Tensor:
    return torch.cat([x.reshape(-1).double() for x in values if x.is_floating_point()])


def written(weights: Sequence[float]) -> str:
    """Write weights as small whole numbers where they are such."""
    parts = [Fraction(w).limit_denominator(MOST_PARTS) for w in weights]
    if any(abs(float(part) - w) > 1e-4 for part, w in zip(parts, weights, strict=True)):
        return ", ".join(f"{w:.4g}" for w in weights)
    shared = math.lcm(*(part.denominator for part in parts))
    return ", ".join(str(int(part * shared)) for part in parts)
