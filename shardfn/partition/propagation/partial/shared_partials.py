"""Partial values that several ops read: whether their terms are reduced at once, or at the end
of the linear ops after each reader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from ....types import MeshPlacements
from ... import rules
from ...planner import op_cost
from ...rule_api.strategy import Choice
from ..values import is_partial

SUM = "sum"
Choices = Callable[[torch.fx.Node], list[tuple[Choice, list[torch.fx.Node]]]]


def counted_readers(
    node: torch.fx.Node, placements: Iterable[MeshPlacements], choices: Choices
) -> int:
    """Return how many readers of a value count: one, if a Partial is cheaper to reduce after
    its readers.

    Args:
        node: the op that makes the value.
        placements: of the value.
        choices: the strategies of an op, each with its tensor arguments.
    """
    count = len(node.users)
    if count < 2 or not any(map(is_partial, placements)):
        return count
    ends = [least(node, reader, choices) for reader in node.users]
    value = node.meta.get("val")
    is_less = sum(ends) < op_cost.nbytes(value)
    return 1 if is_less else count


def least(node: torch.fx.Node, reader: torch.fx.Node, choices: Choices) -> int:
    """Return the smallest size that a chain of linear ops makes of a Partial value."""
    value = node.meta.get("val")
    found = op_cost.nbytes(value)
    while passes(node, reader, choices):
        value = reader.meta["val"]
        made = op_cost.nbytes(value)
        if made > found:
            break
        found = made
        if len(reader.users) != 1:
            break
        node = reader
        (reader,) = node.users
    return found


def passes(node: torch.fx.Node, reader: torch.fx.Node, choices: Choices) -> bool:
    """Return whether an op of a Partial sum returns a Partial sum."""
    for choice, nodes in choices(reader):
        ins, outs = choice
        pairs = zip(nodes, ins, strict=True)
        fits = all(_fits(x, placement, node) for x, placement in pairs)
        if fits and outs == (SUM,):
            return True
    return False


def _fits(x: torch.fx.Node, placement: object, node: torch.fx.Node) -> bool:
    """Return whether an argument may have a placement: Partial for the value and for zeros,
    else replicated.
    """
    if x is node:
        return placement == SUM
    if placement == SUM:
        return _is_zero(x)
    return placement == "R"


def _is_zero(x: torch.fx.Node) -> bool:
    """Return whether a node makes zeros."""
    value = x.meta.get("val")
    is_tensor = isinstance(value, torch.Tensor)
    if not is_tensor or x.op != "call_function":
        return False
    dtype = value.dtype
    filled = rules.fill_value(x.target, x.args, dtype)
    if filled is None:
        return False
    return not filled
