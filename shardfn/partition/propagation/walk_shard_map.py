"""The prims of per-rank code in the walk: into a shard_map and out of it, and its collectives.

A value that varies over an axis has the placement "R" there: each rank has its own. Most
collectives are then redistributions: a sum over ranks reduces a Partial sum, an all-gather
replicates a sharded value. Before and after it the value only changes its meaning, by a step that
emits nothing (`plan.Relabel`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import attrs
import torch
from torch.fx import Node

from ...collectives import ALL_TO_ALL, PPERMUTE
from ...ops import shard_map
from ...ops.nodes import args_of
from ...ops.prims import PRIMS, Axes, constants_of, implement
from ...ops.text_formats import parse_axes, parse_pairs, parse_shards
from ...types import MEAN, PENDING, Mark, Marks
from .. import layout, plan
from ..redistribute import Move
from . import refusals
from .values import at_one_placement
from .walk import Walk

NONE: Axes = frozenset()


def to_local(walk: Walk, node: Node) -> None:
    cuts = parse_shards(constants_of(node)[0])
    wanted = {name: "R" if dim is None else dim for name, _, dim in cuts}
    slot = _brought(walk, node, wanted, {d for _, _, d in cuts if d is not None}, ("sum",))
    made = _relabelled(
        walk, node, slot, node.meta["val"], _with(walk, slot.marks, dict.fromkeys(wanted, "R"))
    )
    _make(walk, node, made)


def from_local(walk: Walk, node: Node) -> None:
    cuts = [(name, dim) for name, _, dim in parse_shards(constants_of(node)[0]) if dim is not None]
    slot = _brought(
        walk,
        node,
        dict.fromkeys((name for name, _ in cuts), "R"),
        {dim for _, dim in cuts},
        PENDING,
    )
    made = _relabelled(walk, node, slot, node.meta["val"], _with(walk, slot.marks, dict(cuts)))
    _make(walk, node, made)


def vary(walk: Walk, node: Node) -> None:
    axes = parse_axes(constants_of(node)[0])
    value = walk.values[args_of(node)[0]]
    if value.fill is not None and not value.slots:
        walk.values[node] = attrs.evolve(
            value,
            users=len(node.users),
            slots={},
            varies=_varies(walk, node),
            equal=value.equal.union(axes),
        )
        return
    held = value.readable(node.meta["phase"])
    marks = next((s.marks for s in held if all(_at(walk, s.marks, a) == "R" for a in axes)), None)
    marks = marks or _with(walk, held[0].marks, dict.fromkeys(axes, "R"))
    slot = walk.redistribute(value, marks, node, implicit=False)
    _make(walk, node, slot, value.equal.union(axes))


def vary_in_value(walk: Walk, node: Node) -> None:
    axes = dict.fromkeys(parse_axes(constants_of(node)[0]), "R")
    _make(walk, node, _brought(walk, node, axes, (), ()))


def as_invariant(walk: Walk, node: Node) -> None:
    axes = dict.fromkeys(parse_axes(constants_of(node)[0]), "R")
    slot = _brought(walk, node, axes, (), ("sum",))
    _make(walk, node, _relabelled(walk, node, slot, node.meta["val"], slot.marks))


def own_term(walk: Walk, node: Node) -> None:
    text, kind = constants_of(node)
    axes = parse_axes(text)
    value = walk.values[args_of(node)[0]]
    held = value.readable(node.meta["phase"])
    sums = dict.fromkeys(axes, "sum" if kind == MEAN else kind)
    wanted = _with(walk, held[0].marks if held else ("R",) * len(walk.axes.names), sums)
    if not walk.reaches(value, wanted):
        raise refusals.without_terms(node, axes, kind)
    slot = walk.redistribute(value, wanted, node, implicit=False)
    if kind == MEAN:
        means_of = _with(walk, wanted, dict.fromkeys(axes, MEAN))
        slot = walk.rescaled(node, slot, means_of)
    mine = _with(walk, slot.marks, dict.fromkeys(axes, "R"))
    _make(walk, node, _relabelled(walk, node, slot, node.meta["val"], mine))


def no_cotangent(walk: Walk, node: Node) -> None:
    raise refusals.without_cotangent(node)


def psum(walk: Walk, node: Node) -> None:
    axes, pending = constants_of(node)
    _reduced(walk, node, parse_axes(axes), "sum", pending)


def extremum(walk: Walk, node: Node) -> None:
    axes, kind = constants_of(node)
    _reduced(walk, node, parse_axes(axes), kind, False)


def _reduced(walk: Walk, node: Node, axes: Sequence[str], kind: str, pending: bool) -> None:
    value = walk.values[args_of(node)[0]]
    slot = _brought(walk, node, dict.fromkeys(axes, "R"), (), ("sum",) if kind == "sum" else ())
    if value.equal.issuperset(
        axes
    ):  # nothing is sent: a sum of equal terms is a product, their max is each of them
        made = walk.slot(node.meta["val"], slot.marks)
        walk.steps.append(plan.Apply(node, (slot,), (made,)))
        _make(walk, node, made, value.equal.difference(axes))
        return
    named = _relabelled(
        walk, node, slot, node.meta["val"], _with(walk, slot.marks, dict.fromkeys(axes, kind))
    )
    _make(walk, node, named)
    walk.values[node].asked = True
    if not pending:
        whole = walk.redistribute(
            walk.values[node],
            _with(walk, named.marks, dict.fromkeys(axes, "R")),
            node,
            implicit=False,
        )
        _make(walk, node, whole)


def all_gather(walk: Walk, node: Node) -> None:
    axis, _, dim = constants_of(node)
    slot = _brought(walk, node, {axis: "R"}, {dim}, ())
    whole = _relabelled(walk, node, slot, node.meta["val"], _with(walk, slot.marks, {axis: dim}))
    _make(walk, node, whole)
    gathered = walk.redistribute(walk.values[node], slot.marks, node, implicit=False)
    _make(walk, node, gathered)


def own_piece(walk: Walk, node: Node) -> None:
    axis, _, dim = constants_of(node)
    slot = _brought(walk, node, {axis: dim}, {dim}, ())
    mine = _relabelled(walk, node, slot, node.meta["val"], _with(walk, slot.marks, {axis: "R"}))
    _make(walk, node, mine)


def all_to_all(walk: Walk, node: Node) -> None:
    axis, n, split, concat = constants_of(node)
    slot = _brought(walk, node, {axis: "R"}, {split, concat}, (), alone=True)
    local = walk.values[args_of(node)[0]].fake
    shape = [size * n if d == concat else size for d, size in enumerate(local.shape)]
    stride = layout.dense_strides(shape, layout.stride_order(local.shape, local.stride()))
    whole = torch.empty_strided(shape, stride, dtype=local.dtype, device="meta")
    cut = _relabelled(walk, node, slot, whole, _with(walk, slot.marks, {axis: concat}))
    moved = _moved(
        walk,
        node,
        cut,
        Move(
            ALL_TO_ALL,
            walk.axes.names.index(axis),
            cut.marks,
            _with(walk, cut.marks, {axis: split}),
        ),
    )
    mine = _relabelled(walk, node, moved, node.meta["val"], _with(walk, moved.marks, {axis: "R"}))
    _make(walk, node, mine)


def ppermute(walk: Walk, node: Node) -> None:
    axis, perm = constants_of(node)
    permute(walk, node, axis, parse_pairs(perm))


def permute(walk: Walk, node: Node, axis: str, pairs: tuple[tuple[int, int], ...]) -> None:
    """Place a prim by which the first rank of each pair sends all it has to the second."""
    k = walk.axes.names.index(axis)
    slot = _brought(walk, node, {axis: "R"}, (), ())
    move = Move(PPERMUTE, k, slot.marks, slot.marks, pairs)
    _make(walk, node, _moved(walk, node, slot, move))


def axis_index(walk: Walk, node: Node) -> None:
    slot = walk.slot(node.meta["val"], ("R",) * len(walk.axes.names))
    walk.steps.append(plan.Apply(node, (), (slot,)))
    _make(walk, node, slot)


def _make(walk: Walk, node: Node, slot: plan.Slot, equal: Axes = NONE) -> None:
    """The result of a prim, at one placement; over the axes `equal` it varies in name only."""
    varies = _varies(walk, node)
    walk.values[node] = at_one_placement(slot, len(node.users), varies, equal)


def _varies(walk: Walk, node: Node) -> Axes:
    """The axes over which the result of a prim varies."""
    tensors = [walk.values[x].varies for x in node.all_input_nodes]
    return PRIMS[node.target].varies(node, NONE.union(*tensors))


def _relabelled(
    walk: Walk, node: Node, slot: plan.Slot, fake: torch.Tensor, marks: Marks
) -> plan.Slot:
    """A slot as another value at other placements: nothing is computed."""
    plain = layout.canonical(fake.shape, marks, walk.axes.sizes)
    assert plain is not None, f"{marks} on {fake.shape}"
    made = walk.slot(fake, plain)
    walk.steps.append(plan.Relabel(node, slot, made))
    return made


def _moved(walk: Walk, node: Node, slot: plan.Slot, move: Move) -> plan.Slot:
    """One explicit move."""
    made = walk.slot(slot.value, move.after)
    walk.steps.append(plan.Redistribute(node, slot, made, (move,), False))
    return made


def _at(walk: Walk, marks: Marks, axis: str) -> Mark:
    return marks[walk.axes.names.index(axis)]


def _with(walk: Walk, marks: Marks, wanted: dict[str, Mark]) -> Marks:
    """The placements with others on some axes."""
    return tuple(wanted.get(name, mark) for name, mark in zip(walk.axes.names, marks, strict=True))


def _brought(
    walk: Walk,
    node: Node,
    wanted: Mapping[str, Mark],
    dims: Collection[int],
    partial: Collection[str],
    *,
    alone: bool = False,
) -> plan.Slot:
    """The argument of a prim, with the placements wanted on its axes; on other axes unchanged if
    possible.

    Args:
        walk: at work.
        node: the prim.
        wanted: a placement for each of its axes.
        dims: those that it shards or gathers; other axes may shard them only inside of the
            shards of its own axes.
        partial: the reductions that may stay Partial on other axes.
        alone: whether no other axis may shard those dims.
    """
    value = walk.values[args_of(node)[0]]
    held = value.readable(node.meta["phase"])
    now: Sequence[Mark] = held[0].marks if held else ["R"] * len(walk.axes.names)
    last = max((walk.axes.names.index(name) for name in wanted), default=-1)
    marks: list[Mark] = []
    for k, (name, mark) in enumerate(zip(walk.axes.names, now, strict=True)):
        cut = layout.split(mark)
        if name in wanted:
            marks.append(wanted[name])
        elif cut is not None:
            marks.append("R" if cut[0] in dims and (alone or k < last) else cut[0])
        else:
            marks.append(mark if mark == "R" or mark in partial else "R")
    plain = layout.canonical(value.fake.shape, marks, walk.axes.sizes)
    assert plain is not None, f"{marks} on {value.fake.shape}"
    return walk.redistribute(value, plain, node, implicit=False)


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
implement(shard_map.own_piece, place=own_piece)
implement(shard_map.all_to_all, place=all_to_all)
implement(shard_map.ppermute, place=ppermute)
implement(shard_map.axis_index, place=axis_index)
