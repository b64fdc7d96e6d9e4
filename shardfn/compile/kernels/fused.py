"""The kernels that Inductor fuses into one, and the order in which they run."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import torch
from torch.fx import Node

from ...partition.planner import work
from . import loops, op_kinds
from .formulas import Kernel
from .spaces import layout_of
from .stored import Stored

LARGEST, WIDEST, FARTHEST = (64, 16, 64)  # kernels of a fused one; without a common result; apart
NEAR = 64  # readers of a value after one that are tried with it
ROUNDS = 10
LEAST = 10  # bytes that loops share of which none reads the other
TIMES = 16  # as many bytes as a pair that is fused later


@attrs.define(eq=False)
class Group:
    """Kernels that run as one.

    Args:
        kernels: in order.
        mask: a bit for each.
        before: a bit for each kernel that runs before them.
        parts: the kernels of loops that follow each other inside of loops in common.
        depth: the number of loops in common.
    """

    kernels: list[Kernel]
    mask: int
    before: int
    parts: tuple[tuple[Kernel, ...], ...]
    depth: int = 0

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
            self.group[kernel] = Group([kernel], number, mask, ((kernel,),))
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
        """Fuse pairs that share values: those that share most first. Pairs of which one follows
        the other inside of a loop wait until there are no others.
        """
        shared = self.shared()
        pairs = [pair for pair in shared if self.can_fuse(*pair, shared[pair])]
        best = min((_is_inside(*pair) for pair in pairs), default=False)
        pairs = [pair for pair in pairs if _is_inside(*pair) == best]
        pairs.sort(key=lambda pair: _Score.of(pair, shared[pair]), reverse=True)
        is_any = False
        for one, other in pairs:
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

    def can_fuse(self, a: Group, b: Group, shared: int = LEAST) -> bool:
        """Whether two groups can run as one, the first one before the second."""
        a, b = _ordered(a, b)
        count = len(a.kernels) + len(b.kernels)
        if not a.mask & b.before:
            is_far = _distance(a, b) > FARTHEST or shared < LEAST
            is_one = not is_far and count <= WIDEST and _fit(a, b)
            return is_one and not self.is_between(a, b)
        if count > LARGEST or not _is_read_in_order(a, b):
            return False
        is_one = (_fit(a, b) and not a.is_sum) or _depth(a, b) > 0
        return is_one and not self.is_between(a, b)

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
        a, b = _ordered(a, b)
        is_inside = _is_inside(a, b)
        if not is_inside:
            _align(a, b)
        kernels = sorted([*a.kernels, *b.kernels], key=lambda x: x.number)
        mask = a.mask | b.mask
        before = (a.before | b.before) & ~mask
        parts, depth = ((tuple(kernels),), 0)
        if is_inside:
            parts, depth = (*a.parts, *b.parts), _depth(a, b)
        fused = Group(kernels, mask, before, parts, depth)
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


@attrs.frozen(order=False)
class _Score:
    """How early a pair is fused, as Inductor compares them.

    Args:
        is_alike: whether both are sums, or none.
        shared: bytes that both read or write.
        near: less the farther they are apart.
    """

    is_alike: bool
    shared: int
    near: int

    @classmethod
    def of(cls, pair: tuple[Group, Group], shared: int) -> _Score:
        a, b = pair
        return cls(a.is_sum == b.is_sum, shared, -_distance(a, b))

    def __lt__(self, other: _Score) -> bool:
        least, most = sorted((self.shared, other.shared))
        if most > least * TIMES:
            return self.shared < other.shared
        mine = self.is_alike, self.shared, self.near
        return mine < (other.is_alike, other.shared, other.near)


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
    one = abs(a.kernels[0].place - b.kernels[-1].place)
    other = abs(b.kernels[0].place - a.kernels[-1].place)
    return max(one, other)


def _is_read_in_order(a: Group, b: Group) -> bool:
    """Whether a group reads the elements that loops of another one make as those make them. The
    sums of rows are read by all elements of a row.
    """
    loops = [kernel for kernel in a.kernels if not kernel.is_sum]
    made = {x for kernel in loops for x in kernel.writes}
    reads = [read for kernel in b.kernels for read in kernel.layouts]
    pairs = [(x, layout) for x, layout in reads if x in made]
    return all(layout == layout_of(x) or x.target in op_kinds.JOINED for x, layout in pairs)


def _ordered(a: Group, b: Group) -> tuple[Group, Group]:
    """Two groups, the first one before the second where that waits for it."""
    return (b, a) if b.mask & a.before else (a, b)


def _first_sum(kernels: Sequence[Kernel]) -> Kernel:
    """The first kernel of a loop that adds, or the first."""
    return next((x for x in kernels if x.is_sum), kernels[0])


def _fit(a: Group, b: Group) -> bool:
    """Whether the loops of two groups are alike, so that one runs all."""
    if len(a.parts) > 1 or len(b.parts) > 1:
        return False
    one, other = _first_sum(a.kernels), _first_sum(b.kernels)
    if one.is_last != other.is_last:
        return False
    if loops.fits(one.loop, other.loop):
        return True
    few, ref = _by_dims(a, b)
    is_alone = len(few.kernels) == 1
    is_shape = len({x.loop.shape for x in ref.kernels}) == 1
    return is_alone and is_shape and loops.is_reshaped(one.loop, other.loop)


def _by_dims(a: Group, b: Group) -> tuple[Group, Group]:
    """Two groups, the one whose loop has fewer dims first."""
    one, other = _first_sum(a.kernels), _first_sum(b.kernels)
    return (a, b) if len(one.loop.kept) < len(other.loop.kept) else (b, a)


def _align(a: Group, b: Group) -> None:
    """Have a loop of one dim run over the dims of another one of its shape."""
    one, other = _first_sum(a.kernels), _first_sum(b.kernels)
    if not loops.fits(one.loop, other.loop):
        few, ref = _by_dims(a, b)
        few.kernels[0].loop = _first_sum(ref.kernels).loop


def _depth(a: Group, b: Group) -> int:
    """The number of loops that two groups have in common, inside of which the second one follows
    the first; 0 if there are none.
    """
    one, other = _first_sum(a.parts[-1]), _first_sum(b.parts[0])
    if one.is_last or other.is_last:
        return 0
    if len(a.parts) > 1 and len(b.parts) > 1:
        return a.depth if a.depth == b.depth else 0
    mine, others = one.loop.kept, other.loop.kept
    depth = min(len(mine), len(others))
    if mine[:depth] != others[:depth]:
        return 0
    known = [x.depth for x in (a, b) if len(x.parts) > 1]
    return 0 if known and known != [depth] else depth


def _is_inside(a: Group, b: Group) -> bool:
    """Whether the second of two groups would follow the first inside of loops in common."""
    a, b = _ordered(a, b)
    is_vertical = bool(a.mask & b.before)
    is_one = _fit(a, b) and not a.is_sum
    return is_vertical and not is_one and _depth(a, b) > 0


def values_of(group: Group) -> list[Node]:
    """The values that a group stores."""
    return list(dict.fromkeys(x for kernel in group.kernels for x in kernel.writes))
