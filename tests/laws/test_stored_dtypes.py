"""Dtypes that torch only stores and casts, as float8, unsigned integers of more than 8 bits and
those of less than 8, pass every rule that moves elements; a float8 linear layer trains sharded.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.testing import assert_close
from worlds import simulated

import shardfn as sf
from shardfn import P

FLOAT8 = tuple(
    getattr(torch, name)
    for name in (
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
)
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
PACKED = (torch.uint4, torch.int4, torch.uint1, torch.float4_e2m1fn_x2)
E4M3 = torch.float8_e4m3fn
PLACES = (P("a"), P(None, "a"), P())

MOVES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "clone": torch.clone,
    "transpose": lambda x: x.t().contiguous(),
    "slice": lambda x: x[1:4],
    "view": lambda x: x.reshape(6, 5),
    "cat": lambda x: torch.cat([x, x], 1),
    "stack": lambda x: torch.stack([x, x]),
    "bytes": lambda x: x.view(torch.uint8),
    "zeros": torch.zeros_like,
}
CASTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "wide": lambda x: x.to(torch.float32) * 2,
    "half": lambda x: x.to(torch.bfloat16),
    "sum": lambda x: x.to(torch.float32).sum(0),
}
INTEGERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": torch.sum,
    "sum of rows": lambda x: x.sum(0),
    "cumsum": lambda x: x.cumsum(0),
    "roll": lambda x: x.roll(1),
    "roll rows": lambda x: x.roll((1, 2), (0, 1)),
    "cast": lambda x: x.to(torch.int64),
}


def raw(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8) if x.dtype in (*FLOAT8, *UNSIGNED, *PACKED) else x


def check(fns: dict[str, Callable[[torch.Tensor], torch.Tensor]], x: torch.Tensor) -> None:
    every = lambda x: [fn(x) for fn in fns.values()]
    wanted = every(x)
    results = [sf.jit(every, backend="aten")(x)]
    with simulated(a=3) as mesh:
        for place in PLACES:
            results.append(sf.full(sf.shard(every, mesh, in_placements=place)(x)))
    for result in results:
        for name, got, true in zip(fns, result, wanted, strict=True):
            assert got.dtype == true.dtype, name
            assert torch.equal(raw(got), raw(true)), name


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_float8_is_moved_and_cast(dtype: torch.dtype) -> None:
    x = torch.rand(5, 6, generator=torch.Generator().manual_seed(0)) + 0.5
    check(MOVES | CASTS, x.to(dtype))
    check({"to it": lambda x: x.to(dtype), "and back": lambda x: x.to(dtype).float()}, x)


@pytest.mark.parametrize("dtype", UNSIGNED, ids=str)
def test_unsigned_integers_are_moved_and_added_up(dtype: torch.dtype) -> None:
    check(MOVES | INTEGERS, torch.arange(30).view(5, 6).to(dtype))


@pytest.mark.parametrize("dtype", PACKED, ids=str)
def test_packed_numbers_enter_and_are_viewed(dtype: torch.dtype) -> None:
    x = torch.arange(30, dtype=torch.uint8).view(5, 6).view(dtype)
    check({"bytes": lambda x: x.view(torch.uint8) + 1}, x)


def scaled(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor in float8 and the factor that makes it large again, as torchao has them."""
    scale = torch.finfo(E4M3).max / x.abs().max().clamp_min(1e-12).float()
    return (x.float() * scale).clamp(-448, 448).to(E4M3), 1 / scale


def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    (a, a_scale), (b, b_scale) = scaled(x), scaled(w)
    return torch._scaled_mm(a, b.t(), scale_a=a_scale, scale_b=b_scale, out_dtype=torch.bfloat16)


class Linear(torch.autograd.Function):
    """torchao's float8 linear layer, in short: all three products are of float8."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor, w: torch.Tensor):
        ctx.save_for_backward(x, w)
        return product(x, w)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, g: torch.Tensor):
        x, w = ctx.saved_tensors
        return product(g, w.t().contiguous()), product(g.t().contiguous(), x.t().contiguous())


def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return Linear.apply(x, w).float().pow(2).mean()


@pytest.mark.parametrize("places", [(P(), P("a")), (P("a"), P()), (P(None, "a"), P(None, "a"))])
def test_a_step_of_a_float8_linear_layer_is_that_of_one_device(places: tuple[P, P]) -> None:
    generator = torch.Generator().manual_seed(0)
    w, x = (torch.randn(n, 16, generator=generator).bfloat16() for n in (16, 32))
    own = w.clone().requires_grad_()
    loss(own, x).backward()
    with simulated(a=2) as mesh:
        step = sf.shard(sf.grad(loss), mesh, in_placements=places, backend="inductor")
        got = sf.full(step(w, x))
    assert_close(got, own.grad, rtol=3e-2, atol=3e-3)


def gathered(dtype: torch.dtype) -> bool:
    x = torch.arange(30).view(5, 6).to(dtype)
    mesh = sf.make_mesh((dist.get_world_size(),), ("a",))
    step = sf.shard(
        lambda x: x.t().contiguous(), mesh, in_placements=P("a"), out_placements=P(), backend="aten"
    )
    return torch.equal(raw(sf.full(step(x))), raw(x.t()))


def test_real_processes_gather_stored_dtypes() -> None:
    for dtype in (torch.uint16, E4M3):
        assert all(run_ranks(2, gathered, dtype))


@pytest.mark.parametrize("dtype", [*FLOAT8, *UNSIGNED, torch.complex32, torch.bool])
def test_a_checkpoint_has_every_dtype(dtype: torch.dtype, tmp_path: pathlib.Path) -> None:
    x = torch.tensor([[1, 0, 2], [0, 4, 1], [2, 2, 0]]).to(dtype)
    sf.save(tmp_path, {"x": x}, step=1)
    assert torch.equal(sf.load(tmp_path, {"x": x})["x"].view(torch.uint8), x.view(torch.uint8))
    with simulated(a=2) as mesh:
        sf.save(tmp_path, {"x": sf.distribute(x, mesh, P("a"))}, step=2)
        found = sf.full(sf.load(tmp_path, {"x": sf.ShapeDtype(x.shape, dtype)}, mesh, P(None, "a")))
    assert torch.equal(found["x"].view(torch.uint8), x.view(torch.uint8))
