"""Stage 2, second half: write a plan out as the graph of one rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import torch

from ... import _compat
from ...capture.annotations import RECOMPUTED
from ...collectives import HALO, PPERMUTE
from ...ops.debug import DEBUG, shown_by
from ...ops.loops import loop_of
from ...ops.nodes import origin_of
from ...types import MeshPlacements, stage_of
from .. import layout, rules, strided_shards
from .. import plan as steps
from ..propagation import refusals
from ..propagation.loops import walk_loops as nested
from ..propagation.partial import partial_means
from ..rule_api import registry
from .emit_collectives import apply_move
from .graph_builder import Builder, LocalShard

aten = torch.ops.aten
# Zeros around a chunk, and in place of a value that no rank sends.
CHANGES_ON_ONE_RANK = (HALO, PPERMUTE)
IDENTITY = {"sum": 0.0, "max": float("-inf"), "min": float("inf")}


def emit(
    plan: steps.Plan,
    coordinates: Sequence[int],
    group_names: tuple[str, ...],
    device: str,
    first: int = 0,
) -> torch.fx.Graph:
    """Write a plan as the ATen graph of one rank; all ranks with equal shard sizes share it.

    Args:
        plan: the plan to emit.
        coordinates: of one such rank.
        group_names: the process group name of each axis.
        device: where coordinates live.
        first: the number of the first rank that runs the plan, which shows values.

    Returns:
        A graph whose placeholders are one coordinate per axis and then the local inputs.
    """
    mode = _compat.fake_mode()
    with mode, _compat.patched("fakes"):
        b = Builder(plan.axes, coordinates, mode, device, group_names)
        shards: dict[int, LocalShard] = {}
        for slot in plan.ins:
            shards[slot.number] = _input(b, slot)
            _note_slots([slot], shards)
        axis = plan.stage_axis
        here = None if axis is None else coordinates[axis]
        for number, step in enumerate(plan.steps):
            if step.coordinate in (None, here):
                b.first = first
                if axis is not None and step.coordinate is not None:
                    b.first = _first_at(b, axis)
                b.about = {**_about(step), "step": number}
                EMIT[type(step)](b, step, shards)
                _note_slots(step.made, shards)
        b.about = {}
        b.graph.output([_result(b, shards, slot) for slot in plan.outs])
    return b.graph


def _first_at(b: Builder, axis: int) -> int:
    """The number of the first rank at this rank's coordinate of an axis."""
    return b.coordinates[axis] * math.prod(b.axes.sizes[axis + 1 :])


def _note_slots(slots: Iterable[steps.Slot], shards: dict[int, LocalShard]) -> None:
    """Note on each node the numbers of the slots whose local tensor it is."""
    for slot in slots:
        if slot.number in shards:
            meta = shards[slot.number].node.meta
            meta["slots"] = (*meta.get("slots", ()), slot.number)


def local_sizes(
    plan: steps.Plan, coordinates: Iterable[tuple[int, ...]]
) -> dict[tuple[int, ...], tuple[Any, ...]]:
    """Compute a key of local sizes for each rank; ranks with equal keys share one graph."""
    values = list(_placed_values(plan))
    sizes = plan.axes.sizes
    kinds: dict[tuple[Any, ...], tuple[Any, ...]] = {}  # each key once, however many ranks
    found = {}
    axis = plan.stage_axis
    for own in coordinates:
        key = () if axis is None else (own[axis],)
        key += tuple(
            (
                *layout.local_shape(shape, placements, sizes, own),
                *strided_shards.strided_factors(shape, placements, sizes, own),
            )
            for shape, placements in values
        )
        found[own] = kinds.setdefault(key, key)
    return found


def _placed_values(plan: steps.Plan) -> dict[tuple[torch.Size, MeshPlacements], None]:
    """Collect the shapes and placements of all values of a plan, from which a rank's local
    sizes follow.
    """
    found: dict[tuple[torch.Size, MeshPlacements], None] = {}

    def note(value: torch.Tensor, placements: MeshPlacements) -> None:
        for level in range(len(placements), 0, -1):
            rest = ["R"] * (len(placements) - level)
            found[value.shape, (*placements[:level], *rest)] = None

    for slot in (*plan.ins, *plan.outs):
        note(slot.value, slot.placements)
    for step in plan.steps:
        for slot in (*step.read, *step.made):
            note(slot.value, slot.placements)
        if isinstance(step, steps.Redistribute):
            for move in step.moves:
                note(step.source.value, move.after)
        if isinstance(step, steps.Nested):
            for inner in step.plans:
                found.update(_placed_values(inner))
    return found


def _about(step: steps.Step) -> dict[str, Any]:
    """Return the metadata that emitted nodes take from the step's global node."""
    meta = step.node.meta
    again = {"is_recomputed": True} if RECOMPUTED in (meta.get("custom") or {}) else {}
    phase = meta.get("phase", "forward")
    return {**origin_of(step.node), "phase": phase, "origin": step.node.name, **again}


def _input(b: Builder, slot: steps.Slot) -> LocalShard:
    """Emit the placeholder of a local input."""
    value = slot.value
    shape = b.local_shape(value.shape, slot.placements)
    order = layout.stride_order(value.shape, value.stride())
    is_here = layout.is_here(slot.placements, b.coordinates)
    stride = layout.dense_strides(shape, order if is_here else [0])
    node = b.placeholder(
        f"x{slot.number}",
        torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device),
    )
    inside = tuple("R" if stage_of(m) else m for m in slot.placements)
    return b.shard(node, value, inside if is_here else slot.placements)


def _redistribute(b: Builder, step: steps.Redistribute, shards: dict[int, LocalShard]) -> None:
    """Emit a Redistribute step: its moves, one after the other."""
    shard = shards[step.source.number]
    for move in step.moves:
        is_alone = b.axes.sizes[move.axis] == 1
        if is_alone and move.kind not in CHANGES_ON_ONE_RANK:
            shard = attrs.evolve(shard, placements=move.after)
            continue
        key = b.about["transfer"] = steps.transfer_key(step, move)
        shard = apply_move(b, shard, move, step.implicit)
        shard.node.meta["moved"] = key
    shards[step.target.number] = shard


def _relabel(b: Builder, step: steps.Relabel, shards: dict[int, LocalShard]) -> None:
    """Emit a Relabel step: the same local tensor under another global shape and placement."""
    shard = shards[step.source.number]
    target = step.target
    node = b.restride(shard.node, target.value.shape, target.value.stride())
    shards[target.number] = renamed = LocalShard(
        node,
        tuple(target.value.shape),
        tuple(target.value.stride()),
        target.placements,
        b.local_shape(target.value.shape, target.placements),
    )
    assert renamed.local_shape == shard.local_shape, (
        f"{step.node} calls {shard.local_shape} on a rank {renamed.local_shape}"
    )


def _from_stage(b: Builder, step: steps.FromStage, shards: dict[int, LocalShard]) -> None:
    """Emit a FromStage step: the value where it is, and zeros on the other coordinates."""
    target = step.target
    (axis,) = (k for k, m in enumerate(target.placements) if m != step.source.placements[k])
    if b.coordinates[axis] == step.home:
        node = shards[step.source.number].node
    else:
        shape = b.local_shape(target.value.shape, target.placements)
        zero = False if target.value.dtype is torch.bool else 0
        like = {"dtype": target.value.dtype, "device": target.value.device}
        node = b.call(aten.full.default, list(shape), zero, **like)
        node = b.restride(node, target.value.shape, target.value.stride())
    shards[target.number] = b.shard(node, target.value, target.placements)


def _fill(b: Builder, step: steps.Fill, shards: dict[int, LocalShard]) -> None:
    """Emit a Fill step: this rank's shard of a constant tensor."""
    out = step.out
    shape = b.local_shape(out.value.shape, out.placements)
    node = b.call(
        aten.full.default, list(shape), step.value, dtype=out.value.dtype, device=out.value.device
    )
    node = b.restride(node, out.value.shape, out.value.stride())
    shards[out.number] = b.shard(node, out.value, out.placements)


def _apply(b: Builder, step: steps.Apply, shards: dict[int, LocalShard]) -> None:
    """Emit an Apply step: the op on local shards. Its results must have the shapes that their
    placements give.
    """
    mine = [shards[slot.number] for slot in step.ins]
    row = rules.row_of(step.node.target)
    deciding = mine[:1] if row.decided_by_first else mine
    if not (row.run_empty or step.run_empty) and any(_is_empty_shard(p) for p in deciding):
        results = [_empty_result(b, slot) for slot in step.outs]
    else:
        results = _run(b, step, mine)
    _enter(b, step, mine, results, shards)


def _exchange(b: Builder, step: steps.Exchange, shards: dict[int, LocalShard]) -> None:
    """Emit an Exchange step: all ranks of its axis take part, those with empty shards too."""
    if b.axes.sizes[step.move.axis] > 1:
        b.about["transfer"] = steps.transfer_key(step, step.move)
    mine = [shards[slot.number] for slot in step.ins]
    rows = zip(_run(b, step, mine), step.outs, strict=True)
    results = [b.restride(node, slot.value.shape, slot.value.stride()) for node, slot in rows]
    _enter(b, step, mine, results, shards)


def _enter(
    b: Builder,
    step: steps.Apply,
    mine: list[LocalShard],
    results: list[torch.fx.Node],
    shards: dict[int, LocalShard],
) -> None:
    """Enter the results of an op, whose shapes must be those of their placements."""
    for slot, node in zip(step.outs, results, strict=True):
        shards[slot.number] = shard = b.shard(node, slot.value, slot.placements)
        shape = tuple(node.meta["val"].shape)
        if shape != shard.local_shape and registry.find(step.node.target):
            raise refusals.wrong_local_shape(
                step.node, [p.placements for p in mine], slot.placements, shape, shard.local_shape
            )
        assert shape == shard.local_shape, (
            f"{step.node} has the local shape {shape}, but its placement gives {shard.local_shape}"
        )


def _nested(b: Builder, step: steps.Nested, shards: dict[int, LocalShard]) -> None:
    """Emit a Nested step: a loop or branch whose bodies are graphs of one rank."""
    device = str(b.coords[0].meta["val"].device) if b.coords else "cpu"
    graphs = [emit(plan, b.coordinates, b.group_names, device, b.first) for plan in step.plans]
    loop = nested.with_graphs(loop_of(step.node), graphs, len(b.coords))
    node = b.graph.call_function(
        loop, (*b.coords, *(b.contiguous(shards[slot.number].node) for slot in step.ins))
    )
    shapes = [b.local_shape(slot.value.shape, slot.placements) for slot in step.outs]
    values = [
        torch.empty(shape, dtype=slot.value.dtype, device=slot.value.device)
        for shape, slot in zip(shapes, step.outs, strict=True)
    ]
    node.meta.update(b.about, val=values, plans=step.plans)
    for i, slot in enumerate(step.outs):
        shards[slot.number] = b.shard(b.item(node, i), slot.value, slot.placements)


def _pipelined(b: Builder, step: steps.Pipelined, shards: dict[int, LocalShard]) -> None:
    """Emit a Pipelined step: the actions of this rank's coordinate."""
    device = str(b.coords[0].meta["val"].device)
    own = step.actions.of(b)
    first = _first_at(b, step.actions.axis)
    graphs = [emit(step.plans[i], b.coordinates, b.group_names, device, first) for i in own.plans]
    loop = attrs.evolve(own.pipeline, graphs=tuple(graphs), coordinates=len(b.coords))
    ins = [b.contiguous(shards[step.ins[i].number].node) for i in own.ins]
    node = b.graph.call_function(loop, (*b.coords, *ins))
    outs = [step.outs[i] for i in own.outs]
    values = [
        torch.empty(
            b.local_shape(slot.value.shape, slot.placements),
            dtype=slot.value.dtype,
            device=slot.value.device,
        )
        for slot in outs
    ]
    node.meta.update(b.about, val=values, plans=tuple(step.plans[i] for i in own.plans))
    for i, slot in enumerate(outs):
        shards[slot.number] = b.shard(b.item(node, i), slot.value, slot.placements)


def _is_empty_shard(shard: LocalShard) -> bool:
    """Return whether a rank has no element of a tensor that has some globally."""
    return any(
        mine == 0 != whole for mine, whole in zip(shard.local_shape, shard.shape, strict=True)
    )


def _empty_result(b: Builder, slot: steps.Slot) -> torch.fx.Node:
    """Emit the result on a rank with an empty input shard: empty, or the identity of the
    Partial reduction.
    """
    reduction = next((m for m in slot.placements if m in IDENTITY), "sum")
    dtype = slot.value.dtype
    value = IDENTITY[reduction]
    if reduction != "sum" and not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        value = limits.min if reduction == "max" else limits.max
    shape = list(b.local_shape(slot.value.shape, slot.placements))
    return b.call(
        aten.full.default,
        shape,
        value if dtype.is_floating_point else int(value),
        dtype=dtype,
        device=slot.value.device,
    )


def _run(b: Builder, step: steps.Apply, mine: list[LocalShard]) -> list[torch.fx.Node]:
    """Run a step's op on local shards, by its own lowering or by its rule."""
    feed = iter(mine)
    args, kwargs = torch.fx.node.map_arg(
        (step.node.args, step.node.kwargs), lambda n: next(feed).node
    )
    if step.node.target is DEBUG and b.first:
        args = (args[0], shown_by(args[1], b.first))
    if step.local is not None:
        result = step.local(b, list(args), dict(kwargs), mine)
    else:
        result = _by_rule(b, step, mine, list(args), dict(kwargs))
    return result if isinstance(result, list) else _results(b, result)


def _by_rule(
    b: Builder, step: steps.Apply, mine: list[LocalShard], args: list[Any], kwargs: dict[str, Any]
) -> Any:
    """Run an op on local shards as its row of the rule tables says."""
    target = step.node.target
    row = rules.row_of(target)
    local_shape = lambda out: list(b.local_shape(out.value.shape, out.placements))
    if row.size_arg is not None:
        args[row.size_arg] = local_shape(step.outs[0])
    if row.local_args is not None:
        args = row.local_args(args, [p.local_shape for p in mine])
    if row.lower_at is not None:
        return row.lower_at(b, args, _place(b, step.outs[0], mine[0].node))
    if (lower := rules.lowering(target)) is not None:
        return lower(b, args, kwargs, mine)
    if row.as_view:
        return _view(b, args[0], local_shape(step.outs[0]))
    return b.call(target, *args, **kwargs)


def _place(b: Builder, slot: steps.Slot, node: torch.fx.Node) -> LocalShard:
    """Describe the local shard that the result of an op will be."""
    shape = tuple(slot.value.shape)
    stride = tuple(slot.value.stride())
    local_shape = b.local_shape(shape, slot.placements)
    return LocalShard(node, shape, stride, slot.placements, local_shape)


def _view(b: Builder, x: torch.fx.Node, shape: list[int]) -> torch.fx.Node:
    """Emit a view, or a copy and a view where local strides do not allow one (fake tensors of
    torch 2.13 would).
    """
    value = x.meta["val"]
    return b.call(
        aten.view.default,
        x if layout.can_view(value.shape, value.stride(), shape) else b.contiguous(x),
        shape,
    )


def _results(b: Builder, node: torch.fx.Node) -> list[torch.fx.Node]:
    """Return the tensors that a call returns, as nodes."""
    value = node.meta["val"]
    if isinstance(value, torch.Tensor):
        return [node]
    return [b.item(node, i) for i, v in enumerate(value or ()) if isinstance(v, torch.Tensor)]


def _result(b: Builder, shards: dict[int, LocalShard], slot: steps.Slot) -> torch.fx.Node:
    """Make a result dense in memory, so that it can be passed back as an argument without a
    copy. A rank whose stage does not have it returns an empty tensor.
    """
    if not layout.is_here(slot.placements, b.coordinates):
        like = {"dtype": slot.value.dtype, "device": slot.value.device}
        return b.call(aten.full.default, [*layout.ELSEWHERE], 0, **like)
    shard = shards[slot.number]
    if layout.is_dense(shard.shape, shard.stride):
        return b.restride(shard.node, shard.shape, shard.stride)
    return b.contiguous(shard.node)


EMIT: dict[type, Any] = {
    steps.Redistribute: _redistribute,
    steps.Fill: _fill,
    steps.Apply: _apply,
    steps.Exchange: _exchange,
    steps.Nested: _nested,
    steps.Pipelined: _pipelined,
    steps.FromStage: _from_stage,
    steps.OnStage: _relabel,
    steps.Relabel: _relabel,
    steps.Rescale: partial_means.rescale,
}
