"""In-place writes to memory that a DTensor shares with another tensor. In eager torch both change;
here they are values of their own.
"""

from __future__ import annotations

import collections

import torch

from ...errors import CaptureError
from ...ops import placement, shard_map
from ...ops.nodes import args_of
from .. import annotations as sources
from ..shard_map.varying_nodes import graphs_of, name_of, root_of, written_by

# the result shares memory with the first argument in eager torch
SHARING = (
    *placement.PLACED,
    placement.unmarked,
    placement.shared,
    shard_map.as_invariant,
    shard_map.from_local,
    shard_map.to_local,
)
OF_DTENSORS = (*placement.PLACED, placement.shared)


def refuse_writes(python: torch.fx.GraphModule, name: str) -> None:
    """Refuse writes whose effect another tensor would show in eager torch.

    Raises:
        CaptureError: names the op and the user's line.
    """
    for graph in graphs_of(python):
        if any(node.target in OF_DTENSORS for node in graph.nodes):
            _refuse_writes(graph, name)


def _refuse_writes(graph: torch.fx.Graph, name: str) -> None:
    order = {node: k for k, node in enumerate(graph.nodes)}
    sharing = collections.defaultdict[torch.fx.Node, list[torch.fx.Node]](list)
    for node in graph.nodes:
        if node.op != "output":
            sharing[memory_of(node)[-1]].append(node)
    for node in graph.nodes:
        for x in written_by(node):
            root, *_ = memory = memory_of(x)
            is_shared = any(y.target in OF_DTENSORS for y in memory)
            if is_shared and memory[-1].op in ("placeholder", "get_attr"):
                raise _refused(node, name, "an argument")
            now = order[node]
            before = [y for y in sharing[memory[-1]] if order[y] <= now]
            others = [y for y in before if root_of(y) is not root]
            if any(order[user] > now for y in others for user in y.users):
                raise _refused(node, name, "a DTensor")


def memory_of(x: torch.fx.Node) -> list[torch.fx.Node]:
    """The values whose memory a value shares in eager torch, the first one last."""
    found = [root_of(x)]
    while found[-1].target in SHARING:
        found.append(root_of(args_of(found[-1])[0]))
    return found


def _refused(node: torch.fx.Node, name: str, of: str) -> CaptureError:
    return CaptureError.of(
        name,
        f"{name_of(node)} writes to the memory of {of}",
        needed="a function that only returns",
        fix="return the new value, or write to a copy: x.clone()",
        source=sources.line_of(node.meta.get("stack_trace")),
    )
