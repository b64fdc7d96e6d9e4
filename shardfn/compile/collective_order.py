"""The check that generated code starts collectives in the schedule's order. Compilers reorder, and
ranks that start collectives in different orders deadlock.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from ..collectives import kind_of_op
from ..errors import DivergenceError
from ..ops.debug import has_effect
from ..ops.loops import Loop
from ..ops.pipeline import Pipeline

# As Inductor writes them: torch.ops._c10d_functional.all_reduce_.default(buf3, 'sum', ...);
# aten graphs keep the op's name.
CALL = re.compile(r"torch\.ops\.(\w+\.\w+)\.default\(\[?(\w+)")
WAIT = "_c10d_functional.wait_tensor"
PIPELINE = "shardfn.run_showing_loop"  # also a loop that shows values


def collective_events(code: str) -> list[tuple[str, str]]:
    """List the collectives and pipelines of generated code in order, as ("start", kind) and
    ("wait", buffer).

    Args:
        code: Python text that Inductor made.

    Example:
        >>> collective_events("torch.ops._c10d_functional.wait_tensor.default(buf3)")
        [('wait', 'buf3')]
    """
    events: list[tuple[str, str]] = []
    for op, buffer in CALL.findall(code):
        if op == WAIT:
            events.append(("wait", buffer))
        elif op == PIPELINE:
            events.append(("start", PIPELINE))
        elif (kind := kind_of_op(op)) is not None:
            events.append(("start", kind.name))
    return events


def refuse_other_order(name: str, graph: torch.fx.Graph, code: str) -> None:
    """Refuse generated code that starts the collectives of a graph in another order than the
    graph.

    Raises:
        DivergenceError: it does not.
    """
    wanted = [kind for kind in map(_started_by, graph.nodes) if kind is not None]
    got = [kind for what, kind in collective_events(code) if what == "start"]
    if got != wanted:
        first = next(
            (i for i, (a, b) in enumerate(zip(wanted, got, strict=False)) if a != b),
            min(len(wanted), len(got)),
        )
        difference = (
            f"collective {first} is {_kind_at(got, first)} in the code, "
            f"{_kind_at(wanted, first)} in the schedule"
        )
        fix = 'backend="aten", which keeps the order of the schedule'
        raise DivergenceError.of(
            name, "Inductor changed the order of the program's collectives", difference, fix=fix
        )


def _started_by(node: torch.fx.Node) -> str | None:
    """Return the kind of collective that a node starts, or that it runs a pipeline."""
    if isinstance(node.target, Loop):
        return PIPELINE if isinstance(node.target, Pipeline) or has_effect(node) else None
    return node.meta["collective"].kind if "collective" in node.meta else None


def _kind_at(kinds: Sequence[str], i: int) -> str:
    """Return the kind of the i-th collective, or "missing"."""
    return kinds[i] if i < len(kinds) else "missing"
