"""torch.distributed's collectives that write into a tensor, in per-rank code, in terms of our
differentiable collectives.

Dynamo reads this.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ... import _compat
from ...capture.dtensors import group_ranks, process_groups, replaced_calls
from ..sharding import _collectives as ours
from ..sharding._scatter import all_to_all
from ._collective_values import chosen, is_chosen, of_rank, reduced, scattered, written

REDUCE_SCATTER = "torch.distributed.reduce_scatter_tensor"


@_compat.read_by_dynamo
def all_reduce(
    tensor: torch.Tensor, op: Any = "sum", group: Any = None, async_op: bool = False
) -> Any:
    """Run torch.distributed.all_reduce, which writes into `tensor`."""
    what = "torch.distributed.all_reduce"
    value = reduced(what, tensor, op, process_groups.axes_of_group(what, group))
    return written(tensor, value, async_op)


@_compat.read_by_dynamo
def all_gather_into_tensor(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Run torch.distributed.all_gather_into_tensor, which writes into `output_tensor`."""
    what = "torch.distributed.all_gather_into_tensor"
    axes = group_ranks.ordered_axes(what, group)
    value = ours.all_gather(input_tensor, axes)
    return written(output_tensor, value, async_op)


@_compat.read_by_dynamo
def reduce_scatter_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    op: Any = "sum",
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Run torch.distributed.reduce_scatter_tensor, which writes into `output`."""
    axes = group_ranks.ordered_axes(REDUCE_SCATTER, group)
    value = scattered(REDUCE_SCATTER, input, op, axes, 0)
    return written(output, value, async_op)


@_compat.read_by_dynamo
def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Any = None,
    input_split_sizes: Any = None,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Run torch.distributed.all_to_all_single of equal splits, which writes into `output`."""
    what = "torch.distributed.all_to_all_single"
    process_groups.check_splits(what, sizes(output_split_sizes), sizes(input_split_sizes))
    axes = group_ranks.ordered_axes(what, group)
    return written(output, all_to_all(input, axes, 0, 0, tiled=True), async_op)


@_compat.read_by_dynamo
def sizes(sizes: Any) -> Any:
    """Turn split sizes into a tuple, a constant of the graph; None if there are none."""
    return tuple(sizes) if sizes else None


@_compat.read_by_dynamo
def broadcast(
    tensor: torch.Tensor,
    src: Any = None,
    group: Any = None,
    async_op: bool = False,
    group_src: Any = None,
) -> Any:
    """Run torch.distributed.broadcast, which writes into `tensor`."""
    what = "torch.distributed.broadcast"
    axes, source = chosen(what, group, src, group_src, "src")
    return written(tensor, of_rank(tensor, source, axes), async_op)


@_compat.read_by_dynamo
def reduce(
    tensor: torch.Tensor,
    dst: Any = None,
    op: Any = "sum",
    group: Any = None,
    async_op: bool = False,
    group_dst: Any = None,
) -> Any:
    """Run torch.distributed.reduce. Ranks other than dst keep their tensor, which torch leaves
    undefined.
    """
    what = "torch.distributed.reduce"
    axes, target = chosen(what, group, dst, group_dst, "dst")
    total = reduced(what, tensor, op, axes)
    value = torch.where(is_chosen(axes, target), total, tensor)
    return written(tensor, value, async_op)


@_compat.read_by_dynamo
def gather(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
    """Refuse torch.distributed.gather, and advise all_gather."""
    fix = "dist.all_gather(outputs, x, group=group), with a list outputs on all ranks"
    process_groups.refuse_of_one("torch.distributed.gather", "gather_list", fix)


@_compat.read_by_dynamo
def scatter(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
    """Refuse torch.distributed.scatter, and advise nn.functional.scatter."""
    call = "torch.distributed.nn.functional.scatter(tensors, src, group)"
    fix = f"x = {call}, with tensors on all ranks"
    process_groups.refuse_of_one("torch.distributed.scatter", "scatter_list", fix)


replaced_calls.FUNCTIONS.update(
    {
        dist.all_reduce: all_reduce,
        dist.all_gather_into_tensor: all_gather_into_tensor,
        dist.reduce_scatter_tensor: reduce_scatter_tensor,
        dist.all_to_all_single: all_to_all_single,
        dist.broadcast: broadcast,
        dist.reduce: reduce,
        dist.gather: gather,
        dist.scatter: scatter,
    }
)
OTHER_NAMES = {  # not all of them in each version of torch
    "all_gather_single": all_gather_into_tensor,
    "reduce_scatter_single": reduce_scatter_tensor,
    "_all_gather_base": all_gather_into_tensor,
    "_reduce_scatter_base": reduce_scatter_tensor,
}
replaced_calls.FUNCTIONS.update(_compat.named(dist.distributed_c10d, OTHER_NAMES))
