"""The prims of per-rank code in the walk: into a shard_map and out of it, and its collectives.

A value that varies over an axis has the placement "R" there: each rank has its own. Most
collectives are then redistributions: a sum over ranks reduces a Partial sum, an all-gather
replicates a sharded value. Before and after it the value only changes its meaning, by a step that
emits nothing (`plan.Relabel`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch.fx import Node

from ...collectives import ALL_TO_ALL, PPERMUTE, RAGGED_ALL_TO_ALL
from ...ops import shard_map
from ...ops.nodes import args_of
from ...ops.prims import PRIMS, Axes, constants_of, implement
from ...ops.text_formats import parse_axes, parse_pairs, parse_shards
from ...types import MEAN, PARTIAL_KINDS, AxisPlacement, MeshPlacements
from .. import layout, plan
from ..emission import emit_collectives
from ..emission.graph_builder import Builder, LocalShard
from ..redistribute import Move
from . import refusals
from .values import Value, value_of_slot
from .walk import Walk

NONE: Axes = frozenset()


class Prim:
    """A prim of per-rank code while the walk places it.

    Args:
        walk: that places it.
        node: of the prim.
    """

    def __init__(self, walk: Walk, node: Node) -> None:
        self.walk, self.node = walk, node
        self.constants = constants_of(node)
        self.value: Value = walk.values[args_of(node)[0]]
        self.slots = self.value.readable(node.meta["phase"])

    def index(self, axis: str) -> int:
        """Return the number of a mesh axis."""
        return self.walk.axes.names.index(axis)

    @property
    def now(self) -> MeshPlacements:
        """The placements of the argument; replicated, if it is not made yet."""
        return self.slots[0].placements if self.slots else self.walk.replicated

    def changed(
        self, placements: MeshPlacements, wanted: Mapping[str, AxisPlacement]
    ) -> MeshPlacements:
        """Replace the placements on some axes."""
        pairs = zip(self.walk.axes.names, placements, strict=True)
        return tuple(wanted.get(name, placement) for name, placement in pairs)

    def redistribute(self, placements: MeshPlacements) -> plan.Slot:
        """Redistribute the argument."""
        return self.walk.redistribute(self.value, placements, self.node, implicit=False)

    def read(
        self,
        wanted: Mapping[str, AxisPlacement],
        dims: Collection[int] = (),
        partial: Collection[str] = (),
        *,
        alone: bool = False,
    ) -> plan.Slot:
        """Redistribute the argument to the placements that the prim needs on its axes; other
        axes keep theirs if possible.

        Args:
            wanted: a placement for each axis of the prim.
            dims: those that it shards or gathers; other axes may shard them only inside of the
                shards of its own axes.
            partial: the reductions that may stay Partial on other axes.
            alone: whether no other axis may shard those dims.
        """
        last = max(map(self.index, wanted), default=-1)
        placements = list(self.changed(self.now, wanted))
        for k, (name, placement) in enumerate(zip(self.walk.axes.names, placements, strict=True)):
            cut = layout.split(placement)
            if name in wanted:
                continue
            if cut is not None:
                placements[k] = "R" if cut[0] in dims and (alone or k < last) else cut[0]
            elif placement not in partial:
                placements[k] = "R"
        return self.redistribute(
            layout.fitted(self.value.fake.shape, placements, self.walk.axes.sizes)
        )

    def relabel(
        self, slot: plan.Slot, wanted: Mapping[str, AxisPlacement], fake: torch.Tensor | None = None
    ) -> plan.Slot:
        """Give a slot another global shape and other placements, which computes nothing."""
        value: torch.Tensor = self.node.meta["val"] if fake is None else fake
        placements = self.changed(slot.placements, wanted)
        target = self.walk.slot(value, layout.fitted(value.shape, placements, self.walk.axes.sizes))
        self.walk.steps.append(plan.Relabel(self.node, slot, target))
        return target

    def send(
        self, kind: str, axis: str, slot: plan.Slot, after: AxisPlacement, *pairs: Any
    ) -> plan.Slot:
        """Add one explicit collective over an axis. Returns the slot after it."""
        placements = self.changed(slot.placements, {axis: after})
        move = Move(kind, self.index(axis), slot.placements, placements, *pairs)
        target = self.walk.slot(slot.value, move.after)
        self.walk.steps.append(plan.Redistribute(self.node, slot, target, (move,), False))
        return target

    def make(self, slot: plan.Slot, equal: Axes = NONE) -> Value:
        """Record the result of the prim."""
        result = value_of_slot(slot, len(self.node.users), varying(self.walk, self.node), equal)
        self.walk.values[self.node] = result
        return result


def varying(walk: Walk, node: Node) -> Axes:
    """Return the mesh axes over which the result of a prim varies."""
    tensors = [walk.values[x].varies for x in node.all_input_nodes]
    return PRIMS[node.target].varies(node, NONE.union(*tensors))


def replicated(axes: Iterable[str]) -> dict[str, AxisPlacement]:
    """Map some axes to replicated."""
    return dict.fromkeys(axes, "R")


def to_local(walk: Walk, node: Node) -> None:
    """Place the step from a global tensor to a rank's shard of it."""
    prim = Prim(walk, node)
    shards = parse_shards(prim.constants[0])
    wanted: dict[str, AxisPlacement] = {
        name: "R" if dim is None else dim for name, _, dim in shards
    }
    slot = prim.read(wanted, {dim for _, _, dim in shards if dim is not None}, ("sum",))
    prim.make(prim.relabel(slot, replicated(wanted)))


def from_local(walk: Walk, node: Node) -> None:
    """Place the step from the shards of ranks to a global tensor."""
    prim = Prim(walk, node)
    shards = {name: dim for name, _, dim in parse_shards(prim.constants[0]) if dim is not None}
    slot = prim.read(replicated(shards), {*shards.values()}, PARTIAL_KINDS)
    prim.make(prim.relabel(slot, shards))


def vary(walk: Walk, node: Node) -> None:
    """Place an invariant value where it counts as varying, though it is equal on all ranks."""
    prim = Prim(walk, node)
    axes = parse_axes(prim.constants[0])
    equal = prim.value.equal.union(axes)
    if prim.value.fill is not None and not prim.value.slots:
        walk.values[node] = attrs.evolve(
            prim.value, users=len(node.users), slots={}, varies=varying(walk, node), equal=equal
        )
        return
    placements = [slot.placements for slot in prim.slots]
    is_replicated = lambda m: all(m[prim.index(axis)] == "R" for axis in axes)
    wanted = next(filter(is_replicated, placements), None) or prim.changed(
        placements[0], replicated(axes)
    )
    prim.make(prim.redistribute(wanted), equal)


def vary_in_value(walk: Walk, node: Node) -> None:
    """Place a value that differs between ranks."""
    prim = Prim(walk, node)
    prim.make(prim.read(replicated(parse_axes(prim.constants[0]))))


def as_invariant(walk: Walk, node: Node) -> None:
    """Place a value that counts as equal on all ranks."""
    prim = Prim(walk, node)
    slot = prim.read(replicated(parse_axes(prim.constants[0])), (), ("sum",))
    prim.make(prim.relabel(slot, {}))


def own_term(walk: Walk, node: Node) -> None:
    """Place a rank's term of a Partial value."""
    prim = Prim(walk, node)
    text, kind = prim.constants
    axes = parse_axes(text)
    wanted = prim.changed(prim.now, dict.fromkeys(axes, "sum" if kind == MEAN else kind))
    if not walk.reaches(prim.value, wanted):
        raise refusals.partial_is_reduced(node, axes, kind)
    slot = prim.redistribute(wanted)
    if kind == MEAN:
        slot = walk.rescaled(node, slot, prim.changed(wanted, dict.fromkeys(axes, MEAN)))
    prim.make(prim.relabel(slot, replicated(axes)))


def no_cotangent(walk: Walk, node: Node) -> None:
    """Refuse the cotangent of a rank's term."""
    raise refusals.without_cotangent(node)


def psum(walk: Walk, node: Node) -> None:
    """Place a sum over ranks, which may stay Partial."""
    axes, stays_partial = constants_of(node)
    _reduce(walk, node, parse_axes(axes), "sum", stays_partial)


def extremum(walk: Walk, node: Node) -> None:
    """Place a maximum or a minimum over ranks."""
    axes, kind = constants_of(node)
    _reduce(walk, node, parse_axes(axes), kind, False)


def _reduce(walk: Walk, node: Node, axes: Sequence[str], kind: str, stays_partial: bool) -> None:
    """Place a reduction over ranks; of equal values it sends nothing."""
    prim = Prim(walk, node)
    slot = prim.read(replicated(axes), (), ("sum",) if kind == "sum" else ())
    if prim.value.equal.issuperset(axes):
        # nothing is sent: a sum of equal terms is a product, their maximum is each of them
        out = walk.slot(node.meta["val"], slot.placements)
        walk.steps.append(plan.Apply(node, (slot,), (out,)))
        prim.make(out, prim.value.equal.difference(axes))
        return
    terms = prim.relabel(slot, dict.fromkeys(axes, kind))
    result = prim.make(terms)
    result.is_explicit = True
    if not stays_partial:
        placements = prim.changed(terms.placements, replicated(axes))
        prim.make(walk.redistribute(result, placements, node, implicit=False))


def all_gather(walk: Walk, node: Node) -> None:
    """Place an all-gather: the values of ranks are shards, which are gathered."""
    prim = Prim(walk, node)
    axis, _, dim = prim.constants
    slot = prim.read({axis: "R"}, {dim})
    shards = prim.make(prim.relabel(slot, {axis: dim}))
    prim.make(walk.redistribute(shards, slot.placements, node, implicit=False))


def own_chunk(walk: Walk, node: Node) -> None:
    """Place a rank's shard of a value that all ranks have."""
    prim = Prim(walk, node)
    axis, _, dim = prim.constants
    prim.make(prim.relabel(prim.read({axis: dim}, {dim}), {axis: "R"}))


def all_to_all(walk: Walk, node: Node) -> None:
    """Place an all-to-all: the values of ranks are shards of one dim, and then of another."""
    prim = Prim(walk, node)
    axis, n, split, concat = prim.constants
    slot = prim.read({axis: "R"}, {split, concat}, alone=True)
    local = prim.value.fake
    shape = [size * n if d == concat else size for d, size in enumerate(local.shape)]
    stride = layout.dense_strides(shape, layout.stride_order(local.shape, local.stride()))
    fake = torch.empty_strided(shape, stride, dtype=local.dtype, device="meta")
    shards = prim.relabel(slot, {axis: concat}, fake)
    prim.make(prim.relabel(prim.send(ALL_TO_ALL, axis, shards, split), {axis: "R"}))


def ppermute(walk: Walk, node: Node) -> None:
    """Place a permute."""
    axis, pairs = constants_of(node)
    permute(walk, node, axis, parse_pairs(pairs))


def permute(walk: Walk, node: Node, axis: str, pairs: tuple[tuple[int, int], ...]) -> None:
    """Place a prim by which the first rank of each pair sends all it has to the second."""
    prim = Prim(walk, node)
    prim.make(prim.send(PPERMUTE, axis, prim.read({axis: "R"}), "R", pairs))


def ragged_all_to_all(walk: Walk, node: Node) -> None:
    """Place an exchange of rows by counts, which all ranks of the axis have."""
    prim = Prim(walk, node)
    axis, *_ = prim.constants
    counts: Value = walk.values[args_of(node)[1]]
    dims = range(counts.fake.dim() - 1)  # those of a batch, and the rows
    x = prim.read({axis: "R"}, dims, ("sum",), alone=True)
    every = walk.redistribute(counts, walk.replicated, node, implicit=False)
    out = walk.slot(node.meta["val"], x.placements)
    bound = len(dims) - 1, out.value.shape[len(dims) - 1]
    k = prim.index(axis)
    move = Move(RAGGED_ALL_TO_ALL, k, x.placements, out.placements, rows=bound)
    local = _ExchangedRows(move)
    walk.steps.append(plan.Exchange(node, (x, every), (out,), local, move=move))
    prim.make(out)


@attrs.frozen
class _ExchangedRows:
    """How a rank runs an exchange of rows."""

    move: Move

    def __call__(
        self, b: Builder, args: list[Any], kwargs: dict[str, Any], mine: list[LocalShard]
    ) -> list[Node]:
        """Emit the exchange."""
        rows, _ = mine
        _, counts, *_, bound = args
        received = emit_collectives.ragged_all_to_all(b, rows, self.move, False, counts, bound)
        return [received]


def axis_index(walk: Walk, node: Node) -> None:
    """Place the number of a rank along an axis."""
    slot = walk.slot(node.meta["val"], walk.replicated)
    walk.steps.append(plan.Apply(node, (), (slot,)))
    walk.values[node] = value_of_slot(slot, len(node.users), varying(walk, node))


implement(shard_map.to_local, place=to_local)
implement(shard_map.from_local, place=from_local)
implement(shard_map.vary, place=vary)
implement(shard_map.vary_equal, place=vary)
implement(shard_map.as_equal, place=as_invariant)
implement(shard_map.undecided, place=vary_in_value)
implement(shard_map.vary_in_value, place=vary_in_value)
implement(shard_map.as_invariant, place=as_invariant)
implement(shard_map.own_term, place=own_term)
implement(shard_map.no_cotangent, place=no_cotangent)
implement(shard_map.psum, place=psum)
implement(shard_map.extremum, place=extremum)
implement(shard_map.all_gather, place=all_gather)
implement(shard_map.own_chunk, place=own_chunk)
implement(shard_map.all_to_all, place=all_to_all)
implement(shard_map.ppermute, place=ppermute)
implement(shard_map.ragged_all_to_all, place=ragged_all_to_all)
implement(shard_map.axis_index, place=axis_index)
