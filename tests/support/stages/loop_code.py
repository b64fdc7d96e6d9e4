"""Dynamo's graphs of loops and branches, made by hand."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardfn.capture.control_flow import bodies
from shardfn.capture.shard_map.varying import Kinds
from shardfn.ops import shard_map

X = torch.empty(2)


class Code:
    """A graph whose inputs vary over these axes."""

    def __init__(self, **axes: frozenset[str]) -> None:
        self.root, self.graph = torch.nn.Module(), torch.fx.Graph()
        self.inputs = [_valued(self.graph.placeholder(name)) for name in axes]
        self.axes = [*axes.values()]

    def body(
        self,
        name: str,
        fn: Callable[..., Any],
        entering: Sequence[torch.fx.Node],
        free: Sequence[torch.fx.Node],
    ) -> list[torch.fx.Node]:
        """The results of a body: fn(call, *entering, *free) -> results; `call` adds a node."""
        inner = torch.fx.Graph()
        count = len(entering) + len(free)
        holders = [_valued(inner.placeholder(f"{name}_{k}")) for k in range(count)]
        call = lambda target, *args: _valued(inner.call_function(target, args))
        results = fn(call, *holders)
        left = inner.call_function(bodies.leave, (results,))
        n = len(results)
        outs = [call(operator.getitem, left, k) for k in range(n)]
        inner.output(tuple(outs))
        self.root.add_module(name, torch.fx.GraphModule(torch.nn.Module(), inner))
        items = self._items(bodies.enter, (list(entering),), len(entering))
        holder = self.graph.get_attr(name)
        given = (holder, *items, *free)
        return self._items(torch.ops.higher_order.wrap, given, n)

    def ending(self, target: Any, *args: Any) -> torch.fx.Node:
        """A control-flow op, whose results are those of the graph."""
        node = self.graph.call_function(target, args)
        self.graph.output(node)
        return node

    def module(self) -> torch.fx.GraphModule:
        return torch.fx.GraphModule(self.root, self.graph)

    def settled(self) -> torch.fx.GraphModule:
        """The graph after all values have their varying axes."""
        module = self.module()
        Kinds(module).settle(self.axes)
        return module

    def _items(self, target: Any, args: Any, n: int) -> list[torch.fx.Node]:
        if not n:
            return []
        node = self.graph.call_function(target, args)
        return [_valued(self.graph.call_function(operator.getitem, (node, k))) for k in range(n)]


def varied(module: Any) -> list[str]:
    """The values that are made varying, and over which axes, sorted."""
    nodes = module.graph.find_nodes(op="call_function", target=shard_map.vary)
    return sorted(f"{x.args[0].name} over {x.args[1]}" for x in nodes)


def _valued(node: torch.fx.Node) -> torch.fx.Node:
    node.meta["example_value"] = X
    return node
