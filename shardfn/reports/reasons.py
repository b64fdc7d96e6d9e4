"""Why each collective is sent, and what spares it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
from torch.fx import Node

from ..collectives import ALL_GATHER
from ..inspect.transfers import Transfer, communicating_moves, transfers
from ..ops.nodes import args_of, origin_of
from ..ops.placement import ALIGN
from ..partition import layout, plan
from ..partition.planner.start_costs import parameter_slots
from ..placement import spec_of
from ..runtime.stages import Lowered
from ..source_text import located_in_program
from ..types import MeshPlacements
from .collectives import Reason, SentByLine
from .program import ops_of
from .suggestions import Key, Suggestion, key_of_move, key_of_row

LARGE = 5_000  # ops of a program whose strategies are not weighed again


def reasons(
    lowered: Lowered, sent: Sequence[SentByLine], found: Mapping[SentByLine, Suggestion]
) -> dict[SentByLine, Reason]:
    """Return why the collectives of each line are sent, and what spares them.

    Args:
        lowered: the step.
        sent: its collectives, by line.
        found: the placements that spare some of them.
    """
    by_key, lines = _by_key(lowered), _lines_of_gradients(lowered)
    rows = {}
    for row in sent:
        reason = by_key.get(key_of_row(row), Reason(""))
        if row.buckets and row.source is None:
            members = [line for leaf in row.leaves for line in lines.get(leaf, ())]
            members = members or _lines_of_gathers(lowered, row)
            why = "gradients or parameters of several lines, in one collective"
            is_asked = row.kind == ALL_GATHER  # of parameters
            reason = Reason(why, is_asked=is_asked, lines=tuple(dict.fromkeys(members)))
        suggestion = found.get(row)
        if suggestion is not None:
            before, after = suggestion.seconds
            planned = dict(saves=suggestion.saves, seconds=before - after)
            reason = attrs.evolve(reason, instead=str(suggestion), **planned)
        rows[row] = reason
    return rows


def _lines_of_gradients(lowered: Lowered) -> dict[str, list[str]]:
    """Return the lines that make the gradient of each argument, by its path."""
    program = lowered.traced.program
    graph = program.graph.graph
    placeholders = graph.find_nodes(op="placeholder")
    paths = dict(zip(placeholders, program.in_paths, strict=False))
    lines: dict[str, list[str]] = {}
    for node in graph.find_nodes(op="call_function", target=ALIGN):
        gradient, parameter = args_of(node)[:2]
        if parameter in paths and (line := gradient.meta.get("source")):
            lines.setdefault(paths[parameter], []).append(line)
    return lines


def _lines_of_gathers(lowered: Lowered, row: SentByLine) -> list[str]:
    """Return the lines that read what some collectives without a line of their own gather."""
    chosen = lowered.partition
    kinds = [(step.node, move) for step, move in communicating_moves(chosen) if step.implicit]
    found = [
        node.meta.get("source")
        for node, move in kinds
        if (move.kind, chosen.axes.names[move.axis]) == (row.kind, row.axis)
    ]
    return [line for line in found if line]


def _by_key(lowered: Lowered) -> dict[Key, Reason]:
    """Return why the moves of each line are made."""
    graph = lowered.traced.program.graph.graph
    chosen = lowered.partition
    moves = [*communicating_moves(chosen)]
    # stages of a pipeline are placed by the user
    is_weighed = ops_of(graph) <= LARGE and chosen.stage_axis is None
    setting = lowered.traced.request.implicit_comm
    weighed = lowered.transfers if is_weighed else transfers(chosen, setting, {})
    parameters = parameter_slots(chosen, graph)
    made = {slot.number: step.node for step in chosen.steps for slot in step.made}
    found: dict[Key, Reason] = {}
    for (step, move), transfer in zip(moves, weighed, strict=True):
        axis = chosen.axes.names[move.axis]
        if step.node.target is ALIGN:
            done = "gathered" if move.kind == ALL_GATHER else "reduced"
            reason = Reason(f"the gradient of a parameter, {done} over {axis}")
        elif isinstance(step, plan.Exchange):
            reason = Reason(f"the op sends rows to other ranks of {axis}")
        elif not step.implicit:
            asked = "the placement of a result" if step.node.op == "output" else "sf.constrain"
            reason = Reason(f"{asked} asks for it")
        elif step.source.number in parameters:
            why = f"a parameter that is sharded over {axis}, where it is used"
            reason = Reason(why, is_asked=True)
        else:
            reason = _implicit(chosen, step, move.axis, transfer, made)
        found.setdefault(key_of_move(chosen, step, move), reason)
    return found


def _implicit(
    chosen: plan.Plan, step: plan.Sending, axis: int, x: Transfer, made: Mapping[int, Node]
) -> Reason:
    """Return why a collective that nothing asked for is sent, and a constraint that spares it."""
    op = x.op.removeprefix("aten.").removesuffix(".default")
    why = f"{op} needs its argument {x.argument} as {x.wanted}, and it is {x.value}"
    if x.whole:
        why += f"; the op is computed replicated: {x.whole}"
    maker = made.get(step.source.number)
    line = None if maker is None else located_in_program(**origin_of(maker))
    if not line:
        return Reason(why)
    marks, shape = step.source.placements, tuple(step.source.value.shape)
    for native in x.native:
        other: MeshPlacements = (*marks[:axis], native, *marks[axis + 1 :])
        if native != "R" and layout.canonical(shape, other, chosen.axes.sizes) == other:
            spec = spec_of(other, len(shape), chosen.axes)
            return Reason(why, f"sf.constrain(x, {spec}), where x is the value made at {line}")
    return Reason(why)
