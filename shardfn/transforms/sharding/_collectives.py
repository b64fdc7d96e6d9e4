"""Collectives by axis name, for per-rank code in shard_map and for samples in
vmap(axis_name=...).

Dynamo reads this.
"""

from __future__ import annotations

from typing import Any

import torch

from ...capture.refusals import rank_numbers
from ...capture.shard_map import axis_names
from ...ops import shard_map
from ._axis_names import (
    AxisName,
    Names,
    count,
    leafwise,
    linear_index,
    mapped,
    mesh_axes,
    stacked,
    tensor,
)


def psum(x: Any, axis_name: AxisName) -> Any:
    """Sum a value over the ranks or samples of an axis.

    Args:
        x: a tensor, a number, or a pytree of them.
        axis_name: a mesh axis of the enclosing `shard_map`, the `axis_name` of an enclosing `vmap`,
            or a tuple of such names.

    Returns:
        The sum of x over all ranks or samples, which is invariant over the axis (equal on all
        ranks). The transpose of psum needs no communication.

    Raises:
        CaptureError: no enclosing `shard_map` or `vmap` defines the axis name.

    Source: jax.lax.psum.

    Example:
        >>> import torch, shardfn as sf
        >>> sf.vmap(lambda x: x / psum(x, "i"), axis_name="i")(torch.tensor([1.0, 3.0]))
        tensor([0.2500, 0.7500])
    """
    names = axis_names.bindings_of("psum", axis_name)
    return leafwise(lambda leaf: _sum(leaf, names), x)


def _sum(x: Any, names: Names) -> Any:
    if not isinstance(x, torch.Tensor):
        return x * count(names)
    x = x.long() if x.dtype == torch.bool else x
    for _, n, level in mapped(names):
        x = shard_map.mapped_gather(x, n, level).sum(0)
    axes = mesh_axes(names)
    return shard_map.psum(x, axes, False) if axes else x


def pvary(x: Any, axis_name: AxisName) -> Any:
    """Make a value varying over an axis, so that its gradient is not summed over the ranks of the
    axis.

    Inside `shard_map`, the gradient of an invariant value is the sum of the gradients of all ranks.
    The gradient of `pvary(x, axis)` is not summed, and differs between ranks. Per-sample gradients
    need `pvary`.

    Args:
        x: a tensor, a number, or a pytree of them, which is invariant over the axis (equal on all
            ranks).
        axis_name: an axis name, or a tuple of axis names; see `psum`.

    Returns:
        x, varying over the axis. `pvary` sends nothing. The transpose of `pvary` is the sum over
        ranks. If the function that is differentiated calls `pvary(x, axis)`, the gradient of x is
        still the sum over ranks.

    Raises:
        CaptureError: no enclosing `shard_map` or `vmap` defines the axis name, or x already varies
            over the axis.

    Source: jax.lax.pvary, which is jax.lax.pcast(x, axis_name, to="varying").

    Example:
        >>> import torch, shardfn as sf
        >>> def local(w, x):
        ...     loss = lambda w, x: w * x
        ...     return sf.vmap(sf.grad(loss), in_axes=(None, 0))(sf.pvary(w, "dp"), x)
        >>> with sf.fake_world(2):
        ...     mesh = sf.make_mesh((2,), ("dp",))
        ...     f = sf.shard_map(local, mesh, (sf.P(), sf.P("dp")), sf.P("dp"))
        ...     sf.full(f(torch.tensor(1.0), torch.tensor([1.0, 2.0, 3.0, 4.0])))
        tensor([1., 2., 3., 4.])
    """
    axes = mesh_axes(axis_names.bindings_of("pvary", axis_name))
    if not axes:  # of a vmap, whose derivatives are those of each sample
        return x
    return leafwise(lambda leaf: shard_map.vary(tensor(leaf), axes, where="pvary"), x)


def pmean(x: Any, axis_name: AxisName) -> Any:
    """Average a value over the ranks or samples of an axis.

    Args:
        x: a tensor, a number, or a pytree of them.
        axis_name: an axis name, or a tuple of axis names; see `psum`.

    Returns:
        The mean of x over all ranks or samples.

    Raises:
        CaptureError: no enclosing `shard_map` or `vmap` defines the axis name.

    Source: jax.lax.pmean.

    Example:
        >>> import torch, shardfn as sf
        >>> sf.vmap(lambda x: x - pmean(x, "i"), axis_name="i")(torch.tensor([1.0, 3.0]))
        tensor([-1.,  1.])
    """
    names = axis_names.bindings_of("pmean", axis_name)
    return leafwise(lambda leaf: _sum(leaf, names) / count(names), x)


def pmax(x: Any, axis_name: AxisName) -> Any:
    """Compute the elementwise maximum over the ranks or samples of an axis.

    Args:
        x: a tensor, a number, or a pytree of them.
        axis_name: an axis name, or a tuple of axis names; see `psum`.

    Returns:
        The maximum of x over all ranks or samples. If several ranks or samples hold the maximum,
        its derivative is split equally among them.

    Raises:
        CaptureError: no enclosing `shard_map` or `vmap` defines the axis name.

    Source: jax.lax.pmax.

    Example:
        >>> import torch, shardfn as sf
        >>> sf.vmap(lambda x: x - pmax(x, "i"), axis_name="i")(torch.tensor([1.0, 3.0]))
        tensor([-2.,  0.])
    """
    names = axis_names.bindings_of("pmax", axis_name)
    return leafwise(lambda leaf: _extremum(leaf, names, "max"), x)


def pmin(x: Any, axis_name: AxisName) -> Any:
    """Compute the elementwise minimum over the ranks or samples of an axis.

    Args:
        x: a tensor, a number, or a pytree of them.
        axis_name: an axis name, or a tuple of axis names; see `psum`.

    Returns:
        The minimum of x over all ranks or samples. If several ranks or samples hold the minimum,
        its derivative is split equally among them.

    Raises:
        CaptureError: no enclosing `shard_map` or `vmap` defines the axis name.

    Source: jax.lax.pmin.

    Example:
        >>> import torch, shardfn as sf
        >>> sf.vmap(lambda x: x - pmin(x, "i"), axis_name="i")(torch.tensor([1.0, 3.0]))
        tensor([0., 2.])
    """
    names = axis_names.bindings_of("pmin", axis_name)
    return leafwise(lambda leaf: _extremum(leaf, names, "min"), x)


def _extremum(x: Any, names: Names, kind: str) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    for _, n, level in mapped(names):
        all_of_them = shard_map.mapped_gather(x, n, level)
        x = all_of_them.amax(0) if kind == "max" else all_of_them.amin(0)
    axes = mesh_axes(names)
    return shard_map.extremum(x, axes, kind) if axes else x


def all_gather(x: Any, axis_name: AxisName, *, axis: int = 0, tiled: bool = False) -> Any:
    """Gather the tensors of all ranks or samples along a new dim, or concatenate them along an
    existing dim.

    Args:
        x: a tensor or a pytree of tensors.
        axis_name: an axis name, or a tuple of axis names in which the first axis varies slowest;
            see `psum`.
        axis: the position of the new dim. With `tiled`, `axis` is the existing dim along which the
            tensors are concatenated.
        tiled: whether to concatenate along an existing dim instead of stacking.

    Returns:
        The gathered tensor, which is invariant over the axis (equal on all ranks).

    Raises:
        CaptureError: no enclosing `shard_map` or `vmap` defines the axis name.

    Source: jax.lax.all_gather, and jax.lax.all_gather_invariant, whose result is also invariant.

    Example:
        >>> import torch, shardfn as sf
        >>> sf.vmap(lambda x: all_gather(x, "i"), axis_name="i")(torch.tensor([1.0, 3.0]))
        tensor([[1., 3.],
                [1., 3.]])
    """
    names = axis_names.bindings_of("all_gather", axis_name)
    return leafwise(lambda leaf: _gathered(tensor(leaf), names, axis, tiled), x)


def _gathered(x: torch.Tensor, names: Names, axis: int, tiled: bool) -> torch.Tensor:
    dim = axis % (x.dim() + (not tiled))
    out = stacked(x, names).movedim(0, dim)
    return out.flatten(dim, dim + 1) if tiled else out


def axis_index(axis_name: AxisName) -> torch.Tensor:
    """Return the index of this rank or sample on an axis.

    Args:
        axis_name: an axis name, or a tuple of axis names in which the first axis varies slowest;
            see `psum`.

    Returns:
        An int64 scalar tensor. The index is a tensor instead of a Python number, so that all ranks
        can run the same program.

    Raises:
        CaptureError: no enclosing `shard_map` or `vmap` defines the axis name.

    Source: jax.lax.axis_index.

    Example:
        >>> import torch, shardfn as sf
        >>> sf.vmap(lambda x: x * axis_index("i"), axis_name="i")(torch.tensor([1.0, 2.0, 3.0]))
        tensor([0., 2., 6.])
    """
    bound = axis_names.bindings_of("axis_index", axis_name)
    rank_numbers.note_call("axis_index", axis_name)
    return linear_index(bound)


def axis_size(axis_name: AxisName) -> int:
    """Return the number of ranks or samples on an axis.

    Args:
        axis_name: an axis name, or a tuple of axis names; see `psum`.

    Returns:
        A Python number.

    Raises:
        CaptureError: no enclosing `shard_map` or `vmap` defines the axis name.

    Source: jax.lax.axis_size.

    Example:
        >>> import torch, shardfn as sf
        >>> sf.vmap(lambda x: x / axis_size("i"), axis_name="i")(torch.tensor([1.0, 3.0]))
        tensor([0.5000, 1.5000])
    """
    return count(axis_names.bindings_of("axis_size", axis_name))
