"""Higher-order ops in a graph: an op that runs graphs of its own, as one call on tensors."""

from __future__ import annotations

from typing import Any

import torch

from .loops import Loop
from .random_bits import RANDOM_BITS

RANDOM = torch.Tag.nondeterministic_seeded
POINTWISE = torch.Tag.pointwise
OPS = ("cond", "scan", "while_loop", "map_impl", "associative_scan", "flex_attention")


class _Hole:
    """The place of a tensor among the arguments."""

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
        args, kwargs = _filled(self.template, tensors)
        return self.op(*args, **kwargs)

    def __repr__(self) -> str:
        return self.__name__

    @property
    def tags(self) -> list[Any]:
        """The tags of the op: random if a branch draws random numbers, pointwise if all ops of
        its branches are.
        """
        inside = [
            getattr(n.target, "tags", ())
            for g in self.graphs
            for n in g.graph.nodes
            if n.op == "call_function"
        ]
        targets = {n.target for graph in self.graphs for n in graph.graph.nodes}
        is_random = RANDOM_BITS in targets or any(RANDOM in t for t in inside)
        tags = [RANDOM] if is_random else []
        return (
            [*tags, POINTWISE]
            if str(self.op) == "cond" and all(POINTWISE in t for t in inside)
            else tags
        )

    @property
    def graphs(self) -> list[torch.fx.GraphModule]:
        """The graphs that it runs, and those inside them."""
        found: list[torch.fx.GraphModule] = []
        _filled(self.template, (), found)
        return [
            m for graph in found for m in graph.modules() if isinstance(m, torch.fx.GraphModule)
        ]


def _filled(tree: Any, tensors: Any, graphs: list[Any] | None = None) -> Any:
    if isinstance(tree, _Hole):
        return tensors[tree.number] if graphs is None else None
    if isinstance(tree, torch.fx.GraphModule) and graphs is not None:
        graphs.append(tree)
    if isinstance(tree, (list, tuple)):
        return type(tree)([_filled(t, tensors, graphs) for t in tree])
    if isinstance(tree, dict):
        return {k: _filled(t, tensors, graphs) for k, t in tree.items()}
    return tree


def fold(module: torch.fx.GraphModule) -> None:
    """Replace each higher-order op in a graph by one call on tensors."""
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
            return _Hole(len(tensors) - 1)

        template = _plain(torch.fx.node.map_arg((node.args, node.kwargs), place))
        node.target, node.args, node.kwargs = (
            HigherOrder(node.target, template),
            tuple(tensors),
            {},
        )
    for node in module.graph.find_nodes(op="get_attr"):
        if not node.users:
            module.graph.erase_node(node)


def _plain(tree: Any) -> Any:
    """fx keeps arguments in immutable containers, which the ops do not take."""
    if isinstance(tree, list):
        return [_plain(t) for t in tree]
    if isinstance(tree, tuple):
        return tuple(_plain(t) for t in tree)
    return {k: _plain(t) for k, t in tree.items()} if isinstance(tree, dict) else tree


def unfold(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The graph with higher-order ops in torch's form, which compilers understand."""
    for n, node in enumerate(list(module.graph.nodes)):
        if not isinstance(node.target, HigherOrder):
            continue
        graphs: list[torch.fx.GraphModule] = []
        _filled(node.target.template, (), graphs)
        with module.graph.inserting_before(node):
            held = {}
            for k, graph in enumerate(graphs):
                module.register_module(f"graph_{n}_{k}", graph)
                held[id(graph)] = module.graph.get_attr(f"graph_{n}_{k}")
        args, kwargs = _filled(node.target.template, node.args)
        node.target, node.args, node.kwargs = (
            node.target.op,
            _swapped(args, held),
            _swapped(kwargs, held),
        )
    module.recompile()
    return module


def _swapped(tree: Any, held: dict[int, torch.fx.Node]) -> Any:
    if isinstance(tree, torch.fx.GraphModule):
        return held[id(tree)]
    if isinstance(tree, (list, tuple)):
        return type(tree)([_swapped(t, held) for t in tree])
    return {k: _swapped(t, held) for k, t in tree.items()} if isinstance(tree, dict) else tree
