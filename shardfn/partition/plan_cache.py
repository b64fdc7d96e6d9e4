"""The plans of a program, each made once for `lower`, `compile` and a call."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from typing import Any

import attrs

from ..types import MeshAxes, MeshPlacements, Program
from . import rules
from .plan import Plan
from .propagate import GREEDY, propagate
from .rule_api import registry

PROGRAMS = 16  # with plans; those of the oldest are dropped first
PLANS = 8  # of one program

HELD = "shardfn_plans"  # the key under which the graph of a program holds its plans


@attrs.define(eq=False)
class CachedPlans:
    """The cached plans of one program, which its graph holds.

    Args:
        plans: each with all that it depends on.
    """

    plans: list[tuple[Any, Plan]] = attrs.field(factory=list)

    def clear(self) -> None:
        """Drop all cached plans."""
        self.plans.clear()


# of the programs that were planned last
_known: weakref.WeakKeyDictionary[CachedPlans, None] = weakref.WeakKeyDictionary()


def _known_of(program: Program) -> CachedPlans:
    """Return the cached plans of a program; the oldest programs lose theirs."""
    known = program.graph.meta.setdefault(HELD, CachedPlans())
    _known.setdefault(known, None)
    while len(_known) > PROGRAMS:
        first = next(iter(_known.keys()))
        first.clear()
        _known.pop(first, None)
    return known


def cached_plan(
    program: Program,
    axes: MeshAxes,
    in_placements: Sequence[MeshPlacements],
    out_placements: Sequence[MeshPlacements | None],
    unreduced: Collection[int] = (),
    planner: str = GREEDY,
) -> Plan:
    """Return the plan of `propagate`, cached by all arguments and by the registered rules.

    Constraints and pins are ops of the program. A limit of memory decides the placements of the
    inputs.

    Args:
        program: the Program.
        axes: of the mesh, with the costs of its links.
        in_placements: the placement of each input.
        out_placements: the placement of each output.
        unreduced: the positions of inputs that are unreduced gradients.
        planner: "global" or "greedy".
    """
    key = (
        axes,
        tuple(in_placements),
        tuple((type(placements), placements) for placements in out_placements),
        tuple(unreduced),
        planner,
        registry.active(),
        rules.contents(),
    )
    known = _known_of(program)
    for other, plan in known.plans:
        if other == key:
            return plan
    plan = propagate(program, axes, in_placements, out_placements, unreduced, planner)
    known.plans[:] = [*known.plans[1 - PLANS :], (key, plan)]
    return plan
