"""Groups of arguments and results that are placed as one parameter: its state and new value."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence

import torch
from torch.fx import Graph, Node

from ...ops.nodes import args_of
from ...ops.placement import ALIGN
from .. import rules
from ..propagation.walk import op_name

# ops beside pointwise ones that leave each element where it is
STAY = {"clone", "_to_copy", "detach", "alias"}


class ParameterGroups:
    """Groups of tensors that share the placement of one parameter: its gradient, optimizer
    state and new value.

    Values computed element by element from a gradient and other tensors of its shape belong to
    the update of one parameter.

    Args:
        graph: of the program.
    """

    def __init__(self, graph: Graph) -> None:
        self.roots: dict[Node, Node] = {}
        self.aligned = [
            node for node in graph.nodes if node.op == "call_function" and node.target is ALIGN
        ]
        self.parameters = {
            parameter
            for node in self.aligned
            if (parameter := args_of(node)[1]).op == "placeholder"
        }
        before = _ancestors(self.aligned)
        for node in graph.nodes:
            if node.op == "call_function" and node not in before:
                self.add(node)
        self.leaders = self.found()

    def add(self, node: Node) -> None:
        """Group a pointwise op of the update with the inputs that have its shape."""
        if node.target is ALIGN:
            _, parameter, *_ = args_of(node)
            self.join(node, parameter)
        elif rules.is_pointwise(node.target) or op_name(node) in STAY:
            for read in node.all_input_nodes:
                if _shape(read) == _shape(node):
                    self.join(node, read)

    def join(self, a: Node, b: Node) -> None:
        """Merge the groups of two nodes (union-find)."""
        self.roots[self.root(a)] = self.root(b)

    def root(self, node: Node) -> Node:
        """Return the representative node of a group (union-find, with path halving)."""
        above = self.roots.setdefault(node, node)
        while above is not self.roots[above]:
            above = self.roots[above]
        self.roots[node] = above
        return above

    def found(self) -> dict[Node, Node]:
        """Map each node of a group with exactly one parameter to that parameter."""
        groups: dict[Node, list[Node]] = defaultdict(list)
        for node in list(self.roots):
            groups[self.root(node)].append(node)
        found = {}
        for nodes in groups.values():
            parameters = [node for node in nodes if node in self.parameters]
            if len(parameters) == 1:
                found.update(dict.fromkeys(nodes, parameters[0]))
        return found

    def leader(self, node: Node) -> Node | None:
        """Return the parameter of a node's group; a parameter is its own."""
        alone = node if node in self.parameters else None
        return self.leaders.get(node, alone)


def _ancestors(nodes: Sequence[Node]) -> Collection[Node]:
    """Collect all nodes that some nodes depend on, without these nodes."""
    found: dict[Node, None] = {}
    waiting = [read for node in nodes for read in node.all_input_nodes]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found[node] = None
            waiting += node.all_input_nodes
    return found.keys()


def _shape(node: Node) -> tuple[int, ...] | None:
    """Return the shape of a node's tensor; None for other values."""
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None
