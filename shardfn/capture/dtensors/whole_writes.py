"""Collectives that write their result over a tensor: whether the result may be read in its place.
Then a derivative may read what the tensor was before.
"""

from __future__ import annotations

from typing import Any

import torch

from ..control_flow import bodies
from ..dynamo_nodes import memories_of
from .writes import shared_memory


def is_replaceable(x: torch.fx.Node, value: torch.fx.Node, graph: torch.fx.Graph) -> bool:
    """Whether a new value may be read in place of a tensor that it overwrites: no other node shows
    that memory.

    Args:
        x: the tensor.
        value: the new value.
        graph: that Dynamo is writing.
    """
    is_made = x.op in ("call_function", "call_method") and x.graph is graph
    if not is_made or value.graph is not graph or not _are_alike(x, value):
        return False
    others = [y for y in graph.nodes if y.op != "output" and y is not x]
    found = shared_memory(x)
    if found == [x]:
        return not any(x in shared_memory(y) for y in others)
    # a value that enters a body, as one of a list
    entered, *_ = found
    own = memories_of(x)
    others = [y for y in others if y is not entered]
    is_own = entered.target is bodies.mark_inputs and bool(own)
    if not is_own or any({*own} & {*memories_of(y)} for y in others):
        return False
    x.meta["overwritten"] = True
    return True


def _are_alike(x: torch.fx.Node, y: torch.fx.Node) -> bool:
    """Whether two values have one shape, one order in memory and one dtype."""
    kinds = [_kind(node.meta.get("example_value")) for node in (x, y)]
    return kinds[0] == kinds[1] is not None


def _kind(x: Any) -> Any:
    if not isinstance(x, torch.Tensor):
        return None
    return tuple(x.shape), tuple(x.stride()), x.dtype
