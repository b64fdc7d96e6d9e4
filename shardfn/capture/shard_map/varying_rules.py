"""The varying axes of functions with a rule of the user's: custom_vjp, custom_jvp, and
autograd.Functions that communicate.

Without collectives inside, such a function is an op: if any of its values varies over an axis, all
do. With collectives, its code says itself what ranks add up. So an argument stays invariant where
the backward gives an invariant cotangent. And a result varies where the backward reduces its
cotangent over ranks: each has a term of it then. In the code of one rank under `jit` every result
varies, so the backward takes each rank's own cotangent, as in eager torch.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence

import torch

from ...errors import CaptureError
from ...mesh import axes_of
from ...ops.nodes import args_of
from ...ops.prims import CALLS, Axes
from .. import annotations as sources
from ..control_flow import bodies as regions
from ..control_flow import endings
from .axis_names import current_scope
from .gradients import NONE, agreed, axes_in, needed_by_prim, raised
from .protocols import Settled, Varying
from .varying_bodies import ENDINGS, Body, body_of, fixed, free_of
from .varying_nodes import is_wrap, written_by


class Rule:
    """The bodies of a function with a rule for reverse mode, and the varying axes on which they
    agree.

    Args:
        kinds: of the graph around the bodies.
        bodies: the function, its forward, and its backward if it has one.
        given: for each argument, whether the backward gives a cotangent.
    """

    def __init__(self, kinds: Varying, bodies: Sequence[Body], given: Sequence[bool]) -> None:
        self.kinds = kinds
        self.bodies = bodies
        self.given = given
        self.results: list[Axes] = []
        self.entering: dict[torch.fx.Node, list[Axes]] = {}
        self.left: dict[torch.fx.Node, list[Axes]] = {}
        self.free: dict[tuple[torch.fx.Node, int], Axes] = {}

    def step(self, ins: list[Axes], terms: list[Axes]) -> tuple[list[Axes], list[Axes]]:
        """One pass over the bodies.

        Args:
            ins: the axes of the arguments.
            terms: for each result, the axes over which its cotangent is each rank's own.

        Returns:
            Both, as the bodies need them.
        """
        plain, forward, *back = self.bodies
        alone, _ = self.run(plain, ins)
        saving, _ = self.run(forward, ins)
        rows = zip(alone, saving, terms, strict=False)
        self.results = [agreed(*row) for row in rows]
        residuals = saving[len(terms) :]
        self.left[plain.node] = self.results
        self.left[forward.node] = [*self.results, *residuals]
        for body in back:
            ins, terms = self.backward(body, ins, terms, residuals)
        return ins, terms

    def backward(
        self, body: Body, ins: list[Axes], terms: list[Axes], residuals: list[Axes]
    ) -> tuple[list[Axes], list[Axes]]:
        """As `step`, over the backward alone."""
        entering = [*residuals, *self.results]
        cotangents, closed = self.run(body, entering)
        reduced = _reduced(self.kinds, body, entering, closed)
        own = reduced[len(residuals) :]
        terms = [a | b for a, b in zip(terms, own, strict=True)]
        feed = iter(cotangents)
        wider: list[Axes] = []
        left: list[Axes] = []
        for axes, has in zip(ins, self.given, strict=True):
            wider.append(raised(axes, next(feed)) if has else axes)
            if has:
                left.append(wider[-1])
        self.left[body.node] = left
        if own := axes_in(NONE.union(*wider) - NONE.union(*ins)):
            _refuse_written(self.kinds, body, entering, closed, own)
        return wider, terms

    def run(self, body: Body, entering: list[Axes]) -> tuple[list[Axes], dict[int, Axes]]:
        """The axes of the results of a body, and of the values that it closes over."""
        _, results, closed = fixed(self.kinds, body, entering, [], NONE, feeds=False)
        self.entering[body.node] = entering
        self.free |= free_of(body, self.kinds, closed)
        return results, closed


def reverse(kinds: Varying, node: torch.fx.Node) -> Settled:
    """The varying axes of a function with a rule for reverse mode."""
    _, outs, forward, back, xs, given = args_of(node)
    every = [body_of(kinds, left) for left in (outs, forward, back) if left]
    if not any(map(_prims, every)):
        return alike(kinds, node)
    rule = Rule(kinds, every, given)
    now = [kinds.flat(x) for x in xs], [_of_one_rank()] * len(outs)
    after = rule.step(*now)
    while after != now:
        now = after
        after = rule.step(*now)
    return Settled(
        entering=rule.entering,
        leaving=[],
        free=rule.free,
        result=rule.results,
        brought={4: now[0]},
        left=rule.left,
    )


def _of_one_rank() -> Axes:
    """The axes of the mesh, in the code of one rank under `jit`."""
    scope = current_scope()
    is_own = scope.rank is not None and scope.mesh is not None
    return frozenset(axes_of(scope.mesh).names) if is_own else NONE


def _inside(kinds: Varying, body: Body, entering: Sequence[Axes], free: dict[int, Axes]) -> Varying:
    """The axes of the values of a body."""
    at = [body.entered(k) for k in range(len(body.given))]
    inner = type(kinds)(body.graph)
    inner.result([free[k] if e is None else entering[e] for k, e in enumerate(at)])
    return inner


def _refuse_written(
    kinds: Varying, body: Body, entering: Sequence[Axes], free: dict[int, Axes], axes: Axes
) -> None:
    """Refuse a backward that writes what a collective gives to all ranks into a part of a tensor of
    each: its gradient may be summed already, or not.

    Raises:
        CaptureError: naming the line.
    """
    inner = _inside(kinds, body, entering, free)
    for node in body.graph.graph.nodes:
        written = written_by(node)
        others = [x for x in node.all_input_nodes if x not in written]
        before = inner.flat(written)
        after = inner.flat(others)
        gone = axes & before - after
        if not gone:
            continue
        ways = [_origins(x, gone) for x in others]
        found = itertools.chain(*ways)
        if any(_gives(x, gone) for x in found):
            raise CaptureError.of(
                "a function with a rule of its own",
                "its backward writes the result of a collective into a part of a tensor",
                fix="the collective on a tensor of its own: g = g.clone(); dist.all_reduce(g)",
                source=sources.line_of(node.meta.get("stack_trace")),
            )


def _gives(node: torch.fx.Node, axes: Axes) -> bool:
    """Whether a value is the result of a collective over some axes, which all ranks have."""
    row = CALLS.get(node.target)
    if row is None or row.gives_varying:
        return False
    return bool(row.axes_of(node) & axes)


def _reduced(
    kinds: Varying, body: Body, entering: Sequence[Axes], free: dict[int, Axes]
) -> list[Axes]:
    """The axes over which a collective reduces an entering value that is the same on all ranks."""
    at = [body.entered(k) for k in range(len(body.given))]
    inner = _inside(kinds, body, entering, free)
    inputs = body.graph.graph.find_nodes(op="placeholder")
    number = dict(zip(inputs, at, strict=True))
    found = [NONE] * len(entering)
    for node in _prims(body):
        missing = axes_in(needed_by_prim(node) - inner.flat(node.args))
        if not missing:
            continue
        for x in _origins(node, missing):
            k = number.get(x)
            if k is not None:
                found[k] |= missing
    return found


def _origins(node: torch.fx.Node, axes: Axes) -> Iterator[torch.fx.Node]:
    """The values that a collective's argument is computed from, up to other collectives over
    these axes.
    """
    queue = node.all_input_nodes
    seen = set(queue)
    while queue:
        here = queue.pop()
        yield here
        if here.target in CALLS and CALLS[here.target].axes_of(here) & axes:
            continue
        after = here.all_input_nodes
        if here.target is operator.getitem:
            every, k = args_of(here)
            is_entering = every.target is regions.inside
            after = [args_of(every)[0][k]] if is_entering else after
        queue += [x for x in after if x not in seen]
        seen.update(after)


def alike(kinds: Varying, node: torch.fx.Node) -> Settled:
    """The varying axes of a function with a rule that does not communicate: if any of its values
    varies over an axis, all do.
    """
    args = args_of(node)
    rows = [k for k, x in enumerate(args) if isinstance(x, (list, tuple))]
    left = [k for k in rows if args[k] and _is_left(args[k][0])]
    inputs = next(k for k in rows if k > 1 and k not in left)
    bodies = [body_of(kinds, args[k]) for k in left]
    for body in bodies:
        _refuse_collectives(body)
    values = [*args[inputs], *(x for body in bodies for x in body.free)]
    every = agreed(*(kinds.flat(x) for x in values))
    free = {
        (body.node, k): every
        for body in bodies
        for k in range(len(body.given))
        if body.entered(k) is None
    }
    return Settled(
        entering={body.node: [every] * len(body.given) for body in bodies},
        leaving=[every] * max(len(args[k]) for k in rows),
        free=free,
        result=[every] * len(args[1]),
        brought={inputs: [every] * len(args[inputs])},
    )


def _prims(body: Body) -> list[torch.fx.Node]:
    """The calls of prims in a body."""
    return [n for n in body.graph.graph.nodes if n.target in CALLS]


def _refuse_collectives(body: Body) -> None:
    """Refuse collectives in a rule for forward mode."""
    names = _prims(body)
    if names:
        raise CaptureError.of(
            "a function with a rule of its own",
            f"{names[0].target.__name__} inside of it",
            fix="the collective before or after it",
            source=sources.line_of(names[0].meta.get("stack_trace")),
        )


def _is_left(x: object) -> bool:
    return isinstance(x, torch.fx.Node) and x.target is operator.getitem and is_wrap(args_of(x)[0])


ENDINGS.update({endings.custom_vjp: reverse, endings.custom_jvp: alike})
