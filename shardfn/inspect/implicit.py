"""Reports of implicit collectives, which no placement asked for. They are allowed, warned of,
or refused.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable

from ..buckets import human_bytes
from ..errors import PlacementError, problem
from ..partition import layout
from ..partition import plan as steps
from ..types import Marks
from .alternatives import Considered
from .transfers import Fallback, Transfer, fallbacks, sent, strictest, transfers

log = logging.getLogger("shardfn")
FIX = (
    "a placement that needs no transfer, sf.constrain to accept a transfer, or "
    "implicit_comm='allow'"
)


def report_implicit(
    name: str, setting: str, plan: steps.Plan, weigh: Callable[[], Considered]
) -> None:
    """Allow, warn of or refuse a plan's implicit collectives, by the setting or by the stricter
    one of a shard inside.

    Args:
        name: the name of the function.
        setting: allow, warn or error.
        plan: the plan with the redistributions.
        weigh: returns the strategies that propagation considered. Called only if there is
            something to report.

    Raises:
        PlacementError: with setting error. Lists every implicit collective and every fallback.
    """
    if all(not step.implicit or strictest(step.node, setting) == "allow" for step, _ in sent(plan)):
        if log.isEnabledFor(logging.INFO):
            for fallback in fallbacks(transfers(plan, setting, {})):
                log.info("%s: %s", name, whole_line(fallback))
        return
    found = [t for t in transfers(plan, setting, weigh()) if t.implicit]
    refused = tuple(t for t in found if t.setting == "error")
    if refused:
        text = report(name, refused)
        raise PlacementError(text, source=refused[0].source, fix=FIX)
    if warned := tuple(t for t in found if t.setting == "warn"):
        warnings.warn(report(name, warned), stacklevel=2)


def report(name: str, found: tuple[Transfer, ...]) -> str:
    """Implicit transfers as text: each with its bytes and with placements that need no
    transfer, then the fallbacks.
    """
    plural = "" if len(found) == 1 else "s"
    head = f"{len(found)} implicit collective{plural}, {human_bytes(sum(t.nbytes for t in found))}"
    return problem(
        name, head, *map(transfer_line, found), *map(whole_line, fallbacks(found)), fix=FIX
    )


def transfer_line(t: Transfer) -> str:
    """One implicit transfer: the collective, the argument and the op, and placements that would
    send nothing.
    """
    size = human_bytes(t.nbytes)
    sent = f"{t.kind} of {t.argument} over {t.axis} ({size}) for {t.op} at {t.source}"
    placed = f"{t.argument} is {t.value}"
    if t.native:
        placed += f"; {_said(t.native)}, it would need no transfer"
    return f"{sent}: {placed}"


def whole_line(f: Fallback) -> str:
    """A fallback: its arguments, its line, its bytes, and the reason."""
    return (
        f"{f.op}({', '.join(f.arguments)}) at {f.source} is computed replicated, for "
        f"{human_bytes(f.nbytes)}: {f.why}"
    )


def _said(marks: Marks) -> str:
    dims = dict.fromkeys(str(layout.cut_of(m)[0]) for m in marks if m != "R")
    shards = [f"sharded on dim {' or '.join(dims)}"] if dims else []
    return ", or ".join(shards + ["replicated"] * ("R" in marks))
