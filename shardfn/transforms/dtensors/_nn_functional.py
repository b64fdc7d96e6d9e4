"""torch.distributed.nn.functional's differentiable collectives, in per-rank code.

Dynamo reads this.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.nn.functional as torchs

from ... import _compat
from ...capture.dtensors import group_ranks, process_groups, replaced_calls
from ..sharding import _collectives as ours
from ..sharding._scatter import all_to_all as exchanged
from . import _collectives as plain
from . import _list_collectives as lists
from ._collective_values import chosen, is_chosen, of_rank, reduced

NAME = "torch.distributed.nn.functional"


@_compat.read_by_dynamo
def broadcast(tensor: torch.Tensor, src: Any, group: Any = None) -> torch.Tensor:
    """Run nn.functional.broadcast: return the tensor of rank src on all ranks."""
    axes, source = chosen(f"{NAME}.broadcast", group, src, None, "src")
    return of_rank(tensor, source, axes)


@_compat.read_by_dynamo
def gather(tensor: torch.Tensor, dst: Any = 0, group: Any = None) -> Any:
    """Run nn.functional.gather: rank dst gets the tensors of all ranks, the others get zeros."""
    what = f"{NAME}.gather"
    axes, target = chosen(what, group, dst, None, "dst")
    axes = group_ranks.ordered_axes(what, group)
    rows = ours.all_gather(tensor, axes)
    rows = torch.where(is_chosen(axes, target), rows, torch.zeros_like(rows))
    return tuple(rows.unbind(0))


@_compat.read_by_dynamo
def scatter(tensors: Any, src: Any = 0, group: Any = None) -> torch.Tensor:
    """Run nn.functional.scatter: rank k gets `tensors[k]` of rank src."""
    what = f"{NAME}.scatter"
    axes, source = chosen(what, group, src, None, "src")
    axes = group_ranks.ordered_axes(what, group)
    rows = lists.stacked(what, "tensors", tensors, axes)
    if isinstance(source, int):
        return exchanged(rows, axes, 0, 0, tiled=True)[source]
    rows = torch.where(source, rows, torch.zeros_like(rows))
    return exchanged(rows, axes, 0, 0, tiled=True).sum(0).to(rows.dtype)


@_compat.read_by_dynamo
def reduce(tensor: torch.Tensor, dst: Any, op: Any = "sum", group: Any = None) -> torch.Tensor:
    """Run nn.functional.reduce: rank dst gets the reduction, the others their own values as
    constants.
    """
    what = f"{NAME}.reduce"
    axes, target = chosen(what, group, dst, None, "dst")
    total = reduced(what, tensor, op, axes)
    return torch.where(is_chosen(axes, target), total, tensor.detach())


@_compat.read_by_dynamo
def reduce_scatter(
    output: torch.Tensor, input_list: Any, op: Any = "sum", group: Any = None
) -> torch.Tensor:
    """Run nn.functional.reduce_scatter: rank k gets the reduction of `input_list[k]`."""
    lists.reduce_scatter(output, input_list, op, group)
    return output


@_compat.read_by_dynamo
def all_gather(tensor: torch.Tensor, group: Any = None) -> Any:
    """Run nn.functional.all_gather: return the tensors of all ranks as a tuple."""
    axes = group_ranks.ordered_axes(f"{NAME}.all_gather", group)
    return tuple(ours.all_gather(tensor, axes).unbind(0))


@_compat.read_by_dynamo
def all_gather_base(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any = None
) -> torch.Tensor:
    """Run nn.functional._all_gather_base: gather the tensors of all ranks into one output."""
    plain.all_gather_into_tensor(output_tensor, input_tensor, group)
    return output_tensor


@_compat.read_by_dynamo
def all_to_all(output_tensor_list: Any, input_tensor_list: Any, group: Any = None) -> Any:
    """Run nn.functional.all_to_all: send one tensor of a list to each rank, and receive one from
    each.
    """
    lists.all_to_all_lists(output_tensor_list, input_tensor_list, group)
    return tuple(output_tensor_list)


@_compat.read_by_dynamo
def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Any = None,
    input_split_sizes: Any = None,
    group: Any = None,
) -> torch.Tensor:
    """Run nn.functional.all_to_all_single: exchange equal chunks of dim 0 with all ranks."""
    plain.all_to_all_single(output, input, output_split_sizes, input_split_sizes, group)
    return output


@_compat.read_by_dynamo
def all_reduce(tensor: torch.Tensor, op: Any = "sum", group: Any = None) -> torch.Tensor:
    """Run nn.functional.all_reduce: return the reduction on all ranks."""
    what = f"{NAME}.all_reduce"
    return reduced(what, tensor, op, process_groups.axes_of_group(what, group))


FORMS = {
    "broadcast": broadcast,
    "gather": gather,
    "scatter": scatter,
    "reduce": reduce,
    "reduce_scatter": reduce_scatter,
    "all_gather": all_gather,
    "_all_gather_base": all_gather_base,
    "all_to_all": all_to_all,
    "all_to_all_single": all_to_all_single,
    "all_reduce": all_reduce,
}
replaced_calls.FUNCTIONS.update(_compat.named(torchs, FORMS))
