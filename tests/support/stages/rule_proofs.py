"""Sharding rules, proved: each choice of a rule is run on chunks and compared with the plain op, in
float64.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pieces
import pytest
import samples
from effort import EFFORT

from shardfn.partition import layout, rules
from shardfn.partition.rule_api.strategy import Choice, replicated
from shardfn.types import PARTIAL_KINDS, MeshPlacements

LINES = ((2,), (3,), (7,))  # 7 ranks: more than most dims, so that some chunks are empty
GRIDS = ((2, 2), (2, 3))
COARSE, PAIRS, FEW = (
    1,
    3,
    1,
    # how many are tried of the coarser units, of the pairs of choices on a grid, of a pointwise
    # op's ways
)
Placed = tuple[list[MeshPlacements], list[MeshPlacements]]


def choices(op: pieces.OneOp, units: Sequence[int] = (1, 2, 3)) -> list[Choice]:
    """What the rule offers for a call on one axis, in these units."""
    rule = rules.find(op.call.target)
    found = dict.fromkeys(rule(op.call) if rule and op.call.ins else [replicated(op.call)])
    return [
        _coarser(c, u, o)
        for c in found
        for u in units
        for o in ((1, 2, 3) if len(units) > 1 else (1,))
        if o == 1 or rules.takes_strided(op.call, c)
    ]


def _coarser(choice: Choice, unit: int, outer: int) -> Choice:
    ins, outs = choice
    return tuple(layout.scaled(m, unit, outer) for m in ins), tuple(
        layout.scaled(m, unit, outer) for m in outs
    )


def placed(op: pieces.OneOp, per_axis: Sequence[Choice], sizes: Sequence[int]) -> Placed | None:
    """The marks of inputs and results if each axis takes its choice; None where they cannot be
    placed so.
    """
    ins = [tuple(c[0][i] for c in per_axis) for i in range(len(op.call.ins))]
    outs = [tuple(c[1][o] for c in per_axis) for o in range(len(op.call.outs))]
    found_ins = [_fit(x.shape, m, sizes) for x, m in zip(op.call.ins, ins, strict=True)]
    found_outs = [_fit(x.shape, m, sizes) for x, m in zip(op.call.outs, outs, strict=True)]
    if None in found_ins or None in found_outs or not rules.fits(op.call, found_ins):
        return None
    return found_ins, found_outs


def _fit(
    shape: Sequence[int], marks: MeshPlacements, sizes: Sequence[int]
) -> MeshPlacements | None:
    pending = {m for m in marks if m in PARTIAL_KINDS}
    return None if len(pending) > 1 else layout.canonical(shape, marks, sizes)


def plain_ways(op: pieces.OneOp, sizes: Sequence[int]) -> Iterator[Placed]:
    """Every choice of the rule on one axis, once."""
    for choice in choices(op, (1,)):
        if (found := placed(op, [choice] * len(sizes), sizes)) is not None:
            yield found


def some_ways(
    op: pieces.OneOp, sizes: Sequence[int], most: int, units: Sequence[int]
) -> Iterator[Placed]:
    """Ways at random: a choice for each axis, in any units."""
    draw, offered = random.Random(f"{op.call.target} {sizes}"), choices(op, units)
    seen: set[Any] = set()
    for _ in range(20 * most):
        found = placed(op, draw.choices(offered, k=len(sizes)), sizes)
        key = None if found is None else (tuple(found[0]), tuple(found[1]))
        if key is not None and key not in seen and len(seen) < most:
            seen.add(key)
            yield found


def ways(op: pieces.OneOp, sizes: Sequence[int], most: int | None) -> list[Placed]:
    """The ways to try: at most so many of all, else every plain one and some in coarser units."""
    if most is None:
        return [*plain_ways(op, sizes), *some_ways(op, sizes, COARSE * EFFORT, (2, 3))]
    return list(some_ways(op, sizes, most * EFFORT, (1, 1, 2, 3)))


def prove(
    name: str, position: int, meshes: Sequence[tuple[int, ...]], most: int | None = None
) -> None:
    """Run a sample in the ways that its rule knows; all failures at once."""
    op = pieces.OneOp(samples.resolve(name), *samples.make(name, position))
    failed = []
    for sizes in meshes:
        for ins, outs in ways(op, sizes, most):
            try:
                op.prove(ins, outs, sizes)
            except Exception as error:
                failed.append(
                    f"{said(op, ins, outs, sizes)}\n      {type(error).__name__}: "
                    f"{str(error)[:300]}"
                )
    if failed:
        pytest.fail("\n  ".join([f"{len(failed)} wrong", *failed[:8]]), pytrace=False)


def said(
    op: pieces.OneOp, ins: list[MeshPlacements], outs: list[MeshPlacements], sizes: Sequence[int]
) -> str:
    """A placed call in one line."""
    shapes = ", ".join(f"{tuple(x.shape)} {m}" for x, m in zip(op.tensors, ins, strict=True))
    made = ", ".join(f"{tuple(x.shape)} {m}" for x, m in zip(op.results, outs, strict=True))
    return f"{op.call.target} on {sizes}: {shapes} -> {made}"
