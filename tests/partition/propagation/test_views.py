"""Views share what their source gathers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import P


def drawn(*shape: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=g, dtype=torch.float64)


def twice(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Two products with one activation, each with a view of its own."""
    y = x.sin()
    return y.view(-1, 8) @ w + y.view(-1, 8) @ v


def transposed(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """A view of a view."""
    y = x.sin().view(-1, 8)
    return y @ w + (v.t() @ y.t()).t()


@pytest.mark.parametrize("fn", [twice, transposed])
@pytest.mark.parametrize("length", [6, 5])
def test_one_gather_serves_two_views(fn: Callable[..., Any], length: int) -> None:
    args = drawn(2, length, 8), drawn(8, 64), drawn(8, 64)
    weight = P(None, "tp")
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("tp",))
        places = (P(None, "tp"), weight, weight)
        sharded = sf.shard(fn, mesh, places, P(None, "tp"), backend="aten")
        torch.testing.assert_close(sf.full(sharded(*args)), fn(*args))
        kinds = [c.kind for c in sharded.lower(*args).collectives]
    assert kinds == ["all_gather"]


def test_a_small_view_is_gathered_alone() -> None:
    """A slice sends its own bytes, not those of its source."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        return sf.constrain(x.sin()[:, :1], P())

    x = drawn(6, 8)
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("tp",))
        sharded = sf.shard(fn, mesh, P("tp"), P(), backend="aten")
        torch.testing.assert_close(sf.full(sharded(x)), fn(x))
        (gather,) = sharded.lower(x).collectives
    assert (gather.kind, gather.nbytes) == ("all_gather", 6 * 8)
