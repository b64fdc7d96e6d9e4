"""Propagation of the prims of per-rank code: entering and leaving a shard_map, and its
collectives.

A value that varies over an axis has the placement "R" there: each rank has its own. Most
collectives are then moves between placements. A psum reduces a Partial sum, and an all-gather
replicates a sharded value. Before and after the move, the value is relabelled, by a step that
emits nothing (`plan.Relabel`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import attrs
import torch

from ...ops.nodes import args_of
from ...ops.text_formats import parse_axes, parse_pairs, parse_shards
from ...types import PENDING, Mark, Marks
from .. import layout, plan
from ..protocols import Walk
from ..redistribute import Move
from .values import Value


def _constants(node: torch.fx.Node) -> tuple[Any, ...]:
    return node.args[1:]


def visit(walk: Walk, node: torch.fx.Node, name: str) -> None:
    """Place one prim."""
    PRIMS[name](walk, node)


def to_local(walk: Walk, node: torch.fx.Node) -> None:
    cuts = parse_shards(_constants(node)[0])
    wanted: dict[str, Mark] = {
        name: "R" if dim is None else dim for name, _, dim in cuts
    }
    value, slot = _brought(
        walk, node, wanted, {d for _, _, d in cuts if d is not None}, ("sum",)
    )
    made = _relabelled(
        walk,
        node,
        slot,
        node.meta["val"],
        _with(walk, slot.marks, dict.fromkeys(wanted, "R")),
    )
    _make(
        walk,
        node,
        made,
        value.varies | {name for name, _, dim in cuts if dim is not None},
    )


def from_local(walk: Walk, node: torch.fx.Node) -> None:
    cuts = [
        (name, dim)
        for name, _, dim in parse_shards(_constants(node)[0])
        if dim is not None
    ]
    value, slot = _brought(
        walk,
        node,
        dict.fromkeys((name for name, _ in cuts), "R"),
        {dim for _, dim in cuts},
        PENDING,
    )
    made = _relabelled(
        walk, node, slot, node.meta["val"], _with(walk, slot.marks, dict(cuts))
    )
    _make(walk, node, made, value.varies - {name for name, _ in cuts})


def vary(walk: Walk, node: torch.fx.Node) -> None:
    axes = parse_axes(_constants(node)[0])
    value = walk.values[args_of(node)[0]]
    if value.fill is not None and not value.slots:
        varies, equal = value.varies.union(axes), value.equal.union(axes)
        walk.values[node] = attrs.evolve(
            value, users=len(node.users), slots={}, varies=varies, equal=equal
        )
        return
    held = value.readable(node.meta["phase"])
    marks = next(
        (s.marks for s in held if all(_at(walk, s.marks, a) == "R" for a in axes)),
        None,
    )
    marks = marks or _with(walk, held[0].marks, dict.fromkeys(axes, "R"))
    _make(
        walk,
        node,
        walk.redistribute(value, marks, node, implicit=False),
        value.varies.union(axes),
        value.equal.union(axes),
    )


def psum(walk: Walk, node: torch.fx.Node) -> None:
    axes, pending = _constants(node)
    _reduced(walk, node, parse_axes(axes), "sum", pending)


def extremum(walk: Walk, node: torch.fx.Node) -> None:
    axes, kind = _constants(node)
    _reduced(walk, node, parse_axes(axes), kind, False)


def _reduced(
    walk: Walk, node: torch.fx.Node, axes: Sequence[str], kind: str, pending: bool
) -> None:
    value, slot = _brought(
        walk, node, dict.fromkeys(axes, "R"), (), ("sum",) if kind == "sum" else ()
    )
    varies = value.varies.difference(axes)
    if value.equal.issuperset(
        axes
    ):  # nothing is sent: a sum of n equal terms is a product, and their max is each of them
        made = walk.slot(node.meta["val"], slot.marks)
        walk.steps.append(plan.Apply(node, (slot,), (made,)))
        _make(walk, node, made, varies, value.equal.difference(axes))
        return
    named = _relabelled(
        walk,
        node,
        slot,
        node.meta["val"],
        _with(walk, slot.marks, dict.fromkeys(axes, kind)),
    )
    _make(walk, node, named, varies)
    walk.values[node].asked = True
    if not pending:
        whole = walk.redistribute(
            walk.values[node],
            _with(walk, named.marks, dict.fromkeys(axes, "R")),
            node,
            implicit=False,
        )
        _make(walk, node, whole, varies)


def all_gather(walk: Walk, node: torch.fx.Node) -> None:
    axis, _, dim = _constants(node)
    value, slot = _brought(walk, node, {axis: "R"}, {dim}, ())
    whole = _relabelled(
        walk, node, slot, node.meta["val"], _with(walk, slot.marks, {axis: dim})
    )
    _make(walk, node, whole, value.varies - {axis})
    gathered = walk.redistribute(
        walk.values[node], slot.marks, node, implicit=False
    )
    _make(walk, node, gathered, value.varies - {axis})


def own_piece(walk: Walk, node: torch.fx.Node) -> None:
    axis, _, dim = _constants(node)
    value, slot = _brought(walk, node, {axis: dim}, {dim}, ())
    mine = _relabelled(
        walk, node, slot, node.meta["val"], _with(walk, slot.marks, {axis: "R"})
    )
    _make(walk, node, mine, value.varies | {axis})


def all_to_all(walk: Walk, node: torch.fx.Node) -> None:
    axis, n, split, concat = _constants(node)
    value, slot = _brought(walk, node, {axis: "R"}, {split, concat}, (), alone=True)
    local = value.fake
    shape = [
        size * n if d == concat else size for d, size in enumerate(local.shape)
    ]
    stride = layout.dense_strides(
        shape, layout.stride_order(local.shape, local.stride())
    )
    whole = torch.empty_strided(shape, stride, dtype=local.dtype, device="meta")
    cut = _relabelled(
        walk, node, slot, whole, _with(walk, slot.marks, {axis: concat})
    )
    moved = _moved(
        walk,
        node,
        cut,
        Move(
            "all_to_all",
            walk.axes.names.index(axis),
            cut.marks,
            _with(walk, cut.marks, {axis: split}),
        ),
    )
    mine = _relabelled(
        walk, node, moved, node.meta["val"], _with(walk, moved.marks, {axis: "R"})
    )
    _make(walk, node, mine, value.varies | {axis})


def ppermute(walk: Walk, node: torch.fx.Node) -> None:
    axis, perm = _constants(node)
    pairs = parse_pairs(perm)
    value, slot = _brought(walk, node, {axis: "R"}, (), ())
    moved = _moved(
        walk,
        node,
        slot,
        Move(
            "ppermute", walk.axes.names.index(axis), slot.marks, slot.marks, pairs
        ),
    )
    _make(walk, node, moved, value.varies | {axis})


def axis_index(walk: Walk, node: torch.fx.Node) -> None:
    slot = walk.slot(node.meta["val"], ("R",) * len(walk.axes.names))
    walk.steps.append(plan.Apply(node, (), (slot,)))
    _make(walk, node, slot, frozenset((args_of(node)[0],)))


def _make(
    walk: Walk,
    node: torch.fx.Node,
    slot: plan.Slot,
    varies: frozenset[str],
    equal: frozenset[str] = frozenset(),
) -> None:
    """The result of a prim, at one placement."""
    walk.values[node] = Value(
        slot.value,
        early=False,
        slots={slot.marks: (slot, None)},
        users=len(node.users),
        varies=varies,
        equal=equal,
    )


def _relabelled(
    walk: Walk,
    node: torch.fx.Node,
    slot: plan.Slot,
    fake: torch.Tensor,
    marks: Marks,
) -> plan.Slot:
    """Relabel a slot as another value at other placements. Computes nothing."""
    plain = layout.canonical(fake.shape, marks, walk.axes.sizes)
    assert plain is not None, f"{marks} on {fake.shape}"
    made = walk.slot(fake, plain)
    walk.steps.append(plan.Relabel(node, slot, made))
    return made


def _moved(
    walk: Walk, node: torch.fx.Node, slot: plan.Slot, move: Move
) -> plan.Slot:
    """One explicit move."""
    made = walk.slot(slot.value, move.after)
    walk.steps.append(plan.Redistribute(slot, made, (move,), node, False))
    return made


def _at(walk: Walk, marks: Marks, axis: str) -> Mark:
    return marks[walk.axes.names.index(axis)]


def _with(walk: Walk, marks: Marks, wanted: dict[str, Mark]) -> Marks:
    """The placements with others on some axes."""
    return tuple(
        wanted.get(name, mark)
        for name, mark in zip(walk.axes.names, marks, strict=True)
    )


def _brought(
    walk: Walk,
    node: torch.fx.Node,
    wanted: dict[str, Mark],
    dims: Collection[int],
    pending: Collection[str],
    *,
    alone: bool = False,
) -> tuple[Value, plan.Slot]:
    """Redistribute the argument of a prim to the given placements on the prim's axes. Other
    axes keep their placements if possible.

    Args:
        walk: the current walk.
        node: the prim.
        wanted: a placement for each of the prim's axes.
        dims: the dims that it shards or gathers. Other axes may shard them only inside the
            shards of its own axes.
        pending: the reductions that may stay Partial on other axes.
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
            marks.append(mark if mark == "R" or mark in pending else "R")
    plain = layout.canonical(value.fake.shape, marks, walk.axes.sizes)
    assert plain is not None, f"{marks} on {value.fake.shape}"
    return value, walk.redistribute(value, plain, node, implicit=False)


PRIMS: dict[str, Callable[[Walk, torch.fx.Node], None]] = {
    "prim_to_local": to_local,
    "prim_from_local": from_local,
    "vary": vary,
    "psum": psum,
    "extremum": extremum,
    "all_gather": all_gather,
    "own_piece": own_piece,
    "all_to_all": all_to_all,
    "ppermute": ppermute,
    "axis_index": axis_index,
}
