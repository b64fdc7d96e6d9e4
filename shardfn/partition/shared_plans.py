"""The plans of a program, each made once for `lower`, `compile` and a call."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from typing import Any

from ..types import Marks, MeshAxes, Program
from . import rules
from .plan import Plan
from .propagate import GREEDY, propagate
from .rule_api import registry

PROGRAMS = 16  # with plans; those of the oldest are dropped first
PLANS = 8  # of one program

# of each program the plans that were made last, with all else that they depend on
_plans: weakref.WeakKeyDictionary[Program, list[tuple[Any, Plan]]] = (
    weakref.WeakKeyDictionary()
)


def shared_plan(
    program: Program,
    axes: MeshAxes,
    in_marks: Sequence[Marks],
    out_marks: Sequence[Marks | None],
    unreduced: Collection[int] = (),
    planner: str = GREEDY,
) -> Plan:
    """The plan that `propagate` makes, or has made for the same arguments and the same rules.

    Constraints and pins are ops of the program. A limit of memory decides the placements of the
    inputs.

    Args:
        program: the Program.
        axes: of the mesh, with the costs of its links.
        in_marks: the placement of each input.
        out_marks: the placement of each output.
        unreduced: the positions of inputs that are unreduced gradients.
        planner: "global" or "greedy".
    """
    key = (
        axes,
        axes.costs,
        tuple(in_marks),
        tuple((type(marks), marks) for marks in out_marks),
        tuple(unreduced),
        planner,
        registry.active(),
        rules.contents(),
    )
    known = _plans.setdefault(program, [])
    for other, plan in known:
        if other == key:
            return plan
    plan = propagate(program, axes, in_marks, out_marks, unreduced, planner)
    known[:] = [*known[1 - PLANS :], (key, plan)]
    while len(_plans) > PROGRAMS:
        _plans.pop(next(iter(_plans.keys())), None)
    return plan
