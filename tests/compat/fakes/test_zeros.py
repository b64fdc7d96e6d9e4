"""Tangents that are zero without being computed, where tensors are fake: what torch gets wrong
of them (torch 2.13).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import shardfn as sf
from shardfn import _compat
from shardfn._compat.patches import PATCHES

F64 = torch.float64
G = torch.Generator().manual_seed(3)
W, X = (torch.randn(3, 3, generator=G, dtype=F64), torch.randn(5, 3, generator=G, dtype=F64))


@pytest.fixture(autouse=True)
def nothing_known() -> None:
    """Torch remembers what it answered of fake tensors, and what went wrong once may go right
    the next time.
    """
    FakeTensorMode.cache_clear()


def captures() -> Any:
    """Torch as it is for a capture."""
    takes = (row.takes for row in PATCHES["capture"] if row.takes)
    return _compat.patched("capture", **{**dict.fromkeys(takes), "device": "cpu"})


VIEWS = {
    "view": lambda z: z.view(9),
    "twice": lambda z: z.view(9).view(3, 3),
    "of another dtype": lambda z: z.view(torch.int64),
    "as_strided": lambda z: z.as_strided((2, 2), (1, 3)),
    "transposed": lambda z: z.T,
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_of_such_a_zero_stays_fake(view: str) -> None:
    with captures(), _compat.fake_mode():
        found = VIEWS[view](torch._efficientzerotensor((3, 3), dtype=F64))
        assert _compat.is_fake(found)
        assert found._is_zerotensor()
        assert found.device.type == "cpu"


def test_outside_torch_is_as_it_was() -> None:
    def kernel() -> str:
        return next(
            line
            for line in torch._C._dispatch_dump("aten::view").splitlines()
            if line.startswith("ZeroTensor")
        )

    before = kernel()
    with captures():
        assert kernel() != before
    assert kernel() == before


# functions of (3, 3) and (5, 3) whose tangents are zero in places
FUNCTIONS = {
    "a number over": lambda w, x: torch.func.jvp(lambda c: (x @ c / 9).sin(), (w,), (w.cos(),))[1],
    "a number added": lambda w, x: torch.func.jvp(
        lambda c: (torch.zeros_like(c) * c).T.reshape(9) + 2, (w,), (w,)
    )[1],
    "normalised": lambda w, x: torch.func.jvp(
        lambda c: torch.log_softmax(c, -1) * torch.tanh(c), (x,), (x + 1,)
    )[1],
    "constant": lambda w, x: torch.func.jvp(
        lambda c: torch.ones(9, dtype=F64).view(3, 3) @ c + x.detach()[:3], (w,), (w,)
    )[1],
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("placement", [sf.P(), sf.P("a")], ids=["replicated", "sharded"])
def test_gradients_and_tangents_through_such_zeros(function: str, placement: sf.P) -> None:
    f = FUNCTIONS[function]

    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return f(w, x).sin().sum()

    both = torch.stack([W, W.T])
    wanted = (
        torch.func.vmap(torch.func.grad(loss), (0, None))(both, X),
        torch.func.jvp(torch.func.grad(loss, 1), (W, X), (W, X))[1],
    )
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("a",))
        got = sf.shard(sf.vmap(sf.grad(loss), (0, None)), mesh, (None, placement), backend="aten")(
            both, X
        )
        torch.testing.assert_close(sf.full(got), wanted[0], rtol=1e-12, atol=1e-12)
        tangent = sf.shard(
            lambda w, x: sf.jvp(sf.grad(loss, 1), (w, x), (w, x))[1],
            mesh,
            (None, placement),
            backend="aten",
        )(W, X)
        torch.testing.assert_close(sf.full(tangent), wanted[1], rtol=1e-12, atol=1e-12)


def test_no_program_holds_such_a_zero() -> None:
    """Outside of a capture torch would take such a zero to a meta tensor, which meets others."""
    loss = lambda x: (torch.sin(x) * x).sum()
    f = sf.vmap(sf.hessian(loss))
    assert "_efficientzerotensor" not in str(f.trace(X))
    torch.testing.assert_close(f(X), torch.func.vmap(torch.func.hessian(loss))(X))


@pytest.mark.parametrize("op", [torch.add, torch.sub, torch.mul, torch.div, torch.linalg.cross])
def test_arithmetic_of_such_a_zero_is_as_torch_has_it(op: object) -> None:
    x = torch.rand(2, 3, generator=G, dtype=torch.float32) + 1  # x / 0 is inf in torch, for -1 too
    zero = lambda *shape, dtype=F64: torch._efficientzerotensor(shape, dtype=dtype)
    pairs = [(zero(3), x), (x, zero(2, 3))]
    if op is torch.linalg.cross:
        pairs = [(zero(2, 3, dtype=torch.float32), x)]
    for a, b in pairs:
        wanted = op(a, b)
        with captures():
            got = op(a, b)
        assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
        assert got._is_zerotensor() == wanted._is_zerotensor()
        torch.testing.assert_close(got.to("cpu") + 0, wanted.to("cpu") + 0, equal_nan=True)
