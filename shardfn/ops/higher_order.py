"""torch's higher-order ops (cond, scan, flex_attention) as one call on tensors, with their graphs
bound.
"""

from __future__ import annotations

from typing import Any

import torch

from .loops import Loop
from .random_bits import RANDOM_BITS

RANDOM = torch.Tag.nondeterministic_seeded
POINTWISE = torch.Tag.pointwise
OPS = ("cond", "scan", "while_loop", "map_impl", "associative_scan", "flex_attention")


class TensorSlot:
    """The position of a tensor in a template of arguments."""

    def __init__(self, number: int) -> None:
        self.number = number


class HigherOrder:
    """A higher-order op with its graphs bound. It takes only its tensors, in order.

    Args:
        op: an op of torch.ops.higher_order.
        template: (args, kwargs) with graphs in their places and holes for tensors.

    For partition it is an op without a rule, so its inputs are all-gathered. If all ops of its
    branches are pointwise, it is a pointwise op. Every rank runs the same branch equally often.
    """

    def __init__(self, op: Any, template: Any) -> None:
        self.op, self.template, self.__name__ = op, template, str(op)

    def __call__(self, *tensors: Any) -> Any:
        args, kwargs = _substitute(self.template, tensors)
        return self.op(*args, **kwargs)

    def __repr__(self) -> str:
        return self.__name__

    @property
    def tags(self) -> list[Any]:
        """Return the tags of the op: random if a branch draws random numbers, pointwise if all ops
        of its branches are.
        """
        op_tags = [
            getattr(n.target, "tags", ())
            for g in self.graphs
            for n in g.graph.nodes
            if n.op == "call_function"
        ]
        targets = {n.target for graph in self.graphs for n in graph.graph.nodes}
        is_random = RANDOM_BITS in targets or any(RANDOM in t for t in op_tags)
        tags = [RANDOM] if is_random else []
        return (
            [*tags, POINTWISE]
            if str(self.op) == "cond" and all(POINTWISE in t for t in op_tags)
            else tags
        )

    @property
    def graphs(self) -> list[torch.fx.GraphModule]:
        """Return the graphs that the op runs, and those inside them."""
        graphs: list[torch.fx.GraphModule] = []
        _substitute(self.template, (), graphs)
        return [
            m for graph in graphs for m in graph.modules() if isinstance(m, torch.fx.GraphModule)
        ]


def _substitute(tree: Any, tensors: Any, graphs: list[Any] | None = None) -> Any:
    """Fill a template of arguments with tensors; or collect its graphs into a list, if one is
    passed.
    """
    if isinstance(tree, TensorSlot):
        return tensors[tree.number] if graphs is None else None
    if isinstance(tree, torch.fx.GraphModule) and graphs is not None:
        graphs.append(tree)
    if isinstance(tree, (list, tuple)):
        return type(tree)([_substitute(t, tensors, graphs) for t in tree])
    if isinstance(tree, dict):
        return {k: _substitute(t, tensors, graphs) for k, t in tree.items()}
    return tree


def bind_graphs(module: torch.fx.GraphModule) -> None:
    """Replace each higher-order op of a graph by a HigherOrder call that takes tensors alone."""
    for node in list(module.graph.nodes):
        if (
            node.op != "call_function"
            or str(node.target) not in OPS
            or isinstance(node.target, Loop)
        ):
            continue
        tensors: list[torch.fx.Node] = []

        def place(n: torch.fx.Node, tensors: list[torch.fx.Node] = tensors) -> Any:
            if n.op == "get_attr" and isinstance(
                getattr(module, str(n.target)), torch.fx.GraphModule
            ):
                return getattr(module, str(n.target))
            tensors.append(n)
            return TensorSlot(len(tensors) - 1)

        template = _mutable(torch.fx.node.map_arg((node.args, node.kwargs), place))
        node.target, node.args, node.kwargs = (
            HigherOrder(node.target, template),
            tuple(tensors),
            {},
        )
    for node in module.graph.find_nodes(op="get_attr"):
        if not node.users:
            module.graph.erase_node(node)


def _mutable(tree: Any) -> Any:
    """Copy fx's immutable lists and dicts into plain ones, as the ops require."""
    if isinstance(tree, list):
        return [_mutable(t) for t in tree]
    if isinstance(tree, tuple):
        return tuple(_mutable(t) for t in tree)
    return {k: _mutable(t) for k, t in tree.items()} if isinstance(tree, dict) else tree


def unbind_graphs(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Restore torch's form of the higher-order ops, which compilers understand: graphs as
    arguments.
    """
    for n, node in enumerate(list(module.graph.nodes)):
        if not isinstance(node.target, HigherOrder):
            continue
        graphs: list[torch.fx.GraphModule] = []
        _substitute(node.target.template, (), graphs)
        with module.graph.inserting_before(node):
            graph_nodes = {}
            for k, graph in enumerate(graphs):
                module.register_module(f"graph_{n}_{k}", graph)
                graph_nodes[id(graph)] = module.graph.get_attr(f"graph_{n}_{k}")
        args, kwargs = _substitute(node.target.template, node.args)
        node.target, node.args, node.kwargs = (
            node.target.op,
            _with_graph_nodes(args, graph_nodes),
            _with_graph_nodes(kwargs, graph_nodes),
        )
    module.recompile()
    return module


def _with_graph_nodes(tree: Any, graph_nodes: dict[int, torch.fx.Node]) -> Any:
    """Replace each graph in a tree of arguments by the node that holds it."""
    if isinstance(tree, torch.fx.GraphModule):
        return graph_nodes[id(tree)]
    if isinstance(tree, (list, tuple)):
        return type(tree)([_with_graph_nodes(t, graph_nodes) for t in tree])
    return (
        {k: _with_graph_nodes(t, graph_nodes) for k, t in tree.items()}
        if isinstance(tree, dict)
        else tree
    )
