"""Varying axes in loops and branches: raise the inputs of a body and its control-flow op to the
varying axes on which they agree.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...ops.nodes import args_of
from ..control_flow import bodies as regions
from . import varying_rules  # noqa: F401  (enters them in a table)
from .protocols import Axes, Settled, Varying
from .varying_bodies import ENDINGS, NONE, Body, ending_of
from .varying_nodes import BACKWARD, PLUMBING, children_of, is_wrap, name_of


def is_part(node: torch.fx.Node) -> bool:
    """Whether a node marks a body's inputs or results, runs a body, or is a control-flow op."""
    return (
        is_wrap(node)
        or node.target in ENDINGS
        or node.target in (regions.enter, regions.inside, regions.leave)
    )


def is_apart(module: torch.fx.GraphModule, node: torch.fx.Node) -> bool:
    """Whether a node runs another graph, or belongs to one that does, or takes a derivative."""
    has_graph = bool(children_of(module, node))
    return has_graph or is_part(node) or name_of(node) in (*BACKWARD, *PLUMBING)


def kind(kinds: Varying, node: torch.fx.Node) -> list[Axes] | None:
    """The varying axes of the results of a node of control flow (see `is_part`). None for any
    other node.
    """
    if not is_part(node):
        return None
    if node.target in (regions.inside, regions.leave):
        return [kinds.flat(x) for x in args_of(node)[0]]
    ending = ending_of(node)
    if ending is None:
        if is_wrap(node):
            return [kinds.flat(args_of(node))] * len(node.users)
        return [kinds.flat(x) for x in args_of(node)[0]]
    agreed = ENDINGS[ending.target](kinds, ending)
    if node.target in ENDINGS:
        return agreed.result
    if node.target is regions.enter:
        known = [w for w in _regions_of(node) if w in agreed.entering]
        return agreed.entering[known[0]] if known else [NONE] * len(args_of(node)[0])
    region = getattr(kinds.module, args_of(node)[0].target)
    (output,) = region.graph.find_nodes(op="output")
    positions = [args_of(x)[1] for x in args_of(output)[0]]
    leaving = agreed.left.get(node, agreed.leaving)
    count = len(leaving)
    return [leaving[k] if k < count else NONE for k in positions]


def _regions_of(enter: torch.fx.Node) -> list[torch.fx.Node]:
    return [w for item in enter.users for w in item.users if is_wrap(w)]


def rewrite(kinds: Varying, node: torch.fx.Node) -> bool:
    """Raise the inputs of a body or a control-flow op to the agreed varying axes. Returns
    whether the node is one of these.
    """
    if node.target in (regions.enter, regions.inside):
        return True
    if node.target is regions.leave:
        values = args_of(node)[0]
        wanted = kinds.leaving or [kinds.flat(x) for x in values]
        pairs = zip(values, wanted, strict=False)
        node.args = ([kinds.vary(x, axes) for x, axes in pairs],)
        return True
    if not is_wrap(node) and node.target not in ENDINGS:
        return False
    ending = ending_of(node)
    if ending is None:
        return is_wrap(node)
    agreed = kinds.known.setdefault(ending, ENDINGS[ending.target](kinds, ending))
    if node.target in ENDINGS:
        _vary_arguments(kinds, node, agreed)
    else:
        _vary_region(kinds, node, agreed)
    return True


def _varied(
    kinds: Varying, values: Sequence[torch.fx.Node], wanted: Sequence[Axes]
) -> list[torch.fx.Node]:
    """The values, made to vary over these axes too."""
    return [kinds.vary(x, axes) for x, axes in zip(values, wanted, strict=True)]


def _vary_arguments(kinds: Varying, ending: torch.fx.Node, agreed: Settled) -> None:
    """Raise the arguments of a control-flow op to the varying axes on which it and its bodies
    agree.
    """
    args = list(args_of(ending))
    for k, wanted in agreed.brought.items():
        args[k] = _varied(kinds, args[k], wanted)
    ending.args = tuple(args)


def _vary_region(kinds: Varying, node: torch.fx.Node, agreed: Settled) -> None:
    """Raise the closed-over and the inner values of a body to those varying axes."""
    body = Body(node, getattr(kinds.module, args_of(node)[0].target))
    entered = [body.entered(k) for k in range(len(body.given))]
    inner = type(kinds)(body.graph)
    inner.leaving = agreed.left.get(node, agreed.leaving)
    inner.settle(
        [
            agreed.free[node, k] if e is None else agreed.entering[node][e]
            for k, e in enumerate(entered)
        ]
    )
    given = [
        kinds.vary(x, agreed.free[node, k]) if (node, k) in agreed.free else x
        for k, x in enumerate(body.given)
    ]
    node.args = (args_of(node)[0], *given)
