"""Checks on a local graph, which run before and after every pass."""

from __future__ import annotations

import functools

import torch

from .. import _compat
from ..collectives import started_by
from ..ops.graph_keys import LOCAL, check_keys
from ..types import Collective, MeshAxes

WAIT = torch.ops._c10d_functional.wait_tensor.default


@functools.cache
def sends(target: _compat.OpOverload) -> bool:
    """Whether a call of this op starts a collective."""
    if target.namespace == "_c10d_functional":
        return target is not WAIT  # also ops that we never emit
    return started_by(f"{target.namespace}.{_compat.name_of_op(target)}") is not None


def check(graph: torch.fx.Graph, axes: MeshAxes) -> None:
    """Check a local graph: every node has a value, arguments precede uses, each collective has
    one wait, and all axes and meta keys are known.

    Args:
        graph: the local graph.
        axes: the mesh of the graph.

    Raises:
        AssertionError: a pass broke the graph; names the node.
    """
    graph.lint()
    check_keys(graph.nodes, LOCAL)
    for node in graph.nodes:
        if node.op == "output":
            continue
        assert "val" in node.meta, f"{node} has no value"
        record = node.meta.get("collective")
        started = isinstance(node.target, _compat.OpOverload) and sends(node.target)
        assert started == isinstance(record, Collective), (
            f"{node} is a collective without a record, or the other way round"
        )
        if record is not None:
            assert record.axis in axes.names, (
                f"{node} is over {record.axis}, which is not an axis of {axes}"
            )
            waits = [user for user in node.users if user.target is WAIT]
            assert len(waits) == len(node.users) == 1, (
                f"{node} must be read by one wait, and by nothing else"
            )
