"""The shapes and strides of each rank's own arguments, where they differ between ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, distribute_tensor

import shardfn as sf
from shardfn.simulated import SimulatedTensor
from shardfn.transforms.dtensors import _own_layouts
from shardfn.transforms.dtensors._own_layouts import have_own_sizes, own_layouts

X = torch.ones(2, 3)


def own(*rows: torch.Tensor) -> SimulatedTensor:
    return SimulatedTensor(list(rows), 0)


def test_sizes_are_own_where_one_rank_differs() -> None:
    with sf.fake_world(2):
        even, uneven = own(X, X + 1), own(X, X[:1])
        assert have_own_sizes(({"x": uneven},), {})
        assert have_own_sizes((even,), {"k": uneven})
        assert not have_own_sizes((even, X, 3), {})


def test_layouts_are_given_where_they_differ() -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        d = distribute_tensor(X, mesh, [Replicate()])
        args = (own(X, X), own(X, X[:1]), d, 3)
        rows = own_layouts(mesh, args, {"k": own(X, X.T.contiguous().T)})
        assert rows == (
            None,
            (((2, 3), (3, 1)), ((1, 3), (3, 1))),
            None,
            None,
            (((2, 3), (3, 1)), ((2, 3), (1, 2))),
        )


def test_nothing_is_said_of_equal_layouts() -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        assert own_layouts(mesh, (own(X, X + 1), X, 3), {}) == ()
        assert own_layouts(mesh, (3,), {}) == ()
    with sf.fake_world(2, numerics=False):
        mesh = sf.make_mesh((2,), ("dp",))
        assert own_layouts(mesh, (X,), {}) == ()


def test_ranks_exchange_over_the_store_in_the_order_of_the_mesh(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 3 is the first of the mesh."""

    class Watch:
        def lane(self, name: str, ranks: Any) -> Any:
            return name, tuple(ranks)

        def gathered(self, where: str, mine: str, lane: Any) -> list[str]:
            assert lane == ("shardfn:dp", (3, 1))
            return [mine, "[null, [[4], [1]]]"]

    monkeypatch.setattr(_own_layouts, "watch_of", lambda world: Watch())
    monkeypatch.setattr(_own_layouts, "group_names", lambda mesh: ("shardfn:dp",))
    monkeypatch.setattr(_own_layouts, "ranks_of", lambda mesh: [3, 1])
    rows = _own_layouts._exchanged(None, [None, ((5,), (1,))])
    assert rows == [[None, ((5,), (1,))], [None, ((4,), (1,))]]
