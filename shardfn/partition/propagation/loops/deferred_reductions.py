"""Deferred reductions: gradients that no step of their loop reads stay Partial, and are reduced
once, after the loop.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ....ops.nodes import args_of
from ....ops.placement import ALIGN
from ....types import PARTIAL_KINDS, MeshPlacements
from ..gradients import aligned
from ..walk import Walk

ATEN = torch.ops.aten
LINEAR = (
    ATEN.mul.Tensor,
    ATEN.mul.Scalar,
    ATEN.div.Tensor,
    ATEN.div.Scalar,
    ATEN.neg.default,
    ATEN._to_copy.default,
)
SUMS = (ATEN.add.Tensor, ATEN.sub.Tensor)


def deferrable(
    graph: torch.fx.Graph, first: int, zeros: Sequence[bool]
) -> dict[torch.fx.Node, int]:
    """Find the gradients that a loop only adds to a carry or returns, so that they are reduced
    once, after the loop.

    Args:
        graph: of the loop: (consts, carries, rows) -> (carries, per-step outputs).
        first: the index of the first carry among its inputs.
        zeros: whether each carry enters the loop as zeros.
    """
    carries = graph.find_nodes(op="placeholder")[first : first + len(zeros)]
    (output,) = graph.find_nodes(op="output")
    found = {}
    for node in graph.nodes:
        if node.target is ALIGN and not node.args[2]:
            k = _result(node, output.args[0])
            if k is None:
                continue
            if k >= len(carries) or (zeros[k] and _only_added(carries[k], output.args[0][k])):
                found[node] = k
    return found


def _result(node: torch.fx.Node, results: Sequence[torch.fx.Node]) -> int | None:
    """Return the index of the one result that a value is a linear term of; None if others read
    it.
    """
    while len(node.users) == 1:
        (user,) = node.users
        if user.op == "output":
            at = [k for k, x in enumerate(results) if x is node]
            return at[0] if len(at) == 1 else None
        if not _is_linear(user, node):
            return None
        node = user
    return None


def _is_linear(user: torch.fx.Node, node: torch.fx.Node) -> bool:
    """Return whether an op of a Partial sum returns a Partial sum."""
    if user.args.count(node) != 1:
        return False
    if user.target in SUMS:
        return True
    divides = user.target in (ATEN.div.Tensor, ATEN.div.Scalar)
    return user.target in LINEAR and (not divides or user.args[0] is node)


def _only_added(carry: torch.fx.Node, result: torch.fx.Node) -> bool:
    """Return whether a carry reaches a result through additions only."""
    while len(carry.users) == 1 and carry is not result:
        (user,) = carry.users
        if user.target not in SUMS or (
            user.args[0] is not carry and user.target is not ATEN.add.Tensor
        ):
            return False
        carry = user
    return carry is result


def placements(
    walk: Walk, nodes: dict[torch.fx.Node, int], around: dict[torch.fx.Node, MeshPlacements]
) -> dict[int, MeshPlacements]:
    """Return the placements after the loop of each result that holds gradients: those of the
    parameters.

    Args:
        walk: the walk over the loop's graph, which left these gradients Partial.
        nodes: the gradients, and the results that they are terms of.
        around: the placements of the loop's constants before it.
    """
    found: dict[int, MeshPlacements] = {}
    for node, k in nodes.items():
        parameter = args_of(node)[1]
        like = walk.values[parameter]
        wanted = around.get(parameter) or next(iter(like.slots), walk.replicated)
        found.setdefault(k, aligned(node.meta["val"].shape, like.fake.shape, wanted, walk.axes))
    return found


def stays_partial(before: MeshPlacements, after: MeshPlacements) -> bool:
    """Return whether a carry is Partial on every axis on which the gradients added to it are."""
    return all(b == a for b, a in zip(before, after, strict=True) if b in PARTIAL_KINDS)


def stays_replicated(before: MeshPlacements, wanted: MeshPlacements) -> bool:
    """Return whether a gradient is replicated after the loop, so that it is not scattered in
    each step.
    """
    return all(w == "R" for b, w in zip(before, wanted, strict=True) if b in PARTIAL_KINDS)
