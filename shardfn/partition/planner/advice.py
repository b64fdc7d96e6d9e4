"""The placements that a plan of all ops has for its ops: one axis after the other."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from torch.fx import Node

from ..propagation.values import Placed
from . import integer_program
from .axis_problem import AxisProblem, undecided
from .observed import Observed

log = logging.getLogger("shardfn")
GREEDY = 'each op takes its cheapest strategy, as with planner="greedy"'


def advise(observed: Observed) -> Mapping[Node, Placed]:
    """Choose the strategies of all ops at once, on one mesh axis after the other. Empty if time
    was up.

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
    """What the user should know of the plan of an axis. Empty if it is the cheapest."""
    where = f"the placements on axis {name}"
    late = f"within {integer_program.SECONDS:g} s"
    if problem.is_too_large:
        return f"the program is too large to plan {where} at once; {GREEDY}"
    if problem.program.is_impossible:
        return f"{where} cannot be planned at once; {GREEDY}"
    if not is_solved:
        return f"{where} were not planned {late}; {GREEDY}"
    if problem.program.is_late:
        best = "the best that were found are used"
        return f"{where} were not known to be the cheapest {late}; {best}"
    return ""
