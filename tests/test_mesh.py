"""Meshes: names and sizes, the current one, and what cannot be one."""

from __future__ import annotations

from typing import Any

import pytest

import shardfn as sf
from shardfn.mesh import all_coordinates, axes_of, entered_meshes, restore_meshes
from shardfn.types import MeshAxes


def test_a_mesh_has_named_axes_in_row_major_order() -> None:
    with sf.fake_world(6):
        mesh = sf.make_mesh((2, 3), ("dp", "tp"))
        axes = axes_of(mesh)
        assert (axes.names, axes.sizes) == (("dp", "tp"), (2, 3))
        assert str(axes) == "(dp=2, tp=3)"
        assert all_coordinates(axes)[:4] == [(0, 0), (0, 1), (0, 2), (1, 0)]
    assert axes_of(None) == MeshAxes((), ()) and all_coordinates(axes_of(None)) == [()]


def test_the_innermost_mesh_is_the_current_one() -> None:
    with sf.fake_world(4):
        outer, inner = sf.make_mesh((4,), ("a",)), sf.make_mesh((2, 2), ("a", "b"))
        before = entered_meshes()
        with sf.use_mesh(outer):
            assert sf.current_mesh() is outer
            with sf.use_mesh(inner):
                assert sf.current_mesh() is inner
                restore_meshes(before)
                assert sf.current_mesh() is None
        assert entered_meshes() == before


WRONG: list[tuple[Any, Any]] = [
    ((2, 3), ("dp",)),
    ((5,), ("dp",)),
    ((2, 3), ("dp", "dp")),
    ((0, 6), ("dp", "tp")),
    ("6", ("dp",)),
    ((6,), (3,)),
]


@pytest.mark.parametrize(("shape", "names"), WRONG, ids=str)
def test_a_shape_that_does_not_fit_is_refused(shape: Any, names: Any) -> None:
    with sf.fake_world(6), pytest.raises(sf.ShardError) as caught:
        sf.make_mesh(shape, names)
    assert "make_mesh" in str(caught.value)
