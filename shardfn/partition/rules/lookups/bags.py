"""Embedding bags: rows of a table, added or averaged in bags.

A table sharded by rows gives a Partial sum, one sharded by features needs nothing. Where the
bags are equally long, a rank computes its own bags from its own indices. Of bags of any length
it adds its indices to all bags, a Partial sum. A maximum shards features alone.
"""

from __future__ import annotations

import torch

from ...rule_api.op import Op
from ...rule_api.strategy import Choice, OpCall, named, replicated
from .bag_numbers import MAX, SUM, Options, options_of
from .bag_shards import (
    BACKWARD,
    FORWARD,
    FORWARD_ONLY,
    WEIGHTS_BACKWARD,
    lower_backward,
    lower_bags,
    lower_weights_backward,
)


def bags(call: OpCall) -> list[Choice]:
    """Shards features, rows, or bags that are equally long. Rows give a Partial sum."""
    o = options_of(call.target, call.args, call.kwargs)
    weights = ("R",) * (len(call.ins) - 3)
    beside = ("R", "R", *weights)
    most = 1 if o.mode == MAX else "R"
    choices: list[Choice] = [replicated(call), ((1, *beside), (1, "R", "R", most))]
    if o.mode == MAX:
        return choices
    choices.append((("sum", *beside), ("sum", "R", "R", "R")))
    if o.open_end:
        choices.append(((0, *beside), ("sum", "R", "R", "R")))
    if o.long:
        own = (0, o.long)
        ins = ("R", own, 0, *[own for _ in weights])
        choices.append((ins, (0, "R", 0, 0)))
    elif _may_add(o):
        parts = [0 for _ in weights]
        choices.append((("R", 0, "R", *parts), ("sum", 0, "R", "R")))
    return choices


def _may_add(o: Options) -> bool:
    """Whether ranks may add parts of a bag: the length of a mean is known from the offsets."""
    return o.open_end and (o.mode == SUM or o.padding < 0)


def bags_backward(call: OpCall) -> list[Choice]:
    """Rows of the table's gradient are added, so sharding the bags gives a Partial sum."""
    values = named(call.target, call.args, call.kwargs)
    o = options_of(call.target, call.args, call.kwargs)
    weights = ("R",) * (len(call.ins) - 6)
    most = 1 if o.mode == MAX else "R"
    choices = [replicated(call)]
    if values["sparse"]:
        return choices
    choices.append(((1, "R", "R", "R", "R", most, *weights), (1,)))
    if o.mode == MAX:
        return choices
    beside = ("R",) * 5
    choices.append((("sum", *beside, *weights), ("sum",)))
    if values["scale_grad_by_freq"] or not _is_open(call.ins[0], call.ins[2]):
        return choices
    choices.append(((0, *beside, *weights), ("sum",)))
    if o.long:
        own = (0, o.long)
        ins = (0, own, 0, "R", 0, 0, *[own for _ in weights])
        choices.append((ins, ("sum",)))
    elif _may_add(o):
        parts = [0 for _ in weights]
        choices.append((("R", 0, "R", 0, "R", "R", *parts), ("sum",)))
    return choices


def weights_backward(call: OpCall) -> list[Choice]:
    """The gradient of the weight of an index: the product of two rows, added over features."""
    o = options_of(call.target, call.args, call.kwargs)
    choices = [
        replicated(call),
        ((1, 1, "R", "R", "R"), ("sum",)),
        (("sum", "R", "R", "R", "R"), ("sum",)),
        (("R", "sum", "R", "R", "R"), ("sum",)),
    ]
    if not _is_open(call.ins[0], call.ins[3]):
        return choices
    choices += [(("R", 0, "R", "R", "R"), ("sum",)), ((0, "R", "R", "R", "R"), ("sum",))]
    if o.long:
        own = (0, o.long)
        choices.append(((0, "R", own, 0, "R"), (own,)))
    else:
        choices.append((("R", "R", 0, "R", 0), (0,)))
    return choices


def _is_open(grad: torch.Tensor, offsets: torch.Tensor) -> bool:
    """Whether each offset begins a bag."""
    return grad.shape[0] == offsets.shape[0]


# A rank with an empty shard runs the forward, too: not all of its results are empty then.
TABLE: dict[object, Op] = {
    FORWARD: Op(bags, lower=lower_bags(FORWARD), run_empty=True),
    FORWARD_ONLY: Op(bags, lower=lower_bags(FORWARD_ONLY), run_empty=True),
    BACKWARD: Op(bags_backward, lower=lower_backward),
    WEIGHTS_BACKWARD: Op(weights_backward, lower=lower_weights_backward),
}
