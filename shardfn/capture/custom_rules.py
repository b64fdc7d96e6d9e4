"""Functions with derivatives of the user's: custom_vjp and custom_jvp, made of regions, right under every transform."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch

from ..errors import CaptureError, problem
from .flat import Body, is_float, mapped
from .regions import Left


@attrs.frozen(eq=False)
class Pair:
    """A function and its rule, over flat tensors: the arguments' first, then what the two close over."""

    name: str
    fn: Body
    rule: Body  # (arguments, closed over) -> (results, residuals); or with tangents behind the arguments -> tangents
    back: Body | None  # (residuals, cotangents, closed over) -> cotangents of the arguments that have one
    count: int  # of the arguments
    results: int
    given: tuple[bool, ...]  # which arguments have a cotangent


def _apart(outs: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Results of which none is an argument itself: autograd cannot save those."""
    return tuple(x.view_as(x) if any(x is t for t in tensors) else x for x in outs)


def _refuse_closed_over(pair: Pair, free: Sequence[torch.Tensor]) -> None:
    """A rule says nothing of what the function closes over: its gradient would be lost."""
    if any(x.requires_grad for x in free):
        fix = "pass it as an argument, for which the rule gives a derivative"
        raise CaptureError(problem(pair.name, "it closes over a value that is differentiated", fix=fix), fix=fix)


class _Reverse(torch.autograd.Function):
    """(arguments, closed over) -> (results, residuals), pulled back by the user's rule."""

    @staticmethod
    def forward(pair: Pair, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return _apart(pair.rule(*tensors), tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pair = ctx.pair = inputs[0]
        _refuse_closed_over(pair, inputs[1 + pair.count :])
        ctx.counts = len(inputs) - 1, len(output)
        ctx.save_for_backward(*inputs[1:], *output)
        ctx.save_for_forward(*inputs[1:])
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(x for x in output if not is_float(x)))

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        pair, n = ctx.pair, ctx.counts[0]
        tensors, outs = ctx.saved_tensors[:n], ctx.saved_tensors[n:]
        free, residuals = tensors[pair.count :], outs[pair.results :]
        given = [torch.zeros_like(x) if g is None else g for x, g in zip(outs[: pair.results], cotangents, strict=False)]
        assert pair.back is not None
        feed = iter(pair.back(*residuals, *given, *free))
        found = [next(feed) if has else None for has in pair.given]
        later = {k: g for k, g in enumerate(cotangents) if k >= pair.results and g is not None}
        if later:  # the residuals are differentiated themselves: by what the rule does, as everything else is
            floats = [k for k, x in enumerate(tensors[: pair.count]) if is_float(x)]

            def run(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
                filled = list(tensors)
                for k, x in zip(floats, xs, strict=True):
                    filled[k] = x
                out = pair.rule(*filled)
                return tuple(out[k] for k in later)

            more = torch.func.vjp(run, *(tensors[k] for k in floats))[1](tuple(later.values()))
            for k, g in zip(floats, more, strict=True):
                found[k] = g if found[k] is None else found[k] + g
        return None, *found, *[None] * len(free)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        fix = "custom_jvp, whose rule serves both modes"
        raise CaptureError(problem(ctx.pair.name, "it has a rule for reverse mode only, and forward mode is asked for", fix=fix), fix=fix)

    @staticmethod
    def vmap(info: Any, in_dims: Any, pair: Pair, *tensors: torch.Tensor) -> Any:
        dims, size = tuple(in_dims[1:]), info.batch_size
        free = dims[pair.count :]
        rule, back = mapped(pair.rule, dims, size), pair.back
        assert back is not None
        given = [d for d, has in zip(dims, pair.given, strict=False) if has]

        def pulled(*xs: torch.Tensor) -> list[torch.Tensor]:
            inner = (*[0] * (len(xs) - len(free)), *free)
            found = mapped(back, inner, size)(*xs)
            return [g.sum(0) if d is None else g.movedim(0, d) for g, d in zip(found, given, strict=True)]

        outs = _Reverse.apply(attrs.evolve(pair, rule=rule, back=pulled), *tensors)
        return outs, tuple([0] * len(outs))


class _Forward(torch.autograd.Function):
    """(arguments, closed over) -> results, pushed forward by the user's rule; reverse mode transposes it."""

    @staticmethod
    def forward(pair: Pair, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return _apart(pair.fn(*tensors), tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pair = ctx.pair = inputs[0]
        _refuse_closed_over(pair, inputs[1 + pair.count :])
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(*inputs[1:])
        ctx.set_materialize_grads(False)
        ctx.floating = [is_float(x) for x in output]
        ctx.mark_non_differentiable(*(x for x in output if not is_float(x)))

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: torch.Tensor | None) -> Any:
        pair, tensors = ctx.pair, ctx.saved_tensors
        xs, free = tensors[: pair.count], tensors[pair.count :]
        dots = [torch.zeros_like(x) if t is None else t for x, t in zip(xs, tangents, strict=False)]
        found = pair.rule(*xs, *dots, *free)
        return tuple(t if f else None for t, f in zip(found, ctx.floating, strict=True))

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        pair, tensors = ctx.pair, ctx.saved_tensors
        xs, free = tensors[: pair.count], tensors[pair.count :]
        given = [k for k, g in enumerate(cotangents) if g is not None]
        floats = [k for k, x in enumerate(xs) if is_float(x)]

        def push(*dots: torch.Tensor) -> tuple[torch.Tensor, ...]:
            all_dots = [torch.zeros_like(x) for x in xs]
            for k, t in zip(floats, dots, strict=True):
                all_dots[k] = t
            found = pair.rule(*xs, *all_dots, *free)
            return tuple(found[k] for k in given)

        pulled = torch.func.vjp(push, *(torch.zeros_like(xs[k]) for k in floats))[1](tuple(cotangents[k] for k in given))
        found: list[Any] = [None] * len(xs)
        for k, g in zip(floats, pulled, strict=True):
            found[k] = g
        return None, *found, *[None] * len(free)

    @staticmethod
    def vmap(info: Any, in_dims: Any, pair: Pair, *tensors: torch.Tensor) -> Any:
        dims, size = tuple(in_dims[1:]), info.batch_size
        xs, free = dims[: pair.count], dims[pair.count :]
        made = attrs.evolve(pair, fn=mapped(pair.fn, dims, size), rule=mapped(pair.rule, (*xs, *xs, *free), size))
        outs = _Forward.apply(made, *tensors)
        return outs, tuple([0] * len(outs))


def reverse_ruled(
    name: str, outs: Sequence[Left], fwd: Sequence[Left], bwd: Sequence[Left], xs: Sequence[torch.Tensor], given: Sequence[bool]
) -> list[torch.Tensor]:
    """A region with a rule of two more: (results, residuals) of its arguments, and cotangents of residuals and cotangents."""
    plain, rule = outs[0].region, fwd[0].region
    back = bwd[0].region if bwd else None
    n, k = len(xs), len(rule.free)
    pair = Pair(
        name,
        lambda *ts: plain(ts[:n], plain.free),
        lambda *ts: rule(ts[:n], ts[n : n + k]),
        (lambda *ts: back(ts[: len(ts) - k - len(back.free)], ts[len(ts) - len(back.free) :])) if back else (lambda *ts: []),
        n,
        len(outs),
        tuple(given),
    )
    return reverse(pair, [*xs, *rule.free, *(back.free if back else [])])


def forward_ruled(name: str, outs: Sequence[Left], dots: Sequence[Left], xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A region with a rule: another one, of its arguments and their tangents, that gives the tangents of its results."""
    plain, rule = outs[0].region, dots[0].region
    n, k = len(xs), len(plain.free)
    pair = Pair(
        name,
        lambda *ts: plain(ts[:n], ts[n : n + k]),
        lambda *ts: rule(ts[: 2 * n], ts[2 * n + k :]),
        None,
        n,
        len(outs),
        (),
    )
    return forward(pair, [*xs, *plain.free, *rule.free])


def reverse(pair: Pair, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The results of a function with a rule for reverse mode."""
    return list(_Reverse.apply(pair, *tensors))[: pair.results]


def forward(pair: Pair, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The results of a function with a rule for forward mode."""
    return list(_Forward.apply(pair, *tensors))
