"""Collectives with a different result on each rank or sample: psum_scatter, all_to_all,
ppermute.

Dynamo reads this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ... import _compat
from ...capture.shard_map import axis_names
from ...errors import PlacementError
from ...ops import shard_map
from ...ops.text_formats import print_pairs
from .._paired import multiples, numbers
from ._axis_names import (
    AxisName,
    Names,
    chosen,
    count,
    index,
    leafwise,
    linear_index,
    mapped,
    mesh_axes,
    stacked,
    tensor,
)


def psum_scatter(
    x: Any, axis_name: AxisName, *, scatter_dimension: int = 0, tiled: bool = False
) -> Any:
    """Sum a value over an axis, and give each rank or sample one chunk of the sum (reduce-scatter).

    Args:
        x: a tensor or a pytree of tensors.
        axis_name: an axis name, or a tuple of axis names in which the first axis varies slowest;
            see `psum`.
        scatter_dimension: the dim that is split. The split dim must have the size of the axis, or,
            with `tiled`, a multiple of the size of the axis.
        tiled: whether to keep the split dim with a smaller size, instead of removing it.

    Returns:
        The chunk of the sum that this rank or sample receives.

    Raises:
        CaptureError: no enclosing `shard_map` or `vmap` defines the axis name.
        PlacementError: the dim cannot be split into chunks of equal size, one for each rank.

    Source: jax.lax.psum_scatter.

    Example:
        >>> import torch, shardfn as sf
        >>> sf.vmap(lambda x: psum_scatter(x, "i"), axis_name="i")(
        ...     torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        ... )
        tensor([4., 6.])
    """
    names = axis_names.bindings_of("psum_scatter", axis_name)
    return leafwise(lambda leaf: _scattered(tensor(leaf), names, scatter_dimension, tiled), x)


def _scattered(x: torch.Tensor, names: Names, dim: int, tiled: bool) -> torch.Tensor:
    x = _parts("psum_scatter", "scatter_dimension", x, names, dim, tiled)
    for _, n, level in mapped(names):
        x = shard_map.mapped_gather(x, n, level).sum(0)
    axes = mesh_axes(names)
    x = shard_map.psum(x, axes, True) if axes else x
    x = x.reshape(*[b[1] for b in names], *x.shape[1:])
    for name, n, level in names:
        piece = (
            shard_map.own_chunk(x, name, n, 0)
            if level == axis_names.MESH
            else chosen(x, 0, index(name, n, level))
        )
        x = piece.squeeze(0)
    return x


def _parts(
    what: str, argument: str, x: torch.Tensor, names: Names, dim: int, tiled: bool
) -> torch.Tensor:
    """The chunk for each rank, along a new first dim: (.., n * a, ..) -> (n, .., a, ..), or
    (.., n, ..) -> (n, .., ..).
    """
    n = count(names)
    has_dim = -x.dim() <= dim < x.dim()
    is_even = tiled and has_dim and bool(x.shape[dim] % n == 0)
    check_size(
        what,
        argument,
        multiples(x, n) if is_even else numbers(x),
        dim,
        n,
        ", ".join([b[0] for b in names]),
        tiled,
    )
    dim = dim % x.dim()
    return x.unflatten(dim, (n, x.shape[dim] // n)).movedim(dim, 0) if tiled else x.movedim(dim, 0)


@_compat.constant_in_graph
def check_size(
    what: str, argument: str, shape: tuple[int, ...], dim: int, n: int, names: str, tiled: bool
) -> None:
    """Check that a dim can be sharded over the axes.

    Raises:
        PlacementError: the dim does not exist, or the axes do not divide its size.
    """
    if not -len(shape) <= dim < len(shape):
        fix = f"a dim from {-len(shape)} to {len(shape) - 1}" if shape else "a tensor with dims"
        raise PlacementError.of(
            f"{what} over {names}", f"{argument} is {dim}, but the value has shape {shape}", fix=fix
        )
    size = shape[dim]
    if size % n if tiled else size != n:
        needed = f"a multiple of {n}" if tiled else f"size {n}; or tiled=True and a multiple of {n}"
        fix = "pad the dim, or use another dim"
        raise PlacementError.of(
            f"{what} over {names}",
            f"dim {dim % len(shape)} of shape {shape} has size {size}",
            needed=needed,
            fix=fix,
            dim=dim % len(shape),
        )


def all_to_all(
    x: Any, axis_name: AxisName, split_axis: int, concat_axis: int, *, tiled: bool = False
) -> Any:
    """Split a dim into chunks, send chunk i to rank i, and join the received chunks along a dim.

    Args:
        x: a tensor or a pytree of tensors.
        axis_name: an axis name, or a tuple of axis names in which the first axis varies slowest;
            see `psum`.
        split_axis: the dim that is split. The split dim must have the size of the axis, or, with
            `tiled`, a multiple of the size of the axis.
        concat_axis: the dim of the result along which the chunks are joined: a new dim, or, with
            `tiled`, an existing dim.
        tiled: whether to keep the split dim with a smaller size, and to concatenate along an
            existing dim.

    Returns:
        The joined chunks that this rank or sample received.

    Raises:
        CaptureError: no enclosing `shard_map` or `vmap` defines the axis name.
        PlacementError: the dim cannot be split into chunks of equal size, one for each rank.

    Source: jax.lax.all_to_all.

    Example:
        >>> import torch, shardfn as sf
        >>> sf.vmap(lambda x: all_to_all(x, "i", 0, 0), axis_name="i")(
        ...     torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        ... )
        tensor([[1., 3.],
                [2., 4.]])
    """
    names = axis_names.bindings_of("all_to_all", axis_name)
    return leafwise(lambda leaf: _exchanged(tensor(leaf), names, split_axis, concat_axis, tiled), x)


def _exchanged(x: torch.Tensor, names: Names, split: int, concat: int, tiled: bool) -> torch.Tensor:
    concat = concat % x.dim()
    x = _parts("all_to_all", "split_axis", x, names, split, tiled)
    rest = x.shape[1:]
    x = x.reshape(*[b[1] for b in names], *rest)
    for k, (name, n, level) in enumerate(names):
        x = x.movedim(k, 0)
        if level == axis_names.MESH:
            x = shard_map.all_to_all(x.unsqueeze(1), name, n, 0, 1).squeeze(0)
        else:
            x = chosen(shard_map.mapped_gather(x, n, level), 1, index(name, n, level)).squeeze(1)
        x = x.movedim(0, k)
    x = x.reshape(count(names), *rest).movedim(0, concat)
    return x.flatten(concat, concat + 1) if tiled else x


def ppermute(x: Any, axis_name: AxisName, perm: Sequence[tuple[int, int]]) -> Any:
    """Send the value of each rank or sample to at most one other rank or sample.

    Args:
        x: a tensor or a pytree of tensors.
        axis_name: an axis name, or a tuple of axis names in which the first axis varies slowest.
            With a tuple of axis names, `ppermute` is implemented as an all-gather, which sends more
            bytes.
        perm: pairs (source, target) of indices on the axis. Each index of the axis may be the
            source of one pair and the target of one pair.

    Returns:
        The value that this rank or sample receives, or zeros if no rank or sample sends to it.

    Raises:
        CaptureError: no enclosing `shard_map` or `vmap` defines the axis name.
        PlacementError: perm contains an index twice, or an index that is not on the axis.

    Source: jax.lax.ppermute.

    Example:
        >>> import torch, shardfn as sf
        >>> sf.vmap(lambda x: ppermute(x, "i", [(0, 1), (1, 2)]), axis_name="i")(
        ...     torch.tensor([1.0, 2.0, 3.0])
        ... )
        tensor([0., 1., 2.])
    """
    names = axis_names.bindings_of("ppermute", axis_name)
    pairs = tuple([(pair[0], pair[1]) for pair in perm])
    check_perm(pairs, count(names), ", ".join([b[0] for b in names]))
    return leafwise(lambda leaf: _permuted(tensor(leaf), names, pairs), x)


@_compat.constant_in_graph
def check_perm(pairs: tuple[tuple[int, int], ...], n: int, names: str) -> None:
    """Check that a perm sends each number at most once, and to each at most once.

    Raises:
        PlacementError: it does not. Lists every violation.
    """
    wrong = []
    for what, column in (("source", [a for a, _ in pairs]), ("target", [b for _, b in pairs])):
        wrong += [
            f"{k} is a {what} {column.count(k)} times"
            for k in sorted(set(column))
            if column.count(k) > 1
        ]
        wrong += [
            f"{what} {k} is not a rank of the axis" for k in sorted(set(column)) if not 0 <= k < n
        ]
    if wrong:
        fix = (
            "give pairs (source, target), with each rank at most once as source and once as target"
        )
        raise PlacementError.of(
            f"ppermute over {names}", *wrong, needed=f"numbers from 0 to {n - 1}", fix=fix
        )


def _permuted(x: torch.Tensor, names: Names, pairs: tuple[tuple[int, int], ...]) -> torch.Tensor:
    if len(names) == 1 and names[0][2] == axis_names.MESH:
        return shard_map.ppermute(x, names[0][0], print_pairs(pairs))
    n = count(names)
    source_of = [0] * n
    comes = [False] * n
    for a, b in pairs:
        source_of[b], comes[b] = a, True
    index = linear_index(names)
    source = chosen(torch.tensor(source_of, device=x.device), 0, index)
    got = chosen(stacked(x, names), 0, source).squeeze(0)
    return torch.where(
        chosen(torch.tensor(comes, device=x.device), 0, index).squeeze(0),
        got,
        torch.zeros_like(got),
    )
