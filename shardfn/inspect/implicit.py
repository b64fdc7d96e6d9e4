"""The option `implicit_comm`, which allows, warns of or refuses implicit collectives."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ..buckets import human_bytes
from ..errors import PlacementError, problem, warn
from ..partition import layout
from ..partition import plan as steps
from ..source_text import located
from ..types import MeshPlacements
from .alternatives import WeighedStrategies
from .transfers import Fallback, Transfer, communicating_moves, fallbacks, strictest, transfers

log = logging.getLogger("shardfn")
FIX = (
    "use a placement that needs no transfer (sf.report suggests one); sf.constrain to accept "
    "this transfer; or implicit_comm='allow' to accept all"
)


def report_implicit(
    name: str, setting: str, plan: steps.Plan, weigh: Callable[[], WeighedStrategies]
) -> None:
    """Allow, warn of or refuse the implicit collectives of a plan. A shard inside may set a
    stricter `implicit_comm` than the program's.

    Args:
        name: the name of the function.
        setting: allow, warn or error.
        plan: the plan with the redistributions.
        weigh: returns the strategies that propagation considered. Called only if there is
            something to report.

    Raises:
        PlacementError: with setting error. Lists every implicit collective and every fallback.
    """
    if all(
        not step.implicit or strictest(step.node, setting) == "allow"
        for step, _ in communicating_moves(plan)
    ):
        if log.isEnabledFor(logging.INFO):
            for fallback in fallbacks(transfers(plan, setting, {})):
                log.info("%s: %s", name, fallback_line(fallback))
        return
    implicit = [t for t in transfers(plan, setting, weigh()) if t.implicit]
    refused = tuple(t for t in implicit if t.setting == "error")
    if refused:
        text = report(name, refused)
        first = refused[0]
        raise PlacementError(text, source=first.source, module=first.module, fix=FIX)
    if warned := tuple(t for t in implicit if t.setting == "warn"):
        warn(report(name, warned))


def report(name: str, implicit: tuple[Transfer, ...]) -> str:
    """Format implicit transfers as one message: each with its bytes and free placements, then the
    fallbacks.
    """
    plural = "" if len(implicit) == 1 else "s"
    total = human_bytes(sum(t.nbytes for t in implicit))
    head = f"{len(implicit)} implicit collective{plural}, {total}"
    return problem(
        name, head, *map(transfer_line, implicit), *map(fallback_line, fallbacks(implicit)), fix=FIX
    )


def transfer_line(t: Transfer) -> str:
    """Format one implicit transfer: collective, argument, op, and placements that would send
    nothing.
    """
    size = human_bytes(t.nbytes)
    place = located(t.source, t.module) or None
    sent = f"{t.kind} of {t.argument} over {t.axis} ({size}) for {t.op} at {place}"
    placed = f"{t.argument} is {t.value}"
    if t.native:
        placed += f"; {_placements_text(t.native)}, {t.argument} would need no transfer"
    return f"{sent}: {placed}"


def fallback_line(f: Fallback) -> str:
    """Format a fallback: the op with its arguments, the line, the bytes and the reason."""
    place = located(f.source, f.module) or None
    return (
        f"{f.op}({', '.join(f.arguments)}) at {place} is computed replicated, for "
        f"{human_bytes(f.nbytes)}: {f.why}"
    )


def _placements_text(marks: MeshPlacements) -> str:
    """Return placements in words: sharded on dim 0 or 1, or replicated."""
    dims = dict.fromkeys(str(layout.dim_and_unit(m)[0]) for m in marks if m != "R")
    shards = [f"sharded on dim {' or '.join(dims)}"] if dims else []
    return ", or ".join(shards + ["replicated"] * ("R" in marks))
