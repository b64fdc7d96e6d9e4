"""Chooses the placements of all ops at once: one integer program for each mesh axis in turn."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from torch.fx import Node

from ..propagation.values import Placed
from .axis_problem import AxisProblem, undecided
from .observed_walk import ObservedWalk

log = logging.getLogger("shardfn")
GREEDY = 'shardfn takes the cheapest strategy of each op, as with planner="greedy"'


def solve_axes(observed: ObservedWalk) -> Mapping[Node, Placed]:
    """Choose the strategies of all ops at once, one mesh axis after the other. Empty if a search
    comes to its limit.

    Args:
        observed: a walk that chose them one op at a time.
    """
    decided = undecided(observed)
    for axis, name in enumerate(observed.walk.axes.names):
        problem = AxisProblem(observed, axis, decided)
        found = problem.solve()
        text = _warning(problem, name, is_solved=found is not None)
        if text:
            log.warning("%s: %s", observed.walk.name, text)
        if found is None:
            return {}
        decided = found
    return decided.ops


def _warning(problem: AxisProblem, name: str, *, is_solved: bool) -> str:
    """Return the warning to log about the plan of one axis; empty if there is none."""
    where = f"the placements on axis {name}"
    late = "within the search limits"
    if problem.is_too_large:
        return f"the program is too large to plan {where} as a whole; {GREEDY}"
    if problem.program.is_impossible:
        return f"{where} cannot be planned as a whole; {GREEDY}"
    if not is_solved:
        return f"{where} were not planned {late}; {GREEDY}"
    if problem.program.is_late:
        best = "shardfn uses the best placements found"
        return f"{where} could not be proved cheapest {late}; {best}"
    return ""
