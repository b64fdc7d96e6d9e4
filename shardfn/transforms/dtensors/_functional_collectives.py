"""torch.distributed._functional_collectives and the ops below them, in per-rank code.

Dynamo reads this.
"""

from __future__ import annotations

from typing import Any

import torch

from ... import _compat
from ...capture.dtensors import group_ranks, process_groups, replaced_calls
from ..sharding import _collectives as ours
from ..sharding._scatter import all_to_all, ppermute
from ._collective_values import chosen, of_rank, reduced, scattered, written
from ._collectives import sizes


@_compat.read_by_dynamo
def all_reduce(self: torch.Tensor, reduceOp: str, group: Any, tag: str = "") -> Any:
    """Run the functional collective all_reduce."""
    what = "all_reduce"
    return reduced(what, self, reduceOp, process_groups.axes_of_group(what, group))


@_compat.read_by_dynamo
def all_gather(self: torch.Tensor, gather_dim: int, group: Any, tag: str = "") -> Any:
    """Run the functional collective all_gather_tensor along `gather_dim`."""
    axes = group_ranks.ordered_axes("all_gather_tensor", group)
    return ours.all_gather(self, axes, axis=gather_dim, tiled=True)


@_compat.read_by_dynamo
def reduce_scatter(
    self: torch.Tensor, reduceOp: str, scatter_dim: int, group: Any, tag: str = ""
) -> Any:
    """Run the functional collective reduce_scatter_tensor along `scatter_dim`."""
    what = "reduce_scatter_tensor"
    axes = group_ranks.ordered_axes(what, group)
    return scattered(what, self, reduceOp, axes, scatter_dim)


@_compat.read_by_dynamo
def all_to_all_single(
    self: torch.Tensor, output_split_sizes: Any, input_split_sizes: Any, group: Any, tag: str = ""
) -> Any:
    """Run the functional collective all_to_all_single, of equal splits."""
    what = "all_to_all_single"
    process_groups.check_splits(what, sizes(output_split_sizes), sizes(input_split_sizes))
    axes = group_ranks.ordered_axes(what, group)
    return all_to_all(self, axes, 0, 0, tiled=True)


@_compat.read_by_dynamo
def broadcast(self: torch.Tensor, src: Any, group: Any, tag: str = "") -> Any:
    """Run the functional collective broadcast, whose src is a rank of the group."""
    axes, source = chosen("broadcast", group, None, src, "src")
    return of_rank(self, source, axes)


@_compat.read_by_dynamo
def permute_tensor(self: torch.Tensor, src_dst: Any, group: Any, tag: str = "") -> torch.Tensor:
    """Run the functional collective permute_tensor: rank k sends to rank `src_dst[k]`."""
    axes = group_ranks.ordered_axes("permute_tensor", group)
    process_groups.check_length("permute_tensor", "src_dst", len(src_dst), ours.axis_size(axes))
    return ppermute(self, axes, list(enumerate(src_dst)))


@_compat.read_by_dynamo
def all_reduce_coalesced(self: Any, reduceOp: str, group: Any, tag: str = "") -> Any:
    """Run the functional collective all_reduce_coalesced on a list of tensors."""
    return [all_reduce(x, reduceOp, group) for x in self]


@_compat.read_by_dynamo
def all_gather_coalesced(self: Any, group: Any, tag: str = "") -> Any:
    """Run the functional collective all_gather_into_tensor_coalesced on a list of tensors."""
    return [all_gather(x, 0, group) for x in self]


@_compat.read_by_dynamo
def reduce_scatter_coalesced(
    inputs: Any, reduceOp: str, scatter_dim: Any, group: Any, tag: str = ""
) -> Any:
    """Run the functional collective reduce_scatter_tensor_coalesced, one `scatter_dim` a tensor."""
    what = "reduce_scatter_tensor_coalesced"
    process_groups.check_length(what, "scatter_dim", len(scatter_dim), len(inputs))
    return [
        reduce_scatter(x, reduceOp, dim, group) for x, dim in zip(inputs, scatter_dim, strict=True)
    ]


@_compat.read_by_dynamo
def all_gather_op(x: torch.Tensor, group_size: int, group_name: Any) -> Any:
    """Run the op `_c10d_functional.all_gather_into_tensor`."""
    return all_gather(x, 0, group_name)


@_compat.read_by_dynamo
def reduce_scatter_op(x: torch.Tensor, reduce_op: str, group_size: int, group_name: Any) -> Any:
    """Run the op `_c10d_functional.reduce_scatter_tensor`."""
    return reduce_scatter(x, reduce_op, 0, group_name)


@_compat.read_by_dynamo
def all_gather_coalesced_op(xs: Any, group_size: int, group_name: Any) -> Any:
    """Run the op `_c10d_functional.all_gather_into_tensor_coalesced`."""
    return all_gather_coalesced(xs, group_name)


@_compat.read_by_dynamo
def reduce_scatter_coalesced_op(xs: Any, reduce_op: str, group_size: int, group_name: Any) -> Any:
    """Run the op `_c10d_functional.reduce_scatter_tensor_coalesced`."""
    return [reduce_scatter(x, reduce_op, 0, group_name) for x in xs]


@_compat.read_by_dynamo
def all_reduce_in_place(x: torch.Tensor, reduce_op: str, group_name: Any) -> torch.Tensor:
    """Run the op `_c10d_functional.all_reduce_`, which writes into its input."""
    written(x, all_reduce(x, reduce_op, group_name), False)
    return x


@_compat.read_by_dynamo
def broadcast_in_place(x: torch.Tensor, src: int, group_name: Any) -> torch.Tensor:
    """Run the op `_c10d_functional.broadcast_`, which writes into its input."""
    written(x, broadcast(x, src, group_name), False)
    return x


@_compat.read_by_dynamo
def all_reduce_coalesced_in_place(xs: Any, reduce_op: str, group_name: Any) -> Any:
    """Run the op `_c10d_functional.all_reduce_coalesced_`, which writes into its inputs."""
    return [all_reduce_in_place(x, reduce_op, group_name) for x in xs]


@_compat.read_by_dynamo
def wait_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Run the functional wait_tensor, which returns its input: captured collectives are
    complete.
    """
    return tensor


FUNCTIONAL = {  # not all of them in each version of torch
    "all_reduce": all_reduce,
    "all_gather_tensor": all_gather,
    "all_gather_tensor_autograd": all_gather,
    "all_gather_single": all_gather,
    "all_gather_single_autograd": all_gather,
    "reduce_scatter_tensor": reduce_scatter,
    "reduce_scatter_tensor_autograd": reduce_scatter,
    "reduce_scatter_single": reduce_scatter,
    "reduce_scatter_single_autograd": reduce_scatter,
    "all_to_all_single": all_to_all_single,
    "all_to_all_single_autograd": all_to_all_single,
    "broadcast": broadcast,
    "permute_tensor": permute_tensor,
    "all_reduce_coalesced": all_reduce_coalesced,
    "all_gather_into_tensor_coalesced": all_gather_coalesced,
    "all_gather_single_coalesced": all_gather_coalesced,
    "reduce_scatter_tensor_coalesced": reduce_scatter_coalesced,
    "reduce_scatter_single_coalesced": reduce_scatter_coalesced,
    "wait_tensor": wait_tensor,
}
OPS = {
    "all_reduce": all_reduce,
    "all_reduce_": all_reduce_in_place,
    "all_gather_into_tensor": all_gather_op,
    "reduce_scatter_tensor": reduce_scatter_op,
    "all_to_all_single": all_to_all_single,
    "broadcast": broadcast,
    "broadcast_": broadcast_in_place,
    "all_reduce_coalesced": all_reduce_coalesced,
    "all_reduce_coalesced_": all_reduce_coalesced_in_place,
    "all_gather_into_tensor_coalesced": all_gather_coalesced_op,
    "reduce_scatter_tensor_coalesced": reduce_scatter_coalesced_op,
    "wait_tensor": wait_tensor,
}
OF_AUTOGRAD = {
    name: OPS[name]
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
}
replaced_calls.FUNCTIONS.update(_compat.named(_compat.FUNCTIONAL, FUNCTIONAL))
for space, rows in (
    (torch.ops._c10d_functional, OPS),
    (torch.ops._c10d_functional_autograd, OF_AUTOGRAD),
):
    packets = _compat.named(space, rows)
    replaced_calls.FUNCTIONS.update(packets)
    replaced_calls.FUNCTIONS.update({packet.default: row for packet, row in packets.items()})
