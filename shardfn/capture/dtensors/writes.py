"""In-place writes to memory that a DTensor shares with another tensor. In eager torch both change;
here they are values of their own.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...errors import CaptureError
from ...ops import placement, shard_map
from ...ops.nodes import args_of
from .. import annotations as sources
from ..shard_map.varying_nodes import graphs_of, name_of, root_of, written_by

# the result shares memory with the first argument in eager torch
SHARING = (
    placement.placed,
    placement.unmarked,
    placement.shared,
    shard_map.as_invariant,
    shard_map.from_local,
    shard_map.to_local,
)
OF_DTENSORS = (placement.placed, placement.shared)


def refuse_writes(python: torch.fx.GraphModule, name: str) -> None:
    """Refuse writes whose effect another tensor would show in eager torch.

    Raises:
        CaptureError: names the op and the user's line.
    """
    for graph in graphs_of(python):
        if not any(node.target in OF_DTENSORS for node in graph.nodes):
            continue
        order = {node: k for k, node in enumerate(graph.nodes)}
        for node in graph.nodes:
            for x in written_by(node):
                _refuse_write(node, x, name, order)


def _refuse_write(
    node: torch.fx.Node,
    x: torch.fx.Node,
    name: str,
    order: dict[torch.fx.Node, int],
) -> None:
    *between, base = _bases(x)
    is_shared = any(y.target in OF_DTENSORS for y in between)
    if is_shared and base.op in ("placeholder", "get_attr"):
        raise _refused(node, name, "an argument")
    root, now = root_of(x), order[node]
    before = [y for y, k in order.items() if k <= now and y.op != "output"]
    aliases = [
        y for y in before if root_of(y) is not root and _bases(y)[-1] is base
    ]
    if any(order[user] > now for y in aliases for user in y.users):
        raise _refused(node, name, "a DTensor")


def _bases(x: torch.fx.Node) -> list[torch.fx.Node]:
    """The values whose memory a value shares in eager torch, the first one last."""
    return [*_steps(x)]


def _steps(x: torch.fx.Node) -> Iterator[torch.fx.Node]:
    x = root_of(x)
    yield x
    while x.target in SHARING:
        x = root_of(args_of(x)[0])
        yield x


def _refused(node: torch.fx.Node, name: str, of: str) -> CaptureError:
    return CaptureError.of(
        name,
        f"{name_of(node)} writes to the memory of {of}",
        needed="a function that only returns",
        fix="return the new value, or write to a copy: x.clone()",
        source=sources.line_of(node.meta.get("stack_trace")),
    )
