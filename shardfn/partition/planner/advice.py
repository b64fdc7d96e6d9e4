"""The placements that a plan of all ops has for its ops: one axis after the other."""

from __future__ import annotations

import logging

from ..propagation.values import Placed
from . import integer_program
from .axis_problem import AxisProblem, Decided
from .observed import Observed

log = logging.getLogger("shardfn")


def advise(observed: Observed) -> Decided:
    """Choose the strategies of all ops at once, on one mesh axis after the other. Empty if time
    was up.

    Args:
        observed: a walk that chose them one op at a time.
    """
    decided: Decided = {
        node: Placed([()] * len(chosen.call.ins), [()] * len(chosen.call.outs))
        for node, chosen in observed.chosen.items()
        if chosen.call.outs
    }
    for axis, name in enumerate(observed.walk.axes.names):
        problem = AxisProblem(observed, axis, decided)
        found = problem.solve()
        if problem.is_too_large:
            log.warning(
                "%s: the program is too large to plan the placements on axis %s at once; each "
                'op takes its cheapest strategy, as with planner="greedy"',
                observed.walk.name,
                name,
            )
            return {}
        if found is not None and problem.program.is_late:
            log.warning(
                "%s: the placements on axis %s were not known to be the cheapest within %g s; "
                "the best that were found are used",
                observed.walk.name,
                name,
                integer_program.SECONDS,
            )
        if problem.program.is_impossible:
            log.warning(
                "%s: the placements on axis %s cannot be planned at once; each op takes its "
                'cheapest strategy, as with planner="greedy"',
                observed.walk.name,
                name,
            )
            return {}
        if found is None:
            log.warning(
                "%s: the placements on axis %s were not planned within %g s; each op takes its "
                'cheapest strategy, as with planner="greedy"',
                observed.walk.name,
                name,
                integer_program.SECONDS,
            )
            return {}
        decided = found
    return decided
