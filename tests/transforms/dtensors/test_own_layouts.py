"""The shapes and strides of each rank's own arguments, where they differ between ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
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


def test_ranks_exchange_along_the_last_axis_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank (0, 0) of a 2 by 3 mesh, whose groups answer for the others."""
    asked: list[Any] = []

    def gather(rows: list[Any], mine: Any, group: Any) -> None:
        asked.append(group)
        step = 1 if group == "tp" else 3
        rows[:] = [[r + step * k for r in mine] for k in range(len(rows))]

    class Mesh:
        ndim = 2

        def size(self, k: int) -> int:
            return (2, 3)[k]

        def get_group(self, k: int) -> str:
            return ("dp", "tp")[k]

    monkeypatch.setattr(dist, "all_gather_object", gather)
    assert _own_layouts._exchanged(Mesh(), 0) == [0, 1, 2, 3, 4, 5]
    assert asked == ["tp", "dp"]
