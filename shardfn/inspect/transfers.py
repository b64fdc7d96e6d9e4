"""The communication of a plan as data: every transfer, its reader, its bytes, and placements
that need no transfer.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import torch

from .. import _compat
from ..capture.annotations import ASKS
from ..capture.printing import tensor_type
from ..collectives import ALL_GATHER
from ..ops.prims import PRIMS
from ..partition import layout, rules
from ..partition import plan as steps
from ..partition.payload import nbytes
from ..partition.redistribute import Move
from ..types import PENDING, Mark, Marks, MeshAxes
from .alternatives import Alternative, Considered

SETTINGS = ("allow", "warn", "error")  # in order of strictness
ON_BEHALF = {  # the source of a transfer that is not an op
    "prim_redistribute": "constrain",
    "prim_align": "gradient",
    "output": "result",
}
NO_RULE = "it has no rule"
NO_CHOICE = "no strategy of its rule keeps the sharding"
CHEAPEST = "no strategy of its rule sends less"


@attrs.frozen
class Transfer:
    """One collective: a value redistributed over one mesh axis.

    `nbytes` counts as `Collective` does. `arguments` are all tensor arguments of the op, with
    their placements before any redistribution. `native` lists placements of the argument that
    would need no collective, with the other arguments unchanged.
    """

    kind: str
    axis: str
    nbytes: int
    implicit: bool
    setting: str  # the strictest implicit_comm that holds for the op
    op: str
    source: str | None
    argument: str
    arguments: tuple[str, ...]
    value: str  # its type and placement before
    wanted: str  # its type and placement after
    whole: str | None  # the reason for the fallback on this axis, if the transfer belongs to one
    native: Marks
    alternatives: tuple[
        Alternative, ...
    ]  # the strategies of the op on this axis, the cheapest first


@attrs.frozen
class Fallback:
    """An op that falls back to replicated compute at one line, and the bytes that its arguments
    cost.
    """

    op: str
    source: str | None
    nbytes: int
    why: str
    arguments: tuple[str, ...]


def transfers(plan: steps.Plan, setting: str, weighed: Considered) -> tuple[Transfer, ...]:
    """Every collective of a plan, explicit or implicit, in order.

    Args:
        plan: the plan of `partition.propagate`.
        setting: the program's implicit_comm.
        weighed: the strategies that propagation considered, or empty if no alternatives are
            needed.
    """
    found = []
    for number, inner in enumerate(
        plans(plan)
    ):  # ops of loops are considered again for each placement of the carries, so they are left out
        readers = _readers(inner)
        found += [
            _transfer(inner, step, move, readers, setting, {} if number else weighed)
            for step, move in _sent(inner)
        ]
    return tuple(found)


def plans(plan: steps.Plan) -> Iterator[steps.Plan]:
    """A plan and those of its loops."""
    yield plan
    for step in plan.steps:
        for inner in step.plans if isinstance(step, steps.Nested) else ():
            yield from plans(inner)


def sent(plan: steps.Plan) -> Iterator[tuple[steps.Redistribute, Move]]:
    """The moves that communicate, including those inside loops, each once."""
    for inner in plans(plan):
        yield from _sent(inner)


def _sent(plan: steps.Plan) -> Iterator[tuple[steps.Redistribute, Move]]:
    for step, move in steps.moves(plan):
        if move.sends and plan.axes.sizes[move.axis] > 1:
            yield step, move


def strictest(node: torch.fx.Node, setting: str) -> str:
    """The setting of an op: the program's, or a stricter one of a shard inside it."""
    noted = node.meta.get("custom") or {}
    return max([setting, *(s for s in SETTINGS if ASKS + s in noted)], key=SETTINGS.index)


def fallbacks(found: tuple[Transfer, ...]) -> tuple[Fallback, ...]:
    """The fallbacks, once for each op and line."""
    groups: dict[tuple[str, str | None], list[Transfer]] = {}
    for transfer in found:
        if transfer.whole and transfer.implicit:
            groups.setdefault((transfer.op, transfer.source), []).append(transfer)
    return tuple(
        Fallback(*key, sum(t.nbytes for t in ts), ts[0].whole or "", ts[0].arguments)
        for key, ts in groups.items()
    )


def _readers(plan: steps.Plan) -> dict[int, tuple[steps.Apply, int]]:
    """The first op that reads each slot, and as which argument."""
    found: dict[int, tuple[steps.Apply, int]] = {}
    for step in plan.steps:
        if not isinstance(step, steps.Apply):
            continue
        for k, slot in enumerate(step.ins):
            found.setdefault(slot.number, (step, k))
    return found


def _transfer(
    plan: steps.Plan,
    step: steps.Redistribute,
    move: Move,
    readers: dict[int, tuple[steps.Apply, int]],
    setting: str,
    weighed: Considered,
) -> Transfer:
    axes = plan.axes
    source = step.source
    reader, k = readers.get(step.target.number, (None, 0))
    if reader is None or not step.implicit:
        reader = None
        k = 0
    node = reader.node if reader else step.node
    alternatives = _weighed_for(reader, move, weighed)
    return Transfer(
        kind=move.kind,
        axis=axes.names[move.axis],
        nbytes=nbytes(source.value.shape, source.value.element_size(), move, axes),
        implicit=step.implicit,
        setting=strictest(step.node, setting),
        op=_op_of(node),
        source=node.meta.get("source"),
        argument=argument_names(node)[k] if reader else "it",
        arguments=_arguments_before(step, reader, axes),
        value=_placed(source, axes),
        wanted=_placed(step.target, axes),
        whole=_why_whole(reader, k, move, alternatives) if reader else None,
        native=_native(alternatives, k, move.before[move.axis]),
        alternatives=alternatives,
    )


def _weighed_for(
    reader: steps.Apply | None, move: Move, weighed: Considered
) -> tuple[Alternative, ...]:
    """The strategies of the reader on the axis of a move."""
    if reader is None or not reader.outs:
        return ()
    return weighed.get((reader.outs[0].number, move.axis), ())


def _op_of(node: torch.fx.Node) -> str:
    """The op that needs a transfer, by its name, or the placement that asks for it."""
    if node.target in PRIMS and PRIMS[node.target].public:
        return PRIMS[node.target].public
    name = getattr(node.target, "_opname", node.op)
    return ON_BEHALF.get(name, str(node.target))


def _arguments_before(
    step: steps.Redistribute, reader: steps.Apply | None, axes: MeshAxes
) -> tuple[str, ...]:
    """The tensor arguments of the reader, before the redistribution."""
    names = argument_names(reader.node) if reader else ["it"]
    slots = reader.ins if reader else (step.target,)
    return tuple(
        f"{name} {_placed(step.source if slot is step.target else slot, axes)}"
        for name, slot in zip(names, slots, strict=True)
    )


def _placed(slot: steps.Slot, axes: MeshAxes) -> str:
    """The type and placements of a value."""
    value = slot.value
    return tensor_type(value.shape, value.dtype, slot.marks, axes.names)


def argument_names(node: torch.fx.Node) -> list[str]:
    """The schema's name of each tensor argument of a call: self, other, tensors[0]."""
    schema = (
        [a.name for a in _compat.schema(node.target).arguments]
        if hasattr(node.target, "_schema")
        else [""] * len(node.args)
    )
    names: list[str] = []
    for name, given in (*zip(schema, node.args, strict=False), *node.kwargs.items()):
        inside = given if isinstance(given, (list, tuple)) else [given]
        for i, x in enumerate(inside):
            names += (
                [name if given is x else f"{name}[{i}]"] if isinstance(x, torch.fx.Node) else []
            )
    return names


def _why_whole(
    reader: steps.Apply, k: int, move: Move, alternatives: tuple[Alternative, ...]
) -> str | None:
    axis = move.axis
    before = move.before[move.axis]
    if move.kind != ALL_GATHER or any(
        slot.marks[axis] != "R" for slot in (*reader.ins, *reader.outs)
    ):
        return None
    if rules.find(reader.node.target) is None:
        return NO_RULE
    return (
        CHEAPEST
        if any(layout.split(a.ins[k]) == layout.split(before) for a in alternatives)
        else NO_CHOICE
    )


def _native(alternatives: tuple[Alternative, ...], k: int, before: Mark) -> Marks:
    """Placements of the k-th argument with which nothing would be sent, sharded ones first."""
    free = [
        a
        for a in alternatives
        if not sum(a.sends) - a.sends[k] and not any(m in PENDING for m in (a.ins[k], *a.outs))
    ]
    marks = dict.fromkeys(a.ins[k] for a in free if a.ins[k] != before)
    return tuple(sorted(marks, key=lambda m: (m == "R", str(m))))
