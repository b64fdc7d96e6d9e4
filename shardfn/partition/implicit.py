"""Communication that no placement asked for: allowed, warned of, or refused."""

from __future__ import annotations

import warnings

from ..errors import PlacementError, problem
from .steps import Plan, Redistribute


def report_implicit(name: str, setting: str, plan: Plan) -> None:
    """Do with a plan's implicit collectives what the setting says.

    Args:
        name: of the function.
        setting: allow, warn or error.
        plan: whose redistributions are looked at.

    Raises:
        PlacementError: with setting error, listing every implicit collective.
    """
    if setting == "allow":
        return
    moved = [s for s in plan.steps if isinstance(s, Redistribute) and s.implicit]
    sent = [(m, s.node) for s in moved for m in s.moves if m.kind != "slice" and plan.axes.sizes[m.axis] > 1]
    if not sent:
        return
    lines = [f"{m.kind} over {plan.axes.names[m.axis]} for {node.name} at {node.meta.get('source')}" for m, node in sent]
    fix = "constrain the value first, or implicit_comm='allow'"
    text = problem(name, f"{len(lines)} implicit collectives", *lines, fix=fix)
    if setting == "error":
        raise PlacementError(text, fix=fix)
    warnings.warn(text, stacklevel=2)
