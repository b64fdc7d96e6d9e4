"""torch.distributed's collectives over lists of tensors, and coalesced ones, in per-rank code.

Dynamo reads this.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ... import _compat
from ...capture.dtensors import group_ranks, process_groups, replaced_calls
from .._paired import kind, kinds
from ..sharding import _collectives as ours
from ..sharding._scatter import all_to_all
from ._collective_values import Done, reduced, scattered, written

ALL_GATHER = "torch.distributed.all_gather"


@_compat.read_by_dynamo
def all_gather(
    tensor_list: Any, tensor: torch.Tensor, group: Any = None, async_op: bool = False
) -> Any:
    """Run torch.distributed.all_gather: write the tensor of rank k into `tensor_list[k]`."""
    axes = group_ranks.ordered_axes(ALL_GATHER, group)
    n = ours.axis_size(axes)
    parts = kinds(tensor_list)
    process_groups.check_list_tensors(ALL_GATHER, "tensor_list", parts, kind(tensor), n)
    rows = ours.all_gather(tensor, axes)
    for k in range(n):
        written(tensor_list[k], rows[k], False)
    return Done() if async_op else None


@_compat.read_by_dynamo
def reduce_scatter(
    output: torch.Tensor,
    input_list: Any,
    op: Any = "sum",
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Run torch.distributed.reduce_scatter: reduce `input_list[k]` to rank k, into `output`."""
    what = "torch.distributed.reduce_scatter"
    axes = group_ranks.ordered_axes(what, group)
    rows = stacked(what, "input_list", input_list, axes)
    process_groups.check_list_tensors(what, "output", (kind(output),), kind(input_list[0]), 1)
    return written(output, scattered(what, rows, op, axes, 0), async_op)


@_compat.read_by_dynamo
def all_to_all_lists(
    output_tensor_list: Any, input_tensor_list: Any, group: Any = None, async_op: bool = False
) -> Any:
    """Run torch.distributed.all_to_all on lists of tensors of one size."""
    what = "torch.distributed.all_to_all"
    axes = group_ranks.ordered_axes(what, group)
    rows = stacked(what, "input_tensor_list", input_tensor_list, axes)
    n = ours.axis_size(axes)
    parts = kinds(output_tensor_list)
    like = kind(input_tensor_list[0])
    process_groups.check_list_tensors(what, "output_tensor_list", parts, like, n)
    rows = all_to_all(rows, axes, 0, 0, tiled=True)
    for k in range(n):
        written(output_tensor_list[k], rows[k], False)
    return Done() if async_op else None


@_compat.read_by_dynamo
def stacked(what: str, argument: str, tensors: Any, axes: tuple[str, ...]) -> torch.Tensor:
    """Stack a list of one tensor per rank along a new first dim, after checking its length."""
    n = ours.axis_size(axes)
    process_groups.check_list_tensors(what, argument, kinds(tensors), None, n)
    return torch.stack(list(tensors))


@_compat.read_by_dynamo
def all_reduce_coalesced(
    tensors: Any, op: Any = "sum", group: Any = None, async_op: bool = False
) -> Any:
    """Run torch.distributed.all_reduce_coalesced: all-reduce each tensor in place."""
    what = "torch.distributed.all_reduce_coalesced"
    axes = process_groups.axes_of_group(what, group)
    every = [tensors] if isinstance(tensors, torch.Tensor) else tensors
    for x in every:
        written(x, reduced(what, x, op, axes), False)
    return Done() if async_op else None


@_compat.read_by_dynamo
def all_gather_coalesced(
    output_tensor_lists: Any, input_tensor_list: Any, group: Any = None, async_op: bool = False
) -> Any:
    """Run torch.distributed.all_gather_coalesced, whose outputs are one list of tensors
    per rank.
    """
    what = "torch.distributed.all_gather_coalesced"
    axes = group_ranks.ordered_axes(what, group)
    n = ours.axis_size(axes)
    process_groups.check_length(what, "output_tensor_lists", len(output_tensor_lists), n)
    for j, x in enumerate(input_tensor_list):
        column = [row[j] for row in output_tensor_lists]
        process_groups.check_list_tensors(what, "a column", kinds(column), kind(x), n)
        rows = ours.all_gather(x, axes)
        for k in range(n):
            written(column[k], rows[k], False)
    return Done() if async_op else None


class Coalescing:
    """Stand in for the context manager of coalesced collectives, which run where they
    are called.
    """

    @_compat.read_by_dynamo
    def __init__(self) -> None:
        pass

    @_compat.read_by_dynamo
    def __enter__(self) -> Any:
        return self

    @_compat.read_by_dynamo
    def __exit__(self, *exc: object) -> None:
        pass

    @_compat.read_by_dynamo
    def wait(self) -> None:
        """Return at once: the coalesced collectives are complete."""


@_compat.read_by_dynamo
def coalescing(*args: Any, **options: Any) -> Coalescing:
    """Replace torch.distributed's `_coalescing_manager`."""
    return Coalescing()


replaced_calls.FUNCTIONS.update(
    {
        dist.all_gather: all_gather,
        dist.reduce_scatter: reduce_scatter,
        dist.all_to_all: all_to_all_lists,
        dist.all_reduce_coalesced: all_reduce_coalesced,
        dist.all_gather_coalesced: all_gather_coalesced,
    }
)
MANAGERS = {"_coalescing_manager": coalescing}
replaced_calls.FUNCTIONS.update(_compat.named(dist.distributed_c10d, MANAGERS))
