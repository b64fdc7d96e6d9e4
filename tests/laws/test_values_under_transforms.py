"""Ops for which torch reads values under a transform: one program serves all values, and every
derivative is torch's own of one device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close
from worlds import simulated

import shardfn as sf
from shardfn import P, ShardError

F64 = torch.float64
X = torch.randn(5, 3, generator=torch.Generator().manual_seed(1), dtype=F64)
X[1, 2] = 0.0  # a product with one zero, and with two
X[2, 2] = 0.0
I = torch.tensor([0, 2, 1, 2, 4])
M = torch.tensor([True, False, True, False, True])
WIDE = M[:, None] ^ torch.tensor([True, False, True])
COUNT = int(WIDE.sum())
COLUMNS = torch.tensor([True, False, True])


def rows(x: Tensor, key: Any, value: Any) -> Tensor:
    y = x * 2
    y[key] = value
    return y


def in_place(x: Tensor) -> Tensor:
    y = x * 2
    y.index_put_((M,), x[:3] ** 2)
    y.index_fill_(0, I[:1], x[3, 1])
    return y


OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "one_hot": lambda x: F.one_hot(I, 5).to(F64) @ x,
    "one_hot by name": lambda x: F.one_hot(I % 3, num_classes=3) * x,
    "bincount": lambda x: torch.bincount(I, minlength=5)[:, None] * x + I.bincount(minlength=7)[6],
    "mask and number": lambda x: rows(x, M, 1.5),
    "mask and scalar": lambda x: rows(x, WIDE, x[0, 1]),
    "mask and row": lambda x: rows(x, M, x[1] ** 2),
    "mask and one row": lambda x: rows(x, M, x[1:2] ** 2),
    "mask and rows": lambda x: rows(x, M, x[:3] ** 2),
    "mask and elements": lambda x: rows(x, WIDE, x.flatten()[:COUNT] ** 2),
    "mask of columns": lambda x: rows(x, (slice(None), COLUMNS), x[:, :2] ** 2),
    "mask from values": lambda x: rows(x, x > 0.1, x.sum()),
    "index_put": lambda x: (x * 2).index_put((M,), x[:3] ** 2),
    "index_put, added": lambda x: torch.index_put(x * 2, (M,), x[:3] ** 2, accumulate=True),
    "index_fill": lambda x: (x * 2).index_fill(0, I[:3], x[3, 0] ** 2),
    "products": lambda x: (x * 2).scatter_reduce(0, I[:, None].expand(5, 3), x, "prod"),
    "others' products": lambda x: torch.scatter_reduce(
        x, 1, I.expand(5, 5)[:, :3] % 3, x + 1, "prod", include_self=False
    ),
    **{
        f"index_reduce {how}": lambda x, how=how: x.index_reduce(0, I, x**2 + 1, how)
        for how in ("prod", "mean", "amax", "amin")
    },
    "products of a part": lambda x: (x * 2).scatter_reduce(
        0, I[:3, None].expand(3, 2), x[:3, :2], "prod"
    ),
    "index_fill of a number": lambda x: x.sum().index_fill(0, I[:1], x[3, 0] ** 2) + x,
    "scatter_reduce of a number": lambda x: x.sum().scatter_reduce(0, I[0], x[3, 0], "prod") + x,
    "index_reduce of a number": lambda x: x.sum().index_reduce(0, I[:1], x[3, 0], "prod") + x,
    "an empty circular pad": lambda x: F.pad(x.expand(0, 5, 3), (1, 1), mode="circular").sum() + x,
    "shifts of bools": lambda x: ((x > 0) >> 1) * x + ((x > 0) << 2) * x,
    "in place": in_place,
}


def loss(name: str) -> Callable[[Tensor], Tensor]:
    return lambda x: (OPS[name](x) ** 2).sum()


def wanted(name: str, x: Tensor) -> Tensor:
    leaf = x.clone().requires_grad_()
    return torch.autograd.grad(loss(name)(leaf), leaf)[0]


@pytest.mark.parametrize("name", OPS)
def test_the_gradient_and_its_kin_are_torchs(name: str) -> None:
    fn = loss(name)
    along = X.cos()
    gradient = wanted(name, X)
    assert_close(sf.grad(fn)(X), gradient)
    assert_close(sf.jvp(fn, (X,), (along,))[1], (gradient * along).sum())
    with simulated(a=2) as mesh:
        run = sf.shard(sf.grad(fn), mesh, P("a"), backend="aten")
        assert_close(sf.full(run(X)), gradient)


@pytest.mark.parametrize("name", [name for name in OPS if "reduce a" not in name])
def test_second_derivatives_and_those_of_samples_are_torchs(name: str) -> None:
    fn = loss(name)
    samples = torch.stack([X, X + 1])
    found = sf.vmap(sf.grad(fn))(samples)
    assert_close(found, torch.stack([wanted(name, x) for x in samples]))
    second = torch.autograd.functional.hvp(fn, X, X.cos())[1]
    assert_close(sf.jvp(sf.grad(fn), (X,), (X.cos(),))[1], second)


def test_without_a_transform_they_are_torchs_too() -> None:
    for name, op in OPS.items():
        assert_close(sf.jit(op, backend="aten")(X), op(X), msg=name)


def test_another_number_of_values_than_the_mask_has_is_nan_where_torch_stops() -> None:
    found = sf.grad(lambda x: rows(x, M, x[:2]).sum())
    assert sf.vmap(lambda x: rows(x, M, x[:2]))(X[None])[0][M].isnan().all()
    assert found(X)[3].eq(2).all()


def test_shapes_that_torch_refuses_are_refused() -> None:
    for key, value in ((M, X[:, :2]), (WIDE, X.expand(2, 5, 3))):
        with pytest.raises(ShardError):
            sf.grad(lambda x, key=key, value=value: rows(x, key, value).sum())(X)
    for value in (1.0, X[:2]):  # torch's own error
        with pytest.raises(IndexError, match=r"The shape of the mask \[3\] at index 0 does not"):
            sf.grad(lambda x, value=value: rows(x, M[:3], value).sum())(X)


def test_a_product_into_one_column_leaves_the_others() -> None:  # torch's gradient does not
    some = lambda x: x.scatter_reduce(0, I[:, None], x, "prod").sin().sum()
    column = lambda x: x[:, :1].scatter_reduce(0, I[:, None], x[:, :1], "prod")
    every = lambda x: torch.cat([column(x), x[:, 1:]], 1).sin().sum()
    assert_close(sf.grad(some)(X), torch.func.grad(every)(X))


def test_a_number_without_a_bin_is_an_error_on_any_shard() -> None:
    with sf.fake_world(2), pytest.raises(Exception, match="out of bounds"):
        count = lambda x: torch.bincount(x, minlength=4)
        sf.full(sf.shard(count, sf.make_mesh((2,), ("a",)), P("a"), backend="aten")(I))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int8, torch.uint8, torch.bool, torch.int64])
def test_products_of_integers_have_their_dtype_under_vmap(dtype: torch.dtype) -> None:
    x = torch.arange(-5, 25).reshape(2, 5, 3).to(dtype)
    at = torch.arange(30).reshape(2, 5, 3) % 4
    by_element = lambda x, i: x.scatter_reduce(0, i, x.flip(0), "prod")
    by_row = lambda x, i: x.index_reduce(0, i[:, 0], x.flip(0), "prod", include_self=False)
    for fn in (by_element,) if dtype is torch.bool else (by_element, by_row):
        wanted = torch.stack([fn(*rows) for rows in zip(x, at, strict=True)])
        assert_close(sf.jit(sf.vmap(fn), backend="aten")(x, at), wanted)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_the_gradient_of_a_soft_margin_has_torchs_nan(reduction: str) -> None:
    x = torch.tensor([[1.0, math.inf, 800.0], [-math.inf, math.nan, -0.5]], dtype=F64)
    target = torch.tensor([[1.0, -1.0, -1.0], [1.0, 1.0, -1.0]], dtype=F64)
    fn = lambda x: F.soft_margin_loss(x, target, reduction=reduction).sum()
    leaf = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(fn(leaf), leaf)
    for backend in ("aten", "inductor"):
        assert_close(sf.jit(sf.grad(fn), backend=backend)(x), slope, equal_nan=True)


def test_a_soft_margin_of_half_precision_has_torchs_infinity() -> None:
    x = torch.tensor([[-12.0, 1.0], [0.5, -3.0]], dtype=torch.float16)
    fn = lambda x: F.soft_margin_loss(x, torch.ones_like(x), reduction="none")
    assert_close(sf.jit(fn, backend="aten")(x), fn(x))


LIMITS: dict[str, Callable[[Tensor], Tensor]] = {
    "prod": lambda x: x.prod(1),
    "cumprod": lambda x: x.cumprod(1) @ torch.arange(1.0, 4, dtype=F64),
    "logit": torch.logit,
    "logit in bounds": lambda x: torch.logit(x, 0.25),
    "loss": lambda x: F.binary_cross_entropy_with_logits(x, X[:4].sigmoid()),
}


@pytest.mark.parametrize("name", LIMITS)
def test_gradients_at_infinite_values_are_those_of_torch_func(name: str) -> None:
    x = torch.tensor([[math.inf, 2, 3], [math.nan, 0, 3], [-math.inf, math.inf, 2], [-0.0, 2, 1]])

    def loss(x: Tensor) -> Tensor:
        return LIMITS[name](x).sum()

    x = x.to(F64)
    wanted = torch.func.grad(loss)(x)
    assert_close(sf.jit(sf.grad(loss), backend="aten")(x), wanted, equal_nan=True)
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        fn = sf.shard(sf.grad(loss), mesh, (P("dp"),), backend="aten")
        assert_close(sf.full(fn(x)), wanted, equal_nan=True)


def test_the_gradient_of_a_scattered_product_is_the_product_of_the_others() -> None:
    def loss(x: Tensor) -> Tensor:
        y = torch.ones(1, dtype=F64).scatter_reduce(0, torch.tensor([0, 0]), x, "prod")
        return y.sum()

    x = torch.tensor([math.inf, 3.0], dtype=F64)
    wanted = torch.tensor([3.0, math.inf], dtype=F64)
    assert_close(sf.jit(sf.grad(loss), backend="aten")(x), wanted)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, i: x.index_select(0, i),
        lambda x, i: x.index_add(1, i, x[:, :1].sin(), alpha=2),
        lambda x, i: (x * 1).index_add_(0, i, x[:1].sin()),
    ],
    ids=["index_select", "index_add", "index_add_"],
)
def test_an_index_without_dims_has_gradients(fn: Any) -> None:
    loss = lambda x, i: fn(x, i).square().sum()
    i = torch.tensor(2)
    leaf = X.clone().requires_grad_()
    (slope,) = torch.autograd.grad(loss(leaf, i), leaf)
    for backend in ("aten", "inductor"):
        assert_close(sf.jit(sf.grad(loss), backend=backend)(X, i), slope)
    assert_close(sf.grad(lambda x: loss(x, torch.tensor(2)))(X), slope)
    for spec in (P("a"), P(None, "a")):
        with simulated(a=2) as mesh:
            sharded = sf.shard(sf.grad(loss), mesh, (spec, P()), backend="aten")
            assert_close(sf.full(sharded(X, i)), slope)
