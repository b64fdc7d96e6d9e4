"""Memory that is free, and kept for a later result of the same size.

Inductor keeps it where that does not raise its own estimate of the peak. In that estimate, no
result takes the memory of a value that its kernel reads.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import attrs
import torch
from torch.fx import Node

from ...ops.placement import AFTER
from ...partition.planner import work
from . import op_kinds
from .fused import Group, values_of
from .stored import Stored

GIVEN = {"addmm", "baddbmm", "bmm", "mm"}  # products into memory that they are given


@attrs.define
class Call:
    """The memory that one call of the code allocates, holds and frees.

    Args:
        groups: the places of its groups in the order, and the values for which each allocates.
        held: the values whose memory is held while it runs.
        freed: the values of which nothing is read later.
    """

    groups: dict[int, list[Node]] = attrs.field(factory=dict)
    held: list[Node] = attrs.field(factory=list)
    freed: list[Node] = attrs.field(factory=list)


@attrs.frozen
class _Free:
    """Memory that nothing reads.

    Args:
        value: that lay in it.
        call: the place of the last call that reads it.
        group: the place of the last group of that call.
    """

    value: Node
    call: int
    group: int


class Reused:
    """For each call, the values whose memory is kept until a later one.

    Args:
        stored: the kernels.
        order: the groups as they run.
        calls: what they allocate and free.
    """

    def __init__(self, stored: Stored, order: Sequence[Group], calls: Sequence[Call]) -> None:
        self.stored = stored
        self.expected = _estimate(stored, order)
        self.most = max(self.expected, default=0)
        self.kept: list[list[Node]] = [[] for _ in calls]
        self.pool: dict[tuple[torch.dtype, int], list[_Free]] = {}
        for place, call in enumerate(calls):
            self.visit(place, call)

    def visit(self, place: int, call: Call) -> None:
        """Take free memory for what a call allocates, and note the values that it frees."""
        for group, values in call.groups.items():
            for value in values:
                if self.is_given(value):
                    self.take(place, group, value)
        last = max(call.groups)
        for value in call.freed:
            free = _Free(value, place, last)
            self.pool.setdefault(_key(value), []).append(free)

    def take(self, place: int, group: int, value: Node) -> None:
        """Give a value the memory that was freed last, if that is as large and may be kept."""
        free = self.pool.get(_key(value))
        if not free:
            return
        known = free[-1]
        between = self.expected[known.group + 1 : group]
        size = work.nbytes(value.meta["val"])
        if between and size + max(between) > self.most:
            return
        free.pop()
        for k in range(known.group + 1, group):
            self.expected[k] += size
        for k in range(known.call + 1, place):
            self.kept[k].append(known.value)

    def is_given(self, value: Node) -> bool:
        """Whether the code allocates memory for a value, rather than the kernel that makes it."""
        (maker, *_) = self.stored.makers[value]
        if maker.space is not None:
            return True
        product = op_kinds.product_of(maker.node) or maker.node
        is_product = op_kinds.name(product) in GIVEN
        return is_product and not op_kinds.allocates(product)


def _key(value: Node) -> tuple[torch.dtype, int]:
    """The dtype and the bytes of a value."""
    x = value.meta["val"]
    return x.dtype, work.nbytes(x)


def _estimate(stored: Stored, order: Sequence[Group]) -> list[int]:
    """The bytes that Inductor expects to be held at each group, without arguments."""
    change = [0] * (len(order) + 1)
    first: dict[Node, int] = {}
    last: dict[Node, int] = {}
    parts = _parts(stored)
    for k, group in enumerate(order):
        for x in values_of(group):
            first.setdefault(_owner(stored, x), k)
        used = [x for y in group.kernels for x in (*y.reads, *y.writes)]
        for x in used[:]:
            if x in parts:
                first.setdefault(x, k)
                used += parts.pop(x)
        last |= {_owner(stored, x): k for x in used}
    results = {_owner(stored, x) for x in stored.results}
    for x, k in first.items():
        size = work.nbytes(x.meta["val"])
        change[k] += size
        if x not in results:
            change[last[x] + 1] -= size
    return list(itertools.accumulate(change[:-1]))


def _parts(stored: Stored) -> dict[Node, list[Node]]:
    """The parts of each joined value that are written where it lies. They count until it is first
    read, as it does from then on.
    """
    found: dict[Node, list[Node]] = {}
    for value, home in stored.home.items():
        if _is_part(stored, value):
            found.setdefault(home, []).append(value)
    return found


def _is_part(stored: Stored, value: Node) -> bool:
    """Whether a value is one of those that a joined one is made of, and lies there."""
    home = stored.home[value]
    is_earlier = stored.place[value] < stored.place[home]
    return home.target in op_kinds.JOINED and is_earlier


def _owner(stored: Stored, value: Node) -> Node:
    """The value to whose memory another one's bytes are counted: what a collective writes over
    counts once, a value by another name and each part of a joined one by itself.
    """
    home = stored.home[value]
    is_own = value.target is AFTER or _is_part(stored, value)
    return value if is_own else home
