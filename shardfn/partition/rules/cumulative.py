"""Cumulative ops. Along a sharded dim each rank works on its own chunk, and gathers one row of each
rank: the totals of chunks, of which it joins those before its own to its results.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch
from torch.fx import Graph, Node

from ...collectives import ALL_GATHER
from ...ops.cumulative import REVERSED
from ...types import MeshAxes, MeshPlacements
from .. import layout, plan
from ..emission.graph_builder import Builder, LocalShard
from ..redistribute import Move, local_bytes
from ..rule_api.op_record import Op
from ..rule_api.strategy import Choice, OpCall, named
from .reduction import along

aten = torch.ops.aten
NewSlot = Callable[[torch.Tensor, MeshPlacements], plan.Slot]
Nodes = list[Node]
HALF = (torch.float16, torch.bfloat16)
INFINITE = float("inf")


@attrs.frozen
class Joined:
    """How the results of a chunk are joined to the totals before it.

    Args:
        join: gives the results, from the totals before and a chunk's own results.
        first: the total before the first chunk: a number, or its sign if it is an extreme of the
            dtype.
        extreme: whether it is.
        is_reverse: whether the op runs from the last element to the first.
    """

    join: Callable[[Builder, Nodes, Nodes], Nodes]
    first: float
    extreme: bool = False
    is_reverse: bool = False

    def identity(self, dtype: torch.dtype) -> float | int | bool:
        """Return the total before the first chunk in a dtype."""
        if not self.extreme or dtype.is_floating_point:
            return self.first if dtype.is_floating_point else int(self.first)
        if dtype is torch.bool:
            return self.first > 0
        limits = torch.iinfo(dtype)
        return limits.max if self.first > 0 else limits.min


def _by(op: Any) -> Callable[[Builder, Nodes, Nodes], Nodes]:
    """Join results to totals by an op of two tensors."""
    return lambda b, before, own: [b.call(op, own[0], before[0])]


def _by_order(op: Any) -> Callable[[Builder, Nodes, Nodes], Nodes]:
    """Join extremes and their indices: the last of equal ones, and of NaNs, as torch's kernel."""

    def join(b: Builder, before: Nodes, own: Nodes) -> Nodes:
        is_own = b.call(op, own[0], before[0])
        if own[0].meta["val"].is_floating_point():
            is_own = b.call(aten.logical_or.default, is_own, b.call(aten.isnan.default, own[0]))
        pairs = zip(own, before, strict=True)
        return [b.call(aten.where.self, is_own, x, total) for x, total in pairs]

    return join


SUM = Joined(_by(aten.add.Tensor), 0.0)
LOG_SUM = Joined(_by(aten.logaddexp.default), -INFINITE)
JOINED: dict[Any, Joined] = {
    aten.cumsum.default: SUM,
    aten.cumprod.default: Joined(_by(aten.mul.Tensor), 1.0),
    aten.logcumsumexp.default: LOG_SUM,
    aten.cummax.default: Joined(_by_order(aten.ge.Tensor), -INFINITE, extreme=True),
    aten.cummin.default: Joined(_by_order(aten.le.Tensor), INFINITE, extreme=True),
    REVERSED[aten.cumsum.default]: attrs.evolve(SUM, is_reverse=True),
    REVERSED[aten.logcumsumexp.default]: attrs.evolve(LOG_SUM, is_reverse=True),
}
FORWARD = {reverse: op for op, reverse in REVERSED.items()}


def _dim(call: OpCall) -> int:
    """Return the dim that a call works along."""
    return call["dim"] % max(call.ins[0].dim(), 1)


def cumulative(call: OpCall) -> list[Choice]:
    """Shard every dim. Along a sharded dim a cumulative op sends one row."""
    (x,), dim = call.ins, _dim(call)
    joined = JOINED[call.target]
    others = along(1, linear=(0,) if joined.join is SUM.join else ())(call)
    is_complex = joined.join is LOG_SUM.join and x.is_complex()
    if not x.dim() or x.shape[dim] < 2 or is_complex:
        return others
    return [*others, ((dim,), (dim,) * len(call.outs))]


def takes_strided(call: OpCall, choice: Choice) -> bool:
    """Return whether a strategy for a chunk is one for any elements: along other dims."""
    placement = choice[0][0]
    return isinstance(placement, str) or not layout.shards(placement, _dim(call))


def fits(call: OpCall, ins: Sequence[MeshPlacements]) -> bool:
    """Return whether the strategies of several axes go together: one may shard the op's dim."""
    return sum(layout.shards(m, _dim(call)) for m in ins[0]) < 2


def sends(
    call: OpCall, ins: Sequence[MeshPlacements], axis: int, sizes: Sequence[int]
) -> tuple[float, int]:
    """Return the bytes of the rows that a rank gathers, and in how many collectives."""
    (x,), (own,), dim = call.ins, ins, _dim(call)
    n = sizes[axis]
    if n == 1 or not layout.shards(own[axis], dim):
        return 0.0, 0
    elements = math.prod(x.shape) / max(x.shape[dim], 1)
    elements = local_bytes(elements, own, sizes[: len(own)], without=axis)
    width = sum(torch.empty((), dtype=_wide(out.dtype)).element_size() for out in call.outs)
    return (n - 1) * elements * width, len(call.outs)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which chunks are joined: sums of half precision are not rounded twice."""
    return torch.float32 if dtype in HALF else dtype


def run(b: Builder, target: Any, x: Node, dim: int, **options: Any) -> Nodes:
    """Emit a cumulative op along a dim of a local tensor."""
    op = FORWARD.get(target)
    if op is not None:
        flipped = b.call(aten.flip.default, x, [dim])
        return [b.call(aten.flip.default, b.call(op, flipped, dim, **options), [dim])]
    results = b.call(target, x, dim, **options)
    count = len(results.meta["val"]) if isinstance(results.meta["val"], tuple) else 0
    return [b.item(results, i) for i in range(count)] or [results]


def lower(
    b: Builder, args: list[Any], kwargs: dict[str, Any], _: list[LocalShard], target: Any
) -> Nodes:
    """Compute a cumulative op on a rank that has all of its dim."""
    x, dim = args
    return run(b, target, x, dim, **kwargs)


def in_steps(step: plan.Apply, axes: MeshAxes, slot: NewSlot) -> Sequence[plan.Step]:
    """Write a cumulative op along a sharded dim as steps; another one is a step as it is."""
    given = named(step.node.target, step.node.args, step.node.kwargs)
    (x,) = step.ins
    dim = given["dim"] % max(x.value.dim(), 1)
    shards = (k for k, m in enumerate(x.placements) if layout.shards(m, dim))
    axis = next((k for k in shards if axes.sizes[k] > 1), None)
    if axis is None:
        return [step]
    return [*Chunks(step, axes, axis, dim, given.get("dtype"), slot).steps()]


@attrs.frozen(eq=False)
class Chunks:
    """The steps of a cumulative op along a sharded dim.

    Args:
        step: of the op.
        axes: of the mesh.
        axis: that shards the dim.
        dim: that the op works along.
        dtype: that the call names, if it names one.
        slot: makes a slot.
        graph: of the nodes of the steps.
    """

    step: plan.Apply
    axes: MeshAxes
    axis: int
    dim: int
    dtype: torch.dtype | None
    slot: NewSlot
    graph: Graph = attrs.field(factory=Graph)

    @property
    def target(self) -> Any:
        """The op."""
        return self.step.node.target

    @property
    def joined(self) -> Joined:
        """How its chunks are joined."""
        return JOINED[self.target]

    @property
    def n(self) -> int:
        """The number of ranks."""
        return self.axes.sizes[self.axis]

    def steps(self) -> Iterator[plan.Step]:
        """Yield the steps: a chunk's own results and its total, a gather, and their join."""
        (x,), outs = self.step.ins, self.step.outs
        own = [self.slot(_like(out.value), out.placements) for out in outs]
        totals = [self.slot(self.rows(out.value), self.with_rows(out)) for out in outs]
        node = self.node((x,), (*own, *totals))
        yield plan.Apply(node, (x,), (*own, *totals), self.emit_own, run_empty=True)
        everyones = []
        for total in totals:
            everyones.append(self.slot(total.value, _replaced(total.placements, self.axis, "R")))
            move = Move(ALL_GATHER, self.axis, total.placements, everyones[-1].placements)
            yield plan.Redistribute(self.step.node, total, everyones[-1], (move,), True)
        read = (*own, *everyones)
        yield plan.Apply(self.node(read, outs), read, tuple(outs), self.emit_join)

    def rows(self, out: torch.Tensor) -> torch.Tensor:
        """Make the fake tensor of one row of each rank."""
        size = [*out.shape]
        size[self.dim] = self.n
        return out.new_empty(size, dtype=_wide(out.dtype))

    def with_rows(self, out: plan.Slot) -> MeshPlacements:
        """Return the placements of one row of each rank."""
        return _replaced(out.placements, self.axis, self.dim)

    def node(self, ins: Sequence[plan.Slot], outs: Sequence[plan.Slot]) -> Node:
        """Make the node of a step, with the metadata of the op."""
        args = tuple(plan.holders(self.graph, ins))
        made = [slot.value for slot in outs]
        return plan.part_of(self.step.node, self.graph, self.target, args, made)

    def run(self, b: Builder, x: Node) -> Nodes:
        """Emit the op on a local tensor."""
        options = {} if self.dtype is None else {"dtype": _wide(self.dtype)}
        return run(b, self.target, x, self.dim, **options)

    def emit_own(self, b: Builder, _: Any, __: Any, shards: list[LocalShard]) -> Nodes:
        """Emit the results of a rank's own chunk, and its total."""
        (x,) = shards
        outs = self.step.outs
        size = x.local_shape[self.dim]
        if 0 in x.local_shape:
            own = [self.filled(b, out, x.local_shape) for out in outs]
            rows = [*x.local_shape]
            rows[self.dim] = 1
            return [*own, *(self.filled(b, out, rows) for out in outs)]
        wide = _wide(x.node.meta["val"].dtype)
        is_half = wide != x.node.meta["val"].dtype and self.dtype is None
        own = self.run(b, b.call(aten._to_copy.default, x.node, dtype=wide) if is_half else x.node)
        if len(own) > 1:  # indices count from the start of the dim
            own[1] = b.call(aten.add.Tensor, own[1], b.offset(x, self.dim))
        start = 0 if self.joined.is_reverse else size - 1
        ends = [b.call(aten.slice.Tensor, y, self.dim, start, start + 1) for y in own]
        return [*own, *ends]

    def filled(self, b: Builder, out: plan.Slot, size: Sequence[int]) -> Node:
        """Emit the total of no element, as often as a shape has elements."""
        dtype = _wide(out.value.dtype)
        number = self.joined.identity(dtype)
        like = {"dtype": dtype, "device": out.value.device}
        return b.call(aten.full.default, [*size], number, **like)

    def emit_join(self, b: Builder, _: Any, __: Any, shards: list[LocalShard]) -> Nodes:
        """Emit the results, from those of a rank's own chunk and the totals of all chunks."""
        count = len(self.step.outs)
        own, totals = ([x.node for x in part] for part in (shards[:count], shards[count:]))
        before = self.before(b, totals)
        results = self.joined.join(b, before, own)
        pairs = zip(results, self.step.outs, strict=True)
        return [self.formed(b, x, out.value) for x, out in pairs]

    def before(self, b: Builder, totals: Nodes) -> Nodes:
        """Emit the total of all chunks before a rank's own one, in the order of the op."""
        sums = self.run(b, totals[0])
        if len(sums) > 1:  # the numbers of the ranks that have the extremes
            sums[1] = b.call(aten.gather.default, totals[1], self.dim, sums[1])
        coordinate = b.coords[self.axis]
        step, first = (1, self.n - 1) if self.joined.is_reverse else (-1, 0)
        place = b.call(aten.add.Tensor, coordinate, step)
        place = b.call(aten.clamp.default, place, 0, self.n - 1)
        place = b.call(aten.view.default, place, [1])
        is_first = b.call(aten.eq.Scalar, coordinate, first)
        found = []
        for x in sums:
            row = b.call(aten.index_select.default, x, self.dim, place)
            value = x.meta["val"]
            like = {"dtype": value.dtype, "device": value.device}
            none = b.call(aten.full.default, [], self.joined.identity(value.dtype), **like)
            found.append(b.call(aten.where.self, is_first, none, row))
        return found

    def formed(self, b: Builder, x: Node, like: torch.Tensor) -> Node:
        """Give a result the dtype and the order of dims in memory of the op's."""
        if x.meta["val"].dtype != like.dtype:
            x = b.call(aten._to_copy.default, x, dtype=like.dtype)
        return b.restride(x, like.shape, like.stride())


def _like(out: torch.Tensor) -> torch.Tensor:
    """Make the fake tensor of results that are not joined yet."""
    return out.new_empty(out.shape, dtype=_wide(out.dtype))


def _replaced(placements: MeshPlacements, axis: int, placement: Any) -> MeshPlacements:
    """Replace the placement on one axis."""
    return (*placements[:axis], placement, *placements[axis + 1 :])


TABLE: dict[object, Op] = {
    target: Op(
        cumulative,
        lower=functools.partial(lower, target=target),
        strided_by=takes_strided,
        fits=fits,
        in_steps=in_steps,
        sends=sends,
        of_sizes=True,
    )
    for target in JOINED
}
