"""Graphs for tests of passes: traced from a function of tensors, and shown as text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx


def graph_of(fn: Callable[..., Any], *args: Any) -> torch.fx.Graph:
    """The ATen graph of a function, with fake values."""
    return make_fx(fn, tracing_mode="fake")(*args).graph


def calls(graph: torch.fx.Graph, name: str) -> list[torch.fx.Node]:
    """The calls of an op in a graph, by the name of the op without its overload."""
    return [node for node in graph.nodes if op_of(node) == name]


def op_of(node: torch.fx.Node) -> str:
    """The name of a node's op without its overload."""
    target = node.target
    return getattr(target, "_opname", getattr(target, "__name__", str(target)))


def shown(graph: torch.fx.Graph) -> str:
    """A graph as text: a line for each call, then the results."""
    lines = []
    for node in graph.nodes:
        if node.op == "call_function":
            named = [f"{key}={value}" for key, value in node.kwargs.items()]
            given = ", ".join([*map(str, node.args), *named])
            lines.append(f"{node.name} = {op_of(node)}({given})")
    (output,) = graph.find_nodes(op="output")
    return "\n".join([*lines, f"return {output.args[0]}"])
