"""Which values are terms of a gradient: they contribute to the gradient alone, and only by
adding and rearranging.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...ops.loops import Scan
from ...partition import plan as steps

Gradients = frozenset[steps.Gradient]
Served = Mapping[
    int, Gradients | None
]  # slot number -> the gradient that it is a term of; None if something else reads it
Outs = Sequence[Gradients | None]  # the same of each result of a plan

REARRANGING = {
    "alias",
    "after",
    "clone",
    "_to_copy",
    "view",
    "reshape",
    "permute",
    "t",
    "transpose",
    "squeeze",
    "unsqueeze",
    "expand",
    "slice",
    "select",
    "split",
    "split_with_sizes",
    "cat",
    "stack",
    "flip",
    "roll",
    "constant_pad_nd",
    "slice_scatter",
    "select_scatter",
    "as_strided",
}
ADDING = {"add", "sub", "neg", "sum"}
SCALING = {"mul", "div"}


def served(plan: steps.Plan, outs: Outs) -> Served:
    """Map each value of a plan to the gradients that it is a term of.

    Args:
        plan: the plan of a program, or of the body of a loop.
        outs: the gradients that its results are terms of.
    """
    fixed = {g.slot.number: frozenset({g}) for g in plan.gradients}
    found: dict[int, Gradients | None] = {}
    fills = {
        slot.number for step in plan.steps if isinstance(step, steps.Fill) for slot in step.made
    }
    for slot, terms in zip(plan.outs, outs, strict=True):
        _note(found, fixed, slot, terms)
    found.update(fixed)
    for step in reversed(plan.steps):
        for slot, terms in _read(step, found, fills):
            _note(found, fixed, slot, terms)
    return found


def _note(
    found: dict[int, Gradients | None],
    fixed: Mapping[int, Gradients],
    slot: steps.Slot,
    terms: Gradients | None,
) -> None:
    """Record the gradients for which one reader uses a value."""
    if slot.number not in fixed:
        found[slot.number] = _union([found.get(slot.number, frozenset()), terms])


def _union(parts: Sequence[Gradients | None]) -> Gradients | None:
    """Unite sets of gradients; None if one is None."""
    return None if None in parts else frozenset().union(*(p for p in parts if p is not None))


def _read(
    step: steps.Step, found: Served, fills: set[int]
) -> Iterator[tuple[steps.Slot, Gradients | None]]:
    """Yield the gradients for which a step uses each of its inputs."""
    made = (
        _union([found.get(slot.number, frozenset()) for slot in step.made]) if step.made else None
    )
    if isinstance(step, steps.Nested):
        yield from zip(step.ins, _entering(step, found), strict=True)
    elif isinstance(step, steps.Apply) and not _adds(step, fills):
        yield from ((slot, None) for slot in step.read)
    else:
        yield from ((slot, made) for slot in step.read)


def _adds(step: steps.Apply, fills: set[int]) -> bool:
    """Return whether an op adds or rearranges its inputs, or scales one of them."""
    name = getattr(step.node.target, "_opname", "")
    if name in SCALING:
        tensors = [slot for slot in step.ins if slot.number not in fills]
        return len(tensors) == 1 and tensors[0] is step.ins[0]
    return name in ADDING or name in REARRANGING


def inside(step: steps.Nested, found: Served) -> list[tuple[steps.Plan, Outs]]:
    """For each body of a loop or branch, return its plan and the gradients that its results are
    terms of.
    """
    if isinstance(step, steps.Pipelined):  # gradients are sent after it
        return [(plan, [None] * len(plan.outs)) for plan in step.plans]
    after = [found.get(slot.number, frozenset()) for slot in step.outs]
    loop = step.node.target
    if not isinstance(loop, Scan):
        return [
            (plan, after if len(plan.outs) == len(after) else [None] * len(plan.outs))
            for plan in step.plans
        ]
    (plan,) = step.plans
    carries = slice(loop.consts, loop.consts + loop.carries)
    for _ in range(loop.carries + 1):  # the next step reads a carry
        within = served(plan, after)
        next_run = [within.get(slot.number, frozenset()) for slot in plan.ins[carries]]
        pairs = itertools.zip_longest(after, next_run, fillvalue=frozenset())
        joined = [_union(pair) for pair in pairs]
        if joined == list(after):
            break
        after = joined
    return [(plan, after)]


def _entering(step: steps.Nested, found: Served) -> list[Gradients | None]:
    """Return the gradients that the inputs of a loop or branch are terms of."""
    if isinstance(step, steps.Pipelined):
        return [None] * len(step.ins)
    parts: list[list[Any]] = [[] for _ in step.ins]
    for plan, outs in inside(step, found):
        within = served(plan, outs)
        for part, slot in zip(parts, plan.ins, strict=False):
            part.append(within.get(slot.number, frozenset()))
    return [_union(part) if part else None for part in parts]
