"""Partial values that several ops read: reduced once, or at the end of each reader where that is
less, and right.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import P

G = torch.Generator().manual_seed(5)
X = torch.randn(6, 9, generator=G, dtype=torch.float64)
W = torch.randn(9, 5, generator=G, dtype=torch.float64)
V = torch.randn(6, 5, generator=G, dtype=torch.float64)
PLACES = torch.tensor([3, 0, 5, 1, 4, 2])
WHOLE = 30

# (function of a Partial product (6, 5) and a global tensor, the elements that it reduces)
READERS: dict[str, tuple[Any, list[int]]] = {
    "sums of rows, and of columns": (lambda y, v: (y.sum(0).sin(), (y * v).sum(1).sin()), [5, 6]),
    "written among zeros": (
        lambda y, v: (
            y.view(3, 2, 5).sum(1).sin(),
            torch.zeros(6, dtype=y.dtype).index_put((PLACES,), y.sum(1), True).cos(),
        ),
        [15, 6],
    ),
    "a result as large": (lambda y, v: (y.sum(0).sin(), (y * v).sin()), [5, WHOLE]),
    "two results of half its size": (
        lambda y, v: (y.view(3, 2, 5).sum(1).sin(), (y * v).view(3, 2, 5).sum(1).sin()),
        [WHOLE],
    ),
    "larger before it is small": (
        lambda y, v: (y.sum(0).sin(), y[:, None].expand(6, 7, 5).clone().sum().sin()),
        [5, WHOLE],
    ),
    "a result that several ops read": (
        lambda y, v: (y.sum(0).sin(), (z := y * v).sum().sin(), z.sin()),
        [5, WHOLE],
    ),
    "its square": (lambda y, v: (y.sum(0).sin(), (y * y).sum().sin()), [5, WHOLE]),
}


@pytest.mark.parametrize("case", READERS)
def test_the_fewest_bytes_are_reduced(case: str) -> None:
    read, wanted = READERS[case]

    def fn(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> Any:
        return read(x @ w, v)

    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("tp",))
        places = (P(None, "tp"), P("tp"), P())  # 9 terms over 2 ranks
        sharded = sf.shard(fn, mesh, places, backend="aten")
        got = sf.full(sharded(X, W, V))
        sent = sharded.lower(X, W, V).collectives
    torch.testing.assert_close(got, fn(X, W, V))
    assert {c.kind for c in sent} == {"all_reduce"}
    assert sorted(c.nbytes // 8 for c in sent) == sorted(wanted)
