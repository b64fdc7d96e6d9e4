"""Writes of a value that all ranks have over all of a tensor of each rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...errors import CaptureError
from ...ops.prims import Axes
from .. import annotations as sources
from ..control_flow.trim_loops import dependencies_of
from ..dynamo_nodes import BACKWARD, name_of, nodes_in, root_of, written_by


def refuse_overwritten(graph: torch.fx.Graph, flat: Callable[[Any], Axes]) -> None:
    """Refuse a gradient through a tensor of each rank that an invariant value was written over: it
    would count the value once for each rank.

    Args:
        graph: of per-rank code, as Dynamo writes it.
        flat: the axes over which a value varies.

    Raises:
        CaptureError: naming the line of the write.
    """
    last: dict[torch.fx.Node, torch.fx.Node] = {}  # the last write so far to a tensor
    for node in graph.nodes:
        last.update({root_of(x): node for x in written_by(node)})
        if name_of(node) not in BACKWARD:
            continue
        outs, ins, *_ = node.args
        read = dependencies_of(nodes_in(outs))
        for root in [x for x in last if x in read]:
            write = last[root]
            if not _is_whole(write, root):
                continue
            if not flat(root) - flat(write.args[1]) - flat(ins):
                continue
            raise CaptureError.of(
                "shard_map",
                "a value that is equal on all ranks overwrites a tensor that differs between "
                "ranks, and a gradient reads the tensor",
                needed="code that uses the equal value itself, without writing it over the tensor",
                fix="y = sf.psum(y, axis) in place of the write; or dist.all_reduce(y) of a "
                "tensor without views",
                source=sources.user_line(write),
            )


def _is_whole(node: torch.fx.Node, root: torch.fx.Node) -> bool:
    """Whether a node copies a value over all of a tensor."""
    if name_of(node) != "copy_" or not isinstance(node.args[1], torch.fx.Node):
        return False
    (written,) = written_by(node)
    part: Any = written.meta.get("example_value")
    whole: Any = root.meta.get("example_value")
    if not (isinstance(part, torch.Tensor) and isinstance(whole, torch.Tensor)):
        return False
    return part.numel() == whole.numel()
