"""The parts of torch's collectives: a reduction by any op, one rank's value, a result that is
written.

Dynamo reads this.
"""

from __future__ import annotations

from typing import Any

import torch

from ... import _compat
from ...capture import trace
from ...capture.dtensors import checks, group_ranks, groups
from ...ops import shard_map as prims
from ...ops.text_formats import print_axes
from ..sharding import _collectives as ours
from ..sharding._scatter import all_to_all, psum_scatter

BITWISE = {"band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}


class Done:
    """The handle of a collective that was started asynchronously. It is done where it is read."""

    @_compat.read_by_dynamo
    def __init__(self) -> None:
        pass

    @_compat.read_by_dynamo
    def wait(self, timeout: Any = None) -> bool:
        """Wait for the collective."""
        return True

    @_compat.read_by_dynamo
    def is_completed(self) -> bool:
        """Whether the collective is done."""
        return True

    @_compat.read_by_dynamo
    def is_success(self) -> bool:
        """Whether it is done without an error."""
        return True

    @_compat.read_by_dynamo
    def get_future(self) -> Any:
        """The future of the collective, which is refused."""
        what = "get_future of a collective"
        fix = "work.wait(), and then what the callback does"
        checks.refuse_option(what, "callbacks run outside of the program", fix)


@_compat.read_by_dynamo
def written(out: torch.Tensor, value: torch.Tensor, async_op: bool) -> Any:
    """Write the result of a collective. Under no_grad a tensor keeps its derivative."""
    value = value.reshape(out.shape)
    if torch.is_grad_enabled() or trace.is_in_rule():
        _compat.overwrite(out, value)
    else:
        out.copy_(value)
    return Done() if async_op else None


@_compat.read_by_dynamo
def reduced(what: str, x: torch.Tensor, op: Any, axes: tuple[str, ...]) -> Any:
    """The reduction over axes, of the dtype of the tensor, which may be written to later."""
    kind = groups.reduction(what, op, x.dtype)
    if kind == "avg":
        return ours.pmean(x, axes)
    carried = x.to(torch.uint8) if x.dtype == torch.bool else x
    if kind == "sum":
        return ours.psum(carried, axes).to(x.dtype)
    carried = carried.clone()  # their derivatives read it
    if kind == "max":
        return ours.pmax(carried, axes).to(x.dtype)
    if kind == "min":
        return ours.pmin(carried, axes).to(x.dtype)
    return _of_rows(ours.all_gather(carried, axes), kind).to(x.dtype)


@_compat.read_by_dynamo
def scattered(what: str, x: torch.Tensor, op: Any, axes: tuple[str, ...], dim: int) -> torch.Tensor:
    """Each rank's chunk along a dim of the reduction over axes."""
    kind = groups.reduction(what, op, x.dtype)
    if kind in ("sum", "avg") and x.dtype != torch.bool:
        total = psum_scatter(x, axes, scatter_dimension=dim, tiled=True)
        return total / ours.axis_size(axes) if kind == "avg" else total
    exchanged = all_to_all(x, axes, dim, 0, tiled=True)  # a row from each rank
    rows = exchanged.unflatten(0, (ours.axis_size(axes), -1))
    return _of_rows(rows, kind)


@_compat.read_by_dynamo
def _of_rows(rows: torch.Tensor, kind: str) -> torch.Tensor:
    """(n, ...) -> (...): the reduction of what n ranks have, of the same dtype."""
    if kind in BITWISE:
        total = rows[0]
        for k in range(1, rows.shape[0]):
            total = BITWISE[kind](total, rows[k])
        return total
    if kind == "product":
        return rows.prod(0).to(rows.dtype)
    if kind == "sum":
        return rows.sum(0).to(rows.dtype)
    return rows.amax(0) if kind == "max" else rows.amin(0)


@_compat.read_by_dynamo
def of_rank(x: torch.Tensor, source: Any, axes: tuple[str, ...]) -> torch.Tensor:
    """The value of one rank of some axes, on all of them.

    Args:
        x: the value.
        source: the number of the rank on the axes, or whether this rank is the one.
        axes: the axes.
    """
    carried = x.to(torch.uint8) if x.dtype == torch.bool else x
    is_source = is_chosen(axes, source)
    term = torch.where(is_source, carried, torch.zeros_like(carried))
    return ours.psum(term, axes).to(x.dtype)


@_compat.read_by_dynamo
def chosen(what: str, group: Any, src: Any, group_src: Any, name: str) -> Any:
    """The axes of a group, and the rank of it that sends or receives, for `of_rank`. A rank of
    the world may be a tensor, as `dist.get_global_rank` is.
    """
    if isinstance(src, torch.Tensor):
        axes = groups.axes_of_group(what, group)
        src = prims.as_invariant(src, print_axes(axes), where=what)
        return axes, looked_up(group_ranks.ranks_here()) == src
    is_ordered = group_src is not None
    find = group_ranks.ordered_axes if is_ordered else groups.axes_of_group
    axes = find(what, group)
    return axes, groups.source_of(what, group, src, group_src, name)


@_compat.read_by_dynamo
def is_chosen(axes: tuple[str, ...], source: Any) -> torch.Tensor:
    """Whether this rank is the one that `chosen` names."""
    is_number = isinstance(source, int)
    return ours.axis_index(axes) == source if is_number else source


@_compat.read_by_dynamo
def looked_up(column: tuple[int, ...]) -> torch.Tensor:
    """A number that each rank of the mesh has of its own, of those of all ranks in row-major
    order.
    """
    axes, rows = group_ranks.by_axes(column)
    place = ours.axis_index(axes)
    every = torch.tensor(rows, device=place.device)
    return every.index_select(0, place.reshape(1)).squeeze(0)
