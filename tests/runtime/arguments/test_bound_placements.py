"""Placements belong to parameters as arguments do: by position, or by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import P

X = torch.arange(8.0).reshape(4, 2)
THREE = (P(), P("dp"), P("dp"))


def f(w: Any, x: Any, y: Any = None) -> Any:
    return w.sum() + (x if y is None else x * y)


@pytest.mark.parametrize(
    "placements", [THREE, list(THREE), {"w": P(), "x": P("dp"), "y": P("dp")}, {"x": P("dp")}]
)
def test_arguments_by_position_and_by_name_are_placed_alike(placements: Any) -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        g = sf.shard(f, mesh, placements)
        for args, kwargs in (
            ((X, X, X), {}),
            ((X, X), {"y": X}),
            ((X,), {"y": X, "x": X}),
            ((), {"x": X, "y": X, "w": X}),
            ((X,), {"x": X}),
        ):
            torch.testing.assert_close(sf.full(g(*args, **kwargs)), f(*args, **kwargs))
            assert "x: f32[4@dp, 2]" in str(g.lower(*args, **kwargs)).replace("%", "")


def test_a_missing_placement_names_the_argument() -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        with pytest.raises(sf.TreeError, match="the whole tree: placements lack y"):
            sf.shard(f, mesh, (P(), P("dp")))(X, X, X)


def test_placements_by_name_inside_of_another_transform() -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        for placements in (THREE, {"w": P(), "x": P("dp")}):
            g = sf.shard(f, mesh, placements)
            got = sf.full(sf.jit(lambda x, g=g: g(x, x, y=x))(X))
            torch.testing.assert_close(got, f(X, X, X))
