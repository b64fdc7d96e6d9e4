"""Transforms around a loss, in shardfn and in torch: the rows that a random program nests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch

import shardfn as sf
from shardfn import P

Fn = Callable[..., Any]
At = tuple[int, ...]
STEPS = (1.0, 0.5, -0.25)


def summed(fn: Fn) -> Fn:
    """A scalar of all results, so that a further derivative can be taken."""
    return lambda *xs: _sum(fn(*xs))


def _sum(tree: Any) -> Any:
    if not isinstance(tree, (tuple, list)):
        return tree.sin().sum()
    total = _sum(tree[0])
    for part in tree[1:]:
        total = total + _sum(part)
    return total


def _of(fn: Fn, at: At, xs: tuple[Any, ...]) -> Fn:
    """The function of the arguments at these positions; the others are closed over."""

    def of(*ys: Any) -> Any:
        given = dict(zip(at, ys, strict=True))
        return fn(*[given.get(i, x) for i, x in enumerate(xs)])

    return of


def _at(at: At, xs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(xs[i] for i in at)


def _ones(xs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(torch.ones_like(x) for x in xs)


def _jvp(jvp: Fn) -> Callable[[Fn, At], Fn]:
    def row(f: Fn, at: At) -> Fn:
        def pushed(*xs: Any) -> Any:
            ys = _at(at, xs)
            return jvp(_of(f, at, xs), ys, _ones(ys))

        return pushed

    return row


def _linearized(f: Fn, at: At) -> Fn:
    def pushed(*xs: Any) -> Any:
        ys = _at(at, xs)
        value, push = sf.linearize(_of(f, at, xs), *ys)
        return value, push(*_ones(ys))

    return pushed


def _vjp(vjp: Fn) -> Callable[[Fn, At], Fn]:
    def row(f: Fn, at: At) -> Fn:
        def pulled(*xs: Any) -> Any:
            value, pull = vjp(_of(f, at, xs), *_at(at, xs))
            return value, pull(torch.ones_like(value) * 0.5)

        return pulled

    return row


def _by(transform: Fn) -> Callable[[Fn, At], Fn]:
    return lambda f, at: transform(f, argnums=at)


def _torch_value_and_grad(f: Fn, at: At) -> Fn:
    def both(*xs: Any) -> Any:
        grads, value = torch.func.grad_and_value(f, argnums=at)(*xs)
        return value, grads

    return both


def _torch_jacobian(jacobian: Fn) -> Callable[[Fn, At], Fn]:
    return lambda f, at: jacobian(f, argnums=at)


def _torch_hessian(f: Fn, at: At) -> Fn:
    return torch.func.jacfwd(torch.func.jacrev(f, argnums=at), argnums=at)


def _torch_vmap(f: Fn, in_axes: int) -> Fn:
    return torch.vmap(f, in_dims=in_axes)


def _samples(vmap: Fn, axis: int) -> Callable[[Fn, At], Fn]:
    """The mean over samples made of the inputs, along a first or last dim."""

    def row(f: Fn, at: At) -> Fn:
        def many(*xs: Any) -> Any:
            batches = [torch.stack([x, x + x, -x], axis) for x in xs]
            return vmap(f, in_axes=axis)(*batches)

        return many

    return row


def _plain(f: Fn, at: At) -> Fn:
    return f


def _scan(f: Fn, at: At) -> Fn:
    def scanned(*xs: Any) -> Any:
        def step(carry: Any, share: Any) -> Any:
            value = f(*_scaled(xs, at, share))
            return carry + value, value * carry

        first = f(*xs)
        steps = torch.tensor(STEPS, dtype=first.dtype)
        return sf.scan(step, torch.zeros_like(first), steps)

    return scanned


def _scan_plainly(f: Fn, at: At) -> Fn:
    def scanned(*xs: Any) -> Any:
        first = f(*xs)
        carry, rows = torch.zeros_like(first), []
        for share in torch.tensor(STEPS, dtype=first.dtype):
            value = f(*_scaled(xs, at, share))
            rows.append(value * carry)
            carry = carry + value
        return carry, torch.stack(rows)

    return scanned


def _scaled(xs: tuple[Any, ...], at: At, share: Any) -> list[Any]:
    return [(x * share).to(x.dtype) if i in at else x for i, x in enumerate(xs)]


def _map(over: Fn) -> Callable[[Fn, At], Fn]:
    def row(f: Fn, at: At) -> Fn:
        def mapped(*xs: Any) -> Any:
            each = lambda share: f(*_scaled(xs, at, share))
            return over(each, torch.tensor(STEPS, dtype=xs[at[0]].dtype))

        return mapped

    return row


def _map_plainly(f: Fn, xs: Any) -> Any:
    return torch.stack([f(x) for x in xs])


def _cond(cond: Fn) -> Callable[[Fn, At], Fn]:
    def row(f: Fn, at: At) -> Fn:
        twice = lambda *xs: f(*xs) * 2

        def chosen(*xs: Any) -> Any:
            return cond(xs[at[0]].sum() > 0, f, twice, *xs)

        return chosen

    return row


def _cond_plainly(pred: Any, yes: Fn, no: Fn, *xs: Any) -> Any:
    return torch.where(pred, yes(*xs), no(*xs))


def _while(f: Fn, at: At) -> Fn:
    def looped(*xs: Any) -> Any:
        go_on = lambda carry: carry[0] < 3
        again = lambda carry: (carry[0] + 1, carry[1] * 0.5 + f(*xs))
        start = (torch.tensor(0), f(*xs))
        return sf.while_loop(go_on, again, start)[1]

    return looped


def _while_plainly(f: Fn, at: At) -> Fn:
    def looped(*xs: Any) -> Any:
        value = f(*xs)
        for _ in range(3):
            value = value * 0.5 + f(*xs)
        return value

    return looped


def _shard_map(f: Fn, at: At) -> Fn:
    def mean(*xs: Any) -> Any:
        value = f(*xs)  # the mean of three equal numbers is rounded in 16 bits
        return sf.pmean(value.double(), "a").to(value.dtype)

    def mapped(*xs: Any) -> Any:
        specs = tuple(P() for _ in xs)
        return sf.shard_map(mean, None, specs, P())(*xs)

    return mapped


def _custom_vjp(f: Fn, at: At) -> Fn:
    """A function whose rule is its derivative."""

    def ruled(*xs: Any) -> Any:
        of = _of(f, at, xs)
        return of(*_at(at, xs))

    own = sf.custom_vjp(ruled)

    def forward(*xs: Any) -> Any:
        return ruled(*xs), xs

    def backward(xs: Any, cotangent: Any) -> Any:
        grads = sf.grad(f, argnums=at)(*xs)
        given = dict(zip(at, grads, strict=True))
        return tuple(given[i] * cotangent if i in at else None for i in range(len(xs)))

    own.defvjp(forward, backward)
    return lambda *xs: own(*xs)


@attrs.frozen
class Row:
    """A transform of a loss of all inputs, in shardfn and in torch.

    Args:
        ours, plain: take the loss, and the positions of the inputs that are differentiated;
            return a function of the inputs.
        grows: by how many times the inputs' size its results, or what it computes for them,
            are larger than those of the loss. 0: not at all.
    """

    ours: Callable[[Fn, At], Fn]
    plain: Callable[[Fn, At], Fn]
    grows: int = 0


ROWS = {
    "grad": Row(_by(sf.grad), _by(torch.func.grad)),
    "value_and_grad": Row(_by(sf.value_and_grad), _torch_value_and_grad),
    "bucketed_grad": Row(_by(sf.bucketed_grad), _torch_value_and_grad),
    "jvp": Row(_jvp(sf.jvp), _jvp(torch.func.jvp)),
    "vjp": Row(_vjp(sf.vjp), _vjp(torch.func.vjp)),
    "linearize": Row(_linearized, _jvp(torch.func.jvp)),
    "jacfwd": Row(_by(sf.jacfwd), _torch_jacobian(torch.func.jacfwd), 1),
    "jacrev": Row(_by(sf.jacrev), _torch_jacobian(torch.func.jacrev), 1),
    "hessian": Row(_by(sf.hessian), _torch_hessian, 2),
    "vmap": Row(_samples(sf.vmap, 0), _samples(_torch_vmap, 0)),
    "vmap of the last dim": Row(_samples(sf.vmap, -1), _samples(_torch_vmap, -1)),
    "checkpoint": Row(lambda f, at: sf.checkpoint(f), _plain),
    "jit": Row(lambda f, at: sf.jit(f, backend="aten"), _plain),
    "shard": Row(lambda f, at: sf.shard(f, backend="aten"), _plain),
    "shard_map": Row(_shard_map, _plain),
    "custom_vjp": Row(_custom_vjp, _plain),
    "scan": Row(_scan, _scan_plainly),
    "map": Row(_map(sf.map), _map(_map_plainly)),
    "cond": Row(_cond(sf.cond), _cond(_cond_plainly)),
    "while_loop": Row(_while, _while_plainly),
}


def nested(loss: Fn, names: tuple[str, ...], at: At, is_ours: bool) -> Fn:
    """The transforms of these rows around a loss, the first innermost."""
    fn = loss
    for i, name in enumerate(names):
        row = ROWS[name]
        scalar = summed(fn) if i else fn
        fn = (row.ours if is_ours else row.plain)(scalar, at)
    return fn


def elements(names: tuple[str, ...], inputs: int) -> int:
    """How many numbers the widest value of a nest has, if its inputs have so many."""
    grows = sum(ROWS[name].grows for name in names)
    return max(inputs, 1) ** grows
