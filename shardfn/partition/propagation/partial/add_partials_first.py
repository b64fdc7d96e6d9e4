"""Sums of several terms, of which some are Partial: these are added first, so that they are
reduced once.
"""

from __future__ import annotations

from typing import Any

import torch

from ..values import Value, is_partial
from ..walk import Walk

ADD = torch.ops.aten.add.Tensor
ORIGIN = ("source", "module", "belongs_to")  # where an op of the program comes from


def is_sum(node: torch.fx.Node) -> bool:
    """Return whether a node adds two tensors of equal shape and dtype."""
    terms = [x for x in node.args if isinstance(x, torch.fx.Node)]
    if node.target is not ADD or node.kwargs or len(terms) != 2:
        return False
    result = node.meta["val"]
    return all(
        isinstance(value := x.meta.get("val"), torch.Tensor)
        and value.shape == result.shape
        and value.dtype == result.dtype
        for x in terms
    )


def add_later(walk: Walk, node: torch.fx.Node) -> bool:
    """Defer a sum of Partial and other terms to the sum that reads it, or add deferred terms,
    the Partial ones first.
    """
    if not is_sum(node) or node in walk.within:
        return False
    read = [x for x in node.args if isinstance(x, torch.fx.Node)]
    terms = [t for x in read for t in walk.summed.get(x, (x,))]
    partial = [t for t in terms if _is_partial(walk.values[t], node)]
    if 0 < len(partial) < len(terms) and _is_term(node):
        walk.summed[node] = terms
        walk.left.add(node)
        return True
    if len(terms) == 2:
        return False
    walk.summed[node] = terms
    others = [t for t in terms if t not in partial]
    _add(walk, node, [*partial, *others])
    return True


def _is_partial(value: Value, node: torch.fx.Node) -> bool:
    """Return whether a value is Partial in every slot."""
    slots = value.readable(node.meta["phase"])
    return bool(slots) and all(is_partial(slot.placements) for slot in slots)


def _is_term(node: torch.fx.Node) -> bool:
    """Return whether a sum is read only by another sum of the same phase."""
    readers = list(node.users)
    return (
        len(readers) == 1
        and is_sum(readers[0])
        and readers[0].args[0] is not readers[0].args[1]
        and readers[0].meta["phase"] == node.meta["phase"]
        and _notes(readers[0]) == _notes(node)
    )


def _notes(node: torch.fx.Node) -> dict[str, Any]:
    """Return capture's annotations of a node, without its origin."""
    custom = node.meta.get("custom") or {}
    return {key: custom[key] for key in custom if key not in ORIGIN}


def _add(walk: Walk, node: torch.fx.Node, terms: list[torch.fx.Node]) -> None:
    """Add terms in the given order, in place of a node."""
    graph = torch.fx.Graph()
    holders = [graph.placeholder(f"term{i}") for i, _ in enumerate(terms)]
    for holder, term in zip(holders, terms, strict=True):
        holder.meta = dict(term.meta)
        walk.values[holder] = walk.values[term]
    total = holders[0]
    for holder in holders[1:]:
        total = graph.call_function(ADD, (total, holder))
        total.meta = dict(node.meta)
    graph.output((total,))
    walk.visit_in_place(node, graph, total)
