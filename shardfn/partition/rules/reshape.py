"""Ops that merge and split dims."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

from ...types import AxisPlacement
from .. import layout
from ..rule_api.strategy import Choice, OpCall, replicated


def linear(choices: list[Choice], call: OpCall) -> list[Choice]:
    """Add the replicated and the Partial strategy, which every rearrangement has."""
    sums_in = ("sum",) * len(call.ins)
    sums_out = ("sum",) * len(call.outs)
    return [replicated(call), (sums_in, sums_out), *choices]


def reshape(call: OpCall) -> list[Choice]:
    """Shard a view over the factors that dims before and after it share."""
    (x,), (out,) = call.ins, call.outs
    if x.numel() == 0:
        return [replicated(call)]
    choices: list[Choice] = []
    for before, after in groups(list(x.shape), list(out.shape)):
        for i, j in itertools.product(before, after):
            placements = _in_common(i, j)
            if placements is not None:
                choices.append(((placements[0],), (placements[1],)))
    return linear(choices, call)


class Part(NamedTuple):
    """One dim of a group of dims that a reshape merges or splits."""

    dim: int
    outer: int  # the product of the group's dims before it
    size: int
    inner: int  # the product of the group's dims after it


def _in_common(a: Part, b: Part) -> tuple[AxisPlacement, AxisPlacement] | None:
    """Return the placements that shard the common factor of two dims; None if they have none."""
    inner = math.lcm(a.inner, b.inner)
    outer = math.lcm(a.outer, b.outer)
    placements: list[AxisPlacement] = []
    for part in (a, b):
        unit = inner // part.inner
        blocks = outer // part.outer
        if part.size % (unit * blocks) or (outer > 1 and part.size == unit * blocks):
            return None
        placements.append(layout.joined(part.dim, unit, outer=blocks))
    return placements[0], placements[1]


def groups(a: list[int], b: list[int]) -> list[tuple[list[Part], list[Part]]]:
    """Group the dims of two shapes that a reshape merges or splits.

    Example:
        >>> [[[p.dim for p in dims] for dims in group] for group in groups([6, 4], [2, 3, 4])]
        [[[0], [0, 1]], [[1], [2]]]
    """
    found = []
    i = 0
    j = 0
    while i < len(a) and j < len(b):
        if a[i] == 1 and b[j] != 1:
            i += 1
            continue
        if b[j] == 1 and a[i] != 1:
            j += 1
            continue
        na = a[i]
        nb = b[j]
        lead_a = i
        lead_b = j
        i += 1
        j += 1
        while na != nb:
            if na < nb:
                na *= a[i]
                i += 1
            else:
                nb *= b[j]
                j += 1
        found.append((_parts(a, lead_a, i), _parts(b, lead_b, j)))
    return found


def _parts(shape: list[int], start: int, end: int) -> list[Part]:
    """Make the parts of a group of dims."""
    return [
        Part(dim, math.prod(shape[start:dim]), shape[dim], math.prod(shape[dim + 1 : end]))
        for dim in range(start, end)
    ]
