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
Choices = Callable[[torch.fx.Node], list[tuple[Choice, list[torch.fx.Node]]]]


def reducing(node: torch.fx.Node, placements: Iterable[Marks], choices: Choices) -> int:
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
    value = node.meta.get("val")
    is_less = sum(ends) < work.nbytes(value)
    return 1 if is_less else count


def least(node: torch.fx.Node, reader: torch.fx.Node, choices: Choices) -> int:
    """The bytes of the smallest value that linear ops make of a Partial one, before they make a
    larger one, or one that several ops read.
    """
    value = node.meta.get("val")
    found = work.nbytes(value)
    while passes(node, reader, choices):
        value = reader.meta["val"]
        made = work.nbytes(value)
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
    for choice, nodes in choices(reader):
        ins, outs = choice
        pairs = zip(nodes, ins, strict=True)
        fits = all(_fits(x, mark, node) for x, mark in pairs)
        if fits and outs == (SUM,):
            return True
    return False


def _fits(x: torch.fx.Node, mark: object, node: torch.fx.Node) -> bool:
    """Whether an argument has a placement: the Partial value, zeros, or a global value."""
    if x is node:
        return mark == SUM
    if mark == SUM:
        return _is_zero(x)
    return mark == "R"


def _is_zero(x: torch.fx.Node) -> bool:
    value = x.meta.get("val")
    is_tensor = isinstance(value, torch.Tensor)
    if not is_tensor or x.op != "call_function":
        return False
    dtype = value.dtype
    filled = rules.fill_value(x.target, x.args, dtype)
    if filled is None:
        return False
    return not filled
