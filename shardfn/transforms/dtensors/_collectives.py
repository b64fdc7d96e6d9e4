"""The collectives of torch.distributed inside the code of one rank, by ours, which have
derivatives.

Dynamo reads this.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ... import _compat
from ...capture.dtensors import groups, table
from ...capture.dtensors.flattened import flatten
from ..sharding import _collectives as ours
from ..sharding._scatter import all_to_all, psum_scatter


class Done:
    """The handle of a collective that was started asynchronously. It is done where it is read."""

    @_compat.read_by_dynamo
    def __init__(self) -> None:
        pass

    @_compat.read_by_dynamo
    def wait(self) -> bool:
        """Wait for the collective."""
        return True

    @_compat.read_by_dynamo
    def is_completed(self) -> bool:
        """Whether the collective is done."""
        return True


@_compat.read_by_dynamo
def _reduced(what: str, x: torch.Tensor, op: Any, axes: tuple[str, ...]) -> Any:
    """The sum, mean, maximum or minimum over axes."""
    kind = groups.reduction(what, op)
    if kind == "sum":
        return ours.psum(x, axes)
    if kind == "avg":
        return ours.pmean(x, axes)
    return ours.pmax(x, axes) if kind == "max" else ours.pmin(x, axes)


@_compat.read_by_dynamo
def _written(out: torch.Tensor, value: torch.Tensor, async_op: bool) -> Any:
    out.copy_(value.reshape(out.shape))
    return Done() if async_op else None


@_compat.read_by_dynamo
def all_reduce(
    tensor: torch.Tensor,
    op: Any = "sum",
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """torch.distributed.all_reduce."""
    what = "torch.distributed.all_reduce"
    value = _reduced(what, tensor, op, groups.axes_of_group(what, group))
    return _written(tensor, value, async_op)


@_compat.read_by_dynamo
def all_gather_into_tensor(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """torch.distributed.all_gather_into_tensor."""
    axes = groups.axes_of_group("torch.distributed.all_gather_into_tensor", group)
    value = ours.all_gather(input_tensor, axes, tiled=True)
    return _written(output_tensor, value, async_op)


@_compat.read_by_dynamo
def reduce_scatter_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    op: Any = "sum",
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """torch.distributed.reduce_scatter_tensor."""
    what = "torch.distributed.reduce_scatter_tensor"
    axes = groups.axes_of_group(what, group)
    return _written(output, _scattered(what, input, op, axes, 0), async_op)


@_compat.read_by_dynamo
def _scattered(
    what: str, x: torch.Tensor, op: Any, axes: tuple[str, ...], dim: int
) -> torch.Tensor:
    kind = groups.scattered_reduction(what, op)
    value = psum_scatter(x, axes, scatter_dimension=dim, tiled=True)
    return value / ours.axis_size(axes) if kind == "avg" else value


@_compat.read_by_dynamo
def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Any = None,
    input_split_sizes: Any = None,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """torch.distributed.all_to_all_single, of equal splits."""
    what = "torch.distributed.all_to_all_single"
    groups.check_splits(
        what, _tuple(output_split_sizes), _tuple(input_split_sizes)
    )
    axes = groups.axes_of_group(what, group)
    return _written(output, all_to_all(input, axes, 0, 0, tiled=True), async_op)


@_compat.read_by_dynamo
def _tuple(sizes: Any) -> Any:
    return None if sizes is None else tuple(sizes)


@_compat.read_by_dynamo
def broadcast(
    tensor: torch.Tensor,
    src: Any = None,
    group: Any = None,
    async_op: bool = False,
    group_src: Any = None,
) -> Any:
    """torch.distributed.broadcast."""
    what = "torch.distributed.broadcast"
    source = groups.source_of(what, group, src, group_src)
    axes = groups.axes_of_group(what, group)
    return _written(tensor, of_rank(tensor, source, axes), async_op)


@_compat.read_by_dynamo
def of_rank(x: torch.Tensor, source: int, axes: tuple[str, ...]) -> torch.Tensor:
    """The value of one rank of some axes, on all of them."""
    carried = x.to(torch.uint8) if x.dtype == torch.bool else x
    is_source = ours.axis_index(axes) == source
    value = ours.psum(
        torch.where(is_source, carried, torch.zeros_like(carried)), axes
    )
    return value.to(x.dtype)


@_compat.read_by_dynamo
def functional_all_reduce(
    self: torch.Tensor, reduceOp: str, group: Any, tag: str = ""
) -> Any:
    """The functional all_reduce."""
    what = "all_reduce"
    return _reduced(what, self, reduceOp, groups.axes_of_group(what, group))


@_compat.read_by_dynamo
def functional_all_gather(
    self: torch.Tensor, gather_dim: int, group: Any, tag: str = ""
) -> Any:
    """The functional all_gather_tensor."""
    axes = groups.axes_of_group("all_gather_tensor", group)
    return ours.all_gather(self, axes, axis=gather_dim, tiled=True)


@_compat.read_by_dynamo
def functional_reduce_scatter(
    self: torch.Tensor, reduceOp: str, scatter_dim: int, group: Any, tag: str = ""
) -> Any:
    """The functional reduce_scatter_tensor."""
    what = "reduce_scatter_tensor"
    axes = groups.axes_of_group(what, group)
    return _scattered(what, self, reduceOp, axes, scatter_dim)


@_compat.read_by_dynamo
def functional_all_to_all(
    self: torch.Tensor,
    output_split_sizes: Any,
    input_split_sizes: Any,
    group: Any,
    tag: str = "",
) -> Any:
    """The functional all_to_all_single, of equal splits."""
    what = "all_to_all_single"
    groups.check_splits(
        what, _tuple(output_split_sizes), _tuple(input_split_sizes)
    )
    return all_to_all(self, groups.axes_of_group(what, group), 0, 0, tiled=True)


@_compat.read_by_dynamo
def functional_broadcast(
    self: torch.Tensor, src: int, group: Any, tag: str = ""
) -> Any:
    """The functional broadcast."""
    source = groups.source_of("broadcast", group, src, None)
    return of_rank(self, source, groups.axes_of_group("broadcast", group))


@_compat.read_by_dynamo
def wait_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The functional wait_tensor: a value is there where it is read."""
    return tensor


@_compat.read_by_dynamo
def rank(group: Any = None) -> torch.Tensor:
    """torch.distributed.get_rank, as a tensor: ranks share one program."""
    return ours.axis_index(
        groups.axes_of_group("torch.distributed.get_rank", group)
    )


@_compat.read_by_dynamo
def local_rank(mesh: Any, mesh_dim: Any = None) -> torch.Tensor:
    """DeviceMesh.get_local_rank and get_rank, as a tensor."""
    return ours.axis_index(groups.axes_of_mesh("get_local_rank", mesh, mesh_dim))


@_compat.read_by_dynamo
def coordinate(mesh: Any) -> list[torch.Tensor]:
    """DeviceMesh.get_coordinate, as tensors."""
    axes = groups.axes_of_mesh("get_coordinate", mesh, None)
    return [ours.axis_index(axis) for axis in axes]


table.FUNCTIONS.update(
    {
        dist.all_reduce: all_reduce,
        dist.all_gather_into_tensor: all_gather_into_tensor,
        dist.reduce_scatter_tensor: reduce_scatter_tensor,
        dist.all_to_all_single: all_to_all_single,
        dist.broadcast: broadcast,
        dist.get_rank: rank,
    }
)
FUNCTIONAL = {
    "all_reduce": functional_all_reduce,
    "all_gather_tensor": functional_all_gather,
    "all_gather_tensor_autograd": functional_all_gather,
    "reduce_scatter_tensor": functional_reduce_scatter,
    "reduce_scatter_tensor_autograd": functional_reduce_scatter,
    "all_to_all_single": functional_all_to_all,
    "all_to_all_single_autograd": functional_all_to_all,
    "broadcast": functional_broadcast,
    "wait_tensor": wait_tensor,
}
table.FUNCTIONS.update(
    {_compat.FUNCTIONAL[name]: fn for name, fn in FUNCTIONAL.items()}
)
table.OF_GROUPS["rank"] = rank
table.OF_MESHES.update(
    {
        "get_local_rank": local_rank,
        "get_rank": local_rank,
        "get_coordinate": coordinate,
        "_create_flatten_mesh": flatten,
    }
)
