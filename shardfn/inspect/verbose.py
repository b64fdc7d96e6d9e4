"""A plan op by op, for one rank: every op and transfer with the placements and local shapes of
its arguments and results.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from ..buckets import human_bytes
from ..capture.printing import graph_titles, legend, tensor_type
from ..ops.loops import loop_of
from ..partition import layout
from ..partition import plan as steps
from ..partition.payload import nbytes
from ..types import MeshAxes
from .transfers import argument_names


def verbose_text(plan: steps.Plan, name: str, coordinates: Sequence[int]) -> str:
    """One line for each step: op, arguments and results as `f64[6@dp, 4] (3, 4)`; the second
    shape is the local one.

    Args:
        plan: the plan of `partition.propagate`.
        name: of the function.
        coordinates: the coordinates of the rank.
    """
    at = ", ".join(f"{axis}={c}" for axis, c in zip(plan.axes.names, coordinates, strict=True))
    header = f"{name} on mesh {plan.axes}, rank at ({at}): {len(plan.steps)} steps"
    lines = [
        line for step in plan.steps for line in LINES[type(step)](step, plan.axes, coordinates)
    ]
    return "\n".join([header, *legend(lines), *lines])


def _placed(slot: steps.Slot, axes: MeshAxes, coordinates: Sequence[int]) -> str:
    local = layout.local_shape(slot.value.shape, slot.marks, axes.sizes, coordinates)
    return f"{tensor_type(slot.value.shape, slot.value.dtype, slot.marks, axes.names)} {local}"


def _applied(step: steps.Apply, axes: MeshAxes, coordinates: Sequence[int]) -> list[str]:
    pairs = zip(argument_names(step.node), step.ins, strict=True)
    ins = ", ".join(f"{name} {_placed(slot, axes, coordinates)}" for name, slot in pairs)
    outs = ", ".join(_placed(slot, axes, coordinates) for slot in step.outs)
    return [_line(f"{step.node.target}({ins})" + (f" -> {outs}" if outs else ""), step)]


def _nested(step: steps.Nested, axes: MeshAxes, coordinates: Sequence[int]) -> list[str]:
    placed = lambda slots: ", ".join(_placed(slot, axes, coordinates) for slot in slots)
    lines = [_line(f"{step.node.target}({placed(step.ins)}) -> {placed(step.outs)}", step)]
    titles = graph_titles(loop_of(step.node))
    for title, plan in zip(titles, step.plans, strict=True):
        lines.append(f"    {title}:")
        lines += [
            "    " + line
            for inner in plan.steps
            for line in LINES[type(inner)](inner, axes, coordinates)
        ]
    return lines


def _filled(step: steps.Fill, axes: MeshAxes, coordinates: Sequence[int]) -> list[str]:
    return [_line(f"fill {step.value} -> {_placed(step.out, axes, coordinates)}", step)]


def _moved(step: steps.Redistribute, axes: MeshAxes, coordinates: Sequence[int]) -> list[str]:
    lines = []
    for move in step.moves:
        before, after = (
            _placed(steps.Slot(0, step.source.value, marks), axes, coordinates)
            for marks in (move.before, move.after)
        )
        free = not move.sends or axes.sizes[move.axis] == 1
        itemsize = step.source.value.element_size()
        price = 0 if free else nbytes(step.source.value.shape, itemsize, move, axes)
        origin = "implicit" if step.implicit else "explicit"
        where = f"{move.kind} over {axes.names[move.axis]}, {human_bytes(price)}, {origin}"
        lines.append(_line(f"{where}: {before} -> {after}", step))
    return lines


def _line(text: str, step: steps.Step) -> str:
    source = step.node.meta.get("source")
    return f"  {text}" + (f"   # {os.path.basename(source)}" if source else "")


def _renamed(
    step: steps.Relabel | steps.Rescale, axes: MeshAxes, coordinates: Sequence[int]
) -> list[str]:
    verb = "rescale" if isinstance(step, steps.Rescale) else "relabel"
    before, after = (_placed(slot, axes, coordinates) for slot in (step.source, step.target))
    return [_line(f"{verb} {before} -> {after}", step)]


LINES = {
    steps.Apply: _applied,
    steps.Nested: _nested,
    steps.Fill: _filled,
    steps.Redistribute: _moved,
    steps.Relabel: _renamed,
    steps.Rescale: _renamed,
}
