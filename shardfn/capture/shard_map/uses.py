"""How ranks use the values of Dynamo's graph: what says that they use them alike, and where the
cotangent of a value is that of all ranks.
"""

from __future__ import annotations

import torch

from ...ops import placement, shard_map
from ...ops.nodes import args_of
from ...ops.prims import CALLS, Axes
from ...ops.text_formats import parse_axes
from ..dtensors.mixing import of_control_flow
from .varying_nodes import BACKWARD, name_of, written_by

NONE: Axes = frozenset()


def axes_gone(node: torch.fx.Node) -> Axes:
    """The axes over which a prim makes one value of those of the ranks."""
    row = CALLS[node.target]
    if row.gives_varying:
        return NONE
    return row.axes_of(node)


def standing_for(node: torch.fx.Node, every: torch.fx.Node) -> list[torch.fx.Node]:
    """Of several values, those that one stands for; all, if it decides which they are."""
    decides = all(node is x for x in args_of(every)[:1])
    if decides:
        return [*every.users]
    mine = []
    for item in every.users:
        values = of_control_flow(item)
        if values is None or node in values:
            mine.append(item)
    return mine


def live(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """The values that are read, or written to."""
    found: set[torch.fx.Node] = set()
    for node in reversed(graph.nodes):
        is_read = any(user in found for user in node.users)
        if is_read or node.op == "output" or written_by(node):
            found.add(node)
    return found


def is_differentiated(node: torch.fx.Node) -> bool:
    """Whether a derivative of a value is taken."""
    backwards = [user for user in node.users if name_of(user) in BACKWARD]
    return any(node in args_of(user)[0] for user in backwards)


def is_gathered(x: torch.fx.Node) -> bool:
    """Whether ranks have terms of the gradient of a value, as the code says."""
    return x.target is placement.shared and args_of(x)[1] == placement.GATHERED


def makes_invariant(node: torch.fx.Node, axis: str) -> bool:
    """Whether the code says of a value that all ranks of an axis have the same."""
    if node.target is not shard_map.as_invariant:
        return False
    return axis in parse_axes(args_of(node)[1])


def alike_of(node: torch.fx.Node) -> Axes:
    """The axes over which the code takes the gradient of a tensor for the same."""
    text = node.args[2:3] if node.target is placement.shared else ()
    return frozenset(parse_axes(str(*text))) if any(text) else NONE
