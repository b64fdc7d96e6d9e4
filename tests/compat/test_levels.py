"""The innermost level of torch.func: its kind, values below it, and derivatives of one's own."""

from __future__ import annotations

from typing import Any

import torch

from shardfn._compat.levels import Level, grad_and_value, jvp, stops_pulls

X = torch.tensor([2.0, 3.0])
T = torch.tensor([5.0, 7.0])


def seen(transform: Any, look: Any) -> Any:
    """What a function sees of the level of a transform."""
    found: list[Any] = []
    transform(lambda x: found.append(look(Level(), x)) or x.sum())
    return found[0]


def grad(fn: Any) -> Any:
    return torch.func.grad(fn)(X)


def push(fn: Any) -> Any:
    return torch.func.jvp(fn, (X,), (T,))


def vmap(fn: Any) -> Any:
    return torch.func.vmap(fn)(torch.stack([X, T]))


def test_the_kind_of_the_innermost_level() -> None:
    kind = lambda level, x: level.kind
    assert [seen(t, kind) for t in (grad, push, vmap)] == ["grad", "jvp", "vmap"]
    assert Level().kind is None and Level().number is None
    both = lambda fn: torch.func.vmap(torch.func.grad(fn))(torch.stack([X, T]))
    assert seen(both, kind) == "grad"


def test_a_value_below_is_plain_and_wrapped_again_it_is_here() -> None:
    def look(level: Level, x: Any) -> Any:
        below = level.below(x)
        again = level.wrapped(below)
        is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(below)
        return is_wrapped, level._is_here(again)

    assert seen(grad, look) == (False, True)
    x = X.clone().requires_grad_()
    assert not Level().below(x).requires_grad and Level().wrapped(x) is not x


def test_what_moves_at_a_level() -> None:
    moves = lambda level, x: (level.moves(x), level.moves(X))
    assert seen(grad, moves) == (True, False)
    assert seen(push, moves) == (True, False)
    assert Level().moves(X.clone().requires_grad_()) and not Level().moves(X)

    def nested(fn: Any) -> Any:
        inner = lambda x: torch.func.grad(lambda y: fn(x) + y.sum())(X).sum()
        return torch.func.grad(inner)(X)

    assert seen(nested, lambda level, x: level.moves(x)) is False, "it moves outside"


def test_tangents_of_a_level() -> None:
    tangent = lambda level, x: level.tangent(x).tolist()
    assert seen(push, tangent) == [5.0, 7.0]
    none = lambda level, x: level.tangent(X)
    assert seen(push, none) is None

    def dual(level: Level, x: Any) -> Any:
        with level.lowered():
            value, dot = X * 2, X * 10
        return level.tangent(level.dual(value, dot)).tolist()

    assert seen(push, dual) == [20.0, 30.0]


def test_samples_and_their_batch() -> None:
    def look(level: Level, x: Any) -> Any:
        (below, same), dims, size = level.batched([x, X])
        return below.shape, same is X, dims, size, level.sample(below).shape

    assert seen(vmap, look) == ((2, 2), True, (0, None), 2, (2,))


def test_a_lowered_level_does_not_differentiate_and_the_others_do() -> None:
    def fn(x: Any) -> Any:
        level = Level()
        with level.lowered():
            y = level.below(x) * 3
        return (x + level.wrapped(y)).sum()

    assert torch.func.grad(fn)(X).tolist() == [1.0, 1.0]
    outer = torch.func.grad(lambda x: torch.func.grad(lambda z: fn(x) * z)(X[0]))(X)
    assert outer.tolist() == [4.0, 4.0], "the outer level follows both"


def pulled(x: Any) -> Any:
    """3 x, with the derivative 10 x."""
    level = Level()
    below = level.below(x)
    with level.lowered():
        outs = [below * 3]
    pull = lambda cotangents, again: [cotangents[0] * 10 * (below if again is None else again[0])]
    return level.pulled(outs, pull, [x])[0]


def test_a_derivative_of_ones_own() -> None:
    assert torch.func.grad(lambda x: pulled(x).sum())(X).tolist() == [20.0, 30.0]
    x = X.clone().requires_grad_()
    y = pulled(x)
    assert y.tolist() == [6.0, 9.0]
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    assert g.tolist() == [20.0, 30.0]
    assert torch.autograd.grad(g.sum(), x)[0].tolist() == [10.0, 10.0]


def test_pulls_stop_without_grad_mode_and_without_a_derivative_around() -> None:
    assert not stops_pulls()
    with torch.no_grad():
        assert stops_pulls()
        inside = lambda level, x: stops_pulls()
        assert seen(vmap, inside)

        def look(x: Any) -> Any:
            with torch.no_grad():
                assert not stops_pulls()
            return x.sum()

        torch.func.grad(look)(X)


def test_tangents_have_the_dtypes_of_their_values() -> None:
    half = X.half()
    (y,), (t,) = jvp(lambda x: (x * torch.tensor(2.0),), (half,), (half,))
    assert (y.dtype, t.dtype) == (torch.float16, torch.float16)
    values, dots, aux = jvp(lambda x: ((x * x,), x + 1), (X,), (T,), has_aux=True)
    assert values[0].tolist() == [4, 9] and dots[0].tolist() == [20, 42]
    assert aux.tolist() == [3, 4]
    with torch.autograd.forward_ad.dual_level():
        assert jvp(lambda x: (x * 3,), (X,), (T,))[1][0].tolist() == [15.0, 21.0]


def test_gradients_are_those_of_torch_func_at_every_level() -> None:
    def cubed(xs: Any) -> Any:
        return (xs[0] ** 3 * xs[1]).sum(), (xs[0] * 2,)

    def ours(x: torch.Tensor) -> torch.Tensor:
        return grad_and_value(cubed, (x, T))[0][0]

    def theirs(x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad_and_value(cubed, has_aux=True)((x, T))[0][0]

    grads, value, aux = grad_and_value(cubed, (X, T))
    expected, (scalar, extra) = torch.func.grad_and_value(cubed, has_aux=True)((X, T))
    assert all(map(torch.equal, grads, expected)) and value == scalar
    assert torch.equal(aux[0], extra[0]) and not aux[0].requires_grad
    for around in (torch.func.jacrev, torch.func.jacfwd):
        assert torch.equal(around(ours)(X), around(theirs)(X))


def test_the_gradient_of_an_unread_primal_is_zero() -> None:
    grads, _, aux = grad_and_value(lambda xs: (xs[0].sum(), ()), (X, T))
    assert aux == () and torch.equal(grads[1], torch.zeros(2))
