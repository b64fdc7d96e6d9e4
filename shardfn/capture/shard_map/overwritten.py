"""Writes of a value that all ranks have over all of a tensor of each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ...errors import CaptureError
from ...ops.prims import Axes
from .. import annotations as sources
from .varying_nodes import BACKWARD, name_of, nodes_in, root_of, written_by


def refuse_overwritten(graph: torch.fx.Graph, flat: Callable[[Any], Axes]) -> None:
    """Refuse a gradient, by what all ranks have, of what reads such a tensor: it would count the
    value once for each rank.

    Args:
        graph: of per-rank code, as Dynamo writes it.
        flat: the axes over which a value varies.

    Raises:
        CaptureError: naming the line of the write.
    """
    last: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in graph.nodes:
        for x in written_by(node):
            last[root_of(x)] = node
    whole = {root: node for root, node in last.items() if _is_whole(node, root)}
    for derivative in graph.nodes if whole else ():
        if name_of(derivative) not in BACKWARD:
            continue
        outs, ins, *_ = derivative.args
        read = _ancestors(nodes_in(outs))
        for root in (root for root in whole if root in read):
            node = whole[root]
            if not flat(root) - flat(node.args[1]) - flat(ins):
                continue
            raise CaptureError.of(
                "shard_map",
                "a value that all ranks have is written over a tensor of each rank, and a "
                "gradient reads the tensor",
                needed="the value itself",
                fix="y = sf.psum(y, axis) in place of a write; or dist.all_reduce(y) of a tensor "
                "without views",
                source=sources.line_of(node.meta.get("stack_trace")),
            )


def _ancestors(nodes: Iterable[torch.fx.Node]) -> set[torch.fx.Node]:
    """The values that some are computed from, and these."""
    found: set[torch.fx.Node] = set()
    queue = [*nodes]
    while queue:
        node = queue.pop()
        if node not in found:
            found.add(node)
            queue += node.all_input_nodes
    return found


def _is_whole(node: torch.fx.Node, root: torch.fx.Node) -> bool:
    """Whether a node copies another value over all of a tensor."""
    if name_of(node) != "copy_" or not isinstance(node.args[1], torch.fx.Node):
        return False
    (written,) = written_by(node)
    part: Any = written.meta.get("example_value")
    whole: Any = root.meta.get("example_value")
    if not (isinstance(part, torch.Tensor) and isinstance(whole, torch.Tensor)):
        return False
    return part.numel() == whole.numel()
