"""Tensors that a function closes over as primals of a derivative around it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch

from ...ops import placement
from ..dynamo_nodes import name_of
from .closed_over_tensors import results_by_leaf, results_through

# functions of torch.func in Dynamo's graph
WRAPS = "_wrap_for_grad"
STEPS = {"_grad_increment_nesting": 1, "_grad_decrement_nesting": -1}


@attrs.frozen
class Derivative:
    """What autograd knows about a captured function that returns gradients.

    Args:
        results: for each floating result, whether it has a derivative.
        primals: for each tensor that autograd follows, the numbers of the results that depend
            on it.
        once: the numbers of the results whose derivative would differentiate the gradients of a
            pipeline.
        lost: the numbers of the primals that a pipeline reads and does not differentiate.
    """

    results: tuple[bool, ...]
    primals: tuple[tuple[int, ...], ...]
    once: frozenset[int] = frozenset()
    lost: tuple[int, ...] = ()


@attrs.define(eq=False)
class KnownDerivatives:
    """The pipelines of one capture, whose gradients its outermost derivative reads.

    Args:
        once: nodes of autograd's graph, of results that have no derivative.
        lost: tensors that pipelines read and do not differentiate.
    """

    once: list[Any] = attrs.field(factory=list)
    lost: list[Any] = attrs.field(factory=list)


def derivative_of(
    results: Sequence[torch.Tensor],
    primals: Sequence[torch.Tensor],
    known: KnownDerivatives | None = None,
) -> Derivative:
    """Which results have a derivative, and which of them depend on each primal."""
    ends = results_by_leaf(results)
    known = known or KnownDerivatives()
    lost = {id(x) for x in known.lost}
    return Derivative(
        tuple(x.requires_grad for x in results),
        tuple(tuple(ends.get(id(x), ())) for x in primals),
        frozenset(results_through(results, known.once)),
        tuple(k for k, x in enumerate(primals) if id(x) in lost),
    )


def follow_primals(python: torch.fx.GraphModule) -> None:
    """Have code inside a derivative read closed-over tensors as primals of it.

    Dynamo wraps a closed-over tensor for the derivative that has it as a primal. The function
    inside reads the tensor itself, which the derivative would not see.
    """
    for marked in python.graph.find_nodes(op="call_function", target=placement.closed_over_primal):
        (held,) = marked.all_input_nodes
        wrapped = _wrapped(marked)
        for node in _nodes_of_level(wrapped):
            node.replace_input_with(held, wrapped)
        marked.replace_all_uses_with(held)
        python.graph.erase_node(marked)


def _wrapped(marked: torch.fx.Node) -> torch.fx.Node:
    """The node that wraps a closed-over primal for torch.func. In the code of one rank it varies
    before it is wrapped.
    """
    queue = [marked]
    for node in queue:
        if name_of(node) == WRAPS:
            return node
        queue += node.users
    raise AssertionError(f"no derivative has {marked} as a primal")


def _nodes_of_level(wrapped: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """The nodes between a wrapped primal and the end of its derivative's forward."""
    node = wrapped
    depth = 1
    while depth:
        node = node.next
        depth += STEPS.get(name_of(node), 0)
        yield node
