"""The arguments whose placements are to be chosen, and the placements that each may have."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import attrs
import torch
from torch.fx import Node

from ...types import AxisPlacement, MeshAxes, MeshPlacements, Program
from .. import layout
from ..propagation.strategy_units import extended
from .parameter_groups import ParameterGroups

# A shard that gives a rank more than so many even shares is not tried.
UNEVEN = 1.25


class Contradiction(Exception):
    """Raised where tensors of one parameter group are given different placements; its arguments
    name them.
    """


@attrs.frozen(eq=False)
class FreeArguments:
    """The arguments of a program whose placements are free, and what decides them.

    Args:
        holders: the arguments of the program.
        given: the placements of each; None where it is free.
        followers: which argument follows which.
        axes: of the mesh.
        leaving: the placements of its results; None where one may leave as it is made.
        rows: the arguments that scans take row by row, whose step dim no axis shards.
    """

    holders: Sequence[Node]
    given: dict[Node, MeshPlacements | None]
    followers: ParameterGroups
    axes: MeshAxes
    leaving: Sequence[MeshPlacements | None]
    rows: Collection[Node] = ()

    def leader(self, node: Node) -> Node | None:
        """Return the parameter whose placement an argument takes (itself, if it follows none);
        None if its placement is given.
        """
        if self.given.get(node) is not None:
            return None
        return self.followers.leader(node) or node

    def fixed(self, leader: Node) -> MeshPlacements | None:
        """Return the placement that is given for a parameter, directly or for its optimizer
        state; None if it is free.
        """
        own = self.given[leader]
        if own is not None:
            return own
        for node in self.holders:
            placements = self.given[node]
            if placements is not None and self.followers.leader(node) is leader:
                return placements
        return None

    def candidates(self, leader: Node, before: MeshPlacements) -> list[MeshPlacements]:
        """List the placements that an argument may have, extended by the next mesh axis."""
        axis = len(before)
        fixed = self.fixed(leader)
        if fixed is not None:
            return [fixed[: axis + 1]]
        x = leader.meta["val"]
        first = self.first_dim(leader)
        return shards(x, before, self.axes.sizes, first)

    def first_dim(self, node: Node) -> int:
        """Return the first dim that an axis may shard: 1 for the stacked inputs of a scan, else
        0.
        """
        return 1 if node in self.rows else 0

    def free(self) -> list[Node]:
        """List the arguments without a given placement."""
        return [node for node in self.holders if self.given[node] is None]


def free_arguments_of(
    program: Program,
    axes: MeshAxes,
    given: Sequence[MeshPlacements | None],
    leaving: Sequence[MeshPlacements | None],
    rows: Collection[Node] = (),
) -> FreeArguments:
    """Collect the free arguments of a program.

    Args:
        program: the Program.
        axes: of the mesh.
        given: the placements of its inputs; None where they are to be chosen.
        leaving: the placements of its results; None where they are free.
        rows: the arguments that scans take row by row.

    Raises:
        Contradiction: the states of one parameter are placed otherwise.
    """
    graph = program.graph.graph
    holders = graph.find_nodes(op="placeholder")
    followers = ParameterGroups(graph)
    placed = dict(zip(holders, given, strict=True))
    paths = dict(zip(holders, program.in_paths, strict=False))
    for parameter in holders:
        if placed[parameter] is None and parameter in followers.parameters:
            by_placements = {}
            for node in holders:
                placements = placed[node]
                if placements is not None and followers.leader(node) is parameter:
                    by_placements.setdefault(placements, paths.get(node, node.name))
            if len(by_placements) > 1:
                raise Contradiction(paths[parameter], by_placements)
    return FreeArguments(holders, placed, followers, axes, leaving, rows)


def shards(
    x: torch.Tensor, before: MeshPlacements, sizes: Sequence[int], first: int = 0
) -> list[MeshPlacements]:
    """List the placements of a tensor extended by one mesh axis: replicated, and sharded on
    each dim that is long enough.
    """
    axis = len(before)
    n = sizes[axis]
    found: list[MeshPlacements] = [(*before, "R")]
    for dim in range(first, x.dim()):
        length, _ = layout.grain(x.shape[dim], dim, before, sizes)
        share = layout.full_chunk(length, 1, n) * n
        is_even = length >= n and share <= UNEVEN * length
        placements = extended(tuple(x.shape), before, dim, tuple(sizes))
        plain = (*before, dim)
        if n > 1 and is_even and placements == plain:
            found.append(plain)
    return found


def data_parallel(unknowns: FreeArguments) -> list[MeshPlacements]:
    """Return the placements of data parallelism: parameters and their state replicated, other
    arguments sharded on dim 0.
    """
    return textbook(unknowns, over=())


def fully_sharded(unknowns: FreeArguments, over: Collection[int]) -> list[MeshPlacements]:
    """Return the placements of fully sharded data parallelism: parameters sharded on their
    largest dim over some axes.
    """
    return textbook(unknowns, over=over)


def textbook(
    unknowns: FreeArguments,
    over: Collection[int],
    tensor: Mapping[int, Mapping[Node, int]] = {},
    experts: Mapping[int, Mapping[Node, int]] = {},
    *,
    is_uneven: bool = False,
) -> list[MeshPlacements]:
    """Return the placements of textbook parallelism: data parallel, fully sharded over some
    axes, tensor parallel over others, expert parallel over some.

    Args:
        unknowns: the arguments.
        over: the axes over which parameters are fully sharded.
        tensor: for an axis of tensor parallelism, which shards no batch, the dims over which it
            shards parameters.
        experts: for an axis of expert parallelism, which shards the batch too, the dims over
            which it shards parameters of experts.
        is_uneven: whether ranks may have no row of a batch.
    """
    sizes = unknowns.axes.sizes
    of_batch = [k for k in range(len(sizes)) if k not in tensor]
    found = []
    for node in unknowns.holders:
        given = unknowns.given[node]
        leader = unknowns.leader(node)
        fixed = None if leader is None else unknowns.fixed(leader)
        x = node.meta["val"]
        placements: MeshPlacements
        if given is not None:
            placements = given
        elif fixed is not None:
            placements = fixed
        elif leader is not None and leader in unknowns.followers.parameters:
            first = unknowns.first_dim(node)
            by_axis = [*tensor.items(), *experts.items()]
            dims = {k: rows[leader] for k, rows in by_axis if leader in rows}
            free = [k for k in over if k not in dims]
            placements = _on_largest(x, free, sizes, first, dims)
        else:
            first = unknowns.first_dim(node)
            placements = _on_first(x, sizes, first, of_batch, is_uneven=is_uneven)
        found.append(placements)
    return found


def _on_largest(
    x: torch.Tensor,
    over: Collection[int],
    sizes: Sequence[int],
    first: int,
    dims: Mapping[int, int],
) -> MeshPlacements:
    """Shard a parameter on its largest free dim that the given axes divide.

    Args:
        dims: the dims that other axes shard.
    """
    placements: list[AxisPlacement] = [dims.get(axis, "R") for axis in range(len(sizes))]
    n = math.prod(sizes[axis] for axis in over)
    is_free = lambda dim: dim not in dims.values() and x.shape[dim] % n == 0 and x.shape[dim]
    free = [dim for dim in range(first, x.dim()) if is_free(dim)]
    if n > 1 and free:
        best = max(free, key=lambda dim: (x.shape[dim], -dim))
        for axis in over:
            placements[axis] = best
    return tuple(placements)


def _on_first(
    x: torch.Tensor, sizes: Sequence[int], first: int, over: Collection[int], *, is_uneven: bool
) -> MeshPlacements:
    """Shard a batch on its first free dim, over the axes that divide it, or over all of them if
    shards may be uneven.
    """
    placements: list[AxisPlacement] = ["R"] * len(sizes)
    left = x.shape[first] if x.dim() > first else 1
    for axis in over:
        n = sizes[axis]
        divides = left % n == 0 and left > 0
        if n > 1 and (divides or (is_uneven and left > 1)):
            placements[axis] = first
            left = -(-left // n)
    fitting = layout.canonical(tuple(x.shape), tuple(placements), tuple(sizes))
    if is_uneven and fitting != tuple(placements):
        return _on_first(x, sizes, first, over, is_uneven=False)
    return tuple(placements)
