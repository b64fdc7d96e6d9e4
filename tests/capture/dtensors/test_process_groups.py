"""The mesh axes that a group stands for, and the reductions and sources of a collective."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import shardfn as sf
from shardfn.capture.dtensors import process_groups
from shardfn.capture.shard_map import axis_names

BOTH = ("dp", "tp")


@pytest.fixture(name="mesh")
def _mesh() -> Iterator[Any]:
    with sf.fake_world(6):
        yield sf.make_mesh((2, 3), BOTH)


@pytest.fixture(name="inside")
def _inside(mesh: Any) -> Iterator[Any]:
    """In the code of one rank of the mesh."""
    with axis_names.scope(mesh, "cpu"):
        axis_names.enter_mesh("f", mesh, None)
        yield mesh


def test_ranks_that_are_no_axis_are_refused(inside: Any) -> None:
    with pytest.raises(sf.CaptureError) as caught:
        process_groups.axes_of_group("all_reduce", [0, 1])
    text = str(caught.value)
    assert "the group is [0, 1], which is not an axis of (dp=2, tp=3)" in text
    assert "mesh.get_group(axis)" in text
