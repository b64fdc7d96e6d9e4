"""cond under every torch.func transform: its derivatives, which are conds again, and its vmap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch

from ... import _compat
from ...ops.loops import Branch, Tensors
from ...random import ambient
from .. import annotations as sources
from .. import aten_trace
from ..shard_map import axis_names
from . import body_ops, wrapper_subclasses
from .bodies import BodyGraph, BodyResult
from .flat_tensors import (
    Body,
    add_inputs,
    body_with_random_state,
    floats_of,
    for_floats,
    is_float,
    randomness_of,
    vmapped_body,
    with_floats,
)


@attrs.frozen(eq=False)
class UntracedCond:
    """A cond that is not traced yet: two bodies of the same tensors with results of the same
    shapes.
    """

    bodies: tuple[Body, Body]
    # whether it is a derivative of another one, whose values it recomputes
    derived: bool = False
    # the levels of the vmaps around it, or around those values
    origin: frozenset[int] = attrs.field(factory=_compat.vmap_levels)


class CondOp(torch.autograd.Function):
    """The autograd.Function of a cond: (truth, closed-over tensors) -> results."""

    @staticmethod
    def forward(
        branch: UntracedCond, truth: torch.Tensor, *consts: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        (yes, first), (no, second) = (
            aten_trace.traced(body, consts, "cond", branch.derived) for body in branch.bodies
        )
        add_inputs(yes, len(consts) + len(first), second)
        add_inputs(no, len(consts), first)
        inputs = [*consts, *first, *second]
        branches = Branch((yes, no), len(inputs))
        return tuple(aten_trace.emit_loop(branches, [*inputs, truth]))

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
        yes, no = (transposed_body(body, len(consts), given) for body in ctx.branch.bodies)
        transpose = UntracedCond((yes, no), True, ctx.branch.origin)
        incoming = [cotangents[k] for k in given]
        of_consts = CondOp.apply(transpose, truth, *consts, *incoming)
        return None, None, *for_floats(consts, of_consts)

    @staticmethod
    def jvp(ctx: Any, _: Any, __: Any, *tangents: torch.Tensor | None) -> Any:
        truth, *consts = ctx.saved_tensors
        dots = [
            torch.zeros_like(x) if t is None else t
            for x, t in zip(consts, tangents, strict=True)
            if is_float(x)
        ]
        floating: list[bool] = []
        yes, no = (body_with_tangents(body, len(consts), floating) for body in ctx.branch.bodies)
        pushforward = UntracedCond((yes, no), True, ctx.branch.origin)
        outs = CondOp.apply(pushforward, truth, *consts, *dots)
        of_floats = iter(outs)
        return tuple(next(of_floats) if f else None for f in floating)

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, branch: UntracedCond, truth: torch.Tensor, *consts: torch.Tensor
    ) -> Any:
        size = info.batch_size
        randomness = randomness_of(info, branch.origin, branch.derived)
        batched, dims = batch_first(consts, in_dims[2:])
        yes, no = (vmapped_body(body, dims, size, randomness) for body in branch.bodies)
        truth_dim = in_dims[1]
        if truth_dim is None:
            of_all = attrs.evolve(branch, bodies=(yes, no))
            outs = CondOp.apply(of_all, truth, *batched)
        else:
            truth = truth.movedim(truth_dim, 0)  # (size,)
            first = _results_where(truth, yes, batched, dims, branch)
            second = _results_where(~truth, no, batched, dims, branch)
            pairs = zip(first, second, strict=True)
            outs = tuple(select_by_sample(truth, a, b) for a, b in pairs)
        return outs, tuple([0] * len(outs))


def select_by_sample(truth: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Select, for each sample along dim 0, a where the condition is true and else b."""
    ones = [1] * (a.dim() - 1)
    by_sample = truth.view(-1, *ones)  # (size, 1, ..)
    return torch.where(by_sample, a, b)


def _results_where(
    truth: torch.Tensor,
    body: Body,
    xs: Sequence[torch.Tensor],
    dims: Sequence[int | None],
    branch: UntracedCond,
) -> Sequence[torch.Tensor]:
    """The results of a branch for the samples that take it, and any for the others. A branch that
    may raise an error at some values runs only if a sample takes it.
    """
    ops = body_ops.ops_of(body, xs, "cond")
    operands = operands_of_body(truth, xs, dims, ops.may_raise)
    if not ops.may_raise:
        return body(*operands)
    like = ops.results
    zeros: Body = lambda *_: [torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in like]
    of_some = attrs.evolve(branch, bodies=(body, zeros))
    return CondOp.apply(of_some, truth.any(), *operands)


def batch_first(
    xs: Sequence[torch.Tensor], dims: Sequence[int | None]
) -> tuple[list[torch.Tensor], tuple[int | None, ...]]:
    """Move the batch dim of each tensor to the front, and say where it is."""
    moved = [x if d is None else x.movedim(d, 0) for x, d in zip(xs, dims, strict=True)]
    return moved, tuple(d if d is None else 0 for d in dims)


def operands_of_body(
    truth: torch.Tensor, xs: Sequence[torch.Tensor], dims: Sequence[int | None], raising: bool
) -> Sequence[torch.Tensor]:
    """The operands of a branch under vmap, where only some samples take the branch.

    A derivative of the body at the operands of another sample may be nan, and nan times a zero
    cotangent is nan. The body itself may raise an error at them. So each other sample has the
    operands of one that takes the body. Its own have no gradient.

    Args:
        truth: whether a sample takes the body: (size,).
        xs: the operands.
        dims: 0 for an operand of each sample, None for one of all.
        raising: whether the body may raise an error at some values.
    """
    if not raising and not any(map(_compat.is_differentiated, xs)):
        return xs
    row = truth.to(torch.int64).argmax().reshape(1)
    some = truth.any()
    return [
        _with_gradient_if(some, x)
        if d is None
        else select_by_sample(truth, x, x.detach().index_select(0, row))
        for x, d in zip(xs, dims, strict=True)
    ]


def _with_gradient_if(truth: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.where(truth, x, x.detach()) if is_float(x) else x


def transposed_body(body: Body, count: int, positions: Sequence[int]) -> Body:
    """The transpose of a body: the cotangents of its floating inputs, from its inputs and the
    cotangents of some results.
    """

    def pulled(*xs: torch.Tensor) -> Sequence[torch.Tensor]:
        consts = xs[:count]
        cotangents = xs[count:]

        def run(*floats: torch.Tensor) -> tuple[torch.Tensor, ...]:
            outs = body(*with_floats(consts, floats))
            sources.follow_backward((outs[k].grad_fn for k in positions), {})
            return tuple(outs[k] for k in positions)

        floats = floats_of(consts)
        with sources.annotations_restored():
            pull = torch.func.vjp(run, *floats)[1]
            return pull(tuple(cotangents))

    return pulled


def body_with_tangents(body: Body, count: int, floating: list[bool]) -> Body:
    """The forward-mode derivative of a body: the tangents of its floating results, from its inputs
    and their tangents.
    """

    def pushed(*xs: torch.Tensor) -> Sequence[torch.Tensor]:
        consts = xs[:count]
        dots = xs[count:]

        def run(*floats: torch.Tensor) -> tuple[torch.Tensor, ...]:
            outs = body(*with_floats(consts, floats))
            floating[:] = [is_float(x) for x in outs]
            return tuple(floats_of(outs))

        floats = floats_of(consts)
        _, of_outs = _compat.jvp(run, tuple(floats), tuple(dots))
        return of_outs

    return pushed


def replay_cond(
    truth: torch.Tensor, yes: Sequence[BodyResult], no: Sequence[BodyResult]
) -> Tensors:
    """When Dynamo's graph is replayed: the cond of two bodies, in the trace."""
    yes_region = yes[0].region
    no_region = no[0].region
    frees = [*yes_region.free, *no_region.free]
    wrapper_subclasses.refuse_partly_followed("cond", frees)
    first = wrapper_subclasses.BodyOverInnerTensors("cond", yes_region, [])
    second = wrapper_subclasses.BodyOverInnerTensors("cond", no_region, [])
    n = len(first.free)
    end = n + len(second.free)
    yes_body: Body = lambda *xs: first([], xs[:n])
    no_body: Body = lambda *xs: second([], xs[n:end])
    free = [*first.free, *second.free]
    bodies = yes_body, no_body
    if _draws(yes_region, yes_body, free) or _draws(no_region, no_body, free):
        bodies = body_with_random_state(yes_body), body_with_random_state(no_body)
        free = [*free, ambient.new_states([], axis_names.device())]
    outs = CondOp.apply(UntracedCond(bodies), truth, *free)
    wrapper_subclasses.refuse_different_results("cond", first.left, second.left)
    return list(wrapper_subclasses.rebuilt_subclasses("cond", first.left, outs))


def _draws(region: BodyGraph, body: Body, xs: Sequence[torch.Tensor]) -> bool:
    """Whether a branch draws random numbers. The graph of the region remembers it: a branch in a
    branch is traced several times.
    """
    known = region.graph.meta
    if "draws" not in known:
        known["draws"] = body_ops.ops_of(body, xs, "cond").draw
    return known["draws"]
