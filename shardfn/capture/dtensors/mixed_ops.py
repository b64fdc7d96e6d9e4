"""Ops that a captured function may not have: of DTensors and plain tensors, and of a DTensor and
a number of each rank. torch refuses the first; the second would give wrong values.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ...errors import CaptureError
from ...ops import placement
from ...ops.nodes import args_of
from ...ops.prims import CALLS
from ...ops.shard_map import from_local, own_term, to_local
from ...ops.text_formats import parse_placed
from .. import annotations as sources
from ..control_flow import bodies, control_flow_ops
from ..dynamo_nodes import BACKWARD, PLUMBING, name_of, nodes_in


class Origin(NamedTuple):
    """Where a tensor in a function comes from, for an error."""

    text: str  # in words
    expression: str | None  # the user's, if there is one


ANNOTATIONS = (
    *placement.PLACING_CALLS,
    placement.forget_dtensor,
    placement.per_rank_result,
    placement.forbid_writes,
    placement.align,
)


# the arguments of an op that its results stand for
RESULTS: dict[Any, tuple[int, ...]] = {
    bodies.mark_entering: (0,),
    bodies.mark_inputs: (0,),
    bodies.mark_results: (0,),
    control_flow_ops.scan: (0,),
    control_flow_ops.cond: (1, 2),
    control_flow_ops.while_loop: (1,),
}


def refuse_mixed(
    node: torch.fx.Node,
    is_dtensor: Callable[[torch.fx.Node], bool],
    origin_of: Callable[[torch.fx.Node], Origin],
) -> None:
    """Refuse an op of a DTensor and a plain tensor.

    Raises:
        CaptureError: names the op, and says which of its tensors is a DTensor.
    """
    _refuse_global(node, is_dtensor)
    if _passes_values_on(node):
        return
    every = [x for x in nodes_in((node.args, node.kwargs)) if _has_dims(x)]
    kinds = {x: is_dtensor(x) for x in every}
    if len(set(kinds.values())) < 2:
        return
    names = [_tensor_text(x, kind, origin_of(x)) for x, kind in kinds.items()]
    plain = _expression(kinds, False, origin_of) or "plain"
    placed = _expression(kinds, True, origin_of) or "dtensor"
    fix = (
        f"DTensor.from_local({plain}, mesh, placements) if {plain} differs between ranks, "
        f"distribute_tensor({plain}, mesh, placements) if it is the same on all ranks; or "
        f"{placed}.to_local()"
    )
    if any(_is_of_shard_map(x) for x, kind in kinds.items() if not kind):
        names.append(
            "the operand that is not a DTensor is a result of shard_map, which is a global tensor"
        )
        fix = (
            f"pass {placed} as an argument of the function and of shard_map. The body of "
            "shard_map then reads its own argument, and the op outside of shard_map has two "
            "global tensors as operands"
        )
    raise CaptureError.of(
        name_of(node), "the op has a DTensor and a plain tensor as operands", *names, fix=fix
    )


def _is_of_shard_map(node: torch.fx.Node) -> bool:
    """Whether a value depends on a result of `shard_map`."""
    queue = [node]
    for x in queue:
        if x.target is from_local:
            return True
        queue += [y for y in x.all_input_nodes if y not in queue]
    return False


def refuse_two_meshes(
    node: torch.fx.Node,
    is_dtensor: Callable[[torch.fx.Node], bool],
    axes_of: Callable[[torch.fx.Node], tuple[str, ...]],
) -> None:
    """Refuse DTensors on a mesh and on a part of it, as torch does.

    Raises:
        CaptureError: names the op and the meshes.
    """
    if _passes_values_on(node):
        return
    every = nodes_in((node.args, node.kwargs))
    meshes = [axes_of(x) for x in every if is_dtensor(x)]
    if len(set(meshes)) > 1:
        names = " and ".join(f"({', '.join(axes)})" for axes in dict.fromkeys(meshes))
        raise CaptureError.of(
            name_of(node),
            f"the operands of the op are DTensors on different meshes, with the axes {names}",
            needed="one mesh",
            fix="DTensor.from_local(x.to_local(), mesh, placements), with one placement for each "
            "axis of the mesh",
        )


def _refuse_global(node: torch.fx.Node, is_dtensor: Callable[[torch.fx.Node], bool]) -> None:
    """Refuse a DTensor where each rank's own tensor is needed.

    Raises:
        CaptureError: names the call.
    """
    is_local = node.target in CALLS and node.target not in (to_local, own_term)
    if not is_local and node.target is not placement.forbid_writes:
        return
    if any(is_dtensor(x) for x in node.all_input_nodes[:1]):
        call = CALLS.get(node.target)
        name = (call.public or name_of(node)) if call else "DTensor.from_local"
        raise CaptureError.of(
            name,
            "the op has a DTensor as operand",
            needed="a plain tensor, the local tensor of each rank",
            fix="pass x.to_local(), or x.redistribute(mesh, placements)",
        )


def _passes_values_on(node: torch.fx.Node) -> bool:
    """Whether a node only passes values on, or runs a subgraph."""
    return (
        node.target in CALLS
        or node.target in ANNOTATIONS
        or node.target in RESULTS
        or name_of(node) in (*BACKWARD, *PLUMBING)
        or any(x.op == "get_attr" for x in node.all_input_nodes)
    )


def refuse_varying(
    graph: torch.fx.Graph, varies: Callable[[torch.fx.Node], frozenset[str]]
) -> None:
    """Refuse a DTensor that would have another value on each rank: it has met a number that does.

    Args:
        graph: Dynamo's.
        varies: the axes over which a value varies.

    Raises:
        CaptureError: names the op and the user's line.
    """
    every = _mesh_axes(graph)
    for node, axes in every.items():
        is_result = node.target is placement.per_rank_result
        wrong = sorted(varies(node) if is_result else axes & varies(node))
        if wrong:
            own = every.get(node.all_input_nodes[0]) if is_result else None
            is_part = own is not None and not own & {*wrong}
            raise _part_error(node, wrong) if is_part else _varying_error(node, wrong)


def _mesh_axes(graph: torch.fx.Graph) -> dict[torch.fx.Node, set[str]]:
    """The axes of the mesh of each DTensor, as far as ops lead from one to the other."""
    axes: dict[torch.fx.Node, set[str]] = {}
    for node in graph.nodes:
        if node.target in placement.PLACING_CALLS:
            axes[node] = {axis for axis, _ in parse_placed(str(node.args[1]))}
        elif node.target is placement.per_rank_result:
            axes[node] = set()
        elif node.target in RESULTS:
            continue  # its results are, each as it is
        elif not _passes_values_on(node) or name_of(node) in PLUMBING:
            of_body = of_control_flow(node)
            given = node.all_input_nodes if of_body is None else of_body
            found = [axes[x] for x in given if x in axes]
            axes.update({node: set().union(*found)} if found else {})
    return axes


def of_control_flow(node: torch.fx.Node) -> list[torch.fx.Node] | None:
    """The values that an item of a control-flow op, or of the values that enter or leave a body,
    stands for.
    """
    if node.target is not operator.getitem:
        return None
    every, k = args_of(node)
    if not isinstance(every, torch.fx.Node) or not isinstance(k, int):
        return None
    rows = RESULTS.get(every.target)
    if rows is None:
        return None
    given = [args_of(every)[row] for row in rows]
    return [xs[k] for xs in given if k < len(xs)]


def _part_error(node: torch.fx.Node, axes: list[str]) -> CaptureError:
    over = ", ".join(axes)
    return CaptureError.of(
        "a DTensor on a submesh",
        f"the result differs between ranks of {over}, an axis that the submesh does not have",
        needed="a placement for each axis of the mesh",
        fix="DTensor.from_local(x.to_local(), mesh, placements) on the whole mesh",
        source=_line_of(node),
    )


def _varying_error(node: torch.fx.Node, axes: list[str]) -> CaptureError:
    name = "a DTensor" if node.target in ANNOTATIONS else name_of(node)
    got = "the op combines a DTensor with a number or a condition that differs between ranks"
    return CaptureError.of(
        name,
        f"{got} of {', '.join(axes)}",
        fix=(
            "make the number equal on all ranks, by dist.all_reduce or sf.psum; or compute on each "
            "rank's shard: DTensor.from_local(x.to_local() * number, mesh, x.placements)"
        ),
        source=_line_of(node),
    )


def _line_of(node: torch.fx.Node) -> str | None:
    """The user's line of a node, or of the nearest one that leads to it."""
    queue = [node]
    for x in queue:
        if line := sources.user_line(x):
            return line
        queue += [y for y in x.all_input_nodes if y not in queue]
    return None


def _has_dims(x: torch.fx.Node) -> bool:
    """Whether a value is a tensor with dims: torch takes one without for a number."""
    value = x.meta.get("example_value")
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _tensor_text(x: torch.fx.Node, is_placed: bool, origin: Origin) -> str:
    kind = "a DTensor" if is_placed else "a plain tensor"
    shape = tuple(x.meta["example_value"].shape)
    return f"{origin.text}: {kind} of shape {shape}"


def _expression(
    kinds: Mapping[torch.fx.Node, bool],
    is_placed: bool,
    origin_of: Callable[[torch.fx.Node], Origin],
) -> str | None:
    """The user's expression for the first tensor of a kind, where it is known."""
    first = next(x for x, kind in kinds.items() if kind == is_placed)
    return origin_of(first).expression


def origin_of(
    node: torch.fx.Node,
    outer: Mapping[torch.fx.Node, torch.fx.Node],
    arguments: Sequence[tuple[str, Any]],
) -> Origin:
    """Where a tensor of Dynamo's graph comes from: an argument, a closed-over tensor, or a line.

    Args:
        node: its node.
        outer: the node of the graph around it, for each input of a subgraph.
        arguments: the path and the fake tensor of each tensor argument.
    """
    way = _carriers_of(node, outer)
    argument = way[-1].meta.get("grapharg")
    if argument is None:
        made = next((x for x in way if sources.user_line(x)), node)
        line = _line_of(made)
        text = f"{made.name}, made at {line}" if line else made.name
        return Origin(text, None)
    example = argument.example
    path = next((path for path, x in arguments if x is example), None)
    if path is not None:
        return Origin(f"argument {path}", path)
    *_, name = re.findall(r"[A-Za-z]\w*", argument.source.name) or ["tensor"]
    closed_over = "a closed-over tensor"
    if name == "cell_contents":
        return Origin(closed_over, None)
    return Origin(f"{name}, {closed_over}", None)


def _carriers_of(
    node: torch.fx.Node, outer: Mapping[torch.fx.Node, torch.fx.Node]
) -> list[torch.fx.Node]:
    """The node and the nodes that only pass its value on, up to an argument or a user's op."""
    way = [node]
    while node in outer or (node.all_input_nodes and _only_carries(node)):
        node = outer[node] if node in outer else node.all_input_nodes[0]
        way.append(node)
    return way


def _only_carries(x: torch.fx.Node) -> bool:
    is_mark = x.target in ANNOTATIONS or name_of(x) in PLUMBING
    return is_mark or sources.user_line(x) is None
