"""The ranks of process groups, where each rank has its own answer, while a function is traced.

A group of a mesh axis stands for many groups, one for each row of ranks. Dynamo runs these
functions on constants, so errors reach the user unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ... import _compat
from ...errors import CaptureError
from ...mesh import axes_of, meshes_here, ranks_of, real_mesh
from ..shard_map.axis_names import current_scope
from .process_groups import axes_of_group, axes_with, is_world_group

OF_GROUP = "pass dist.get_process_group_ranks(group) and the tag of the same group"
NAME = "group.group_name, of mesh.get_group(axis)"


@_compat.constant_in_graph
def ranks_of_world_group(group: Any) -> tuple[int, ...] | None:
    """The ranks of a group that has all ranks, and so is the same everywhere. None for another."""
    group = real_mesh(group)
    count = dist.get_world_size()
    if is_world_group(group) or len(dist.get_process_group_ranks(group)) == count:
        return tuple(range(count))
    return None


@_compat.constant_in_graph
def are_ranks_in_order(axes: Sequence[str]) -> bool:
    """Whether groups over axes number their ranks as the mesh does. torch sorts them."""
    return all(row == sorted(row) for row in _ranks_of_groups(axes))


@_compat.constant_in_graph
def ordered_axes(what: str, group: Any) -> tuple[str, ...]:
    """The manual axes over which a group communicates that numbers its ranks as the mesh does.

    Raises:
        NeedsRanks: outside of the code of one rank.
        CaptureError: the group has its ranks in another order, or the mesh has no such axis.
    """
    axes = axes_of_group(what, group)
    if not are_ranks_in_order(axes):
        mesh = current_scope().mesh
        names = ", ".join(axes)
        raise CaptureError.of(
            what,
            f"the ranks of the mesh {axes_of(mesh)} along {names} are not in ascending order",
            needed="a group whose ranks have the order of the mesh",
            fix=f"use the collectives by axis name, such as sf.all_gather(x, {axes[0]!r})",
        )
    return axes


@_compat.constant_in_graph
def numbers_in_groups(axes: Sequence[str]) -> tuple[int, ...]:
    """The number of each rank of the mesh in its group over axes, in row-major order."""
    return tuple(members.index(rank) for rank, members in _with_members(axes))


@_compat.constant_in_graph
def ranks_by_number(axes: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """For each number in a group over axes: the world rank that has it, by the rank of the mesh
    that asks.
    """
    every = [members for _, members in _with_members(axes)]
    return tuple(zip(*every, strict=True))


@_compat.constant_in_graph
def ranks_here() -> tuple[int, ...]:
    """The ranks of the world in the mesh whose code is read, in row-major order."""
    return tuple(ranks_of(current_scope().mesh))


@_compat.constant_in_graph
def axes_that_differ(column: Sequence[int]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The mesh axes over which a number of each rank differs, and the numbers by coordinate on
    these axes. Both orders are row-major.
    """
    known = axes_of(current_scope().mesh)
    names, sizes = list(known.names), list(known.sizes)
    rows = list(column)
    for name in known.names:
        k = names.index(name)
        first = _first_on(k, sizes, rows)
        repeated = _repeated(k, sizes, first)
        if repeated == rows and len(names) > 1:
            rows = first
            del names[k], sizes[k]
    return tuple(names), tuple(rows)


def _first_on(k: int, sizes: Sequence[int], rows: Sequence[int]) -> list[int]:
    """The numbers at coordinate 0 of dim k, in row-major order."""
    inner = math.prod(sizes[k + 1 :])
    block = sizes[k] * inner
    starts = range(0, len(rows), block)
    return [x for start in starts for x in rows[start : start + inner]]


def _repeated(k: int, sizes: Sequence[int], first: Sequence[int]) -> list[int]:
    """The numbers repeated along dim k, in row-major order."""
    inner = math.prod(sizes[k + 1 :])
    starts = range(0, len(first), inner)
    return [x for start in starts for x in [*first[start : start + inner]] * sizes[k]]


@_compat.constant_in_graph
def group_rank(what: str, group: Any, rank: int | None) -> int:
    """The number in a group of a rank of the world.

    Raises:
        CaptureError: it is another one on each rank.
    """
    every = ranks_of_world_group(group)
    if rank is not None and every is not None and rank in every:
        return rank
    which = (
        "the number of a rank, which is a tensor in captured code,"
        if rank is None
        else f"rank {rank}"
    )
    raise CaptureError.of(
        what,
        f"{which} has a different number, or no number, in each group of a mesh axis",
        needed="the same number on all ranks",
        fix="use group_src= and group_dst= of the collective, or dist.get_rank(group)",
    )


@_compat.constant_in_graph
def is_non_member(group: Any) -> bool:
    """Whether a group is torch's NON_GROUP_MEMBER."""
    return group == dist.GroupMember.NON_GROUP_MEMBER


@_compat.constant_in_graph
def note_ranks(group: Any, *ranks: Any) -> None:
    """Note the tensors that are the ranks of a group, of which each rank has its own."""
    current_scope().group_ranks.append((real_mesh(group), ranks))


@_compat.constant_in_graph
def name_of_ranks(tag: str, *ranks: Any) -> str:
    """The name of the group of these ranks with a tag: numbers, or the tensors that
    get_process_group_ranks gives.

    Raises:
        CaptureError: there is none.
    """
    what = "torch.distributed._resolve_group_name_by_ranks_and_tag"
    numbers = sorted(map(id, ranks))  # in any order, as torch has it
    for group, noted in current_scope().group_ranks:
        if sorted(map(id, noted)) == numbers and _compat.group_tag(group) == tag:
            return group.group_name
    if any(isinstance(x, torch.Tensor) for x in ranks):
        got = "the given ranks are tensors, but not those of a process group with the given tag"
        raise CaptureError.of(what, got, needed=OF_GROUP, fix=NAME)
    name = _compat.name_of_group(ranks, tag)
    if name is None:
        got = f"no group of this rank has the ranks {list(ranks)} and the tag {tag!r}"
        raise CaptureError.of(what, got, needed=OF_GROUP, fix=NAME)
    return name


@_compat.constant_in_graph
def is_rank_outside(what: str, group: Any) -> bool:
    """Whether this rank is not in a group: the same answer on all ranks.

    Raises:
        CaptureError: it differs.
    """
    group = real_mesh(group)
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        return True
    if ranks_of_world_group(group) is not None:
        return False
    if any(axes_with(mesh, group) is not None for mesh in meshes_here()):
        return False
    raise CaptureError.of(
        what,
        "only some ranks are in the group",
        needed="the same answer on all ranks",
        fix="make this call outside of the function, or use mesh.get_group(axis) of one mesh axis",
    )


def _ranks_of_groups(axes: Sequence[str]) -> list[list[int]]:
    """The ranks of each group over axes, in the order of the mesh."""
    groups: dict[int, list[int]] = {}
    for place, rank in zip(_group_of_each_rank(axes), ranks_here(), strict=True):
        groups.setdefault(place, []).append(rank)
    return list(groups.values())


def _group_of_each_rank(axes: Sequence[str]) -> list[int]:
    """For each rank of the mesh: which of the groups over axes has it."""
    known = axes_of(current_scope().mesh)
    places = [0]
    for name, size in zip(known.names, known.sizes, strict=True):
        is_inside = name in axes
        steps = [0] * size if is_inside else range(size)
        scale = 1 if is_inside else size
        places = [place * scale + step for place in places for step in steps]
    return places


def _with_members(axes: Sequence[str]) -> list[tuple[int, list[int]]]:
    """Each rank of the mesh, with the ranks of its group over axes as torch orders them."""
    members = {rank: sorted(row) for row in _ranks_of_groups(axes) for rank in row}
    return [(rank, members[rank]) for rank in ranks_here()]
