"""`check`: the comparison of a sharded function with the function on one device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ... import _tree
from ...accepted import accept
from ...errors import DivergenceError, ShardError
from ...mesh import make_mesh, use_mesh
from ...placement import P
from ...tracebacks import filter_errors
from ...world import fake_world
from .._jit import jit
from ..sharding._distribute import full
from ..sharding._shard import shard
from ._means import mean_of_means


@filter_errors
def check(
    fn: Callable[..., Any],
    *args: Any,
    worlds: Sequence[Any] = (2, 3),
    placements: Any = None,
    rtol: float = 1e-5,
    atol: float = 1e-6,
) -> dict[Any, float]:
    """Check, in simulated worlds, that a sharded function equals the function on one device.

    Args:
        fn: a pure function of pytrees of tensors.
        args: the arguments of fn: ordinary tensors with global values, not DTensors.
        worlds: a list of meshes to simulate. Each entry of `worlds` is a number of ranks, which
            form one axis "dp", or a dict of axis names and sizes.
        placements: the placements of the arguments, like `in_placements` of `shard`. By default,
            every tensor with dims is sharded on dim 0, over the first mesh axis.
        rtol: the relative tolerance.
        atol: the absolute tolerance.

    Returns:
        For each entry of `worlds`, the largest absolute difference from the results on one device.

    Raises:
        DivergenceError: a result of the sharded function differs from the result on one device. The
            message names the simulated mesh, the result that differs, and the difference. If the
            result is a mean of means, the message also shows the weights of the inner means.

    Source: chex.assert_trees_all_close; DTensor's own op tests.

    Example:
        >>> import torch, shardfn as sf
        >>> sf.check(lambda x: x.cumsum(0) * 2, torch.ones(5), worlds=[2])
        {2: 0.0}
    """
    accept("check", fn=fn, worlds=worlds, rtol=rtol, atol=atol)
    return {_name(world): _differ(fn, args, world, placements, (rtol, atol)) for world in worlds}


def _name(world: Any) -> Any:
    return world if isinstance(world, int) else tuple(world.items())


def _differ(
    fn: Any, args: Any, world: Any, placements: Any, tolerance: tuple[float, float]
) -> float:
    axes = {"dp": world} if isinstance(world, int) else dict(world)
    first = next(iter(axes))
    specs = (
        _tree.tree_map(lambda x: _first_dim(x, first), args) if placements is None else placements
    )
    with fake_world(math.prod(axes.values())):
        mesh = make_mesh(tuple(axes.values()), tuple(axes), device_type="cpu")
        got = full(shard(fn, mesh, specs, backend="aten")(*args))
    wanted = _plain(fn, args, axes)
    worst = 0.0
    leaves = _tree.leaves(got)
    for path, a, b in zip(_tree.paths(got), leaves, wanted, strict=True):
        if not isinstance(b, torch.Tensor):
            continue
        worst = max(
            worst, float((a - b).abs().max()) if b.numel() and b.dtype != torch.bool else 0.0
        )
        if not torch.allclose(a, b, rtol=tolerance[0], atol=tolerance[1], equal_nan=True):
            cause = mean_of_means(
                fn, args, axes, specs, _tree.tensors(leaves), _tree.tensors(wanted)
            )
            raise DivergenceError.of(
                f"check, world {_name(world)}, result{path}",
                f"the sharded result differs from the result on one device by up to {worst:.3g}",
                *([f"it is {cause}"] if cause else []),
                arg_path=path,
            )
    return worst


def _plain(fn: Any, args: Any, axes: dict[str, int]) -> list[Any]:
    """Run a function on one device. One that needs a mesh is compiled for a mesh of one rank, where
    the results of transforms inside it are plain, as they are around it.
    """
    try:
        return _tree.leaves(full(fn(*args)))
    except ShardError:  # of collectives, or of DTensors, which need a mesh
        pass
    with fake_world(1), use_mesh(make_mesh((1,) * len(axes), tuple(axes), device_type="cpu")):
        return _tree.leaves(full(jit(fn, backend="aten")(*args)))


def _first_dim(x: Any, axis: str) -> P | None:
    return P(axis) if isinstance(x, torch.Tensor) and x.dim() else None
