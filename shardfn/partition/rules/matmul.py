"""Matrix products."""

from __future__ import annotations

import torch

from ..rule_api.einsum import parsed
from ..rule_api.strategy import Choice, OpCall, Rule, replicated

aten = torch.ops.aten


def product(text: str) -> Rule:
    """The strategies of a product, given as a factor mapping: one for each factor, and Linear in
    each operand.
    """
    mapping = parsed(text, ())
    operands = range(len(mapping.ins))
    linear: list[Choice] = [
        (tuple("sum" if i == j else "R" for j in operands), ("sum",))
        for i in operands
    ]
    choices = [*mapping.cuts(mapping.ins, mapping.outs), *linear]

    def rule(call: OpCall) -> list[Choice]:
        return [replicated(call), *choices]

    return rule


TABLE: dict[object, Rule] = {
    aten.mm.default: product("i k, k j -> i j"),
    aten.bmm.default: product("b i k, b k j -> b i j"),
    aten.mv.default: product("i k, k -> i"),
    aten.dot.default: product("k, k ->"),
}
