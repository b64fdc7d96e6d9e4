"""The arguments whose placements are to be chosen, and the placements that each may have."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import attrs
import torch
from torch.fx import Node

from ...types import Mark, Marks, MeshAxes, Program
from .. import layout
from ..propagation.units import extended
from .followers import Followers

# A shard that gives a rank more than so many even shares is not tried.
UNEVEN = 1.25


class Contradiction(Exception):
    """Tensors that follow one parameter are placed otherwise. Its arguments name them."""


@attrs.frozen(eq=False)
class Unknowns:
    """Arguments with free placements.

    Args:
        holders: the arguments of the program.
        given: the placements of each; None where it is free.
        followers: which argument follows which.
        axes: of the mesh.
        leaving: the placements of its results; None where one may leave as it is made.
        rows: the arguments that scans take row by row, whose step dim no axis shards.
    """

    holders: Sequence[Node]
    given: dict[Node, Marks | None]
    followers: Followers
    axes: MeshAxes
    leaving: Sequence[Marks | None]
    rows: Collection[Node] = ()

    def leader(self, node: Node) -> Node | None:
        """The parameter whose placement an argument has. None for one with a placement."""
        if self.given.get(node) is not None:
            return None
        return self.followers.leader(node) or node

    def fixed(self, leader: Node) -> Marks | None:
        """The placement of a parameter that is given, by itself or by what follows it."""
        own = self.given[leader]
        if own is not None:
            return own
        for node in self.holders:
            marks = self.given[node]
            if marks is not None and self.followers.leader(node) is leader:
                return marks
        return None

    def candidates(self, leader: Node, before: Marks) -> list[Marks]:
        """The placements that an argument may have on the axes up to the next one."""
        axis = len(before)
        fixed = self.fixed(leader)
        if fixed is not None:
            return [fixed[: axis + 1]]
        x = leader.meta["val"]
        first = self.first_dim(leader)
        return shards(x, before, self.axes.sizes, first)

    def first_dim(self, node: Node) -> int:
        """The first dim of an argument that an axis may shard."""
        return 1 if node in self.rows else 0

    def free(self) -> list[Node]:
        """The arguments that are free."""
        return [node for node in self.holders if self.given[node] is None]


def unknowns_of(
    program: Program,
    axes: MeshAxes,
    given: Sequence[Marks | None],
    leaving: Sequence[Marks | None],
    rows: Collection[Node] = (),
) -> Unknowns:
    """The unknowns of a program.

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
    followers = Followers(graph)
    placed = dict(zip(holders, given, strict=True))
    paths = dict(zip(holders, program.in_paths, strict=False))
    for parameter in holders:
        if placed[parameter] is None and parameter in followers.parameters:
            by_marks = {}
            for node in holders:
                marks = placed[node]
                if marks is not None and followers.leader(node) is parameter:
                    by_marks.setdefault(marks, paths.get(node, node.name))
            if len(by_marks) > 1:
                raise Contradiction(paths[parameter], by_marks)
    return Unknowns(holders, placed, followers, axes, leaving, rows)


def shards(x: torch.Tensor, before: Marks, sizes: Sequence[int], first: int = 0) -> list[Marks]:
    """A tensor replicated on the next axis, and sharded on each dim that is long enough, from the
    first that an axis may shard.
    """
    axis = len(before)
    n = sizes[axis]
    found: list[Marks] = [(*before, "R")]
    for dim in range(first, x.dim()):
        length, _ = layout.grain(x.shape[dim], dim, before, sizes)
        share = layout.full_chunk(length, 1, n) * n
        is_even = length >= n and share <= UNEVEN * length
        marks = extended(tuple(x.shape), before, dim, tuple(sizes))
        plain = (*before, dim)
        if n > 1 and is_even and marks == plain:
            found.append(plain)
    return found


def data_parallel(unknowns: Unknowns) -> list[Marks]:
    """Parameters and what follows them are replicated, other arguments sharded on their first
    dim over all axes that divide it.
    """
    return textbook(unknowns, over=())


def fully_sharded(unknowns: Unknowns, over: Collection[int]) -> list[Marks]:
    """The same, with parameters sharded on their largest dim over some axes."""
    return textbook(unknowns, over=over)


def textbook(
    unknowns: Unknowns,
    over: Collection[int],
    tensor: Mapping[int, Mapping[Node, int]] = {},
    *,
    is_uneven: bool = False,
) -> list[Marks]:
    """Placements as textbooks have them.

    Args:
        unknowns: the arguments.
        over: the axes over which parameters are fully sharded.
        tensor: for an axis of tensor parallelism, which shards no batch, the dims over which it
            shards parameters.
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
        marks: Marks
        if given is not None:
            marks = given
        elif fixed is not None:
            marks = fixed
        elif leader is not None and leader in unknowns.followers.parameters:
            first = unknowns.first_dim(node)
            dims = {k: rows[leader] for k, rows in tensor.items() if leader in rows}
            marks = _on_largest(x, over, sizes, first, dims)
        else:
            first = unknowns.first_dim(node)
            marks = _on_first(x, sizes, first, of_batch, is_uneven=is_uneven)
        found.append(marks)
    return found


def _on_largest(
    x: torch.Tensor,
    over: Collection[int],
    sizes: Sequence[int],
    first: int,
    dims: Mapping[int, int],
) -> Marks:
    """A tensor sharded over some axes on its largest free dim that they divide, from the first
    that they may shard.

    Args:
        dims: the dims that other axes shard.
    """
    marks: list[Mark] = [dims.get(axis, "R") for axis in range(len(sizes))]
    n = math.prod(sizes[axis] for axis in over)
    is_free = lambda dim: dim not in dims.values() and x.shape[dim] % n == 0 and x.shape[dim]
    free = [dim for dim in range(first, x.dim()) if is_free(dim)]
    if n > 1 and free:
        best = max(free, key=lambda dim: (x.shape[dim], -dim))
        for axis in over:
            marks[axis] = best
    return tuple(marks)


def _on_first(
    x: torch.Tensor, sizes: Sequence[int], first: int, over: Collection[int], *, is_uneven: bool
) -> Marks:
    """A tensor sharded on the first dim that axes may shard, over the first that divide it, or
    over all.
    """
    marks: list[Mark] = ["R"] * len(sizes)
    left = x.shape[first] if x.dim() > first else 1
    for axis in over:
        n = sizes[axis]
        divides = left % n == 0 and left > 0
        if n > 1 and (divides or (is_uneven and left > 1)):
            marks[axis] = first
            left = -(-left // n)
    fitting = layout.canonical(tuple(x.shape), tuple(marks), tuple(sizes))
    if is_uneven and fitting != tuple(marks):
        return _on_first(x, sizes, first, over, is_uneven=False)
    return tuple(marks)
