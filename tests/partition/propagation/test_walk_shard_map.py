"""Collectives of per-rank code where other axes of the mesh cut the same values, unevenly too,
and in either mesh order.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import P

X = torch.randn(4, 7, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
MESHES = {"manual axis first": ((2, 3), ("a", "b")), "manual axis last": ((3, 2), ("b", "a"))}
AUTO: dict[str, Any] = {"whole": None, "dim 0": 0, "dim 1": 1, "dim 2": 2}

# name: (code of a rank, how a cuts the result, the same of the two halves)
CASES: dict[str, Any] = {
    "psum": (lambda x: sf.psum(x, "a").sin(), P(), lambda p, q: (p + q).sin()),
    "pmax": (lambda x: sf.pmax(x, "a").sin(), P(), lambda p, q: torch.maximum(p, q).sin()),
    "all_gather 0": (
        lambda x: sf.all_gather(x, "a", tiled=True).sin(),
        P(),
        lambda p, q: torch.cat([p, q]).sin(),
    ),
    "all_gather 1": (
        lambda x: sf.all_gather(x, "a", axis=1, tiled=True).sin(),
        P(),
        lambda p, q: torch.cat([p, q], 1).sin(),
    ),
    "psum_scatter": (
        lambda x: sf.psum_scatter(x, "a", tiled=True).sin(),
        P("a"),
        lambda p, q: (p + q).sin(),
    ),
    "all_to_all": (
        lambda x: sf.all_to_all(x, "a", 0, 2, tiled=True).sin(),
        P("a"),
        lambda p, q: torch.cat([p, q], 2).sin(),
    ),
    "ppermute": (
        lambda x: sf.ppermute(x.sin(), "a", [(0, 1)]),
        P("a"),
        lambda p, q: torch.cat([p * 0, p.sin()]),
    ),
    "into another dim": (lambda x: x.sin(), P(None, "a"), lambda p, q: torch.cat([p, q], 1).sin()),
}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("cut", AUTO)
@pytest.mark.parametrize("case", CASES)
def test_a_collective_beside_an_axis_that_cuts_as_it_likes(case: str, cut: str, mesh: str) -> None:
    body, outs, whole = CASES[case]
    shape, names = MESHES[mesh]
    spec = P(*("b" if d == AUTO[cut] else None for d in range(3)))

    def ours(x: Tensor) -> Tensor:
        placed = sf.constrain(x * 1, spec)
        return sf.shard_map(body, None, P("a"), outs, axis_names={"a"})(placed).square().sum()

    def theirs(x: Tensor) -> Tensor:
        return whole(*x.chunk(2)).square().sum()

    with sf.fake_world(6):
        step = sf.shard(sf.value_and_grad(ours), sf.make_mesh(shape, names), spec, backend="aten")
        torch.testing.assert_close(
            sf.full(step(X)), torch.func.grad_and_value(theirs)(X)[::-1], rtol=1e-12, atol=1e-12
        )


def test_a_cut_by_another_axis_stays_where_the_collective_does_not_touch_it() -> None:
    with sf.fake_world(6):
        mesh = sf.make_mesh((2, 3), ("a", "b"))
        fn = sf.shard_map(
            lambda x: sf.psum(sf.all_gather(x, "a", tiled=True), "a"),
            mesh,
            P("a"),
            P(),
            axis_names={"a"},
            backend="aten",
        )
        lowered = fn.lower(sf.distribute(X[:, :6], mesh, P(None, "b")))
        (gather,) = lowered.collectives  # the sum is of equal terms, and sends nothing
        assert (gather.kind, gather.axis, gather.nbytes) == ("all_gather", "a", 4 * 2 * 5 * 8)


def test_pending_sums_over_another_axis_stay_pending_through_a_sum() -> None:
    with sf.fake_world(6):
        mesh = sf.make_mesh((2, 3), ("a", "b"))
        inner = sf.shard_map(
            lambda x, w: sf.psum(x @ w, "a"), None, (P("a"), P()), P(), axis_names={"a"}
        )
        step = sf.shard(lambda x, w: inner(x, w) * 2, mesh, (P("a", "b"), P("b")), backend="aten")
        x, w = X[:, :6, 0], X[0, :6]
        torch.testing.assert_close(sf.full(step(x, w)), (x[:2] @ w + x[2:] @ w) * 2)
        assert [(c.kind, c.axis) for c in step.lower(x, w).collectives] == [
            ("all_reduce", "a"),
            ("all_reduce", "b"),
        ]
