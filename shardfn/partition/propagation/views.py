"""Views share the slots of the tensor that they view: what is gathered once is gathered for all.

A view of a gathered tensor is a gathered view. So a view has a slot for each slot of its source,
and a gather of a view is one of its source, which other views of it then read.
"""

from __future__ import annotations

import functools

import attrs
import torch

from ...types import PENDING, Marks
from .. import plan, rules
from ..protocols import Walk
from ..rule_api.checked import answered
from ..rule_api.strategy import OpCall
from .units import in_units
from .values import Placed, Value


@attrs.define(eq=False)
class View:
    """How a value is a view of another one.

    Args:
        node: the op, of one tensor.
        call: its call.
        source: the value that it views.
        images: the placements of the view, by those of the source. None where it has none.
    """

    node: torch.fx.Node
    call: OpCall
    source: Value
    images: dict[Marks, Marks | None] = attrs.field(factory=dict)


def note(node: torch.fx.Node, call: OpCall, source: Value, result: Value) -> None:
    """Note that the result of an op is a view of its argument."""
    if node.target in rules.REARRANGES and not result.varies:
        result.view = View(node, call, source)


def follow(walk: Walk, value: Value, phase: str) -> None:
    """Add the slots of a view that follow from those of its source."""
    view = value.view
    if view is None:
        return
    follow(walk, view.source, phase)
    for marks, (slot, only) in list(view.source.slots.items()):
        if only not in (None, phase):
            continue
        image = _image(walk, view, marks)
        if image is None or _is_readable(value, image, phase):
            continue
        out = walk.slot(value.fake, image)
        walk.steps.append(plan.Apply(view.node, (slot,), (out,)))
        value.slots[image] = out, only


def gathered(
    walk: Walk, value: Value, marks: Marks, node: torch.fx.Node, *, implicit: bool
) -> plan.Slot | None:
    """A view at a placement that replicates it on more axes, by its source at such a placement.
    None where that costs more, or does not exist.
    """
    view = value.view
    if view is None or not _is_same_size(view):
        return None
    phase = node.meta.get("phase", "forward")
    for own in view.source.readable(phase):
        image = _image(walk, view, own.marks)
        if image is None:
            continue
        pairs = list(zip(own.marks, image, marks, strict=True))
        if any(seen != wanted != "R" for _, seen, wanted in pairs):
            continue
        # a gradient is reduced where it is ready
        reduces = [seen in PENDING and wanted == "R" for _, seen, wanted in pairs]
        if any(reduces):
            continue
        before = tuple(mark if seen == wanted else wanted for mark, seen, wanted in pairs)
        if _image(walk, view, before) != marks:
            continue
        walk.redistribute(view.source, before, node, implicit=implicit)
        follow(walk, value, phase)
        return value.slots[marks][0]
    return None


def _is_same_size(view: View) -> bool:
    """Whether a gather of the source sends as many bytes as one of the view."""
    (x,), (out,) = view.call.ins, view.call.outs
    return x.dtype == out.dtype and x.numel() == out.numel()


def _is_readable(value: Value, marks: Marks, phase: str) -> bool:
    return marks in value.slots and value.slots[marks][1] in (None, phase)


def _image(walk: Walk, view: View, marks: Marks) -> Marks | None:
    """The placements of a view, given those of its source."""
    if marks not in view.images:
        view.images[marks] = _imaged(walk, view, marks)
    return view.images[marks]


def _imaged(walk: Walk, view: View, marks: Marks) -> Marks | None:
    call = view.call
    rows = answered(rules.find(call.target), call, walk.name, view.node)
    placed = Placed([()], [()])
    for mark in marks:
        fitting = [
            fit
            for row in rows
            for strategy in in_units(
                row, [{mark}], strided=functools.partial(rules.takes_strided, call, row)
            )
            if strategy[0] == (mark,) and (fit := walk.fit(call, strategy, placed)) is not None
        ]
        if not fitting:
            return None
        placed = fitting[0]
    return placed.outs[0] if placed.ins[0] == marks else None
