"""Rank numbers, group members and mesh coordinates in per-rank code, as tensors that differ by
rank.

Dynamo reads this.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ... import _compat
from ...capture.dtensors import group_ranks, process_groups, replaced_calls
from ...capture.dtensors.flattened_meshes import flatten
from ...capture.refusals import rank_numbers
from ...capture.shard_map import axis_names
from ..sharding._axis_names import linear_index
from ._collective_values import looked_up


@_compat.read_by_dynamo
def rank(group: Any = None) -> Any:
    """Run torch.distributed.get_rank. The number is a tensor, since all ranks share one program; it
    is -1 for a group without members.
    """
    what = "torch.distributed.get_rank"
    if group_ranks.is_non_member(group):
        return -1
    rank_numbers.note_call(what)
    axes = process_groups.axes_of_group(what, group)
    if group_ranks.are_ranks_in_order(axes):
        return _index(axes)
    return looked_up(group_ranks.numbers_in_groups(axes))


@_compat.read_by_dynamo
def ranks_of_group(group: Any = None) -> Any:
    """Run torch.distributed.get_process_group_ranks: ints, or tensors where the groups of ranks
    differ.
    """
    every = group_ranks.ranks_of_world_group(group)
    if every is not None:
        return list(every)
    what = "torch.distributed.get_process_group_ranks"
    axes = process_groups.axes_of_group(what, group)
    members = [looked_up(column) for column in group_ranks.ranks_by_number(axes)]
    group_ranks.note_ranks(group, *members)
    return members


@_compat.read_by_dynamo
def name_of_ranks(ranks: Any, tag: str) -> str:
    """Run distributed_c10d._resolve_group_name_by_ranks_and_tag."""
    return group_ranks.name_of_ranks(tag, *ranks)


@_compat.read_by_dynamo
def global_rank(group: Any, group_rank: Any) -> Any:
    """Run torch.distributed.get_global_rank: an int, or a tensor where the groups of
    ranks differ.
    """
    if group_ranks.ranks_of_world_group(group) is not None:
        return group_rank
    what = "torch.distributed.get_global_rank"
    axes = process_groups.axes_of_group(what, group)
    columns = group_ranks.ranks_by_number(axes)
    if not isinstance(group_rank, torch.Tensor):
        return looked_up(columns[group_rank])
    every = torch.stack([looked_up(column) for column in columns])
    return every.index_select(0, group_rank.reshape(1)).squeeze(0)


@_compat.read_by_dynamo
def group_rank(group: Any, global_rank: Any) -> Any:
    """Run torch.distributed.get_group_rank for the group of all ranks."""
    what = "torch.distributed.get_group_rank"
    is_tensor = isinstance(global_rank, torch.Tensor)
    if is_tensor and group_ranks.ranks_of_world_group(group) is not None:
        return global_rank
    return group_ranks.group_rank(what, group, None if is_tensor else global_rank)


@_compat.read_by_dynamo
def is_outside(group: Any) -> bool:
    """Return whether this rank is outside of a group."""
    return group_ranks.is_rank_outside("torch.distributed._rank_not_in_group", group)


@_compat.read_by_dynamo
def local_rank(mesh: Any, mesh_dim: Any = None) -> torch.Tensor:
    """Run DeviceMesh.get_local_rank; the result is a tensor."""
    what = "get_local_rank"
    rank_numbers.note_call(what)
    return _index(process_groups.axes_of_mesh(what, mesh, mesh_dim))


@_compat.read_by_dynamo
def rank_of_world(mesh: Any) -> torch.Tensor:
    """Run DeviceMesh.get_rank: the global rank as a tensor, on a submesh too."""
    what = "get_rank"
    rank_numbers.note_call(what)
    process_groups.axes_of_mesh(what, mesh, None)
    return looked_up(group_ranks.ranks_here())


@_compat.read_by_dynamo
def coordinate(mesh: Any) -> list[torch.Tensor]:
    """Run DeviceMesh.get_coordinate; one tensor per mesh axis."""
    what = "get_coordinate"
    rank_numbers.note_call(what)
    axes = process_groups.axes_of_mesh(what, mesh, None)
    return [_index((axis,)) for axis in axes]


@_compat.read_by_dynamo
def size(mesh: Any, mesh_dim: Any = None) -> int:
    """Run DeviceMesh.size, an int."""
    return process_groups.size_of_mesh(mesh, mesh_dim)


@_compat.read_by_dynamo
def every_group(mesh: Any) -> list[Any]:
    """Run DeviceMesh.get_all_groups."""
    return [mesh.get_group(k) for k in range(mesh.ndim)]


@_compat.read_by_dynamo
def _index(axes: tuple[str, ...]) -> torch.Tensor:
    return linear_index(axis_names.bindings_of("axis_index", axes))


replaced_calls.FUNCTIONS.update(
    {
        dist.get_rank: rank,
        dist.get_process_group_ranks: ranks_of_group,
        dist.get_global_rank: global_rank,
        dist.get_group_rank: group_rank,
    }
)
PRIVATE = {"_rank_not_in_group": is_outside, "_resolve_group_name_by_ranks_and_tag": name_of_ranks}
replaced_calls.FUNCTIONS.update(_compat.named(dist.distributed_c10d, PRIVATE))
replaced_calls.OF_GROUPS["rank"] = rank
replaced_calls.OF_MESHES.update(
    {
        "get_local_rank": local_rank,
        "get_rank": rank_of_world,
        "get_coordinate": coordinate,
        "size": size,
        "get_all_groups": every_group,
        "_create_flatten_mesh": flatten,
    }
)
