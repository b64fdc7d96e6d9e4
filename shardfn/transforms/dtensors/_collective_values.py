"""What all forms of torch's collectives share: reduce by any op, send the value of one rank to all,
write a result into an output tensor.

Dynamo reads this.
"""

from __future__ import annotations

from typing import Any

import torch

from ... import _compat
from ...capture import aten_trace
from ...capture.dtensors import group_ranks, placement_checks, process_groups
from ...ops import shard_map as prims
from ...ops.text_formats import print_axes
from ..sharding import _collectives as ours
from ..sharding._scatter import all_to_all, psum_scatter

BITWISE = {"band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}


class Done:
    """Stand in for the `Work` handle of an `async_op=True` collective, which is already
    complete.
    """

    @_compat.read_by_dynamo
    def __init__(self) -> None:
        pass

    @_compat.read_by_dynamo
    def wait(self, timeout: Any = None) -> bool:
        """Return at once: the collective is complete."""
        return True

    @_compat.read_by_dynamo
    def is_completed(self) -> bool:
        """Return True: the collective is complete."""
        return True

    @_compat.read_by_dynamo
    def is_success(self) -> bool:
        """Return True: a captured collective raises no error."""
        return True

    @_compat.read_by_dynamo
    def get_future(self) -> Any:
        """Refuse `work.get_future()`, whose callbacks would run outside of the program."""
        what = "get_future of a collective"
        fix = "call work.wait(), and then run the callback's code"
        placement_checks.refuse_option(
            what, "a callback of work.get_future() would run outside of the captured program", fix
        )


@_compat.read_by_dynamo
def written(out: torch.Tensor, value: torch.Tensor, async_op: bool) -> Any:
    """Write the result of a collective into its output tensor. Under no_grad the output keeps its
    derivative, as in torch.
    """
    value = value.reshape(out.shape)
    if torch.is_grad_enabled() or aten_trace.is_in_rule():
        _compat.overwrite(out, value)
    else:
        out.copy_(value)
    return Done() if async_op else None


@_compat.read_by_dynamo
def reduced(what: str, x: torch.Tensor, op: Any, axes: tuple[str, ...]) -> Any:
    """All-reduce a tensor over mesh axes by torch's reduce op, in the dtype of the tensor. The
    result does not alias x, which may be written to later.
    """
    kind = process_groups.reduction(what, op, x.dtype)
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
    """Reduce-scatter: reduce over mesh axes by torch's reduce op, and keep this rank's chunk of a
    dim.
    """
    kind = process_groups.reduction(what, op, x.dtype)
    if kind in ("sum", "avg") and x.dtype != torch.bool:
        total = psum_scatter(x, axes, scatter_dimension=dim, tiled=True)
        return total / ours.axis_size(axes) if kind == "avg" else total
    exchanged = all_to_all(x, axes, dim, 0, tiled=True)  # a row from each rank
    rows = exchanged.unflatten(0, (ours.axis_size(axes), -1))
    return _of_rows(rows, kind)


@_compat.read_by_dynamo
def _of_rows(rows: torch.Tensor, kind: str) -> torch.Tensor:
    """Reduce the stacked values of n ranks, (n, ...) -> (...), locally and in the same dtype."""
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
    """Broadcast the value of one rank to all ranks of some mesh axes.

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
    """Resolve the group and the src or dst argument of a rooted collective to (mesh axes, root
    rank), for `of_rank`. A global rank may be a tensor, as `dist.get_global_rank` returns.
    """
    if isinstance(src, torch.Tensor):
        axes = process_groups.axes_of_group(what, group)
        src = prims.as_invariant(src, print_axes(axes), where=what)
        return axes, looked_up(group_ranks.ranks_here()) == src
    is_ordered = group_src is not None
    find = group_ranks.ordered_axes if is_ordered else process_groups.axes_of_group
    axes = find(what, group)
    return axes, process_groups.number_of_root(what, group, src, group_src, name)


@_compat.read_by_dynamo
def is_chosen(axes: tuple[str, ...], source: Any) -> torch.Tensor:
    """Return whether this rank is the root that `chosen` resolved, as a bool tensor."""
    is_number = isinstance(source, int)
    return ours.axis_index(axes) == source if is_number else source


@_compat.read_by_dynamo
def looked_up(column: tuple[int, ...]) -> torch.Tensor:
    """Look up this rank's entry in a table of one number per rank, in row-major order
    of the mesh.
    """
    axes, rows = group_ranks.axes_that_differ(column)
    place = ours.axis_index(axes)
    every = torch.tensor(rows, device=place.device)
    return every.index_select(0, place.reshape(1)).squeeze(0)
