"""any, all, norms and copies of views as ops that have sharding rules."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardfn.capture.rewrites.reductions import TABLE, narrow, vector_norm, wide

aten = torch.ops.aten
X = torch.tensor([[0.0, -2.0, 3.0], [1.0, 0.0, -4.0]], dtype=torch.float64)
TRUTH = [
    X > 1,
    X,
    torch.zeros(2, 3),
    torch.tensor([[1, 0], [2, 3]], dtype=torch.uint8),
    torch.ones(0, 3),
]


@pytest.mark.parametrize("x", TRUTH, ids=lambda x: f"{x.dtype}{tuple(x.shape)}")
@pytest.mark.parametrize("packet", [aten.any, aten.all], ids=str)
def test_any_and_all_by_counting(packet: Any, x: torch.Tensor) -> None:
    for op, args in ((packet.default, ()), (packet.dim, (-1, True)), (packet.dims, ([0, 1],))):
        got, wanted = TABLE[op](x, *args), op(x, *args)
        assert torch.equal(got, wanted) and got.dtype == wanted.dtype


def test_no_dims_at_all_are_left_to_torch() -> None:
    assert TABLE[aten.any.dims](X, []) is NotImplemented
    assert torch.equal(TABLE[aten.any.default](torch.tensor(2.0)), torch.tensor(True))


@pytest.mark.parametrize("order", [0, 1, 2, 3.5, -1, float("inf"), -float("inf")])
@pytest.mark.parametrize("dims", [None, 0, [0, 1]])
def test_norms(order: float, dims: Any) -> None:
    x = X + 0.5
    got = vector_norm(x, order, dims, True)
    torch.testing.assert_close(got, torch.linalg.vector_norm(x, order, dims, True))


def test_half_precision_is_summed_wide_and_returned_narrow() -> None:
    x = torch.full((4096,), 0.25, dtype=torch.float16)
    assert vector_norm(x, 1).item() == 1024.0 and vector_norm(x, 1).dtype == x.dtype
    wider, result = wide(x)
    assert (wider.dtype, result) == (torch.float32, torch.float16)
    assert narrow(wider, result).dtype == torch.float16
    assert wide(X)[0] is X and narrow(X, X.dtype) is X


def test_a_norm_of_nothing_is_left_to_torch() -> None:
    assert vector_norm(torch.ones(0)) is NotImplemented
    assert vector_norm(torch.tensor(2.0)) is NotImplemented


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.permute_copy.default, ([1, 0],)),
        (aten.view_copy.default, ([6],)),
        (aten.expand_copy.default, ([4, 2, 3],)),
        (aten.t_copy.default, ()),
        (aten.unbind_copy.int, (1,)),
    ],
    ids=str,
)
def test_a_copy_of_a_view_has_contiguous_memory_of_its_own(op: Any, args: Any) -> None:
    got, wanted = TABLE[op](X, *args), op(X, *args)
    pairs = [(got, wanted)] if isinstance(got, torch.Tensor) else zip(got, wanted, strict=True)
    for mine, theirs in pairs:
        assert torch.equal(mine, theirs) and mine.is_contiguous()
        assert mine.untyped_storage().data_ptr() != X.untyped_storage().data_ptr()


def test_other_sums() -> None:
    y = X.flip(0)
    torch.testing.assert_close(TABLE[aten.dist.default](X, y, 3), torch.dist(X, y, 3))
    a, b = X[None].expand(4, 2, 3), X.t()[None].expand(4, 3, 2)
    bias = torch.ones(2, 2, dtype=X.dtype)
    got = TABLE[aten.addbmm.default](bias, a, b, beta=2, alpha=3)
    torch.testing.assert_close(got, torch.addbmm(bias, a, b, beta=2, alpha=3))
