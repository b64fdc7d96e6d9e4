"""The reason for each collective, and how to avoid the collective."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence

import attrs
import torch
from torch.fx import Node

from .. import _compat
from ..collectives import ALL_GATHER
from ..inspect.transfers import Transfer, communicating_moves, transfers
from ..ops.nodes import origin_of
from ..ops.placement import ALIGN
from ..partition import layout, plan
from ..partition.planner.op_cost import nbytes
from ..partition.planner.start_costs import parameter_slots
from ..placement import spec_of
from ..runtime.stages import Lowered
from ..source_text import located_in_program
from ..types import MeshPlacements
from .collectives import Reason, SentByLine
from .program import ops_of
from .suggestions import Key, Suggestion, key_of_move, key_of_row

COPY = torch.ops.aten._to_copy.default
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
    by_key, readers = _by_key(lowered), _readers(lowered)
    rows = {}
    for row in sent:
        reason = by_key.get(key_of_row(row), Reason(""))
        if row.buckets:
            if row.source is None:
                why = "one collective for gradients or parameters of several source lines"
                reason = Reason(why, is_asked=row.kind == ALL_GATHER)
            reason = attrs.evolve(reason, lines=_lines_of_buckets(lowered, row, readers))
        suggestion = found.get(row)
        if suggestion is not None:
            before, after = suggestion.seconds
            planned = dict(saves=suggestion.saves, seconds=before - after)
            changes = tuple(suggestion.changes)
            reason = attrs.evolve(reason, instead=str(suggestion), changes=changes, **planned)
        rows[row] = reason
    return rows


def _readers(lowered: Lowered) -> dict[str, str]:
    """Return the line that reads each argument first, by its path. Casts and views of it are
    followed to what reads them.
    """
    program = lowered.traced.program
    placeholders = program.graph.graph.find_nodes(op="placeholder")
    found = {}
    for node, path in zip(placeholders, program.in_paths, strict=False):
        reader = node
        while reader is node or _is_passed(reader):
            users = [x for x in reader.users if x.op == "call_function" and x.target is not ALIGN]
            if not users:
                break
            reader = users[0]
        if line := reader.meta.get("source"):
            found[path] = line
    return found


def _is_passed(node: Node) -> bool:
    """Return whether an op only casts its input or views it."""
    target = node.target
    return target is COPY or (isinstance(target, _compat.OpOverload) and target.is_view)


def _lines_of_buckets(
    lowered: Lowered, row: SentByLine, readers: Mapping[str, str]
) -> dict[str, float]:
    """Return the lines that read what some buckets carry, with their shares of its bytes."""
    sizes = collections.Counter[str]()
    for bucket in lowered.plan.buckets:
        if bucket.index in row.buckets:
            for leaf, nbytes in zip(bucket.leaves, bucket.sizes, strict=True):
                if leaf in readers:
                    sizes[readers[leaf]] += nbytes * bucket.times
    return _shares(sizes)


def _shares(sizes: collections.Counter[str]) -> dict[str, float]:
    """Return what share of all bytes each line has, the largest first."""
    total = sizes.total() or 1
    return {line: nbytes / total for line, nbytes in sizes.most_common()}


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
    sizes = collections.defaultdict[Key, collections.Counter[str]](collections.Counter)
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
            why = f"a parameter sharded over {axis} is gathered where the code uses it"
            reason = Reason(why, is_asked=True)
        else:
            reason = _implicit(chosen, step, move.axis, transfer, made)
        key = key_of_move(chosen, step, move)
        found.setdefault(key, reason)
        maker = made.get(step.source.number)
        if not step.node.meta.get("source") and maker and (line := maker.meta.get("source")):
            sizes[key][line] += nbytes(step.source.value)
    return {
        key: attrs.evolve(reason, lines=_shares(sizes[key])) if sizes[key] else reason
        for key, reason in found.items()
    }


def _implicit(
    chosen: plan.Plan, step: plan.Sending, axis: int, x: Transfer, made: Mapping[int, Node]
) -> Reason:
    """Return why a collective that nothing asked for is sent, and a constraint that spares it."""
    op = x.op.removeprefix("aten.").removesuffix(".default")
    why = (
        f"{op} needs its argument {x.argument} placed {x.wanted}, but the argument is placed "
        f"{x.value}"
    )
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
