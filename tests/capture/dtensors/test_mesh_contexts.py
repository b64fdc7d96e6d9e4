"""A mesh in a `with`: the current one inside, and none after an error."""

from __future__ import annotations

import pytest

import shardfn as sf
from shardfn.capture.dtensors.mesh_contexts import in_mesh


def test_the_mesh_is_the_current_one_inside() -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("a",))
        with in_mesh(mesh) as entered:
            assert entered is mesh and sf.current_mesh() == mesh
        with pytest.raises(ZeroDivisionError), in_mesh(mesh):
            raise ZeroDivisionError
        assert sf.current_mesh() is None


def test_what_is_no_mesh_is_refused() -> None:
    with pytest.raises(sf.ShardError, match="use_mesh"), in_mesh("dp"):
        pass
