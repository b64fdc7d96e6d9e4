"""Ops that merge and split dims."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

from ...types import Mark
from .. import layout
from ..rule_api.strategy import Choice, OpCall, replicated


def linear(choices: list[Choice], call: OpCall) -> list[Choice]:
    sums_in = ("sum",) * len(call.ins)
    sums_out = ("sum",) * len(call.outs)
    return [replicated(call), (sums_in, sums_out), *choices]


def reshape(call: OpCall) -> list[Choice]:
    """Shards a factor that a dim before and a dim after have in common: of the leading dims in
    units that do not split rows, of others as a strided shard.
    """
    (x,), (out,) = call.ins, call.outs
    if x.numel() == 0:
        return [replicated(call)]
    choices: list[Choice] = []
    for before, after in groups(list(x.shape), list(out.shape)):
        for i, j in itertools.product(before, after):
            marks = _in_common(i, j)
            if marks is not None:
                choices.append(((marks[0],), (marks[1],)))
    return linear(choices, call)


class Part(NamedTuple):
    """A dim of a group that a reshape mixes."""

    dim: int
    outer: int  # the product of the group's dims before it
    size: int
    inner: int  # the product of the group's dims after it


def _in_common(a: Part, b: Part) -> tuple[Mark, Mark] | None:
    """The placements of two dims that shard the factor that they have in common, None where
    they have none.
    """
    inner = math.lcm(a.inner, b.inner)
    outer = math.lcm(a.outer, b.outer)
    marks: list[Mark] = []
    for part in (a, b):
        unit = inner // part.inner
        blocks = outer // part.outer
        if part.size % (unit * blocks) or (outer > 1 and part.size == unit * blocks):
            return None
        marks.append(layout.joined(part.dim, unit, outer=blocks))
    return marks[0], marks[1]


def groups(a: list[int], b: list[int]) -> list[tuple[list[Part], list[Part]]]:
    """The dims of a and of b in each group of dims that a reshape mixes. Other dims of size 1
    are in no group.

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
    """Some dims of a shape, as a group."""
    return [
        Part(dim, math.prod(shape[start:dim]), shape[dim], math.prod(shape[dim + 1 : end]))
        for dim in range(start, end)
    ]
