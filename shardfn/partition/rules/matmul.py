"""Matrix products."""

from __future__ import annotations

import functools

import torch

from .. import layout
from ..rule_api.einsum import parsed
from ..rule_api.op_record import Op
from ..rule_api.strategy import Choice, OpCall, Rule, replicated

aten = torch.ops.aten


def product(text: str) -> Rule:
    """Make the rule of a matrix product from an einsum-like text."""
    mapping = parsed(text, ())
    operands = range(len(mapping.ins))
    linear: list[Choice] = [
        (tuple("sum" if i == j else "R" for j in operands), ("sum",)) for i in operands
    ]
    choices = [*mapping.factor_strategies(mapping.ins, mapping.outs), *linear]

    def rule(call: OpCall) -> list[Choice]:
        return [replicated(call), *choices]

    return rule


GROUPED = {  # by the numbers of dims of the two operands
    (2, 3): ((1, 1, "sum"), ("R", 2, 1)),
    (3, 2): ((1, "R", 0), (2, 0, "sum")),
    (2, 2): ((0, "R", 1), ("R", 1, 2)),
    (3, 3): ((0, 0, 0), (1, "R", 1), ("R", 2, 2), (2, 1, "sum")),
}
ALIGNED = 16  # bytes: of the rows of its operands


def grouped_product(call: OpCall) -> list[Choice]:
    """Shard a grouped matrix product over the dims that groups do not divide."""
    a, b, *others = call.ins
    choices = [replicated(call)]
    unit = ALIGNED // a.dtype.itemsize
    for *dims, made in GROUPED[a.dim(), b.dim()]:
        sizes = {x.shape[d] for x, d in zip((a, b), dims, strict=True) if d != "R"}
        if any(n % unit for n in sizes):
            continue
        placements = [d if d == "R" else layout.joined(d, unit) for d in dims]
        out = made if made == "sum" else layout.joined(made, unit)
        choices.append(((*placements, *("R",) * len(others)), (out,)))
    return choices


def fallback_backward(call: OpCall) -> list[Choice]:
    """Shard the backward of the transformers library's grouped product."""
    return [
        replicated(call),
        ((1, 1, "R", "R"), (1, 1)),
        (("R", 2, "R", 1), ("sum", 2)),
        (("R", "R", "R", "sum"), ("sum", "sum")),
    ]


def fallback_product(call: OpCall) -> list[Choice]:
    """Shard the transformers library's grouped product."""
    return [
        replicated(call),
        ((1, 1, "R"), ("sum",)),
        (("R", 2, "R"), (1,)),
        (("sum", "R", "R"), ("sum",)),
        (("R", "sum", "R"), ("sum",)),
    ]


row = functools.partial(Op, strided=True, of_sizes=True)
# By name: ops that exist once their package is imported. They are what Hugging Face's models
# call where torch has no grouped product for their dtype.
BY_NAME: dict[str, Op] = {
    "transformers::grouped_mm_fallback": row(fallback_product),
    "transformers::grouped_mm_fallback_backward": row(fallback_backward),
}

TABLE: dict[object, Op] = {
    aten.mm.default: row(product("i k, k j -> i j")),
    aten.bmm.default: row(product("b i k, b k j -> b i j")),
    aten.mv.default: row(product("i k, k -> i")),
    aten.dot.default: row(product("k, k ->")),
    aten._grouped_mm.default: row(grouped_product),
}
