"""The varying axes of loops, branches and their bodies: a carry varies over the same axes in
every step, and so does a result in both branches.

A closed-over value that must vary is made varying (`vary`) outside of the body, so that its
gradient is summed once, after the loop.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import attrs
import torch

from ...errors import CaptureError
from ...ops.nodes import args_of
from ...ops.prims import CALLS
from .. import annotations as sources
from ..control_flow import bodies as regions
from ..control_flow import endings
from .gradients import NONE, agreed, axes_in, needs_in, raised
from .protocols import Axes, Settled, Varying
from .varying_nodes import is_wrap


@attrs.frozen(eq=False)
class Body:
    """A body in its graph: its own graph, the node that runs it, and the node's arguments that
    are closed over.
    """

    node: torch.fx.Node
    graph: torch.fx.GraphModule

    @property
    def given(self) -> list[torch.fx.Node]:
        return list(args_of(self.node)[1:])

    def entered(self, k: int) -> int | None:
        """The index of an argument among the entering values, or None if it is closed over."""
        x = self.given[k]
        return (
            args_of(x)[1]
            if x.target is operator.getitem and args_of(x)[0].target is regions.enter
            else None
        )

    @property
    def free(self) -> list[torch.fx.Node]:
        return [x for k, x in enumerate(self.given) if self.entered(k) is None]


def ending_of(node: torch.fx.Node) -> torch.fx.Node | None:
    """The control-flow op of a body or of a value that enters one, or the op itself."""
    queue = [node]
    while queue:
        found = queue.pop()
        if found.target in ENDINGS:
            return found
        queue += [
            u
            for u in found.users
            if u.target is operator.getitem or is_wrap(u) or u.target in ENDINGS
        ]
    return None


def body_of(kinds: Varying, left: list[torch.fx.Node]) -> Body:
    """The body of which these are results."""
    node = args_of(left[0])[0]
    return Body(node, getattr(kinds.module, args_of(node)[0].target))


def _run(
    kinds: Varying, body: Body, entering: list[Axes], free: dict[int, Axes]
) -> tuple[list[Axes], dict[int, Axes]]:
    """The varying axes of a body's results, in the order of `leave`, and those that it needs of
    closed-over values.
    """
    given = body.given
    at = [body.entered(k) for k in range(len(given))]
    ins = [
        raised(kinds.flat(x), free[k]) if e is None else entering[e]
        for k, (e, x) in enumerate(zip(at, given, strict=True))
    ]
    inner = type(kinds)(body.graph)
    outs = inner.result(ins)
    inner.ask()
    graph = body.graph.graph
    needed = {}
    for k, holder in enumerate(graph.find_nodes(op="placeholder")):
        if k in free and holder in inner.asked:
            needed[k] = NONE.union(*(inner.needs(user) for user in holder.users))
    (output,) = graph.find_nodes(op="output")
    order = [args_of(x)[1] for x in args_of(output)[0]]
    rows = sorted(zip(order, outs, strict=True), key=lambda row: row[0])
    return [kind for _, kind in rows], needed


def fixed(
    kinds: Varying,
    body: Body,
    carry: list[Axes],
    rows: list[Axes],
    floor: Axes,
    *,
    feeds: bool = True,
) -> tuple[list[Axes], list[Axes], dict[int, Axes]]:
    """The fixed point of the varying axes of carries, results and closed-over values.

    Args:
        kinds: of the graph around the body.
        body: of a loop or a branch.
        carry: the axes of the carries at first.
        rows: those of the per-step inputs.
        floor: the axes over which all of them vary.
        feeds: whether its first results are the next carries; those of a test are not.
    """
    free = {k: floor for k in range(len(body.given)) if body.entered(k) is None}
    carry = [raised(c, floor) for c in carry]
    while True:
        outs, more = _run(kinds, body, [*carry, *rows], free)
        fed = zip(carry, outs, strict=False) if feeds else ()
        wider = [*(agreed(c, o) for c, o in fed), *carry[len(outs) if feeds else 0 :]]
        spread = {k: axes | more.get(k, NONE) for k, axes in free.items()}
        if (wider, spread) == (carry, free):
            return carry, outs, free
        carry = wider
        free = spread


def free_of(
    body: Body, kinds: Varying, free: dict[int, Axes]
) -> dict[tuple[torch.fx.Node, int], Axes]:
    """The axes of the values that a body closes over, by its node and their index."""
    return {(body.node, k): raised(kinds.flat(body.given[k]), axes) for k, axes in free.items()}


def _scan(kinds: Varying, node: torch.fx.Node) -> Settled:
    outs, init, columns, *_ = args_of(node)
    body = body_of(kinds, outs)
    rows = [kinds.flat(x) for x in columns]
    entering = [kinds.flat(x) for x in init]
    carry, left, free = fixed(kinds, body, entering, rows, NONE)
    result = [*carry, *left[len(carry) :]]
    return Settled(
        entering={body.node: [*carry, *rows]},
        leaving=result,
        free=free_of(body, kinds, free),
        result=result,
        brought={1: carry},
    )


def _cond(kinds: Varying, node: torch.fx.Node) -> Settled:
    truth, yes, no = args_of(node)
    floor = needs_in(kinds.flat(truth))
    bodies = [body_of(kinds, yes), body_of(kinds, no)]
    found = [fixed(kinds, body, [], [], floor) for body in bodies]
    _refuse_apart(bodies, floor, "cond")
    left_by_body = [left for _, left, _ in found]
    left = [agreed(a, b, floor) for a, b in zip(*left_by_body, strict=True)]
    free = {
        key: axes
        for body, (_, _, own) in zip(bodies, found, strict=True)
        for key, axes in free_of(body, kinds, own).items()
    }
    return Settled(entering={}, leaving=left, free=free, result=left, brought={})


def _while(kinds: Varying, node: torch.fx.Node) -> Settled:
    go_on, outs, init = args_of(node)
    test = body_of(kinds, go_on)
    body = body_of(kinds, outs)
    floor = NONE
    carry = [kinds.flat(x) for x in init]
    while True:
        carry, _, free = fixed(kinds, body, carry, [], floor)
        _, (truth, *_), told = fixed(kinds, test, carry, [], floor, feeds=False)
        if needs_in(truth) <= floor:
            break
        floor |= needs_in(truth)
    _refuse_apart([test, body], floor, "while_loop")
    every = {**free_of(body, kinds, free), **free_of(test, kinds, told)}
    return Settled(
        entering={body.node: carry, test.node: carry},
        leaving=carry,
        free=every,
        result=carry,
        brought={2: carry},
        left={test.node: [floor]},
    )


def _refuse_apart(bodies: list[Body], floor: Axes, what: str) -> None:
    """Refuse collectives that not all ranks may reach, or not equally often."""
    axes = axes_in(floor)
    for body in bodies if axes else ():
        found = next(
            (
                n
                for m in body.graph.modules()
                if isinstance(m, torch.fx.GraphModule)
                for n in m.graph.nodes
                if _sends(n)
            ),
            None,
        )
        if found is not None:
            said = " and ".join(sorted(axes))
            source = sources.line_of(found.meta.get("stack_trace"))
            fix = (
                "the collective before or after it, or a condition that is invariant "
                f"over {said}: psum or pmax it"
            )
            got = f"{found.target.__name__} inside it, and its condition varies over {said}"
            raise CaptureError.of(what, got, fix=fix, source=source)


def _sends(node: torch.fx.Node) -> bool:
    return node.target in CALLS and CALLS[node.target].communicates


# `varying_rules` adds those of functions with rules
ENDINGS: dict[Any, Callable[[Varying, torch.fx.Node], Settled]] = {
    endings.scan: _scan,
    endings.cond: _cond,
    endings.while_loop: _while,
}
