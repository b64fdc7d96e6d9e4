"""The arguments of a program near an op, and other placements of them: what a search for a program
that sends less tries.
"""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Iterator, Mapping

import attrs
from torch.fx import Graph, Node

from ..partition import layout, plan
from ..partition.auto.parameter_groups import ParameterGroups
from ..types import AxisPlacement, MeshPlacements
from .everywhere import inputs_of_bodies

Changes = dict[int, MeshPlacements]  # of arguments, by their number


@attrs.frozen(eq=False)
class Arguments:
    """The arguments of a program under a plan.

    Args:
        graph: the program.
        chosen: its plan.
        count: how many of its inputs are arguments of the user.
    """

    graph: Graph
    chosen: plan.Plan
    count: int

    @functools.cached_property
    def inputs(self) -> list[Node]:
        """The inputs of the program, of which the arguments come first."""
        return self.graph.find_nodes(op="placeholder")

    @functools.cached_property
    def groups(self) -> ParameterGroups:
        """Which inputs follow a parameter, as its state does."""
        return ParameterGroups(self.graph)

    @functools.cached_property
    def _operands(self) -> dict[Node, list[Node]]:
        return inputs_of_bodies(self.graph)

    def nearest(self, node: Node, most: int) -> list[int]:
        """Return the numbers of the arguments that an op depends on, the nearest first.

        Args:
            node: the op.
            most: how many.
        """
        number = {x: i for i, x in enumerate(self.inputs[: self.count])}
        seen, queue = {node}, collections.deque([node])
        numbers: list[int] = []
        while queue and len(numbers) < most:
            current = queue.popleft()
            if current in number:
                numbers.append(number[current])
            for read in self._operands.get(current) or current.all_input_nodes:
                if read not in seen:
                    seen.add(read)
                    queue.append(read)
        return numbers

    def data(self, most: int) -> list[int]:
        """Return the numbers of the first arguments that follow no parameter, as a batch does."""
        arguments = enumerate(self.inputs[: self.count])
        return [i for i, x in arguments if self.groups.leader(x) is None][:most]

    def with_followers(self, changes: Mapping[int, MeshPlacements]) -> Changes:
        """Place the inputs that follow a changed one, as a parameter's state does, like it."""
        placed: Changes = {}
        for i, marks in changes.items():
            leader = self.groups.leader(self.inputs[i])
            for k, x in enumerate(self.inputs):
                if k == i or (leader and self.groups.leader(x) is leader):
                    placed[k] = marks
        return placed

    def on_dims(self, i: int, axis: int) -> Iterator[MeshPlacements]:
        """Yield the placements that shard another dim of an argument over an axis."""
        now = self.chosen.ins[i]
        for dim in range(now.value.dim()):
            marks = placed_on(now.placements, axis, dim)
            if self.fits(i, marks):
                yield marks

    def fits(self, i: int, marks: MeshPlacements) -> bool:
        """Return whether placements are others than now, with plain chunks of one size."""
        now, sizes = self.chosen.ins[i], self.chosen.axes.sizes
        shape = tuple(now.value.shape)
        if marks == now.placements or layout.canonical(shape, marks, sizes) != marks:
            return False
        ranks = [
            math.prod(n for n, m in zip(sizes, marks, strict=True) if m == dim)
            for dim in range(len(shape))
        ]
        return all(size and size % n == 0 for size, n in zip(shape, ranks, strict=True))


def placed_on(marks: MeshPlacements, axis: int, mark: AxisPlacement) -> MeshPlacements:
    """Return placements with another one on one mesh axis."""
    return (*marks[:axis], mark, *marks[axis + 1 :])
