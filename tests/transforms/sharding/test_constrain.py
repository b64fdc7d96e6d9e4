"""constrain: a value and its gradient are placed; outside of a transform nothing happens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.testing import assert_close
from worlds import simulated

import shardfn as sf
from shardfn import P


@pytest.fixture
def mesh() -> Any:
    with simulated(dp=2, tp=4) as mesh:
        yield mesh


def aten(fn: Any, mesh: Any, *args: Any, **options: Any) -> Any:
    return sf.shard(fn, mesh, *args, backend="aten", **options)


def test_constrain_pins_a_value_and_its_gradient(mesh: Any) -> None:
    def f(x: torch.Tensor) -> Any:
        h = sf.constrain(x * 2, P("dp", "tp"))
        return h, (h * h).sum()

    x = torch.randn(6, 8, dtype=torch.float64)
    h, _ = aten(f, mesh)(x)
    assert h.placements == (Shard(0), Shard(1))
    g = aten(sf.grad(lambda x: f(x)[1]), mesh)(x)
    assert_close(sf.full(g), 8 * x)
    assert g.placements == (Replicate(), Replicate()), "a gradient is placed as its argument is"
    assert sf.constrain(x, P("dp")) is x, "outside a transform it is the identity"
    assert torch.equal(sf.grad(lambda x: f(x)[1])(x), 8 * x), "and without a mesh"


WRONG = [
    ((torch.ones(2), P("dp", "tp")), sf.PlacementError),
    ((torch.ones(2, 2), P("dp", "dp")), sf.PlacementError),
    ((torch.ones(2), Shard(0)), sf.PlacementError),
    (({"a": torch.ones(2)}, {"b": P()}), sf.TreeError),
]


@pytest.mark.parametrize(("args", "kind"), WRONG, ids=str)
def test_what_does_not_fit_is_refused_outside_too(args: Any, kind: Any) -> None:
    with pytest.raises(kind) as caught:
        sf.constrain(*args)
    assert str(caught.value).startswith("constrain")


def test_none_leaves_a_value_free_and_a_prefix_stands_for_a_tree() -> None:
    tree = {"a": torch.ones(2), "b": [torch.ones(3), 5]}
    assert sf.constrain(tree, {"a": P("dp"), "b": None}) is tree
    assert sf.constrain(tree, P("dp")) is tree
