"""Views: which values of a graph share memory with others, by the schemas of their ops."""

from __future__ import annotations

import operator
from typing import Any

import torch

SAME = (
    torch.ops._c10d_functional.wait_tensor.default,
)  # returns its argument, though its schema does not say so


def viewed(node: torch.fx.Node) -> torch.fx.Node | None:
    """The node whose memory a node's result is a view of. None for a value with its own memory."""
    if node.op != "call_function":
        return None
    if node.target is operator.getitem:
        parent = node.args[0]
        return viewed(parent) if isinstance(parent, torch.fx.Node) else None
    if node.target in SAME:
        return _node(node.args[0])
    schema = getattr(node.target, "_schema", None)
    if schema is None or not any(result.alias_info is not None for result in schema.returns):
        return None
    for k, argument in enumerate(schema.arguments):
        if argument.alias_info is not None:
            return _node(node.args[k] if k < len(node.args) else node.kwargs.get(argument.name))
    return None


def _node(x: Any) -> torch.fx.Node | None:
    return x if isinstance(x, torch.fx.Node) else None


def memory_of(node: torch.fx.Node) -> torch.fx.Node | tuple[Any, ...]:
    """The node that allocated the memory of a value, with an index if it made several tensors."""
    while (source := viewed(node)) is not None:
        node = source
    return node.args if node.target is operator.getitem else node
