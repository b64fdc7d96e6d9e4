"""Gradients of parameters that are computed with in a smaller dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from worlds import SimulatedTensor

import shardfn as sf
from shardfn import P

random = torch.Generator().manual_seed(0)
W = {"a": torch.randn(17, 33, generator=random), "b": torch.randn(33, 7, generator=random)}
X = torch.randn(65, 17, generator=random)
Y = torch.randn(65, 7, generator=random)


def _loss(w: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    a, b = w["a"].bfloat16(), w["b"].bfloat16()
    h = torch.relu(x.bfloat16() @ a)
    return ((h @ b).float() - y).square().mean()


def _step(**options: Any) -> Any:
    return sf.bucketed_grad(_loss, **options)


def _reductions(fn: Any, mesh: Any, where: Any) -> list[tuple[str, str]]:
    """The kind and the dtype of each reduction of a gradient."""
    text = sf.shard(fn, mesh, (where, P("dp"), P("dp"))).lower(W, X, Y).text()
    lines = [line for line in text.split("\n") if "[sum, dp](" in line]
    found = [line.split(" = ")[1] for line in lines]
    return [
        (kind.split("[")[0], kind.split("): ")[1].split("[")[0])
        for kind in found
        if "f32[] " not in kind  # the loss
    ]


@pytest.mark.parametrize(("where", "kind"), [(P("dp"), "reduce_scatter"), (P(), "all_reduce")])
def test_a_gradient_is_reduced_once_in_the_smaller_dtype_or_the_one_asked_for(
    where: Any, kind: str
) -> None:
    with sf.fake_world(3):
        mesh = sf.make_mesh((3,), ("dp",))
        assert _reductions(_step(), mesh, where) == [(kind, "bf16")]
        wide = _step(reduce_dtype=torch.float32)
        assert _reductions(wide, mesh, where) == [(kind, "f32")]
        plain = _reductions(sf.value_and_grad(_loss), mesh, where)
        assert plain == [(kind, "bf16")] * 2


def test_the_wider_reduction_rounds_no_sum() -> None:
    """In float32 the error is that of the terms, each a bfloat16 product of one rank."""
    exact = torch.func.grad(lambda w: _loss(w, X, Y))(W)
    errors = {}
    with sf.fake_world(8):
        mesh = sf.make_mesh((8,), ("dp",))
        for dtype in (None, torch.float32):
            step = sf.shard(_step(reduce_dtype=dtype), mesh, (P(), P("dp"), P("dp")))
            grads = sf.full(step(W, X, Y)[1])
            difference = (grads["a"] - exact["a"]).abs().max()
            errors[dtype] = float(difference / exact["a"].abs().max())
    assert errors[torch.float32] < errors[None] < 0.02


def test_a_gradient_that_a_loop_adds_up_stays_partial_through_its_cast() -> None:
    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        def body(carry: torch.Tensor, row: torch.Tensor) -> Any:
            h = (row.bfloat16() @ w.bfloat16()).float()
            return carry + h.square().sum(), None

        return sf.scan(body, x.new_zeros(()), x)[0]

    drawn = torch.Generator().manual_seed(0)
    w = torch.randn(5, 3, generator=drawn)
    x = torch.randn(4, 9, 5, generator=drawn)
    with sf.fake_world(3):
        mesh = sf.make_mesh((3,), ("dp",))
        step = sf.shard(sf.grad(loss), mesh, (P(), P(None, "dp")))
        grad = sf.full(step(w, x))
        torch.testing.assert_close(grad, sf.grad(loss)(w, x), rtol=0.02, atol=0.1)
        assert step.lower(w, x).text().count("all_reduce[sum, dp]") == 1


@pytest.mark.parametrize(
    ("dtypes", "reduced"),
    [
        ({}, "f64"),
        ({"backward_dtype": torch.bfloat16}, "bf16"),
        ({"forward_dtype": torch.bfloat16}, "f64"),  # the dtype of the input
        ({"forward_dtype": torch.bfloat16, "backward_dtype": torch.float32}, "f32"),
    ],
)
def test_redistribute_reduces_the_gradient_in_the_dtype_of_its_backward(
    dtypes: Any, reduced: str
) -> None:
    with sf.fake_world(3):
        mesh = sf.make_mesh((3,), ("dp",))

        def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            d = DTensor.from_local(x, mesh, [Shard(0)])
            same = d.redistribute(mesh, [Replicate()], **dtypes)
            own = same.to_local(grad_placements=[Partial()])
            return (own * w).double().sum()

        step = sf.jit(sf.grad(loss), backend="aten")
        w = SimulatedTensor([torch.full((6,), k / 3).double() for k in range(1, 4)])
        x = torch.ones(2, dtype=torch.float64)
        (line,) = [
            line
            for line in step.lower(x, w).text().split("\n")
            if " = reduce_scatter[sum, dp](" in line
        ]
        assert f"): {reduced}[2]" in line
        gradient = step(x, w)
        assert gradient.dtype == torch.float64
        torch.testing.assert_close(gradient.shards[0], x * 2, rtol=0.01, atol=0)
