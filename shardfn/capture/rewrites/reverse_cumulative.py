"""Cumulative ops between two flips, as gradients of cumulative ops are, as one op each."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from ...ops.cumulative import REVERSED
from ...ops.nodes import args_of

FLIP = torch.ops.aten.flip.default


def join_flips(graph: torch.fx.Graph) -> None:
    """Replace a flip, a cumulative op and a flip, all along one dim, by the op from the last
    element to the first. What is then unread stays in the graph.
    """
    for last in graph.find_nodes(op="call_function", target=FLIP):
        source = _flipped_twice(last)
        if source is None:
            continue
        op, x, dim = source
        with graph.inserting_before(last):
            joined = graph.call_function(op, (x, dim))
        joined.meta = {**last.meta}
        last.replace_all_uses_with(joined)


def _flipped_twice(last: Node) -> tuple[Any, Node, int] | None:
    """Return the op from the last element to the first, its tensor and its dim; None if a flip
    is not the last of three.
    """
    middle, dims = args_of(last)
    if middle.target not in REVERSED or middle.kwargs or len(middle.users) > 1:
        return None
    first, dim = args_of(middle)
    if first.target is not FLIP:
        return None
    x, own = args_of(first)
    n = max(x.meta["val"].dim(), 1)
    same = [d % n for d in dims] == [d % n for d in own] == [dim % n]
    return (REVERSED[middle.target], x, dim % n) if same else None
