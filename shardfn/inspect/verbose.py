"""The verbose text of a plan: each op and each redistribution with placements and local shapes,
for one rank.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..buckets import human_bytes
from ..capture.printing import graph_titles, legend, tensor_type
from ..ops.loops import loop_of
from ..ops.nodes import origin_of
from ..partition import layout
from ..partition import plan as steps
from ..partition.collective_bytes import nbytes
from ..source_text import located_in_program
from ..types import MeshAxes
from .transfers import argument_names


def verbose_text(plan: steps.Plan, name: str, coordinates: Sequence[int]) -> str:
    """Format a plan, one line for each step: op, arguments and results as `f64[6@dp, 4] (3, 4)`;
    the second shape is the local one.

    Args:
        plan: the plan of `partition.propagate`.
        name: of the function.
        coordinates: the coordinates of the rank.
    """
    position = ", ".join(
        f"{axis}={c}" for axis, c in zip(plan.axes.names, coordinates, strict=True)
    )
    header = f"{name} on mesh {plan.axes}, rank at ({position}): {len(plan.steps)} steps"
    lines = [
        line for step in plan.steps for line in LINES[type(step)](step, plan.axes, coordinates)
    ]
    return "\n".join([header, *legend(lines), *lines])


def _typed(slot: steps.Slot, axes: MeshAxes, coordinates: Sequence[int]) -> str:
    """Return the type, the placements and the local shape of a value as text."""
    local = layout.local_shape(slot.value.shape, slot.placements, axes.sizes, coordinates)
    return f"{tensor_type(slot.value.shape, slot.value.dtype, slot.placements, axes.names)} {local}"


def _op_lines(step: steps.Apply, axes: MeshAxes, coordinates: Sequence[int]) -> list[str]:
    """Format an op with its arguments and results."""
    pairs = zip(argument_names(step.node), step.ins, strict=True)
    ins = ", ".join(f"{name} {_typed(slot, axes, coordinates)}" for name, slot in pairs)
    outs = ", ".join(_typed(slot, axes, coordinates) for slot in step.outs)
    return [_line(f"{step.node.target}({ins})" + (f" -> {outs}" if outs else ""), step)]


def _loop_lines(step: steps.Nested, axes: MeshAxes, coordinates: Sequence[int]) -> list[str]:
    """Format a loop or branch, followed by the steps of its bodies."""
    typed = lambda slots: ", ".join(_typed(slot, axes, coordinates) for slot in slots)
    lines = [_line(f"{step.node.target}({typed(step.ins)}) -> {typed(step.outs)}", step)]
    titles = graph_titles(loop_of(step.node))
    for title, plan in zip(titles, step.bodies, strict=True):
        lines.append(f"    {title}:")
        lines += [
            "    " + line
            for inner in plan.steps
            for line in LINES[type(inner)](inner, axes, coordinates)
        ]
    return lines


def _fill_lines(step: steps.Fill, axes: MeshAxes, coordinates: Sequence[int]) -> list[str]:
    """Format the fill of a new tensor with a constant."""
    return [_line(f"fill {step.value} -> {_typed(step.out, axes, coordinates)}", step)]


def _redistribute_lines(
    step: steps.Sending, axes: MeshAxes, coordinates: Sequence[int]
) -> list[str]:
    """Format each collective of a redistribution, with its bytes and the placements before and
    after.
    """
    lines = []
    for move in step.moves:
        before, after = (
            _typed(steps.Slot(0, step.source.value, marks), axes, coordinates)
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
    """Indent a line, and end it with the source file and line of a step."""
    place = located_in_program(**origin_of(step.node))
    return f"  {text}" + (f"   # {place}" if place else "")


def _relabel_lines(
    step: steps.Relabel | steps.Rescale, axes: MeshAxes, coordinates: Sequence[int]
) -> list[str]:
    """Format a relabel or rescale, which changes placements without a collective."""
    verb = "rescale" if isinstance(step, steps.Rescale) else "relabel"
    before, after = (_typed(slot, axes, coordinates) for slot in (step.source, step.target))
    return [_line(f"{verb} {before} -> {after}", step)]


LINES = {
    steps.Apply: _op_lines,
    steps.Nested: _loop_lines,
    steps.Fill: _fill_lines,
    steps.Exchange: _redistribute_lines,
    steps.Redistribute: _redistribute_lines,
    steps.Relabel: _relabel_lines,
    steps.Rescale: _relabel_lines,
    steps.FromStage: _relabel_lines,
    steps.OnStage: _relabel_lines,
    steps.Pipelined: _loop_lines,
}
