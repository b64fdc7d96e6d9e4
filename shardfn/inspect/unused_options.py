"""Warnings about options of mesh axes that no op of a program uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import attrs
import torch

from ..collectives import RAGGED_ALL_TO_ALL
from ..errors import problem
from ..ops.loops import Loop
from ..partition import plan, rules
from ..partition.planner.plan_price import bodies_of
from ..types import ATTENTION, ROWS, Program


@attrs.frozen
class _Use:
    """What uses an option.

    Args:
        is_used: whether a program uses the option over an axis.
        missing: what a program that does not use it lacks.
        needed: the code that uses it.
        page: the page that says more.
    """

    is_used: Callable[[Program, plan.Plan, int], bool]
    missing: str
    needed: str
    page: str


def unused_options(program: Program, chosen: plan.Plan) -> Iterator[str]:
    """Yield a warning for each option of an axis that nothing uses.

    Args:
        program: the Program.
        chosen: its plan.
    """
    for option in chosen.axes.options:
        axis, use = chosen.axes.names.index(option.axis), USES[option.name]
        if chosen.axes.sizes[axis] > 1 and not use.is_used(program, chosen, axis):
            yield problem(
                f"{program.name}, {option.name}",
                f"{option.name}={{{option.axis!r}: {option.value!r}}} has no effect, because "
                f"{use.missing}",
                needed=use.needed,
                fix=f"no {option.name}= for {option.axis!r}; {use.page} lists what is recognised",
            )


def _has_attention(program: Program, _: plan.Plan, __: int) -> bool:
    """Return whether a program has an op whose strategy can be asked for."""
    return any(_can_be_asked(graph) for graph in _graphs(program.graph.graph))


def _can_be_asked(graph: torch.fx.Graph) -> bool:
    """Return whether a graph has an op whose strategy can be asked for."""
    calls = (node for node in graph.nodes if node.op == "call_function")
    return any(rules.row_of(node.target).way_of is not None for node in calls)


def _graphs(graph: torch.fx.Graph) -> Iterator[torch.fx.Graph]:
    """Yield a graph and the graphs of the loops and branches in it."""
    yield graph
    for node in graph.nodes:
        if isinstance(node.target, Loop):
            for body in node.target.graphs:
                yield from _graphs(body)


def _has_dispatch(program: Program, chosen: plan.Plan, axis: int) -> bool:
    """Return whether a plan sends rows to the ranks of their experts over an axis."""
    kinds = (move.kind for _, move in plan.moves(chosen) if move.axis == axis)
    bodies = (inner for inner, _, _ in bodies_of(chosen))
    return RAGGED_ALL_TO_ALL in kinds or any(_has_dispatch(program, x, axis) for x in bodies)


USES: Mapping[str, _Use] = {
    ATTENTION: _Use(
        _has_attention,
        "the program has no attention op",
        "F.scaled_dot_product_attention, on a CPU without dropout; flex_attention, and attention "
        "written as matrix products and a softmax, are other ops",
        "docs/sequences.md",
    ),
    ROWS: _Use(
        _has_dispatch,
        "no tokens are sent to the ranks of their experts over this axis",
        "tokens that are multiplied by the weights of their experts, with the weights sharded on "
        "their first dim over the axis",
        "docs/experts.md",
    ),
}
