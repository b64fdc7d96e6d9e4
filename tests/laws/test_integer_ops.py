"""Ops of integers, also with fractional factors, have torch's values and dtypes: op by op,
compiled, and sharded.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from worlds import simulated

import shardfn as sf
from shardfn import P

PRODUCTS: dict[str, tuple[Callable[..., torch.Tensor], tuple[tuple[int, ...], ...]]] = {
    "addmm": (torch.addmm, ((3, 5), (3, 4), (4, 5))),
    "addmv": (torch.addmv, ((3,), (3, 4), (4,))),
    "addbmm": (torch.addbmm, ((3, 5), (2, 3, 4), (2, 4, 5))),
    "baddbmm": (torch.baddbmm, ((2, 3, 5), (2, 3, 4), (2, 4, 5))),
}
FACTORS = ((1, 1), (2, 3), (0.5, 1), (1, 0.5), (1.5, 2.5), (0.4, 0.4), (True, False))
DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
OTHERS = (torch.bfloat16, torch.float16, torch.complex64)


def operands(name: str, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    _, shapes = PRODUCTS[name]
    return [torch.randint(0, 5, s, generator=generator).to(dtype) for s in shapes]


def every(name: str) -> Callable[..., list[torch.Tensor]]:
    op, _ = PRODUCTS[name]
    return lambda *xs: [op(*xs, alpha=a, beta=b) for a, b in FACTORS]


def assert_same(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for factors, mine, true in zip(FACTORS, got, wanted, strict=True):
        assert mine.dtype == true.dtype, factors
        bound = 3e-2 if true.is_floating_point() or true.is_complex() else 0
        assert torch.allclose(mine, true, rtol=bound, atol=bound), factors


@pytest.mark.parametrize("name", list(PRODUCTS))
@pytest.mark.parametrize("dtype", DTYPES + OTHERS, ids=str)
def test_products_with_factors_have_torchs_dtype_and_value(name: str, dtype: torch.dtype) -> None:
    xs, fn = operands(name, dtype), every(name)
    wanted = fn(*xs)
    assert_same(sf.jit(fn, backend="aten")(*xs), wanted)
    with simulated(a=3) as mesh:
        for places in ((P(), P("a"), P()), (P("a"), P(), P()), (P(), P(), P("a"))):
            step = sf.shard(fn, mesh, in_placements=places)
            assert_same(sf.full(step(*xs)), wanted)


def test_compiled_products_with_factors_have_torchs_dtype_and_value() -> None:
    names, dtypes = list(PRODUCTS), (torch.int32, torch.int8, torch.uint8)
    xs = [operands(name, dtype) for name in names for dtype in dtypes]
    fns = [every(name) for name in names for _ in dtypes]
    results = sf.jit(
        lambda xs: [fn(*x) for fn, x in zip(fns, xs, strict=True)], backend="inductor"
    )(xs)
    for fn, x, got in zip(fns, xs, results, strict=True):
        assert_same(got, fn(*x))


LINES = ((0.5, 5.7, 5), (-9, 10, 7), (10, -3, 8), (2, 2, 1), (-5.5, 5.5, 6), (0, 100, 17))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linspace_of_integers_is_torchs(dtype: torch.dtype) -> None:
    lines = [line for line in LINES if dtype.is_signed or min(line[:2]) >= 0]
    fn = lambda: [torch.linspace(*line, dtype=dtype) for line in lines]
    for got, wanted in zip(sf.jit(fn, backend="aten")(), fn(), strict=True):
        assert got.dtype == wanted.dtype
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64])
def test_compiled_writes_of_scaled_products_keep_the_dtype(dtype: torch.dtype) -> None:
    x = torch.arange(35, dtype=dtype).reshape(5, 7)
    fn = lambda x: x.clone().addcmul_(x, x, value=3)
    got = sf.jit(fn, backend="inductor")(x)
    assert got.dtype is dtype
    assert torch.equal(got, fn(x))
