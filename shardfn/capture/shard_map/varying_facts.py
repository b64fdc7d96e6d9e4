"""Facts about values in per-rank code: over which axes a value varies, and whether the gradient
of an invariant value is that of each rank or a sum of terms.

A plain argument of the code of one rank may differ between ranks, or not, as the labels of a batch.
So where `to_local` of a replicated DTensor meets plain arguments, `grad_placements` says which of
both its gradient is; without it the gradient is refused. Where the value meets one that differs for
certain, as a shard does, or where ranks communicate, the gradient is the sum. A value may not enter
both ways.

The facts here join the axes over which a value varies (varying.py), in one set.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...ops import placement, shard_map
from ...ops.nodes import args_of
from ...ops.prims import CALLS, Axes
from ...ops.shard_map import CONTRADICTED, SUMMED, UNDECIDED
from ...ops.text_formats import parse_axes

CERTAIN = "certain"  # the value differs between ranks, whatever plain arguments they have
EQUAL = "equal"  # the code says that all ranks have the same gradient of it
Facts = frozenset[Any]  # the axes over which a value varies, and facts
NONE: Facts = frozenset()
IN_NAME = (shard_map.vary, shard_map.vary_equal, shard_map.as_invariant)
MAY_DIFFER = (placement.ARGUMENT, placement.PART, placement.CLOSED_OVER)


class Fact(NamedTuple):
    """A fact about a value over one mesh axis: CERTAIN or EQUAL, UNDECIDED where the code does not
    say how ranks share its gradient, SUMMED where one that it depends on is summed over ranks.
    """

    name: str
    axis: str


DIFFERENTIABLE = Fact("differentiable", "")  # a derivative may be taken through the value


def facts_over(name: str, axes: Axes) -> Facts:
    """The fact of this name over each of these axes."""
    return frozenset(Fact(name, axis) for axis in axes)


def axes_in(facts: Facts) -> Axes:
    """The axes among the facts of a value: those over which it varies."""
    return frozenset(x for x in facts if isinstance(x, str))


def needed_facts(facts: Facts) -> Facts:
    """The facts that a value must have to enter one op with a value that has these."""
    return frozenset(x for x in facts if isinstance(x, str) or x.name == CERTAIN)


def reasons_to_vary(facts: Facts, needs: Facts) -> dict[str, Axes]:
    """The axes over which a value must be made varying before it meets others, by reason.

    Returns:
        For each reason, which decides its gradient, the axes: EQUAL, UNDECIDED, SUMMED, or
        CONTRADICTED for a value that varies already.
    """
    axes_by_reason: dict[str, Axes] = {}
    for axis in sorted(axes_in(needs)):
        is_certain = Fact(CERTAIN, axis) in needs
        is_equal = Fact(EQUAL, axis) in facts
        why = None
        if axis in facts:
            is_new = is_certain and Fact(CERTAIN, axis) not in facts
            why = CONTRADICTED if is_new and is_equal else None
        elif is_certain:
            why = SUMMED
        elif Fact(UNDECIDED, axis) in facts:
            why = UNDECIDED
        else:
            why = EQUAL if is_equal else SUMMED
        if why is not None:
            axes_by_reason[why] = axes_by_reason.get(why, NONE) | {axis}
    return axes_by_reason


def facts_after_meeting(facts: Facts, needs: Facts) -> Facts:
    """The facts of a value after it was made varying to meet others with these needs."""
    is_summed = DIFFERENTIABLE in facts
    summed = reasons_to_vary(facts, needs).get(SUMMED, NONE) if is_summed else NONE
    return facts | needed_facts(needs) | facts_over(SUMMED, summed)


def joint_facts(*every: Facts) -> Facts:
    """The facts of the result of an op on several values, each made varying to meet the others."""
    needs = needed_facts(NONE.union(*every))
    return NONE.union(*(facts_after_meeting(facts, needs) for facts in every))


def prim_result_facts(node: torch.fx.Node, before: Facts) -> Facts:
    """The facts of the result of a prim, from the facts of its argument."""
    prim = CALLS[node.target]
    axes = prim.axes_of(node)
    facts = [x for x in before if isinstance(x, Fact)]
    if not prim.gives_varying:  # one value, whose cotangent is that of all ranks
        facts = [x for x in facts if x.axis not in axes]
    elif node.target not in IN_NAME:
        facts += facts_over(CERTAIN, axes)
    elif node.kwargs.get("where") and DIFFERENTIABLE in before:
        facts += facts_over(SUMMED, axes)
    if node.all_input_nodes:
        facts.append(DIFFERENTIABLE)
    return prim.varies(node, axes_in(before)).union(facts)


def prim_needs(node: torch.fx.Node) -> Facts:
    """The facts that the argument of a prim must have. The argument of a collective counts as one
    that differs between ranks for certain.
    """
    prim = CALLS[node.target]
    axes = prim.axes_of(node) if prim.takes_varying else NONE
    is_collective = prim.communicates and node.kwargs.get("where") != shard_map.RESULT
    return axes | facts_over(CERTAIN, axes) if is_collective else axes


def local_tensor_facts(node: torch.fx.Node, before: Facts) -> Facts:
    """The facts of a local tensor that `to_local` or an argument gives, by what the code says."""
    _, what, *texts = args_of(node)
    if what in MAY_DIFFER:
        return frozenset(x for x in before if isinstance(x, str) or x.name != CERTAIN)
    rows = zip((EQUAL, UNDECIDED), texts, strict=False)
    return before.union(*(facts_over(name, frozenset(parse_axes(text))) for name, text in rows))
