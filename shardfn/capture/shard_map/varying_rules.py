"""The varying axes of functions with a rule of the user's: custom_vjp, custom_jvp, and
autograd.Functions that communicate.

Without collectives inside, such a function is an op: if any of its values varies over an axis, all
do. With collectives, its code says itself what ranks add up. So an argument stays invariant where
the backward gives an invariant cotangent. And a result varies where the backward reduces its
cotangent over ranks: each has a term of it then. In the code of one rank under `jit` every result
varies, so the backward takes each rank's own cotangent, as in eager torch.
"""

from __future__ import annotations

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
from . import varying_prims
from .axis_names import current_scope
from .protocols import Settled, Varying
from .varying_bodies import ENDINGS, NONE, Body, body_of, fixed, free_of
from .varying_nodes import is_wrap


def reverse(kinds: Varying, node: torch.fx.Node) -> Settled:
    """The varying axes of a function with a rule for reverse mode."""
    _, outs, forward, back, xs, given = args_of(node)
    every = [body_of(kinds, left) for left in (outs, forward, back) if left]
    if not any(_prims(body) for body in every):
        return alike(kinds, node)
    plain, ahead, *others = every
    count = len(outs)
    ins = [kinds.flat(x) for x in xs]
    # the axes over which the cotangents of results are each rank's own
    terms = [_of_one_rank()] * count
    while True:
        before = ins, terms
        free: dict[tuple[torch.fx.Node, int], Axes] = {}
        _, results, closed = fixed(kinds, plain, ins, [], NONE, feeds=False)
        free |= free_of(plain, kinds, closed)
        _, after, closed = fixed(kinds, ahead, ins, [], NONE, feeds=False)
        free |= free_of(ahead, kinds, closed)
        residuals = after[count:]
        pairs = zip(results, after, terms, strict=False)
        results = [NONE.union(*row) for row in pairs]
        entering = {plain.node: ins, ahead.node: ins}
        leaving = {plain.node: results, ahead.node: [*results, *residuals]}
        for body in others:
            entering[body.node] = [*residuals, *results]
            _, found, closed = fixed(
                kinds, body, entering[body.node], [], NONE, feeds=False
            )
            free |= free_of(body, kinds, closed)
            reduced = _reduced(kinds, body, entering[body.node], closed)
            terms = [a | b for a, b in zip(terms, reduced[len(residuals) :], strict=True)]
            feed = iter(found)
            ins = [x | next(feed) if has else x for x, has in zip(ins, given, strict=True)]
            leaving[body.node] = [x for x, has in zip(ins, given, strict=True) if has]
        if (ins, terms) == before:
            return Settled(entering, [], free, results, {4: ins}, leaving)


def _of_one_rank() -> Axes:
    """The axes of the mesh, in the code of one rank under `jit`."""
    scope = current_scope()
    is_own = scope.rank is not None and scope.mesh is not None
    return frozenset(axes_of(scope.mesh).names) if is_own else NONE


def _reduced(
    kinds: Varying, body: Body, entering: Sequence[Axes], free: dict[int, Axes]
) -> list[Axes]:
    """The axes over which a collective reduces an entering value that is the same on all ranks."""
    at = [body.entered(k) for k in range(len(body.given))]
    inner = type(kinds)(body.graph)
    inner.result([free[k] if e is None else entering[e] for k, e in enumerate(at)])
    inputs = body.graph.graph.find_nodes(op="placeholder")
    number = dict(zip(inputs, at, strict=True))
    found = [NONE] * len(entering)
    for node in _prims(body):
        missing = varying_prims.needed(node) - inner.flat(node.args)
        for x in _origins(node, missing) if missing else ():
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
        if here.target is operator.getitem and args_of(here)[0].target is regions.inside:
            every, k = args_of(here)
            after = [args_of(every)[0][k]]
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
    every = NONE.union(*(kinds.flat(x) for x in values))
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
    return (
        isinstance(x, torch.fx.Node)
        and x.target is operator.getitem
        and is_wrap(args_of(x)[0])
    )


ENDINGS.update({endings.custom_vjp: reverse, endings.custom_jvp: alike})
