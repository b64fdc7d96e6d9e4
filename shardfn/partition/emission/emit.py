"""Stage 2, second half: write a plan out as the graph of one rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import torch

from ... import _compat
from ...collectives import HALO, PPERMUTE
from ...ops.loops import loop_of
from ...types import Marks
from .. import layout, rules, strided
from .. import plan as steps
from ..propagation import refusals
from ..propagation.loops import walk_loops as nested
from ..propagation.partial import means
from ..redistribute import Move
from ..rule_api import registry
from .builder import Builder, Piece
from .moves import apply_move

aten = torch.ops.aten
# Zeros around a chunk, and in place of a value that no rank sends.
CHANGES_ON_ONE_RANK = (HALO, PPERMUTE)
IDENTITY = {"sum": 0.0, "max": float("-inf"), "min": float("inf")}


def emit(
    plan: steps.Plan, coordinates: Sequence[int], group_names: tuple[str, ...], device: str
) -> torch.fx.Graph:
    """The local graph of all ranks whose shards have the sizes of the rank at these
    coordinates.

    Args:
        plan: the plan to emit.
        coordinates: of one such rank.
        group_names: the process group name of each axis.
        device: where coordinates live.

    Returns:
        A graph whose placeholders are one coordinate per axis and then the local inputs.
    """
    mode = _compat.fake_mode()
    with mode, _compat.patched("fakes"):
        b = Builder(plan.axes, coordinates, mode, device, group_names)
        pieces: dict[int, Piece] = {}
        for slot in plan.ins:
            pieces[slot.number] = _input(b, slot)
        for number, step in enumerate(plan.steps):
            b.about = {**_about(step), "step": number}
            EMIT[type(step)](b, step, pieces)
        b.about = {}
        b.graph.output([_result(b, pieces[slot.number]) for slot in plan.outs])
    return b.graph


def local_sizes(
    plan: steps.Plan, coordinates: Iterable[tuple[int, ...]]
) -> dict[tuple[int, ...], tuple[Any, ...]]:
    """The key of each rank's local graph, by coordinates. Ranks with equal keys share one graph."""
    values = list(_placed_values(plan))
    sizes = plan.axes.sizes
    kinds: dict[tuple[Any, ...], tuple[Any, ...]] = {}  # each key once, however many ranks
    found = {}
    for own in coordinates:
        key = tuple(
            (
                *layout.local_shape(shape, marks, sizes, own),
                *strided.strided_factors(shape, marks, sizes, own),
            )
            for shape, marks in values
        )
        found[own] = kinds.setdefault(key, key)
    return found


def _placed_values(plan: steps.Plan) -> dict[tuple[torch.Size, Marks], None]:
    """The shapes of a plan's values with their placements, and with those before each axis sharded
    them, from which offsets are computed.
    """
    found: dict[tuple[torch.Size, Marks], None] = {}

    def note(value: torch.Tensor, marks: Marks) -> None:
        for level in range(len(marks), 0, -1):
            rest = ["R"] * (len(marks) - level)
            placements = (*marks[:level], *rest)
            found[value.shape, placements] = None

    for slot in (*plan.ins, *plan.outs):
        note(slot.value, slot.marks)
    for step in plan.steps:
        for slot in (*step.read, *step.made):
            note(slot.value, slot.marks)
        if isinstance(step, steps.Redistribute):
            for move in step.moves:
                note(step.source.value, move.after)
        if isinstance(step, steps.Nested):
            for inner in step.plans:
                found.update(_placed_values(inner))
    return found


def _about(step: steps.Step) -> dict[str, Any]:
    meta = step.node.meta
    return {
        "source": meta.get("source"),
        "phase": meta.get("phase", "forward"),
        "origin": step.node.name,
    }


def _input(b: Builder, slot: steps.Slot) -> Piece:
    value = slot.value
    shape = b.local_shape(value.shape, slot.marks)
    stride = layout.dense_strides(shape, layout.stride_order(value.shape, value.stride()))
    node = b.placeholder(
        f"x{slot.number}",
        torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device),
    )
    return b.piece(node, value, slot.marks)


def transfer_key(step: steps.Redistribute, move: Move) -> tuple[Any, ...]:
    """A key that is equal for equal moves, and equal on all ranks."""
    return (
        step.source.number,
        move.before,
        move.after,
        move.perm,
        step.node.meta.get("phase", "forward"),
    )


def _redistribute(b: Builder, step: steps.Redistribute, pieces: dict[int, Piece]) -> None:
    piece = pieces[step.source.number]
    for move in step.moves:
        is_alone = b.axes.sizes[move.axis] == 1
        if is_alone and move.kind not in CHANGES_ON_ONE_RANK:
            piece = attrs.evolve(piece, marks=move.after)
            continue
        key = b.about["transfer"] = transfer_key(step, move)
        piece = apply_move(b, piece, move, step.implicit)
        piece.node.meta["moved"] = key
    pieces[step.target.number] = piece


def _relabel(b: Builder, step: steps.Relabel, pieces: dict[int, Piece]) -> None:
    piece = pieces[step.source.number]
    target = step.target
    node = b.restride(piece.node, target.value.shape, target.value.stride())
    pieces[target.number] = renamed = Piece(
        node,
        tuple(target.value.shape),
        tuple(target.value.stride()),
        target.marks,
        b.local_shape(target.value.shape, target.marks),
    )
    assert renamed.local_shape == piece.local_shape, (
        f"{step.node} calls {piece.local_shape} on a rank {renamed.local_shape}"
    )


def _fill(b: Builder, step: steps.Fill, pieces: dict[int, Piece]) -> None:
    out = step.out
    shape = b.local_shape(out.value.shape, out.marks)
    node = b.call(
        aten.full.default, list(shape), step.value, dtype=out.value.dtype, device=out.value.device
    )
    node = b.restride(node, out.value.shape, out.value.stride())
    pieces[out.number] = b.piece(node, out.value, out.marks)


def _apply(b: Builder, step: steps.Apply, pieces: dict[int, Piece]) -> None:
    mine = [pieces[slot.number] for slot in step.ins]
    row = rules.row_of(step.node.target)
    deciding = mine[:1] if row.decided_by_first else mine
    if not row.run_empty and any(_emptied(p) for p in deciding):
        results = [_nothing(b, slot) for slot in step.outs]
    else:
        results = _run(b, step, mine)
    for slot, node in zip(step.outs, results, strict=True):
        pieces[slot.number] = piece = b.piece(node, slot.value, slot.marks)
        shape = tuple(node.meta["val"].shape)
        if shape != piece.local_shape and registry.find(step.node.target):
            raise refusals.wrong_piece(
                step.node, [p.marks for p in mine], slot.marks, shape, piece.local_shape
            )
        assert shape == piece.local_shape, (
            f"{step.node} gives {shape} on a rank, its placement {piece.local_shape}"
        )


def _nested(b: Builder, step: steps.Nested, pieces: dict[int, Piece]) -> None:
    device = str(b.coords[0].meta["val"].device) if b.coords else "cpu"
    graphs = [emit(plan, b.coordinates, b.group_names, device) for plan in step.plans]
    loop = nested.evolved(loop_of(step.node), graphs, len(b.coords))
    node = b.graph.call_function(
        loop, (*b.coords, *(b.contiguous(pieces[slot.number].node) for slot in step.ins))
    )
    shapes = [b.local_shape(slot.value.shape, slot.marks) for slot in step.outs]
    values = [
        torch.empty(shape, dtype=slot.value.dtype, device=slot.value.device)
        for shape, slot in zip(shapes, step.outs, strict=True)
    ]
    node.meta.update(b.about, val=values, plans=step.plans)
    for i, slot in enumerate(step.outs):
        pieces[slot.number] = b.piece(b.item(node, i), slot.value, slot.marks)


def _emptied(piece: Piece) -> bool:
    return any(
        mine == 0 != whole for mine, whole in zip(piece.local_shape, piece.shape, strict=True)
    )


def _nothing(b: Builder, slot: steps.Slot) -> torch.fx.Node:
    """The result on a rank with an empty chunk: an empty chunk, or the identity of the Partial
    reduction.
    """
    pending = next((m for m in slot.marks if m in IDENTITY), "sum")
    dtype = slot.value.dtype
    value = IDENTITY[pending]
    if pending != "sum" and not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        value = limits.min if pending == "max" else limits.max
    shape = list(b.local_shape(slot.value.shape, slot.marks))
    return b.call(
        aten.full.default,
        shape,
        value if dtype.is_floating_point else int(value),
        dtype=dtype,
        device=slot.value.device,
    )


def _run(b: Builder, step: steps.Apply, mine: list[Piece]) -> list[torch.fx.Node]:
    feed = iter(mine)
    args, kwargs = torch.fx.node.map_arg(
        (step.node.args, step.node.kwargs), lambda n: next(feed).node
    )
    if step.local is not None:
        result = step.local(b, list(args), dict(kwargs), mine)
    else:
        result = _by_rule(b, step, mine, list(args), dict(kwargs))
    return result if isinstance(result, list) else _results(b, result)


def _by_rule(
    b: Builder, step: steps.Apply, mine: list[Piece], args: list[Any], kwargs: dict[str, Any]
) -> Any:
    """The op on shards, as its row has it."""
    target = step.node.target
    row = rules.row_of(target)
    local_shape = lambda out: list(b.local_shape(out.value.shape, out.marks))
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


def _place(b: Builder, slot: steps.Slot, node: torch.fx.Node) -> Piece:
    """Where the result of a call will be; the node is any of its arguments."""
    shape = tuple(slot.value.shape)
    stride = tuple(slot.value.stride())
    local_shape = b.local_shape(shape, slot.marks)
    return Piece(node, shape, stride, slot.marks, local_shape)


def _view(b: Builder, x: torch.fx.Node, shape: list[int]) -> torch.fx.Node:
    """A view if local strides allow it, else a view of a copy. Does not rely on fake tensors,
    which allow invalid views (torch 2.13).
    """
    value = x.meta["val"]
    return b.call(
        aten.view.default,
        x if layout.can_view(value.shape, value.stride(), shape) else b.contiguous(x),
        shape,
    )


def _results(b: Builder, node: torch.fx.Node) -> list[torch.fx.Node]:
    value = node.meta["val"]
    if isinstance(value, torch.Tensor):
        return [node]
    return [b.item(node, i) for i, v in enumerate(value or ()) if isinstance(v, torch.Tensor)]


def _result(b: Builder, piece: Piece) -> torch.fx.Node:
    """Make results dense, so that they can be passed back as arguments without a copy."""
    if layout.is_dense(piece.shape, piece.stride):
        return b.restride(piece.node, piece.shape, piece.stride)
    return b.contiguous(piece.node)


EMIT: dict[type, Any] = {
    steps.Redistribute: _redistribute,
    steps.Fill: _fill,
    steps.Apply: _apply,
    steps.Nested: _nested,
    steps.Relabel: _relabel,
    steps.Rescale: means.rescale,
}
