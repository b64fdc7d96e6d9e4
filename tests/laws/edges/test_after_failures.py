"""A call depends on its arguments: what failed before it, the `except` block around it and the
grad mode of an earlier call change neither its value nor its error.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from worlds import simulated

import shardfn as sf
from shardfn import P

F64 = torch.float64
G = torch.Generator().manual_seed(11)
X = torch.randn(3, 5, generator=G, dtype=F64)


def loss(x: torch.Tensor) -> torch.Tensor:
    return (x / (1 + x.norm())).pow(3).sum()


def _raising(x: torch.Tensor) -> torch.Tensor:
    raise ValueError(f"of {x.dim()} dims")


# calls that fail, each in its own way
FAILURES: dict[str, Callable[[], Any]] = {
    "argnums is a tensor": lambda: sf.grad(loss, argnums=torch.tensor(0))(X),
    "the same while it is read": lambda: sf.jit(lambda x: sf.hessian(loss, argnums=x[0, 0])(x))(X),
    "axes are a tensor": lambda: sf.vmap(loss, in_axes=torch.tensor(0))(X),
    "a branch on a value": lambda: sf.jit(lambda x: x if x.sum() > 0 else -x)(X),
    "shapes do not fit": lambda: sf.grad(lambda x: (x @ x).sum())(X),
    "it raises": lambda: sf.jit(_raising)(X),
    "a body raises": lambda: sf.grad(
        lambda x: sf.scan(lambda c, r: (_raising(r), c), x[0], x)[0].sum()
    )(X),
    "not a scalar": lambda: sf.grad(torch.sin)(X),
    "no mesh": lambda: sf.shard(loss, None, (P("a"),))(X),
}


ERRORS = sf.ShardError, RuntimeError, ValueError


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(ERRORS) as error:
        call()
    return str(error.value)


def test_a_failed_call_changes_no_later_one() -> None:
    value = torch.func.grad(loss)(X)
    for failure in FAILURES.values():
        refusal(failure)
        assert_close(sf.grad(lambda x: loss(x))(X), value)
    wanted = torch.func.hessian(loss)(X)
    assert_close(sf.hessian(loss)(X), wanted)
    with simulated(a=2) as mesh:
        f = sf.shard(lambda x: sf.grad(loss)(x), mesh, (P("a"),), backend="aten")
        assert_close(sf.full(f(X)), value)


def test_an_error_inside_an_except_block_is_its_own() -> None:
    names = [*FAILURES]
    alone = {name: refusal(FAILURES[name]) for name in names}
    for shift in (1, 4):
        for first, second in zip(names, names[shift:] + names[:shift], strict=True):
            try:
                FAILURES[first]()
            except ERRORS:
                assert refusal(FAILURES[second]) == alone[second], (first, second)


HESSIANS = {
    "norm": loss,
    "solve": lambda x: torch.linalg.solve(x @ x.T + torch.eye(3), x[:, 0]).sum(),
    "constant factor": lambda x: (torch.ones(15).view(5, 3).T * x.sin()).sum(),
    "softmax": lambda x: torch.softmax(x, 1).pow(2).sum(),
}


@pytest.mark.parametrize("name", HESSIANS)
def test_a_hessian_read_without_grad_mode_is_right_in_both(name: str) -> None:
    f = lambda x: HESSIANS[name](x.float())  # captured nowhere else
    wanted = torch.func.hessian(f)(X)
    second = {torch.no_grad: sf.hessian(f), torch.inference_mode: sf.jacrev(sf.jacrev(f))}
    for mode, transformed in second.items():
        with mode():
            assert_close(transformed(X), wanted)
        assert_close(transformed(X), wanted)


def test_the_tangents_of_pulls_are_right_without_grad_mode() -> None:
    f = HESSIANS["solve"]
    wanted = torch.func.hessian(f)(X.float())
    pull = lambda x: sf.vjp(f, x)[1](torch.ones(()))[0]
    with torch.no_grad():
        assert_close(sf.jacfwd(pull)(X.float()), wanted)


def test_no_grad_inside_a_derivative_still_stops_it() -> None:
    def stopped(module: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        def f(x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                slope = module.jacrev(lambda x: x.sin().sum())(x)
            return (slope * x).sum()

        return f

    with torch.no_grad():
        got = sf.grad(stopped(sf))(X)
    assert_close(got, torch.func.grad(stopped(torch.func))(X))


def test_reading_in_inference_mode_keeps_the_grad_mode() -> None:
    f = lambda x: x + float(torch.is_grad_enabled())
    with torch.inference_mode():
        assert torch.equal(sf.jit(f, backend="aten")(X), f(X))
    assert torch.equal(sf.jit(f, backend="aten")(X), f(X))


INDEXED = {
    "transposed": lambda x, i: x[i.T],
    "sliced": lambda x, i: x[i.t()[1:]],
    "stepped": lambda x, i: x[i[:, ::2]],
    "expanded": lambda x, i: x[i.unsqueeze(0).expand(2, 3, 4)],
    "put": lambda x, i: x.index_put((i.T,), x[0].expand(4, 3, 5)),
    "taken": lambda x, i: torch.take(x, i.T),
    "two": lambda x, i: x[i.T, i.T % 5],
}


def test_views_of_sharded_indices_index_as_they_do_on_one_device() -> None:
    x = torch.randn(7, 5, generator=G, dtype=F64)
    i = torch.randint(0, 7, (3, 4), generator=G)
    specs = [(P(), P("a")), (P("a"), P(None, "b")), (P(("a", "b")), P("b", "a"))]
    # the last value put at an index is any of them, so all are equal
    with simulated(a=2, b=3) as mesh:
        for (name, f), where in itertools.product(INDEXED.items(), specs):
            got = sf.full(sf.shard(f, mesh, where, backend="aten")(x, i))
            assert_close(got, f(x, i), msg=f"{name} {where}")


@pytest.mark.parametrize("name", ["transposed", "taken", "two"])
def test_gradients_through_views_of_sharded_indices(name: str) -> None:
    x = torch.randn(7, 5, generator=G, dtype=F64)
    i = torch.randint(0, 7, (5, 3), generator=G)
    loss = lambda x, i: (INDEXED[name](x, i) ** 3).sum()
    with simulated(a=3) as mesh:
        step = sf.shard(sf.grad(loss), mesh, (P("a"), P("a")), backend="aten")
        got = sf.full(step(x, i))
    assert_close(got, torch.func.grad(loss)(x, i))


def test_the_tangent_of_a_gradient_of_loops_keeps_its_dtype() -> None:
    x, w = X.float(), X[:, :3].float()

    def scanned(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        step = lambda c, r: (0.5 * torch.tanh(w @ c) + r[:3] * 2, c.sum() * 0.1)
        c, ys = sf.scan(step, x[0, :3], x)
        return (c * ys.sum()).sum()

    def unrolled(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        c, total = x[0, :3], torch.zeros(())
        for row in x:
            total = total + c.sum() * 0.1
            c = 0.5 * torch.tanh(w @ c) + row[:3] * 2
        return (c * total).sum()

    got = sf.jvp(sf.grad(scanned, (0, 1)), (w, x), (w, x))
    _, pull = torch.func.vjp(torch.func.grad(unrolled, (0, 1)), w, x)
    for value, wanted in zip(got[0], torch.func.grad(unrolled, (0, 1))(w, x), strict=True):
        assert_close(value, wanted)
    # the hessian is symmetric, so its product with a vector is that from the other side
    for tangent, wanted in zip(got[1], pull((w, x)), strict=True):
        assert_close(tangent, wanted)


def test_a_map_has_jacobians_under_grad() -> None:
    mapped = lambda x: sf.map(lambda r: torch.sin(r) * r.sum(), x)
    plain = lambda x: torch.sin(x) * x.sum(1, keepdim=True)
    got = sf.grad(lambda x: sf.jacfwd(mapped)(x).pow(2).sum())(X)
    wanted = torch.func.grad(lambda x: torch.func.jacfwd(plain)(x).pow(2).sum())(X)
    assert_close(got, wanted)
