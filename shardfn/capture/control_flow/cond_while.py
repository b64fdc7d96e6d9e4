"""cond and while_loop under every torch.func transform. A derivative of a cond is a cond."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch

from ... import _compat
from ...errors import CaptureError
from ...ops.loops import Branch, Tensors, While
from ...random import ambient
from .. import annotations as sources
from .. import trace
from ..shard_map import axis_names
from . import holders
from .bodies import Left
from .flat import (
    Body,
    add_inputs,
    drawing,
    filled,
    floats_of,
    is_float,
    mapped,
    move_constants,
    split,
    spread,
)


@attrs.frozen(eq=False)
class Branched:
    """A cond that is not traced yet: two bodies of the same tensors with results of the same
    shapes.
    """

    bodies: tuple[Body, Body]
    # whether it is a derivative of another one, whose values it recomputes
    derived: bool = False


class _Branch(torch.autograd.Function):
    """(truth, consts) -> results."""

    @staticmethod
    def forward(
        branch: Branched, truth: torch.Tensor, *consts: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        (yes, first), (no, second) = (
            trace.traced(body, consts, "cond", branch.derived)
            for body in branch.bodies
        )
        add_inputs(yes, len(consts) + len(first), second)
        add_inputs(no, len(consts), first)
        inputs = [*consts, *first, *second]
        branches = Branch((yes, no), len(inputs))
        return tuple(trace.emitted(branches, [*inputs, truth]))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.branch = inputs[0]
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(*inputs[1:])
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(x for x in output if not is_float(x)))

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        truth, *consts = ctx.saved_tensors
        given = [k for k, g in enumerate(cotangents) if g is not None]
        yes, no = (
            _transposed(body, len(consts), given) for body in ctx.branch.bodies
        )
        transpose = Branched((yes, no), derived=True)
        incoming = [cotangents[k] for k in given]
        of_consts = _Branch.apply(transpose, truth, *consts, *incoming)
        return None, None, *spread(consts, of_consts)

    @staticmethod
    def jvp(ctx: Any, _: Any, __: Any, *tangents: torch.Tensor | None) -> Any:
        truth, *consts = ctx.saved_tensors
        dots = [
            torch.zeros_like(x) if t is None else t
            for x, t in zip(consts, tangents, strict=True)
            if is_float(x)
        ]
        floating: list[bool] = []
        yes, no = (
            _with_tangents(body, len(consts), floating)
            for body in ctx.branch.bodies
        )
        pushforward = Branched((yes, no), derived=True)
        outs = _Branch.apply(pushforward, truth, *consts, *dots)
        of_floats = iter(outs)
        return tuple(next(of_floats) if f else None for f in floating)

    @staticmethod
    def vmap(
        info: Any,
        in_dims: Any,
        branch: Branched,
        truth: torch.Tensor,
        *consts: torch.Tensor,
    ) -> Any:
        dims = tuple(in_dims[2:])
        size = info.batch_size
        randomness = info.randomness
        yes, no = (
            mapped(body, dims, size, randomness) for body in branch.bodies
        )
        truth_dim = in_dims[1]
        if truth_dim is None:
            of_all = attrs.evolve(branch, bodies=(yes, no))
            outs = _Branch.apply(of_all, truth, *consts)
        else:
            truth = truth.movedim(truth_dim, 0)  # (size,)
            pairs = zip(yes(*consts), no(*consts), strict=True)
            outs = tuple(_chosen(truth, a, b) for a, b in pairs)
        return outs, tuple([0] * len(outs))


def _chosen(
    truth: torch.Tensor, a: torch.Tensor, b: torch.Tensor
) -> torch.Tensor:
    """Select a or b for each sample along dim 0."""
    ones = [1] * (a.dim() - 1)
    by_sample = truth.view(-1, *ones)  # (size, 1, ..)
    return torch.where(by_sample, a, b)


def _transposed(body: Body, count: int, given: Sequence[int]) -> Body:
    """The cotangents of a body's floating inputs, from its inputs and the cotangents of some
    results.
    """

    def pulled(*xs: torch.Tensor) -> Sequence[torch.Tensor]:
        consts = xs[:count]
        cotangents = xs[count:]

        def run(*floats: torch.Tensor) -> tuple[torch.Tensor, ...]:
            outs = body(*filled(consts, floats))
            sources.follow_backward((outs[k].grad_fn for k in given), {})
            return tuple(outs[k] for k in given)

        floats = floats_of(consts)
        with sources.kept():
            pull = torch.func.vjp(run, *floats)[1]
            return pull(tuple(cotangents))

    return pulled


def _with_tangents(body: Body, count: int, floating: list[bool]) -> Body:
    """The tangents of a body's floating results, from its inputs and their tangents."""

    def pushed(*xs: torch.Tensor) -> Sequence[torch.Tensor]:
        consts = xs[:count]
        dots = xs[count:]

        def run(*floats: torch.Tensor) -> tuple[torch.Tensor, ...]:
            outs = body(*filled(consts, floats))
            floating[:] = [is_float(x) for x in outs]
            return tuple(floats_of(outs))

        floats = floats_of(consts)
        _, of_outs = _compat.jvp(run, tuple(floats), tuple(dots))
        return of_outs

    return pushed


@attrs.frozen(eq=False)
class Looped:
    """A while loop that is not traced yet: go_on(*consts, *carries) and body(*consts, *carries)."""

    go_on: Body
    body: Body
    consts: int
    derived: bool = False


def _while_with_tangents(
    loop: Looped, sizes: tuple[int, int, int, int]
) -> Looped:
    """The loop of values and tangents together. `sizes` counts its constants, their tangents,
    its carries and their tangents.
    """
    n, tangents_of_consts, carries, _ = sizes
    pushed = _with_tangents(loop.body, n + carries, [])

    def body(*xs: torch.Tensor) -> list[torch.Tensor]:
        consts, of_consts, carries, of_carries = split(xs, sizes)
        dots = pushed(*consts, *carries, *of_consts, *of_carries)
        return [*loop.body(*consts, *carries), *dots]

    def go_on(*xs: torch.Tensor) -> Sequence[torch.Tensor]:
        consts, _, carries, _ = split(xs, sizes)
        return loop.go_on(*consts, *carries)

    return Looped(go_on, body, n + tangents_of_consts, derived=True)


class _While(torch.autograd.Function):
    """(consts, carries) -> carries."""

    @staticmethod
    def forward(
        loop: Looped, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        n = loop.consts
        (go_on, first), (body, second) = (
            trace.traced(f, tensors, "while_loop", loop.derived)
            for f in (loop.go_on, loop.body)
        )
        move_constants(go_on, len(first), n)
        move_constants(body, len(second), n)
        add_inputs(go_on, n + len(first), second)
        add_inputs(body, n, first)
        consts = [*tensors[:n], *first, *second]
        carries = tensors[n:]
        target = While((go_on, body), len(consts), len(carries))
        return tuple(trace.emitted(target, [*consts, *carries]))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.loop = inputs[0]
        ctx.save_for_forward(*inputs[1:])
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(x for x in output if not is_float(x)))

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        fix = "scan with a fixed length, and torch.where for conditional updates; or jvp"
        raise CaptureError.of(
            "while_loop",
            "it is differentiated in reverse, and how often it runs is not known",
            fix=fix,
        )

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: torch.Tensor | None) -> Any:
        loop = ctx.loop
        tensors = ctx.saved_tensors
        dots = [
            torch.zeros_like(x) if t is None and is_float(x) else t
            for x, t in zip(tensors, tangents, strict=True)
        ]
        n = loop.consts
        consts = tensors[:n]
        carries = tensors[n:]
        # the tangents of floating tensors
        of_consts = [t for t in dots[:n] if t is not None]
        of_carries = [t for t in dots[n:] if t is not None]
        sizes = (n, len(of_consts), len(carries), len(of_carries))
        both = _while_with_tangents(loop, sizes)
        outs = _While.apply(both, *consts, *of_consts, *carries, *of_carries)
        of_outs = outs[len(carries) :]
        return tuple(spread(carries, of_outs))

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, loop: Looped, *tensors: torch.Tensor
    ) -> Any:
        """Loop until no sample continues. A finished sample keeps its values."""
        size = info.batch_size
        n = loop.consts
        carries = tensors[n:]
        dims_of_consts = in_dims[1 : n + 1]
        dims_of_carries = in_dims[n + 1 :]
        dims = (*dims_of_consts, *[0] * len(carries))
        init = [
            x.expand(size, *x.shape) if d is None else x.movedim(d, 0)
            for x, d in zip(carries, dims_of_carries, strict=True)
        ]
        go_on = mapped(loop.go_on, dims, size, info.randomness)
        body = mapped(loop.body, dims, size, info.randomness)

        def step(*xs: torch.Tensor) -> list[torch.Tensor]:
            (truth,) = go_on(*xs)  # (size,)
            before = xs[n:]
            after = body(*xs)
            pairs = zip(after, before, strict=True)
            return [_chosen(truth, new, old) for new, old in pairs]

        any_goes_on = lambda *xs: [go_on(*xs)[0].any()]
        loop_of_all = Looped(any_goes_on, step, n, loop.derived)
        outs = _While.apply(loop_of_all, *tensors[:n], *init)
        return outs, tuple([0] * len(outs))


def branched(
    truth: torch.Tensor, yes: Sequence[Left], no: Sequence[Left]
) -> Tensors:
    """A cond of two bodies."""
    yes_region = yes[0].region
    no_region = no[0].region
    frees = [*yes_region.free, *no_region.free]
    holders.refuse_mixed("cond", frees)
    first = holders.Opened("cond", yes_region, [])
    second = holders.Opened("cond", no_region, [])
    n = len(first.free)
    end = n + len(second.free)
    yes_body: Body = lambda *xs: first([], xs[:n])
    no_body: Body = lambda *xs: second([], xs[n:end])
    free = [*first.free, *second.free]
    try:
        outs = _Branch.apply(Branched((yes_body, no_body)), truth, *free)
    except ambient.StateMissing:
        state = ambient.new_states([], axis_names.device())
        bodies = drawing(yes_body), drawing(no_body)
        branch = Branched(bodies)
        outs = _Branch.apply(branch, truth, *free, state)
    holders.refuse_other("cond", first.left, second.left)
    return list(holders.closed("cond", first.left, outs))


def looped(
    go_on: Left, left: Sequence[Left], init: Sequence[torch.Tensor]
) -> Tensors:
    """A while loop of a condition and a body."""
    frees = [*go_on.region.free, *left[0].region.free]
    holders.refuse_mixed("while_loop", [*frees, *init])
    init, carried = holders.opened(init)
    test = holders.Opened("while_loop", go_on.region, carried)
    body = holders.Opened("while_loop", left[0].region, carried)
    n = len(test.free)
    count = n + len(body.free)
    end = count + len(init)
    test_body: Body = lambda *xs: test(xs[count:end], xs[:n])
    step: Body = lambda *xs: body(xs[count:end], xs[n:count])
    inputs = [*test.free, *body.free, *init]
    try:
        outs = _While.apply(Looped(test_body, step, count), *inputs)
    except ambient.StateMissing:
        state = ambient.new_states([], axis_names.device())
        drawing_test = drawing(test_body)
        loop = Looped(drawing_test, _drawing_step(step), count)
        *outs, _ = _While.apply(loop, *inputs, state)
    holders.refuse_other("while_loop", carried, body.left)
    return list(holders.closed("while_loop", body.left, outs))


def _drawing_step(step: Body) -> Body:
    """A step whose last carry is the state that its random calls draw from."""

    def run(*xs: torch.Tensor) -> list[torch.Tensor]:
        *others, state = xs
        source = ambient.Traced(state)
        with ambient.drawing_from(source):
            outs = step(*others)
        return [*outs, ambient.after_calls(state, source.calls)]

    return run
