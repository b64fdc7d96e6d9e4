"""A pullback, linear function or derivative of any order that is made outside of a loop, a branch
or a rule and applied inside of it equals the Python loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from worlds import simulated

import shardfn as sf
from shardfn import P, ShardError

F64 = torch.float64
W = torch.randn(5, generator=torch.Generator().manual_seed(3), dtype=F64)
U = torch.randn(5, generator=torch.Generator().manual_seed(4), dtype=F64)
Linear = Callable[[Tensor], Tensor]


def layer(w: Tensor) -> Tensor:
    return torch.sin(w) * w.flip(0)


def two_results(w: Tensor, tree: dict[str, Tensor]) -> Any:
    return {"a": layer(w) * tree["b"], "c": tree["b"].sum()}, w.detach()


def of_tree(w: Tensor) -> Linear:
    _, pull, _ = sf.vjp(two_results, w, {"b": w.cos()}, has_aux=True)

    def linear(u: Tensor) -> Tensor:
        of_w, of_tree = pull({"a": u, "c": u[0]})
        return of_w + of_tree["b"]

    return linear


def of_loop(w: Tensor) -> Linear:
    """Of a function with a loop and a branch inside."""

    def fn(w: Tensor) -> Tensor:
        step = lambda c, _: (torch.sin(c) * w, None)
        out, _ = sf.scan(step, w, length=2)
        return sf.cond(w.sum() < 9, torch.sin, torch.cos, out)

    return pulled(sf.vjp(fn, w)[1])


def of_chunks(w: Tensor) -> Linear:
    """Of a function that closes over several values of one op."""
    first, second = (w * 2).split([2, 3])
    _, pull = sf.vjp(lambda v: torch.cat([v[:2] * first, v[2:].sin() * second]), w)
    return pulled(pull)


def of_constant(w: Tensor) -> Linear:
    _, pull = sf.vjp(lambda v: {"a": w * 2, "b": v}, w)
    return lambda u: pull({"a": u, "b": u})[0]


def pulled(pull: Any) -> Linear:
    return lambda u: pull(u)[0]


MADE: dict[str, Callable[[Tensor], Linear]] = {
    "vjp": lambda w: pulled(sf.vjp(layer, w)[1]),
    "vjp of torch": lambda w: pulled(torch.func.vjp(layer, w)[1]),
    "linearize": lambda w: sf.linearize(layer, w)[1],
    "jvp": lambda w: lambda u: sf.jvp(layer, (w,), (u,))[1],
    "grad": lambda w: lambda u: sf.grad(lambda w: (layer(w) * u).sum())(w),
    "second order": lambda w: pulled(sf.vjp(sf.grad(lambda w: layer(w).square().sum()), w)[1]),
    "twice": lambda w: pulled(sf.vjp(lambda v: sf.vjp(layer, v)[1](w)[0], w)[1]),
    "tree": of_tree,
    "loop": of_loop,
    "chunks": of_chunks,
    "constant": of_constant,
    "checkpoint": lambda w: pulled(sf.vjp(sf.checkpoint(layer), w)[1]),
}


def in_scan(step: Linear, u: Tensor) -> Tensor:
    return sf.scan(lambda c, _: (step(c), None), u, length=2)[0]


def in_while(step: Linear, u: Tensor) -> Tensor:
    zero = torch.zeros((), dtype=torch.int64)
    return sf.while_loop(lambda c: c[1] < 2, lambda c: (step(c[0]), c[1] + 1), (u, zero))[0]


def in_branch(step: Linear, u: Tensor) -> Tensor:
    return sf.cond(u.sum() > 99, torch.sin, lambda v: step(step(v)), u)


def in_map(step: Linear, u: Tensor) -> Tensor:
    return sf.map(lambda v: step(step(v)), torch.stack([u, u]))[1]


def in_forward(step: Linear, u: Tensor) -> Tensor:
    fn = sf.custom_vjp(lambda v: v * 1.0)
    fn.defvjp(lambda v: (step(step(v)), None), lambda _, g: (g,))
    return sf.vjp(fn, u)[0]


def in_backward(step: Linear, u: Tensor) -> Tensor:
    fn = sf.custom_vjp(lambda v: v * 1.0)
    fn.defvjp(lambda v: (v * 1.0, None), lambda _, g: (step(step(g)),))
    return sf.vjp(fn, u)[1](u)[0]


def in_tangent(step: Linear, u: Tensor) -> Tensor:
    fn = sf.custom_jvp(lambda v: v * 1.0)
    fn.defjvp(lambda primals, tangents: (primals[0] * 1.0, step(step(tangents[0]))))
    return sf.jvp(fn, (u,), (u,))[1]


def nested(step: Linear, u: Tensor) -> Tensor:
    """In a branch in a loop, and in the loop as well."""
    inner = lambda c: sf.cond(c.sum() > 99, torch.sin, step, c)
    return sf.scan(lambda c, _: (inner(c), None), step(u), length=1)[0]


def in_vmap(step: Linear, u: Tensor) -> Tensor:
    """In a loop that is mapped and differentiated."""
    of_one = lambda a: (in_scan(step, u * a) * a).sum()
    return torch.stack([sf.vmap(sf.grad(of_one))(torch.ones(2, dtype=F64))[1]] * 5)


APPLIED = {
    fn.__name__: fn
    for fn in (in_scan, in_while, in_branch, in_map, in_forward, in_backward, in_tangent, nested)
}
WAYS: dict[str, Callable[[Any], Any]] = {
    "jit": lambda fn: sf.jit(fn, backend="aten"),
    "shard": lambda fn: sf.shard(
        fn, sf.make_mesh((2, 2), ("a", "b")), (P("a"), P("b")), backend="aten"
    ),
    "vmap": lambda fn: lambda w, u: sf.tree_map(lambda x: x[0], sf.vmap(fn)(w[None], u[None])),
}


def looped(step: Linear, u: Tensor) -> Tensor:
    return step(step(u))


def every(
    applied: Callable[[Linear, Tensor], Tensor], names: Iterable[str] = tuple(MADE)
) -> Callable[..., dict[str, Tensor]]:
    return lambda w, u: {name: applied(MADE[name](w), u) for name in names}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("applied", APPLIED)
def test_each_linear_function_in_each_body_equals_the_python_loop(applied: str, way: str) -> None:
    names = list(MADE) if way == "jit" else ["vjp", "second order"]
    with sf.fake_world(4):
        found = sf.full(WAYS[way](every(APPLIED[applied], names))(W, U))
    assert_close(found, every(looped, names)(W, U), rtol=1e-10, atol=1e-12)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        pass  # torch allows hooks again, which it does not inside of a derivative


@pytest.mark.parametrize(
    ("name", "applied"), [("vjp", "in_while"), ("second order", "in_scan"), ("loop", "nested")]
)
def test_derivatives_at_its_point_equal_those_of_the_python_loop(name: str, applied: str) -> None:
    def derivatives(applied: Callable[[Linear, Tensor], Tensor]) -> Any:
        of = lambda w, u: applied(MADE[name](w), u).square().sum()
        whole = lambda w, u: (sf.grad(of, argnums=(0, 1))(w, u), sf.jvp(of, (w, u), (u, w)))
        return whole, lambda w, u: sf.jvp(sf.grad(of), (w, u), (u, w))[1]

    found, wanted = derivatives(APPLIED[applied]), derivatives(looped)
    for one, other in zip(found, wanted, strict=True):
        got = sf.jit(one, backend="aten")(W, U)
        assert_close(got, other(W, U), rtol=1e-9, atol=1e-11)


def test_a_loop_of_it_under_vmap_and_grad_equals_the_python_loop() -> None:
    plain = lambda step, u: torch.stack(
        [sf.grad(lambda a: (looped(step, u * a) * a).sum())(torch.ones((), dtype=F64))] * 5
    )
    names = ["vjp", "tree"]
    found = sf.jit(every(in_vmap, names), backend="aten")(W, U)
    assert_close(found, every(plain, names)(W, U), rtol=1e-10, atol=1e-12)


def test_it_draws_the_numbers_that_its_value_drew() -> None:
    def fn(applied: Any) -> Any:
        def both(w: Tensor, u: Tensor) -> Any:
            value, pull = sf.vjp(lambda v: torch.dropout(v, 0.5, True) * torch.rand(5), w)
            return value, applied(lambda c: pull(c)[0], u), torch.rand(3)

        return sf.jit(both, backend="aten")

    results = []
    for applied in (looped, in_scan, in_while, nested):
        sf.random.state.seed(5)
        results.append(fn(applied)(W, U))
    for result in results[1:]:
        assert_close(result[:2], results[0][:2])
    assert results[0][1].count_nonzero() < 5


def test_one_that_draws_is_refused_where_samples_would_draw_apart() -> None:
    def fn(w: Tensor) -> Tensor:
        _, pull = sf.vjp(lambda v: torch.dropout(v, 0.5, True), w)
        return sf.vmap(lambda u: in_scan(lambda c: pull(c)[0], u), randomness="different")(
            torch.stack([w, w])
        )

    with pytest.raises(ShardError, match="draws random numbers"):
        sf.jit(fn, backend="aten")(W)


def test_one_that_torch_made_outside_of_the_function_is_refused_and_ours_is_not() -> None:
    _, pull = torch.func.vjp(layer, W)
    with pytest.raises(ShardError, match="a pullback of torch.func.vjp that was made outside"):
        in_scan(lambda c: pull(c)[0], U)
    _, ours = sf.vjp(layer, W)
    step = lambda c: ours(c)[0]
    assert_close(in_scan(step, U), looped(step, U))


def test_torchs_own_gradient_of_a_value_from_outside_is_refused() -> None:
    def fn(w: Tensor, u: Tensor) -> Tensor:
        v = w.detach().requires_grad_()
        y = layer(v)
        step = lambda c: torch.autograd.grad(y, v, c, create_graph=True, allow_unused=True)[0]
        return in_scan(step, u)

    with pytest.raises(ShardError, match="differentiates values from outside"):
        sf.jit(fn, backend="aten")(W, U)


def test_in_the_code_of_ranks_it_equals_the_loop() -> None:
    def per_rank(applied: Any) -> Any:
        def fn(w: Tensor, u: Tensor) -> Tensor:
            _, pull = sf.vjp(lambda v: layer(v) * sf.psum(v, "a"), w)
            return applied(lambda c: pull(c)[0], u)

        return sf.shard_map(fn, in_placements=(P("a"), P("a")), out_placements=P("a"))

    with simulated(a=5) as mesh:
        run = lambda applied: sf.full(sf.shard(per_rank(applied), mesh, backend="aten")(W, U))
        assert_close(run(in_scan), run(looped), rtol=1e-10, atol=1e-12)
