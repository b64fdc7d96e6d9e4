"""flip. Along a sharded dim each rank flips its own chunk and sends it to the rank opposite.

Chunks of an uneven dim do not mirror: a flipped chunk has the first elements of one rank and the
last ones of the rank before it. These travel as two pieces, of one size on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch
from torch.fx import Graph, Node

from ...collectives import PPERMUTE
from ...ops.nodes import args_of
from ...types import MeshAxes, MeshPlacements
from .. import layout, plan
from ..emission.graph_builder import Builder, LocalShard
from ..redistribute import Move, local_bytes
from ..rule_api.op_record import Op
from ..rule_api.strategy import Choice, OpCall, replicated, together

aten = torch.ops.aten
NewSlot = Callable[[torch.Tensor, MeshPlacements], plan.Slot]
Nodes = list[Node]


def _flipped(x: torch.Tensor, dims: Sequence[int]) -> set[int]:
    """Return the dims that a flip reverses."""
    return {d % x.dim() for d in dims}


def flip(call: OpCall) -> list[Choice]:
    """Shard every dim. Along a dim that is flipped a rank sends its chunk."""
    (x,) = call.ins
    flipped = _flipped(x, call.args[1])
    dims = (d for d in range(x.dim()) if d not in flipped or x.shape[d] > 1)
    return [replicated(call), *together(call, dims), (("sum",), ("sum",))]


def takes_strided(call: OpCall, choice: Choice) -> bool:
    """Return whether a strategy for a chunk is one for any elements: along other dims."""
    placement = choice[0][0]
    flipped = _flipped(call.ins[0], call.args[1])
    return isinstance(placement, str) or layout.dim_and_unit(placement)[0] not in flipped


def fits(call: OpCall, ins: Sequence[MeshPlacements]) -> bool:
    """Return whether the strategies of several axes go together: one may shard a flipped dim."""
    flipped = _flipped(call.ins[0], call.args[1])
    return sum(any(layout.shards(m, d) for d in flipped) for m in ins[0]) < 2


def sends(
    call: OpCall, ins: Sequence[MeshPlacements], axis: int, sizes: Sequence[int]
) -> tuple[float, int]:
    """Return the bytes of the chunk that a rank sends, and in how many collectives."""
    (x,), (own,), n = call.ins, ins, sizes[axis]
    dim = _dim_over(axis, own, _flipped(x, call.args[1]))
    if n == 1 or dim is None:
        return 0.0, 0
    full = layout.full_chunk(x.shape[dim], layout.dim_and_unit(own[axis])[1], n)
    elements = math.prod(x.shape) / max(x.shape[dim], 1) * full
    elements = local_bytes(elements, own, sizes[: len(own)], without=axis)
    return elements * x.element_size(), 1 + bool(-x.shape[dim] % full)


def _dim_over(axis: int, own: MeshPlacements, flipped: set[int]) -> int | None:
    """Return the flipped dim that an axis shards; None if it shards none."""
    return next((d for d in sorted(flipped) if layout.shards(own[axis], d)), None)


def in_steps(step: plan.Apply, axes: MeshAxes, slot: NewSlot) -> Sequence[plan.Step]:
    """Write a flip along a sharded dim as steps; another one is a step as it is."""
    (x,) = step.ins
    dims: Sequence[int] = args_of(step.node)[1]
    flipped = _flipped(x.value, dims)
    pairs = ((k, _dim_over(k, x.placements, flipped)) for k in range(len(axes.sizes)))
    axis, dim = next(((k, d) for k, d in pairs if d is not None and axes.sizes[k] > 1), (0, None))
    if dim is None:
        return [step]
    return [*Mirror(step, axes, axis, dim, dims, slot).steps()]


@attrs.frozen(eq=False)
class Mirror:
    """The steps of a flip along a sharded dim.

    Args:
        step: of the op.
        axes: of the mesh.
        axis: that shards the dim.
        dim: a flipped one.
        dims: all that are flipped.
        slot: makes a slot.
        graph: of the nodes of the steps.
    """

    step: plan.Apply
    axes: MeshAxes
    axis: int
    dim: int
    dims: Sequence[int]
    slot: NewSlot
    graph: Graph = attrs.field(factory=Graph)

    @property
    def n(self) -> int:
        """The number of ranks."""
        return self.axes.sizes[self.axis]

    @property
    def size(self) -> int:
        """The global size of the dim."""
        return self.step.ins[0].value.shape[self.dim]

    @property
    def full(self) -> int:
        """The size of a full chunk."""
        _, unit = layout.dim_and_unit(self.step.ins[0].placements[self.axis])
        return layout.full_chunk(self.size, unit, self.n)

    @property
    def last(self) -> int:
        """The last rank that has an element."""
        return (self.size - 1) // self.full

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """The size of each piece, and the rank to which rank 0 sends it. The first piece is a
        chunk's first elements, as many as the last rank has; the second one the others.
        """
        first = self.size - self.last * self.full
        rest = self.full - first
        return [(first, self.last), *([(rest, self.last - 1)] if rest else [])]

    def steps(self) -> Iterator[plan.Step]:
        """Yield the steps: the flipped pieces of a chunk, their permutes, and their join."""
        (x,), (out,) = self.step.ins, self.step.outs
        own = [self.slot(self.piece(size), out.placements) for size, _ in self.pieces]
        yield plan.Apply(self.node((x,), own), (x,), tuple(own), self.emit_own, run_empty=True)
        arrived = [self.slot(sent.value, sent.placements) for sent in own]
        for sent, target, (_, end) in zip(own, arrived, self.pieces, strict=True):
            places = sent.placements
            perm = tuple((k, end - k) for k in range(end + 1))
            move = Move(PPERMUTE, self.axis, places, places, perm)
            yield plan.Redistribute(self.step.node, sent, target, (move,), True)
        read = tuple(arrived)
        yield plan.Apply(self.node(read, (out,)), read, (out,), self.emit_join, run_empty=True)

    def piece(self, size: int) -> torch.Tensor:
        """Make the fake tensor of the pieces of all ranks."""
        (out,) = self.step.outs
        shape = [*out.value.shape]
        shape[self.dim] = size * self.n
        return out.value.new_empty(shape)

    def node(self, ins: Sequence[plan.Slot], outs: Sequence[plan.Slot]) -> Node:
        """Make the node of a step, with the metadata of the op."""
        args = (*plan.holders(self.graph, ins), self.dims)
        made = [slot.value for slot in outs]
        return plan.part_of(self.step.node, self.graph, aten.flip.default, args, made)

    def emit_own(self, b: Builder, _: Any, __: Any, shards: list[LocalShard]) -> Nodes:
        """Emit the pieces of a rank's chunk, flipped; zeros in place of those it lacks."""
        (x,) = shards
        padded = _padded(b, x.node, self.dim, self.full)
        starts = [0, self.pieces[0][0]]
        found = []
        for (size, _), start in zip(self.pieces, starts, strict=False):
            part = b.call(aten.slice.Tensor, padded, self.dim, start, start + size)
            found.append(b.call(aten.flip.default, part, [*self.dims]))
        return found

    def emit_join(self, b: Builder, _: Any, __: Any, shards: list[LocalShard]) -> Nodes:
        """Emit a rank's chunk from the pieces that have arrived, the first one first."""
        (out,) = self.step.outs
        nodes = [shard.node for shard in shards]
        both = b.call(aten.cat.default, nodes, self.dim) if len(nodes) > 1 else nodes[0]
        size = b.local_shape(out.value.shape, out.placements)[self.dim]
        own = b.call(aten.slice.Tensor, both, self.dim, 0, size) if size < self.full else both
        return [b.restride(own, out.value.shape, out.value.stride())]


def _padded(b: Builder, x: Node, dim: int, size: int) -> Node:
    """Pad a local tensor with zeros at the end of a dim."""
    shape = x.meta["val"].shape
    pads = [0, 0] * (len(shape) - dim - 1) + [0, size - shape[dim]]
    return b.call(aten.constant_pad_nd.default, x, pads) if pads[-1] else x


TABLE: dict[object, Op] = {
    aten.flip.default: Op(
        flip, strided_by=takes_strided, fits=fits, in_steps=in_steps, sends=sends, of_sizes=True
    )
}
