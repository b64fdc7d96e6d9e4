"""Cumulative ops along a sharded dim: values and gradients of one device, and one row for each rank
sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from equality import close
from ranks import run_ranks

import shardfn as sf
from shardfn import P

Fn = Callable[[torch.Tensor], torch.Tensor]
ROWS, LONG, WIDE = 3, 67, 2  # 67: uneven chunks on all meshes
OPS: dict[str, Fn] = {
    "cumsum": lambda x: x.cumsum(1),
    "from the end": lambda x: x.flip(1).cumsum(1).flip(1),
    "logcumsumexp": lambda x: x.logcumsumexp(1),
    "cummax": lambda x: x.cummax(1)[0],
    "cummin": lambda x: x.cummin(1)[0],
}
MESHES: dict[str, tuple[dict[str, int], P]] = {
    "line": ({"cp": 4}, P(None, "cp")),
    "grid": ({"dp": 2, "cp": 3}, P("dp", "cp")),
    "features too": ({"cp": 3, "tp": 2}, P(None, "cp", "tp")),
}


def drawn(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


X = drawn(ROWS, LONG, WIDE)


def step(fn: Fn) -> Any:
    """The value, the gradient and the result of a function."""

    def loss(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = fn(x)
        return (y.sin() * y).mean(), y

    return sf.value_and_grad(loss, has_aux=True)


def mesh_of(name: str) -> tuple[Any, P]:
    sizes, spec = MESHES[name]
    return sf.make_mesh(tuple(sizes.values()), tuple(sizes)), spec


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", OPS)
def test_values_and_gradients_are_those_of_one_device(name: str, mesh: str) -> None:
    wanted = step(OPS[name])(X)
    sizes, _ = MESHES[mesh]
    n = torch.Size([*sizes.values()]).numel()
    with sf.fake_world(n):
        found = sf.shard(step(OPS[name]), *mesh_of(mesh), backend="aten")(X)
        close(sf.full(found), wanted)


@pytest.mark.parametrize("size", [5, 9])
@pytest.mark.parametrize("name", OPS)
def test_ranks_may_have_no_element(name: str, size: int) -> None:
    x = drawn(2, size, 40)
    wanted = step(OPS[name])(x)
    with sf.fake_world(8):
        mesh = sf.make_mesh((8,), ("cp",))
        found = sf.shard(step(OPS[name]), mesh, P(None, "cp"), backend="aten")(x)
        close(sf.full(found), wanted)


def test_a_product_of_chunks_is_that_of_one_device() -> None:
    x = drawn(ROWS, LONG)
    for fill in (None, 0.0):
        y = x if fill is None else x.masked_fill(torch.arange(LONG) == 40, fill)
        with sf.fake_world(4):
            mesh = sf.make_mesh((4,), ("cp",))
            found = sf.shard(lambda x: x.cumprod(1).sin(), mesh, P(None, "cp"), backend="aten")(y)
            close(sf.full(found), y.cumprod(1).sin())


@pytest.mark.parametrize("mesh", MESHES)
def test_a_cumulative_sum_sends_a_row_of_each_rank_forward_and_backward(mesh: str) -> None:
    sizes, spec = MESHES[mesh]
    n = torch.Size([*sizes.values()]).numel()
    with sf.fake_world(n, numerics=False):
        f = sf.shard(step(OPS["cumsum"]), *mesh_of(mesh), backend="aten")
        sent = [c for c in f.lower(sf.ShapeDtype((6, 4096, 8))).collectives if c.nbytes > 8]
    rows = 6 // sizes.get("dp", 1) * 8 // sizes.get("tp", 1) * sizes["cp"]
    assert [(c.kind, c.axis) for c in sent] == [("all_gather", "cp")] * 2
    assert [c.nbytes for c in sent] == [4 * rows] * 2  # float32
    assert spec  # the same with other axes on other dims


def test_a_short_dim_is_gathered() -> None:
    x = sf.ShapeDtype((3, 8))
    with sf.fake_world(4, numerics=False):
        mesh = sf.make_mesh((4,), ("cp",))
        f = sf.shard(lambda x: x.cumsum(1), mesh, P(None, "cp"), backend="aten")
        assert [c.nbytes for c in f.lower(x).collectives] == [3 * 8 * 4]


@pytest.mark.parametrize("fn", [torch.cumsum, torch.logcumsumexp])
def test_half_precision_is_rounded_as_on_one_device(fn: Any) -> None:
    x = (drawn(2, 256).abs() * 8).round().div(8).bfloat16()  # sums are exact in float32
    with sf.fake_world(4):
        mesh = sf.make_mesh((4,), ("cp",))
        found = sf.shard(lambda x: fn(x, 1), mesh, P(None, "cp"), backend="aten")(x)
        exact = fn is torch.cumsum
        torch.testing.assert_close(sf.full(found), fn(x, 1), rtol=0 if exact else 1e-2, atol=0)


def test_zigzags_and_two_axes_on_the_dim_are_redistributed() -> None:
    x = drawn(2, 48, 3)
    wanted = step(OPS["cumsum"])(x)
    with sf.fake_world(4):
        line = sf.make_mesh((4,), ("cp",))
        grid = sf.make_mesh((2, 2), ("a", "b"))
        for mesh, spec in ((line, P(None, sf.zigzag("cp"))), (grid, P(None, ("a", "b")))):
            found = sf.shard(step(OPS["cumsum"]), mesh, spec, backend="aten")(x)
            close(sf.full(found), wanted)


def test_derivatives_of_gradients_and_batches() -> None:
    x = drawn(LONG)
    fns: list[Any] = [
        sf.vmap(lambda x: x.flip(0).cumsum(0).flip(0).sin()),
        lambda x: sf.grad(lambda x: (sf.grad(lambda x: x[0].cumsum(0).exp().mean())(x) ** 2).sum())(
            x
        ),
        lambda x: sf.jvp(lambda x: x[0].logcumsumexp(0), (x,), (x.cos(),)),
    ]
    for fn in fns:
        with sf.fake_world(3):
            mesh = sf.make_mesh((3,), ("cp",))
            found = sf.shard(fn, mesh, P(None, "cp"), backend="aten")(x[None] / LONG)
            close(sf.full(found), fn(x[None] / LONG))


def test_a_scan_over_layers_sends_rows_in_each_step() -> None:
    ws = drawn(3, WIDE)

    def layers(x: torch.Tensor, ws: torch.Tensor) -> torch.Tensor:
        return (
            sf.scan(lambda h, w: (((h * w).cumsum(1) / LONG).tanh(), None), x, ws)[0].square().sum()
        )

    both = sf.value_and_grad(layers, argnums=(0, 1))
    wanted = both(X, ws)
    with sf.fake_world(4):
        mesh = sf.make_mesh((4,), ("cp",))
        f = sf.shard(both, mesh, (P(None, "cp"), None), backend="aten")
        close(sf.full(f(X, ws)), wanted)


def run(backend: str) -> Any:
    mesh = sf.make_mesh((2,), ("cp",))
    fs = [sf.shard(step(fn), mesh, P(None, "cp"), backend=backend) for fn in OPS.values()]
    return [sf.full(f(X)) for f in fs]


def test_gloo_computes_what_the_simulator_does() -> None:
    torch.set_num_threads(1)
    with sf.fake_world(2):
        simulated = run("aten")
    for real in run_ranks(2, run, "aten"):
        torch.testing.assert_close(real, simulated, rtol=0, atol=0)


def test_compiled_chunks_on_gloo() -> None:
    wanted = [step(fn)(X) for fn in OPS.values()]
    for real in run_ranks(2, run, "inductor"):
        close(real, wanted)
