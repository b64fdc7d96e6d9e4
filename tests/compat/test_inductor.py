"""Inductor: formulas of ours in its code, the graph that it is given, and what it returns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._inductor.lowering import lowerings

import shardfn as sf


def test_a_factor_of_a_sum_stays_where_the_other_term_is_a_product() -> None:
    def sums(w: Any, b: Any, x: Any, y: Any) -> Any:
        return (
            torch.add(w, x @ y, alpha=-0.25),
            torch.add(x @ (2 * y), w, alpha=3),
            torch.add(b, x @ (3 * y), alpha=0.5),
        )

    shapes = (3, 5), (5,), (3, 7), (7, 5)
    args = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    for value, expected in zip(sf.jit(sums)(*args), sums(*args), strict=True):
        torch.testing.assert_close(value, expected)


def test_a_compiled_step_of_sgd_goes_down_the_gradient_of_a_product() -> None:
    opt = sf.optim(torch.optim.SGD, lr=0.5)
    loss = lambda w, x: (x @ w).square().sum()

    def step(w: Any, state: Any, x: Any) -> Any:
        return opt.update(w, sf.grad(loss)(w, x), state)[0]

    w, x = torch.randn(5, 3, dtype=torch.float64), torch.randn(7, 5, dtype=torch.float64)
    found = sf.jit(step)(w, opt.init(w), x)
    torch.testing.assert_close(found, w - x.T @ (x @ w))


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, None])
@pytest.mark.parametrize("value", [1.5, 3])
def test_a_cumulative_sum_of_one_number_has_the_dtype_that_is_asked_for(
    value: float, dtype: torch.dtype | None
) -> None:
    fn = lambda: torch.cumsum(torch.full((2, 5), value), 1, dtype=dtype)
    found = sf.jit(fn)()
    assert found.dtype == fn().dtype
    assert torch.equal(found, fn())


@pytest.mark.parametrize("mode", ["bilinear", "bicubic", "trilinear"])
def test_ops_without_a_lowering_compile_where_the_environment_has_the_variable_ci(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", "true")
    for op in (
        torch.ops.aten.upsample_bilinear2d.default,
        torch.ops.aten.upsample_bicubic2d.default,
        torch.ops.aten.upsample_trilinear3d.default,
    ):
        monkeypatch.delitem(lowerings, op, raising=False)
    image = torch.randn(1, 2, 3, 5, dtype=torch.float64)
    x, size = (image[:, :, None], (2, 4, 7)) if mode == "trilinear" else (image, (4, 7))

    def loss(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.interpolate(x, size=size, mode=mode).square().sum()

    leaf = x.clone().requires_grad_()
    loss(leaf).backward()
    torch.testing.assert_close(sf.jit(sf.grad(loss))(x), leaf.grad)
