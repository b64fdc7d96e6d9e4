"""Whether the gradient of a value that all ranks have is that of each rank, or a sum of terms.

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
from ...ops.shard_map import CONTRADICTED, SUMMED, UNSAID
from ...ops.text_formats import parse_axes

CERTAIN = "certain"  # the value differs between ranks, whatever plain arguments they have
EQUAL = "equal"  # the code says that all ranks have the same gradient of it
Facts = frozenset[Any]  # the axes over which a value varies, and facts
NONE: Facts = frozenset()
IN_NAME = (shard_map.vary, shard_map.vary_equal, shard_map.as_invariant)
MAY_DIFFER = (placement.ARGUMENT, placement.PART, placement.HELD)


class Fact(NamedTuple):
    """A fact about a value over one mesh axis: CERTAIN or EQUAL, UNSAID where the code does not say
    how ranks share its gradient, SUMMED where one that it depends on is summed over ranks.
    """

    name: str
    axis: str


DIFFERENTIABLE = Fact("differentiable", "")  # a derivative may be taken through the value


def each(name: str, axes: Axes) -> Facts:
    """One fact for each of some axes."""
    return frozenset(Fact(name, axis) for axis in axes)


def axes_in(facts: Facts) -> Axes:
    """The axes over which a value varies."""
    return frozenset(x for x in facts if isinstance(x, str))


def needs_in(facts: Facts) -> Facts:
    """How a value must vary to meet one that has these facts."""
    return frozenset(x for x in facts if isinstance(x, str) or x.name == CERTAIN)


def ways(facts: Facts, needs: Facts) -> dict[str, Axes]:
    """How a value comes to meet others that vary.

    Returns:
        By the reason for its gradient, the axes: EQUAL, UNSAID, SUMMED, or CONTRADICTED for a value
        that varies already.
    """
    found: dict[str, Axes] = {}
    for axis in sorted(axes_in(needs)):
        is_certain = Fact(CERTAIN, axis) in needs
        is_equal = Fact(EQUAL, axis) in facts
        why = None
        if axis in facts:
            is_new = is_certain and Fact(CERTAIN, axis) not in facts
            why = CONTRADICTED if is_new and is_equal else None
        elif is_certain:
            why = SUMMED
        elif Fact(UNSAID, axis) in facts:
            why = UNSAID
        else:
            why = EQUAL if is_equal else SUMMED
        if why is not None:
            found[why] = found.get(why, NONE) | {axis}
    return found


def raised(facts: Facts, needs: Facts) -> Facts:
    """The facts of a value once it varies as the others that it meets."""
    is_summed = DIFFERENTIABLE in facts
    summed = ways(facts, needs).get(SUMMED, NONE) if is_summed else NONE
    return facts | needs_in(needs) | each(SUMMED, summed)


def agreed(*every: Facts) -> Facts:
    """The facts of a value that depends on several, each raised to meet the others."""
    needs = needs_in(NONE.union(*every))
    return NONE.union(*(raised(facts, needs) for facts in every))


def of_prim(node: torch.fx.Node, before: Facts) -> Facts:
    """The facts of the result of a prim, of those of its argument."""
    prim = CALLS[node.target]
    axes = prim.axes_of(node)
    facts = [x for x in before if isinstance(x, Fact)]
    if not prim.gives_varying:  # one value, whose cotangent is that of all ranks
        facts = [x for x in facts if x.axis not in axes]
    elif node.target not in IN_NAME:
        facts += each(CERTAIN, axes)
    elif node.kwargs.get("where") and DIFFERENTIABLE in before:
        facts += each(SUMMED, axes)
    if node.all_input_nodes:
        facts.append(DIFFERENTIABLE)
    return prim.varies(node, axes_in(before)).union(facts)


def needed_by_prim(node: torch.fx.Node) -> Facts:
    """The facts that the argument of a prim must have: of a collective it counts as one that
    differs.
    """
    prim = CALLS[node.target]
    axes = prim.axes_of(node) if prim.takes_varying else NONE
    is_collective = prim.communicates and node.kwargs.get("where") != shard_map.RESULT
    return axes | each(CERTAIN, axes) if is_collective else axes


def of_shared(node: torch.fx.Node, before: Facts) -> Facts:
    """The facts of a local tensor, as the code that hands it out says."""
    _, what, *texts = args_of(node)
    if what in MAY_DIFFER:
        return frozenset(x for x in before if isinstance(x, str) or x.name != CERTAIN)
    rows = zip((EQUAL, UNSAID), texts, strict=False)
    return before.union(*(each(name, frozenset(parse_axes(text))) for name, text in rows))
