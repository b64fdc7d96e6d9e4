"""Partial values that several ops read: whether their terms are reduced at once, or at the end
of the linear ops after each reader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from ....types import Marks
from ... import rules
from ...planner import work
from ...rule_api.strategy import Choice
from ..values import is_partial

SUM = "sum"
Choices = Callable[
    [torch.fx.Node],
    list[tuple[Choice, list[torch.fx.Node]]],
]


def reducing(
    node: torch.fx.Node,
    placements: Iterable[Marks],
    choices: Choices,
) -> int:
    """For how many readers a value counts as shared. A Partial value counts as one with a single
    reader, where the ends of all readers have fewer bytes together than the value.

    Args:
        node: the op that makes the value.
        placements: of the value.
        choices: the strategies of an op, each with its tensor arguments.
    """
    count = len(node.users)
    if count < 2 or not any(map(is_partial, placements)):
        return count
    ends = [least(node, reader, choices) for reader in node.users]
    return 1 if sum(ends) < work.nbytes(node.meta.get("val")) else count


def least(node: torch.fx.Node, reader: torch.fx.Node, choices: Choices) -> int:
    """The bytes of the smallest value that linear ops make of a Partial one, before they make a
    larger one, or one that several ops read.
    """
    found = work.nbytes(node.meta.get("val"))
    while passes(node, reader, choices):
        made = work.nbytes(reader.meta["val"])
        if made > found:
            break
        found = made
        if len(reader.users) != 1:
            break
        node = reader
        (reader,) = node.users
    return found


def passes(node: torch.fx.Node, reader: torch.fx.Node, choices: Choices) -> bool:
    """Whether an op of a Partial sum, and of global values, is the sum of what it makes of the
    terms.
    """
    for (ins, outs), nodes in choices(reader):
        pairs = zip(nodes, ins, strict=True)
        if outs == (SUM,) and all(_fits(x, mark, node) for x, mark in pairs):
            return True
    return False


def _fits(x: torch.fx.Node, mark: object, node: torch.fx.Node) -> bool:
    """Whether an argument has a placement: the Partial value, zeros, or a global value."""
    if x is node:
        return mark == SUM
    return mark == "R" or (mark == SUM and _is_zero(x))


def _is_zero(x: torch.fx.Node) -> bool:
    value = x.meta.get("val")
    if not isinstance(value, torch.Tensor) or x.op != "call_function":
        return False
    filled = rules.fill_value(x.target, x.args, value.dtype)
    return filled is not None and not filled
