"""What a compiled program holds at each of its kernels, without compiling it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch.fx import Graph, Node

from ...inspect.memory import Moments
from ...partition.planner import work
from .copied_inputs import is_convolved
from .fused import Fusion, Group, values_of
from .stored import Stored


def inductor_steps(graph: Graph, taken: Mapping[int, int] | None = None) -> Moments:
    """For each kernel, in the order in which Inductor's code runs them: the node that it belongs
    to, and the nodes that own the memory that is held while it runs, arguments among them.

    Args:
        graph: one rank's program, with the values that it recomputes, and with copies of inputs.
        taken: the placeholder into whose memory each of some results goes, by its position.
    """
    yield from _Steps(graph, taken or {}).run()


class _Steps:
    def __init__(self, graph: Graph, taken: Mapping[int, int]) -> None:
        self.stored = Stored(graph, taken)
        self.order = Fusion(self.stored).order
        self.given = dict.fromkeys(self.stored.holders)
        self.last = self.last_uses()
        self.inside = self.never_stored()
        homes = self.stored.home.items()
        self.renamed = {home for value, home in homes if value is not home}

    def home(self, value: Node) -> Node:
        return self.stored.home[value]

    def last_uses(self) -> dict[Node, Group | None]:
        """The last group that uses the memory of each value; None for a result."""
        found: dict[Node, Group | None] = {}
        for group in self.order:
            for kernel in group.kernels:
                for x in (*kernel.reads, *kernel.writes):
                    found[self.home(x)] = group
        return found | {self.home(x): None for x in self.stored.results}

    def never_stored(self) -> set[Node]:
        """The values that only the kernel reads that makes them."""
        found = set()
        for group in self.order:
            kernels = set(group.kernels)
            for x in values_of(group):
                is_kept = self.home(x) is not x or self.last[x] is None
                readers = self.stored.readers.get(x, ())
                if group.is_loop and not is_kept and kernels.issuperset(readers):
                    found.add(x)
        return found

    def calls(self) -> list[list[Group]]:
        """The groups that the code runs in one call: loops that follow each other are one."""
        found: list[list[Group]] = []
        for group in self.order:
            if found and group.is_loop and found[-1][-1].is_loop:
                found[-1].append(group)
            else:
                found.append([group])
        return found

    def run(self) -> Moments:
        """The memory of each call: it allocates all results first, and frees at its end."""
        alive: dict[Node, None] = {}
        for call in self.calls():
            for group in call:
                made = [self.home(x) for x in values_of(group) if x not in self.inside]
                new = [x for x in made if x not in alive and x not in self.given]
                for x in self.in_place(group, new, alive):
                    alive.pop(x)
                alive |= dict.fromkeys(new)
            yield call[-1].kernels[-1].node, [*self.given, *alive]
            for x in [x for x in alive if self.last.get(x) in call]:
                alive.pop(x)

    def in_place(
        self, group: Group, new: Iterable[Node], alive: Iterable[Node]
    ) -> list[Node]:
        """The values whose memory the results of a loop take."""
        if not group.is_loop:
            return []
        found = []
        sizes = [work.nbytes(x.meta["val"]) for x in new]
        for x in alive:
            size = work.nbytes(x.meta["val"])
            is_dying = self.last.get(x) is group
            if is_dying and size in sizes and self.can_be_replaced(x):
                sizes.remove(size)
                found.append(x)
        return found

    def can_be_replaced(self, value: Node) -> bool:
        """Whether a loop may write over a value that it reads: not if it has a second name or other
        strides, nor if its maker reads an argument that is overwritten later.
        """
        if value in self.renamed or is_convolved(value):
            return False
        makers = self.stored.makers.get(value, ())
        read = {self.home(x) for kernel in makers for x in kernel.reads}
        return not read & self.stored.mutated
