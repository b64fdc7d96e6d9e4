"""Values whose strides torch's fake kernels do not know, when they are viewed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import P

X = torch.linspace(-3, 3, 24, dtype=torch.float64).reshape(6, 4)
Y = X.flip(0).reshape(4, 6) + 0.1
OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "copysign": torch.copysign,
    "floor_divide": torch.floor_divide,
    "div": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "log_sigmoid": lambda x, y: torch.nn.functional.logsigmoid(x) + y,
}


def flat(op: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    return op(x.T, y).reshape(-1) * 2


@pytest.mark.parametrize("name", OPS)
def test_a_view_of_them_is_right(name: str) -> None:
    fn = lambda x, y: flat(OPS[name], x, y)
    wanted = fn(X, Y)
    torch.testing.assert_close(sf.jit(fn, backend="aten")(X, Y), wanted)
    with sf.fake_world(3):
        mesh = sf.make_mesh((3,), ("a",))
        for places in ((P(), P()), (P("a"), P()), (P(None, "a"), P("a"))):
            got = sf.shard(fn, mesh, places)(X, Y)
            torch.testing.assert_close(sf.full(got), wanted)


def test_in_a_loop_and_its_gradient() -> None:
    def step(carry: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        row = torch.copysign(carry.T, y).reshape(-1)
        return carry + row.reshape(6, 4), row.sum()

    def loss(x: Tensor, ys: Tensor) -> Tensor:
        last, sums = sf.scan(step, x, ys)
        return last.sum() + sums.sum()

    ys = torch.stack([Y, -Y])
    grad = sf.grad(loss)
    wanted = torch.func.grad(lambda x: written(step, x, ys))(X)
    torch.testing.assert_close(sf.jit(grad, backend="aten")(X, ys), wanted)
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("a",))
        got = sf.shard(grad, mesh, (P("a"), P()))(X, ys)
        torch.testing.assert_close(sf.full(got), wanted)


def written(step: Callable[..., tuple[Tensor, Tensor]], x: Tensor, ys: Tensor) -> Tensor:
    sums = []
    for y in ys:
        x, total = step(x, y)
        sums.append(total)
    return x.sum() + torch.stack(sums).sum()


NAN, INF = float("nan"), float("inf")
NUMBERS = complex(1, NAN), complex(NAN, INF), complex(-INF, 2), complex(3, -INF), complex(-0.0, 1)


@pytest.mark.parametrize("backend", ["aten", "inductor"])
def test_complex_numbers_that_have_no_text_of_their_own_are_constants(backend: str) -> None:
    z = torch.tensor([1 + 2j, -3j], dtype=torch.complex128)
    fn = lambda z: tuple(torch.where(z.real > 0, number, z) for number in NUMBERS)
    torch.testing.assert_close(sf.jit(fn, backend=backend)(z), fn(z), equal_nan=True)


def test_a_zero_with_a_sign_stays_one_in_a_complex_number() -> None:
    fn = lambda z: torch.where(z.real > 0, complex(-0.0, 1), z).real
    z = torch.ones(2, dtype=torch.complex128)
    assert torch.signbit(sf.jit(fn, backend="aten")(z)).all()


def test_hooks_of_all_modules_are_those_of_the_users_modules() -> None:
    linear, x = torch.nn.Linear(2, 2), torch.ones(3, 2)
    hook = torch.nn.modules.module.register_module_forward_hook(lambda module, _, y: y + 100)
    try:
        for backend in ("aten", "inductor"):
            call = sf.jit(lambda x: linear(x) * 2, backend=backend)
            torch.testing.assert_close(call(x), linear(x) * 2)
    finally:
        hook.remove()
