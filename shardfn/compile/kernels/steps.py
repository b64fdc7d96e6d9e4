"""The bytes that a compiled program holds at each of its kernels, without compiling it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from torch.fx import Graph, Node

from ...inspect.memory import Moments
from ...partition.planner import work
from . import op_kinds
from .copied_inputs import is_convolved
from .fused import Fusion, Group, values_of
from .op_kinds import CHANNELS_LAST, COPY, IN_DIMS
from .reused import Call, Reused
from .spaces import layout_of
from .stored import Stored

LONGEST_ROW = 300  # elements for each row of loops in common


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
        fusion = Fusion(self.stored)
        self.order, self.before = fusion.order, fusion.before
        self.given = dict.fromkeys(self.stored.holders)
        self.last = self.last_uses()
        self.inside = self.never_stored()
        homes = self.stored.home.items()
        self.alive: dict[Node, None] = {}
        self.done = 0  # a bit for each kernel that has run
        self.place = 0  # of the next group
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
        """The values that only the loop reads that makes them, or others inside of the same outer
        loops, for which a buffer of one row serves.
        """
        found = set()
        for group in self.order:
            kernels = set(group.kernels)
            for x in values_of(group):
                is_sum = any(y.is_sum for y in self.stored.makers[x])
                is_kept = is_sum or self.home(x) is not x or self.last[x] is None
                is_kept = is_kept or op_kinds.is_scatter(x)
                readers = self.stored.readers.get(x, ())
                if not group.is_loop or is_kept or not kernels.issuperset(readers):
                    continue
                (own,) = (part for part in group.parts if self.stored.makers[x][0] in part)
                if set(own).issuperset(readers) or _has_rows(group):
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
        """The memory of each call: it allocates all results first, and frees at its end. Free
        memory may be kept for a later result.
        """
        calls = self.calls()
        every = [self.called(call) for call in calls]
        reused = Reused(self.stored, self.order, every)
        for call, own, kept in zip(calls, every, reused.kept, strict=True):
            last = call[-1].kernels[-1]
            yield last.node, [*self.given, *own.held, *kept]

    def called(self, call: list[Group]) -> Call:
        """The memory that the next call allocates, holds and frees."""
        own = Call()
        for group in call:
            own.groups[self.place] = self.allocated(group)
            self.done |= group.mask
            self.place += 1
        own.held = list(self.alive)
        own.freed = [x for x in self.alive if self.last.get(x) in call]
        for x in own.freed:
            self.alive.pop(x)
        return own

    def allocated(self, group: Group) -> list[Node]:
        """The results of a group that need memory, and take that of no value that it reads. A
        result over a value that is never stored needs memory too.
        """
        made = [self.home(x) for x in values_of(group) if x not in self.inside]
        new = [x for x in made if x not in self.alive and x not in self.given]
        taken = self.in_place(group, new, self.done)
        results = {result for value, result in taken.items() if value in self.alive or value in new}
        for x in taken:
            self.alive.pop(x, None)
        self.alive |= dict.fromkeys(new)
        return [x for x in dict.fromkeys(new) if x not in results]

    def in_place(self, group: Group, new: Iterable[Node], done: int) -> dict[Node, Node]:
        """The values whose memory the results of a loop take, some of which have none, and those
        results.
        """
        found: dict[Node, Node] = {}
        for kernel in group.kernels if group.is_loop else ():
            known = done | self.before[kernel.number] | 1 << kernel.number
            for x in kernel.writes:
                if self.stored.makers[x][0] is not kernel:
                    continue
                free = [y for y in kernel.reads if self.is_free(y, x, known)]
                free = [y for y in free if _is_read_in_place(group, y, x)]
                taken = [y for y in free if y not in found][:1]
                if x in new:
                    found |= dict.fromkeys(taken, x)
        return found

    def is_free(self, value: Node, result: Node, known: int) -> bool:
        """Whether a loop may write its result over a value that it reads: only known kernels
        read that.
        """
        if self.last.get(value) is None or value in self.given:
            return False
        size, wanted = (work.nbytes(x.meta["val"]) for x in (value, result))
        users = self.stored.readers.get(value, ())
        is_done = all(known >> x.number & 1 for x in users)
        return size == wanted and is_done and self.can_be_replaced(value, result)

    def can_be_replaced(self, value: Node, result: Node) -> bool:
        """Whether a loop may write over a value that it reads: not if it has a second name, was
        written part by part, or has other strides.
        """
        kind = result.meta.get(COPY)
        is_last = kind == CHANNELS_LAST
        is_alike = kind != IN_DIMS and is_convolved(value) == is_last
        is_joined = value.target in op_kinds.JOINED
        is_own = not (value in self.renamed or is_joined or op_kinds.is_scatter(value))
        return is_own and is_alike


def _has_rows(group: Group) -> bool:
    """Whether loops that follow each other run over rows, inside of loops in common."""
    loops = [next((x.loop for x in part if x.is_sum), part[0].loop) for part in group.parts]
    every = [(*loop.kept, *loop.reduced) for loop in loops]
    is_one = all(len(dims) == group.depth + 1 for dims in every)
    outer = [math.prod(dims[: group.depth]) for dims in every]
    pairs = zip(outer, every, strict=True)
    return is_one and all(count * LONGEST_ROW >= dims[-1] for count, dims in pairs)


def _is_read_in_place(group: Group, value: Node, result: Node) -> bool:
    """Whether all loops of a group that read a value do so in the order in which the result is
    written.
    """
    every = [read for kernel in group.kernels for read in kernel.layouts]
    return all(layout == layout_of(result) for x, layout in every if x is value)
