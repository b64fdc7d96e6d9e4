"""Mistakes with DTensors inside a captured function: torch refuses them, or they would give
wrong values here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...errors import CaptureError
from ...ops import placement
from ...ops.prims import CALLS
from ...ops.text_formats import parse_placed
from .. import annotations as sources
from ..shard_map.varying_nodes import (
    BACKWARD,
    PLUMBING,
    graphs_of,
    name_of,
    nodes_in,
    root_of,
    written_by,
)

MARKS = (
    placement.placed,
    placement.unmarked,
    placement.shared,
    placement.align,
)


def refuse_mixed(
    node: torch.fx.Node, is_dtensor: Callable[[torch.fx.Node], bool]
) -> None:
    """Refuse an op of a DTensor and a plain tensor.

    Raises:
        CaptureError: names the op.
    """
    if _is_apart(node):
        return
    every = [x for x in nodes_in((node.args, node.kwargs)) if _counts(x)]
    kinds = {x: is_dtensor(x) for x in every}
    if len(set(kinds.values())) < 2:
        return
    names = " and ".join(_said(x, is_placed) for x, is_placed in kinds.items())
    fix = (
        "DTensor.from_local(x, mesh, placements) for each rank's own, distribute_tensor for "
        "one that all have; or x.to_local() of the DTensor"
    )
    raise CaptureError.of(name_of(node), f"of {names}", fix=fix)


def _is_apart(node: torch.fx.Node) -> bool:
    """Whether a node only carries values on, or runs a subgraph."""
    return (
        node.target in CALLS
        or node.target in MARKS
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
    placed = [n for n in graph.nodes if n.target is placement.placed]
    axes = {n: {axis for axis, _ in parse_placed(str(n.args[1]))} for n in placed}
    for node in graph.nodes if placed else ():
        if node.op not in ("call_function", "call_method") or node in axes:
            continue
        if _is_apart(node) and name_of(node) not in PLUMBING:
            continue
        mine: set[str] = set().union(
            *(axes.get(x, ()) for x in node.all_input_nodes)
        )
        axes[node] = mine
        wrong = sorted(mine & varies(node))
        if wrong:
            raise CaptureError.of(
                name_of(node),
                f"of a DTensor and a number that differs over {', '.join(wrong)}",
                fix="a number that all ranks have: dist.all_reduce or sf.psum it first",
                source=sources.line_of(node.meta.get("stack_trace")),
            )


def _counts(x: torch.fx.Node) -> bool:
    """Whether a value is a tensor that torch does not take for a number."""
    value = x.meta.get("example_value")
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _said(x: torch.fx.Node, is_placed: bool) -> str:
    kind = "a DTensor" if is_placed else "a plain tensor"
    return f"{kind} of shape {tuple(x.meta['example_value'].shape)}"


def refuse_writes(python: torch.fx.GraphModule, name: str) -> None:
    """Refuse writes to memory that a DTensor or an argument of one rank shares.

    Raises:
        CaptureError: names the op and the user's line.
    """
    for graph in graphs_of(python):
        order = {node: k for k, node in enumerate(graph.nodes)}
        for node in graph.nodes:
            _refuse_written(node, name, order)


def _refuse_written(
    node: torch.fx.Node, name: str, order: dict[torch.fx.Node, int]
) -> None:
    for x in written_by(node):
        root = root_of(x)
        known = [root, *(u for u in root.users if order[u] < order[node])]
        for other in known:
            if other.target is placement.shared:
                _refuse_write(node, name, other)


def _refuse_write(node: torch.fx.Node, name: str, shared: Any) -> None:
    raise CaptureError.of(
        name,
        f"{name_of(node)} writes to the memory of {shared.args[1]}",
        needed="a function that only returns",
        fix="return the new value, or write to a copy: x.clone()",
        source=sources.line_of(node.meta.get("stack_trace")),
    )
