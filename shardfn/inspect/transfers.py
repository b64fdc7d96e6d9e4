"""`Transfer`: each collective of a plan as data, with the op that needs it, its bytes, and
placements that would need no collective.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import torch

from .. import _compat
from ..capture.annotations import ASKS
from ..capture.printing import tensor_type
from ..collectives import ALL_GATHER
from ..ops.nodes import origin_of
from ..ops.prims import PRIMS
from ..partition import layout, rules
from ..partition import plan as steps
from ..partition.collective_bytes import nbytes
from ..partition.redistribute import Move
from ..types import PARTIAL_KINDS, AxisPlacement, MeshAxes, MeshPlacements
from .alternatives import Alternative, WeighedStrategies

SETTINGS = ("allow", "warn", "error")  # in order of strictness
PUBLIC_READERS = {  # the source of a transfer that is not an op
    "prim_redistribute": "constrain",
    "prim_align": "gradient",
    "output": "result",
}
NO_RULE = "it has no rule"
NO_SHARDED_STRATEGY = "no strategy of the op's sharding rule keeps the sharding"
CHEAPEST = "no strategy of the op's sharding rule sends less"


@attrs.frozen
class Transfer:
    """One collective that redistributes a value over one mesh axis.

    `nbytes` counts the bytes as `Collective` does. `arguments` lists all tensor arguments of the op
    that reads the value, with their placements before any redistribution. `native` lists the
    placements of the value that would need no collective if the other arguments did not change.
    """

    kind: str
    axis: str
    nbytes: int
    implicit: bool
    setting: str  # the strictest implicit_comm that holds for the op
    op: str
    source: str | None
    module: str | None
    argument: str
    arguments: tuple[str, ...]
    value: str  # its type and placement before
    wanted: str  # its type and placement after
    whole: str | None  # the reason for the fallback on this axis, if the transfer belongs to one
    native: MeshPlacements
    alternatives: tuple[
        Alternative, ...
    ]  # the strategies of the op on this axis, the cheapest first


@attrs.frozen
class Fallback:
    """An op that falls back to replicated compute at one source line, and the bytes that
    all-gathers of its arguments send.
    """

    op: str
    source: str | None
    nbytes: int
    why: str
    arguments: tuple[str, ...]
    module: str | None = None


def transfers(plan: steps.Plan, setting: str, weighed: WeighedStrategies) -> tuple[Transfer, ...]:
    """List every collective of a plan, explicit or implicit, in order.

    Args:
        plan: the plan of `partition.propagate`.
        setting: the program's implicit_comm.
        weighed: the strategies that propagation considered, or empty if no alternatives are
            needed.
    """
    collectives = []
    for number, inner in enumerate(
        plan_and_bodies(plan)
    ):  # ops of loops are considered again for each placement of the carries, so they are left out
        readers = _first_readers(inner)
        collectives += [
            _transfer(inner, step, move, readers, setting, {} if number else weighed)
            for step, move in _communicating_moves(inner)
        ]
    return tuple(collectives)


def plan_and_bodies(plan: steps.Plan) -> Iterator[steps.Plan]:
    """Yield a plan and the plans of its loops and branches."""
    yield plan
    for step in plan.steps:
        for inner in step.bodies if isinstance(step, steps.Nested) else ():
            yield from plan_and_bodies(inner)


def communicating_moves(plan: steps.Plan) -> Iterator[tuple[steps.Sending, Move]]:
    """Yield each redistribution that communicates, with its move, also inside loops."""
    for inner in plan_and_bodies(plan):
        yield from _communicating_moves(inner)


def _communicating_moves(plan: steps.Plan) -> Iterator[tuple[steps.Sending, Move]]:
    """Yield the moves of one plan that communicate over an axis of more than one rank."""
    for step, move in steps.moves(plan):
        if move.sends and plan.axes.sizes[move.axis] > 1:
            yield step, move


def strictest(node: torch.fx.Node, setting: str) -> str:
    """Return the implicit_comm that holds for an op: the program's, or a stricter one of a shard
    inside.
    """
    annotations = node.meta.get("custom") or {}
    return max([setting, *(s for s in SETTINGS if ASKS + s in annotations)], key=SETTINGS.index)


def fallbacks(collectives: tuple[Transfer, ...]) -> tuple[Fallback, ...]:
    """Group the implicit transfers of fallbacks by op, line and module, and sum their bytes."""
    groups: dict[tuple[str, str | None, str | None], list[Transfer]] = {}
    for transfer in collectives:
        if transfer.whole and transfer.implicit:
            groups.setdefault((transfer.op, transfer.source, transfer.module), []).append(transfer)
    return tuple(
        Fallback(op, source, sum(t.nbytes for t in ts), ts[0].whole or "", ts[0].arguments, module)
        for (op, source, module), ts in groups.items()
    )


def _first_readers(plan: steps.Plan) -> dict[int, tuple[steps.Apply, int]]:
    """Map each slot to the first op that reads it, and to the number of the argument."""
    readers: dict[int, tuple[steps.Apply, int]] = {}
    for step in plan.steps:
        if not isinstance(step, steps.Apply):
            continue
        for k, slot in enumerate(step.ins):
            readers.setdefault(slot.number, (step, k))
    return readers


def _transfer(
    plan: steps.Plan,
    step: steps.Sending,
    move: Move,
    readers: dict[int, tuple[steps.Apply, int]],
    setting: str,
    weighed: WeighedStrategies,
) -> Transfer:
    """Build the Transfer of one move: its reader, its bytes and its alternatives."""
    axes = plan.axes
    source = step.source
    reader, k = readers.get(step.target.number, (None, 0))
    is_inside = reader is not None and reader.node.graph is not step.node.graph
    if reader is None or not step.implicit or is_inside:  # a step of an op reads no argument of it
        reader = None
        k = 0
    node = reader.node if reader else step.node
    alternatives = _alternatives_of(reader, move, weighed)
    return Transfer(
        kind=move.kind,
        axis=axes.names[move.axis],
        nbytes=nbytes(source.value.shape, source.value.element_size(), move, axes),
        implicit=step.implicit,
        setting=strictest(step.node, setting),
        op=_reader_name(node),
        **origin_of(node),
        argument=argument_names(node)[k] if reader else "it",
        arguments=_arguments_before(step, reader, axes),
        value=_typed(source, axes),
        wanted=_typed(step.target, axes),
        whole=_fallback_reason(reader, k, move, alternatives) if reader else None,
        native=_free_placements(alternatives, k, move.before[move.axis]),
        alternatives=alternatives,
    )


def _alternatives_of(
    reader: steps.Apply | None, move: Move, weighed: WeighedStrategies
) -> tuple[Alternative, ...]:
    """Return the strategies that propagation weighed for an op, on the axis of a move."""
    if reader is None or not reader.outs:
        return ()
    return weighed.get((reader.outs[0].number, move.axis), ())


def _reader_name(node: torch.fx.Node) -> str:
    """Return the public name of the op that needs a transfer, or of the placement that asks for
    it.
    """
    if node.target in PRIMS and PRIMS[node.target].public:
        return PRIMS[node.target].public
    name = getattr(node.target, "_opname", node.op)
    return PUBLIC_READERS.get(name, str(node.target))


def _arguments_before(
    step: steps.Sending, reader: steps.Apply | None, axes: MeshAxes
) -> tuple[str, ...]:
    """Return the tensor arguments of the reader as text, with their placements before the
    redistribution.
    """
    names = argument_names(reader.node) if reader else ["it"]
    slots = reader.ins if reader else (step.target,)
    return tuple(
        f"{name} {_typed(step.source if slot is step.target else slot, axes)}"
        for name, slot in zip(names, slots, strict=True)
    )


def _typed(slot: steps.Slot, axes: MeshAxes) -> str:
    """Return the type and the placements of a value as text."""
    value = slot.value
    return tensor_type(value.shape, value.dtype, slot.placements, axes.names)


def argument_names(node: torch.fx.Node) -> list[str]:
    """Return the schema's name of each tensor argument of a call: self, other, tensors[0]."""
    schema = (
        [a.name for a in _compat.schema(node.target).arguments]
        if hasattr(node.target, "_schema")
        else [""] * len(node.args)
    )
    names: list[str] = []
    for name, argument in (*zip(schema, node.args, strict=False), *node.kwargs.items()):
        elements = argument if isinstance(argument, (list, tuple)) else [argument]
        for i, x in enumerate(elements):
            names += (
                [name if argument is x else f"{name}[{i}]"] if isinstance(x, torch.fx.Node) else []
            )
    return names


def _fallback_reason(
    reader: steps.Apply, k: int, move: Move, alternatives: tuple[Alternative, ...]
) -> str | None:
    """Return why an all-gather belongs to a fallback, or None if it belongs to none."""
    axis = move.axis
    before = move.before[move.axis]
    if move.kind != ALL_GATHER or any(
        slot.placements[axis] != "R" for slot in (*reader.ins, *reader.outs)
    ):
        return None
    if rules.find(reader.node.target) is None:
        return NO_RULE
    return (
        CHEAPEST
        if any(layout.split(a.ins[k]) == layout.split(before) for a in alternatives)
        else NO_SHARDED_STRATEGY
    )


def _free_placements(
    alternatives: tuple[Alternative, ...], k: int, before: AxisPlacement
) -> MeshPlacements:
    """Return placements of the k-th argument under which nothing would be sent, sharded ones
    first.
    """
    free = [
        a
        for a in alternatives
        if not sum(a.sends) - a.sends[k]
        and not any(m in PARTIAL_KINDS for m in (a.ins[k], *a.outs))
    ]
    placements = dict.fromkeys(a.ins[k] for a in free if a.ins[k] != before)
    return tuple(sorted(placements, key=lambda m: (m == "R", str(m))))
