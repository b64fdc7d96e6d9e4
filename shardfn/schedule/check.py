"""What a legal graph is after each stage, as one table of invariants a stage.

`check_program` holds after capture, `check_plan` after partition, `check` of a rank's graph before
and after every pass of the schedule. Each plan is checked, and each rank's graph by the invariants
in `ALWAYS`; tests check the rest. An error names the node and the invariant.

Source: the spec tables of tinygrad, tinygrad/uop/spec.py.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
from torch.fx import Graph, Node

from .. import _compat
from ..collectives import COLLECTIVES, kind_of_op
from ..ops.elementwise import Elementwise
from ..ops.graph_keys import GLOBAL, LOCAL, check_keys
from ..ops.higher_order import HigherOrder
from ..ops.loops import Loop, loop_of
from ..ops.placement import ALIGN, COTANGENT, REDISTRIBUTE
from ..partition import Plan, layout
from ..partition import plan as steps
from ..partition.redistribute import SLICE
from ..partition.rule_api.strategy import arguments, tensors
from ..types import PARTIAL_KINDS, Collective, MeshAxes

WAIT = torch.ops._c10d_functional.wait_tensor.default
PHASES = ("forward", "backward")
# Constants that an op may take; everything else in its arguments is a node. No mesh, no group.
CONSTANTS = (
    *(int, float, complex, str, type(None)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    *(torch.SymInt, torch.SymFloat, torch.SymBool),
)


@attrs.frozen
class Invariant:
    """One row of a table: what must hold of each node of a graph, or of each step of a plan.

    Args:
        name: of the invariant.
        holds: whether it holds of a node; the second argument is the mesh.
        text: the error, of the `node`, its `record` of a collective, and the mesh (`axes`).
    """

    name: str
    holds: Callable[[Any, MeshAxes], bool]
    text: str


@functools.cache
def sends(target: _compat.OpOverload) -> bool:
    """Return whether a call of this op starts a collective."""
    if target.namespace == "_c10d_functional":
        return target is not WAIT  # also ops that we never emit
    return kind_of_op(f"{target.namespace}.{_compat.name_of_op(target)}") is not None


# What both kinds of graph keep to


def _is_op(node: Node) -> bool:
    return isinstance(node.target, _compat.OpOverload)


def _starts(node: Node) -> bool:
    return _is_op(node) and sends(node.target)


def _has_kind(node: Node, axes: MeshAxes) -> bool:
    return node.op in ("placeholder", "call_function")


def _has_value(node: Node, axes: MeshAxes) -> bool:
    return "val" in node.meta


def _takes_tensors(node: Node, axes: MeshAxes) -> bool:
    return node.op != "placeholder" or isinstance(node.meta["val"], torch.Tensor)


def _is_callable(node: Node, axes: MeshAxes) -> bool:
    is_known = _is_op(node) or isinstance(node.target, (Elementwise, Loop, HigherOrder))
    return node.op != "call_function" or is_known or node.target is operator.getitem


def _is_functional(node: Node, axes: MeshAxes) -> bool:
    return not _is_op(node) or not _compat.schema(node.target).is_mutable


def _has_plain_constants(node: Node, axes: MeshAxes) -> bool:
    return all(isinstance(x, (Node, *CONSTANTS)) for x in _leaves((node.args, node.kwargs)))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for x in value:
            yield from _leaves(x)
    elif isinstance(value, dict):
        yield from _leaves([*value.values()])
    elif isinstance(value, slice):
        yield from (value.start, value.stop, value.step)
    else:
        yield value


def _has_phase(node: Node, axes: MeshAxes) -> bool:
    return node.meta.get("phase", "forward") in PHASES


BOTH = (
    Invariant("kind", _has_kind, "{node} is a {node.op}, but only inputs and calls are allowed"),
    Invariant("value", _has_value, "{node} has no value"),
    Invariant("input", _takes_tensors, "{node} is an input, so it must be a tensor"),
    Invariant("target", _is_callable, "{node} calls {node.target}, which must be an op or a loop"),
    Invariant("functional", _is_functional, "{node} writes in place, by {node.target}"),
    Invariant("constants", _has_plain_constants, "{node} takes an object that is not a constant"),
    Invariant("phase", _has_phase, "{node} must belong to the forward or to the backward"),
)

# After capture


def _sends_nothing(node: Node, axes: MeshAxes) -> bool:
    return not _starts(node) and node.target is not WAIT


def _has_no_placement(node: Node, axes: MeshAxes) -> bool:
    return "type" not in node.meta and "collective" not in node.meta


PROGRAM = (
    *BOTH,
    Invariant("no collective", _sends_nothing, "{node} communicates before partition"),
    Invariant("no placement", _has_no_placement, "{node} is placed before partition"),
)

# After partition: the graph of one rank


def _records(node: Node, axes: MeshAxes) -> bool:
    return _starts(node) == isinstance(node.meta.get("collective"), Collective)


def _is_on_the_mesh(node: Node, axes: MeshAxes) -> bool:
    record = node.meta.get("collective")
    return record is None or record.axis in axes.names


def _is_waited_for(node: Node, axes: MeshAxes) -> bool:
    is_read_once = [user.target for user in node.users] == [WAIT]
    return "collective" not in node.meta or is_read_once


def _is_placed(node: Node, axes: MeshAxes) -> bool:
    return node.target not in (REDISTRIBUTE, ALIGN, COTANGENT)


def _has_placements(node: Node, axes: MeshAxes) -> bool:
    if "type" not in node.meta:
        return True
    shape, placements = node.meta["type"]
    return len(placements) == len(axes.names) and _fit(len(shape), placements)


def _fit(ndim: int, placements: Any) -> bool:
    """Return whether placements shard dims that exist, and are Partial in one way."""
    shards = [x for x in map(layout.split, placements) if x is not None]
    are_shards = all(0 <= dim < ndim and unit > 0 for dim, unit in shards)
    return are_shards and len({x for x in placements if x in PARTIAL_KINDS}) <= 1


RECORD = "{node} is a collective without a record, or has a record without being a collective"
LOCAL_GRAPH = (
    *BOTH,
    Invariant("record", _records, RECORD),
    Invariant(
        "axis", _is_on_the_mesh, "{node} is over {record.axis}, which is not an axis of {axes}"
    ),
    Invariant(
        "wait", _is_waited_for, "{node} must be read by exactly one wait, and by no other node"
    ),
    Invariant(
        "prim", _is_placed, "{node} is a shardfn primitive, which partition should have replaced"
    ),
    Invariant("placements", _has_placements, "{node} has no placement for each axis of {axes}"),
)
# Those that are cheap enough to check after every pass.
ALWAYS = tuple(row for row in LOCAL_GRAPH if row.name in ("value", "record", "axis", "wait"))

# After partition: the plan of all ranks. `node` is a step.


def _has_mesh_placements(step: steps.Step, axes: MeshAxes) -> bool:
    slots = (*step.read, *step.made)
    count = len(axes.names)
    return all(len(x.placements) == count and _fit(x.value.dim(), x.placements) for x in slots)


def _moves_along(step: steps.Step, axes: MeshAxes) -> bool:
    if not isinstance(step, steps.Redistribute):
        return True
    now = step.source.placements
    for move in step.moves:
        others = zip(move.before, move.after, strict=True)
        changed = {k for k, (a, b) in enumerate(others) if a != b}
        if move.before != now or not changed <= {move.axis}:
            return False
        now = move.after
    return now == step.target.placements


def _moves_by_table(step: steps.Step, axes: MeshAxes) -> bool:
    moves = step.moves if isinstance(step, steps.SENDING) else ()
    return all(move.kind == SLICE or move.kind in COLLECTIVES for move in moves)


def _has_all_tensors(step: steps.Step, axes: MeshAxes) -> bool:
    if not isinstance(step, steps.Apply) or step.node.target is operator.getitem:
        return True
    return len(step.outs) == len(tensors(step.node.meta.get("val"))) or len(step.outs) == 1


def _reads_arguments(step: steps.Step, axes: MeshAxes) -> bool:
    return not isinstance(step, steps.Apply) or len(step.ins) <= len(arguments(step.node))


def _plans_each_graph(step: steps.Step, axes: MeshAxes) -> bool:
    is_loop = isinstance(step, steps.Nested)
    return not is_loop or len(step.bodies) == len(loop_of(step.node).graphs)


def _keeps_value(step: steps.Step, axes: MeshAxes) -> bool:
    is_moved = isinstance(step, (steps.Redistribute, steps.Rescale))
    return not is_moved or step.source.value.shape == step.target.value.shape


PLAN = (
    Invariant(
        "placements", _has_mesh_placements, "{node.node}: a placement is missing for a mesh axis"
    ),
    Invariant(
        "moves",
        _moves_along,
        "{node.node}: the steps of the redistribution do not lead to its target placements",
    ),
    Invariant(
        "collective",
        _moves_by_table,
        "{node.node}: a step of the redistribution is not a known collective",
    ),
    Invariant("results", _has_all_tensors, "{node.node}: a result has no slot"),
    Invariant(
        "arguments",
        _reads_arguments,
        "{node.node}: the step reads values that are not its arguments",
    ),
    Invariant("graphs", _plans_each_graph, "{node.node}: each graph of a loop must have a plan"),
    Invariant("value", _keeps_value, "{node.node}: a redistribution changes the value"),
)


def check_program(graph: Graph) -> None:
    """Check a captured graph, and the graphs of its loops.

    Raises:
        AssertionError: capture made an illegal graph; names the node and the invariant.
    """
    graph.lint()
    check_keys(graph.nodes, GLOBAL)
    _check("capture", PROGRAM, [x for x in graph.nodes if x.op != "output"], MeshAxes((), ()))
    for node in graph.nodes:
        for body in node.target.graphs if isinstance(node.target, Loop) else ():
            check_program(body)


def check_plan(plan: Plan) -> None:
    """Check the plan of a partition, and the plans inside it.

    Raises:
        AssertionError: partition made an illegal plan; names the op and the invariant.
    """
    _check("partition", PLAN, plan.steps, plan.axes)
    made = {slot.number for slot in plan.ins} | {slot.number for _, slot in plan.cotangents}
    for step in plan.steps:
        missing = [slot for slot in step.read if slot.number not in made]
        assert not missing, (
            f"{step.node} reads a slot before the slot is written\n  invariant order"
        )
        made.update(slot.number for slot in step.made)
        for inner in step.plans if isinstance(step, steps.Nested) else ():
            check_plan(inner)
    left = [k for k, slot in enumerate(plan.outs) if slot.number not in made]
    assert not left, (
        f"no step of the partition plan computes the results {left} of the plan\n  invariant outs"
    )


def check(graph: Graph, axes: MeshAxes, table: tuple[Invariant, ...] = ALWAYS) -> None:
    """Check the graph of one rank, before and after every pass.

    Args:
        graph: the local graph.
        axes: the mesh of the graph.
        table: the invariants to check.

    Raises:
        AssertionError: a pass broke the graph; names the node and the invariant.
    """
    graph.lint()
    check_keys(graph.nodes, LOCAL)
    _check("schedule", table, [x for x in graph.nodes if x.op != "output"], axes)


def _check(stage: str, table: tuple[Invariant, ...], nodes: Any, axes: MeshAxes) -> None:
    """Check all rows of a table on all nodes."""
    for node in nodes:
        for row in table:
            if not row.holds(node, axes):
                record = getattr(node, "meta", {}).get("collective")
                text = row.text.format(node=node, axes=axes, record=record)
                raise AssertionError(f"{text}\n  after {stage}, invariant {row.name}")
