"""The kernels that Inductor fuses into one, and the order in which they run."""

from __future__ import annotations

import math

import attrs
import torch
from torch.fx import Node

from ...partition.planner import work
from . import op_kinds
from .formulas import Kernel
from .spaces import Space, layout_of
from .stored import Stored

LARGEST, WIDEST, FARTHEST = 64, 16, 64  # kernels of a fused one; without a common result; apart
NEAR = 64  # readers of a value after one that are tried with it
ROUNDS = 10


@attrs.define(eq=False)
class Group:
    """Kernels that run as one.

    Args:
        kernels: in order.
        mask: a bit for each.
        before: a bit for each kernel that runs before them.
    """

    kernels: list[Kernel]
    mask: int
    before: int

    @property
    def first(self) -> int:
        """The place of the first one in the order."""
        return self.kernels[0].number

    @property
    def last(self) -> int:
        """The place of the last one in the order."""
        return self.kernels[-1].number

    @property
    def is_loop(self) -> bool:
        """Whether they are loops."""
        return self.kernels[0].space is not None

    @property
    def is_sum(self) -> bool:
        """Whether one of them is a sum."""
        return any(x.is_sum for x in self.kernels)


class Fusion:
    """The fused kernels of a graph.

    Args:
        stored: its kernels.
    """

    def __init__(self, stored: Stored) -> None:
        self.stored = stored
        self.group: dict[Kernel, Group] = {}
        self.before: list[int] = []  # a bit for each kernel that a kernel waits for
        before = self.before
        for kernel in stored.kernels:
            mask = 0
            for other in self.needed(kernel):
                mask |= before[other.number] | 1 << other.number
            before.append(mask)
            number = 1 << kernel.number
            self.group[kernel] = Group([kernel], number, mask)
        self.all = dict.fromkeys(self.group.values())
        for _ in range(ROUNDS):
            if not self.fuse_once():
                break
        self.order = self.ordered()

    def groups(self) -> list[Group]:
        """The groups, by their first kernels."""
        return list(dict.fromkeys(self.group[x] for x in self.stored.kernels))

    def needed(self, kernel: Kernel) -> list[Kernel]:
        """The kernels that another one waits for."""
        makers = self.stored.makers
        given = [x for value in kernel.reads for x in makers.get(value, ())]
        earlier = [x for x in given if x.number < kernel.number]
        return [*earlier, *kernel.after]

    def fuse_once(self) -> bool:
        """Fuse pairs that share values: those of one kind first, then those that share most."""
        shared = self.shared()
        is_any = False
        for one, other in sorted(shared, key=lambda pair: _order(pair, shared[pair])):
            a = self.group[one.kernels[0]]
            b = self.group[other.kernels[0]]
            if a is not b and self.can_fuse(a, b):
                self.fuse(a, b)
                is_any = True
        return is_any

    def shared(self) -> dict[tuple[Group, Group], int]:
        """The bytes that each two groups share: of values that one makes and the other reads, or
        that both read in one layout.
        """
        users: dict[tuple[Node, object], dict[Group, None]] = {}
        for kernel in self.stored.kernels:
            if kernel.space is None:
                continue
            made = [x for x in kernel.writes if x.target not in op_kinds.JOINED]
            for key in (*kernel.layouts, *((x, layout_of(x)) for x in made)):
                users.setdefault(key, {})[self.group[kernel]] = None
        found: dict[tuple[Group, Group], int] = {}
        for (value, layout), groups in users.items():
            near = sorted(groups, key=lambda group: group.first)
            size = _bytes_read(value, layout)
            for k, one in enumerate(near):
                for other in near[k + 1 : k + 1 + NEAR]:
                    found[one, other] = found.get((one, other), 0) + size
        return found

    def can_fuse(self, a: Group, b: Group) -> bool:
        """Whether two groups can run as one, the first one before the second."""
        if b.mask & a.before:
            a, b = b, a
        count = len(a.kernels) + len(b.kernels)
        is_vertical = bool(a.mask & b.before)
        is_far = _distance(a, b) > FARTHEST and not is_vertical
        if count > (LARGEST if is_vertical else WIDEST) or is_far:
            return False
        if is_vertical and not _is_read_in_order(a, b):
            return False
        return _fit(a, b, is_vertical) and not self.is_between(a, b)

    def is_between(self, a: Group, b: Group) -> bool:
        """Whether a third kernel runs after the first group and before the second."""
        for kernel in b.kernels:
            for other in self.needed(kernel):
                group = self.group[other]
                if group is not a and group is not b and group.before & a.mask:
                    return True
        return False

    def fuse(self, a: Group, b: Group) -> None:
        """Make one group of two."""
        kernels = sorted([*a.kernels, *b.kernels], key=lambda x: x.number)
        mask = a.mask | b.mask
        before = (a.before | b.before) & ~mask
        fused = Group(kernels, mask, before)
        for kernel in kernels:
            self.group[kernel] = fused
        self.all.pop(a)
        self.all.pop(b)
        for group in self.all:
            if group.before & mask:
                group.before |= before | mask
        self.all[fused] = None

    def ordered(self) -> list[Group]:
        """The groups as they run: by their first kernels, each after those that it needs."""
        order: dict[Group, None] = {}
        for group in self.groups():
            waiting = {group: None}
            while waiting:
                now = next(reversed(waiting))
                needed = [self.group[y] for x in now.kernels for y in self.needed(x)]
                missing = [x for x in needed if x not in order and x is not now]
                if missing and now not in order:
                    assert missing[0] not in waiting, f"{now} waits for itself"
                    waiting[missing[0]] = None
                else:
                    order.setdefault(now)
                    waiting.pop(now)
        return list(order)


def _order(pair: tuple[Group, Group], shared: int) -> tuple[bool, int, int]:
    """Pairs of one kind come first, then those that share most, then those that are near."""
    a, b = pair
    is_mixed = a.is_sum != b.is_sum
    far = _distance(a, b)
    return is_mixed, -shared, far


def _bytes_read(value: Node, layout: object) -> int:
    """The bytes of a value, or those of the part that a layout reads."""
    x = value.meta.get("val")
    whole = work.nbytes(x)
    if not isinstance(x, torch.Tensor) or not isinstance(layout, tuple):
        return whole
    shape, *_ = layout
    is_shape = isinstance(shape, tuple) and all(isinstance(n, int) for n in shape)
    return min(whole, math.prod(shape) * x.itemsize) if is_shape else whole


def _distance(a: Group, b: Group) -> int:
    """How far the kernels of two groups are apart at most."""
    one = abs(a.first - b.last)
    other = abs(b.first - a.last)
    return max(one, other)


def _is_read_in_order(a: Group, b: Group) -> bool:
    """Whether a group reads the elements that loops of another one make as those make them. The
    sums of rows are read by all elements of a row.
    """
    loops = [kernel for kernel in a.kernels if not kernel.is_sum]
    made = {x for kernel in loops for x in kernel.writes}
    reads = [read for kernel in b.kernels for read in kernel.layouts]
    pairs = [(x, layout) for x, layout in reads if x in made]
    return all(
        layout == layout_of(x) or x.target in op_kinds.JOINED for x, layout in pairs
    )


def _fit(a: Group, b: Group, is_vertical: bool) -> bool:
    """Whether the loops of two groups are alike."""
    ones, others = _loops(a), _loops(b)
    sums = {x for x in (*ones, *others) if x[0] != x[1]}
    rows = {x[0] for x in sums}
    if any(not is_row for _, _, is_row, _ in sums):
        return ones == others
    if not sums:
        return ones == others
    if any(is_last for *_, is_last in ones | others):
        return False
    (most,) = {max(total for _, total, *_ in sums)}
    if len(rows) > 1 or len({total for _, total, *_ in sums}) > 1:
        return False
    is_sum_first = bool(ones & sums) and not others <= sums
    if is_sum_first and (rows == {1} or not is_vertical):
        return False
    return all(total in (most, *rows) for _, total, *_ in ones | others)


def _loops(group: Group) -> set[Space]:
    return {x.space for x in group.kernels if x.space is not None}


def values_of(group: Group) -> list[Node]:
    """The values that a group stores."""
    return list(dict.fromkeys(x for kernel in group.kernels for x in kernel.writes))
