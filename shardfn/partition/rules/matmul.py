"""Matrix products."""

from __future__ import annotations

import torch

from ..rule_api.strategy import Choice, OpCall, Rule, replicated

aten = torch.ops.aten


def factors(text: str) -> Rule:
    """The strategies of a product written as an einsum: one for each letter. Linear in each
    operand.

    A letter of the result shards it; a contracted letter leaves a Partial sum.
    """
    left, out = text.split("->")
    operands = left.split(",")
    letters = dict.fromkeys(out + "".join(operands))

    def rule(call: OpCall) -> list[Choice]:
        choices = [replicated(call)]
        for letter in letters:
            ins = tuple(o.index(letter) if letter in o else "R" for o in operands)
            choices.append((ins, (out.index(letter) if letter in out else "sum",)))
        for i in range(len(operands)):
            choices.append(
                (
                    tuple("sum" if i == j else "R" for j in range(len(operands))),
                    ("sum",),
                )
            )
        return choices

    return rule


TABLE: dict[object, Rule] = {
    aten.mm.default: factors("ik,kj->ij"),
    aten.bmm.default: factors("bik,bkj->bij"),
    aten.mv.default: factors("ik,k->i"),
    aten.dot.default: factors("k,k->"),
}
