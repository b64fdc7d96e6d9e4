"""The records that pass between the stages."""

from __future__ import annotations

import pytest
import torch

import shardfn as sf
from shardfn.training.checkpoints import agreed
from shardfn.training.checkpoints.texts import Texts
from shardfn.types import Aval, MeshAxes


def test_bytes_of_a_shape() -> None:
    assert Aval((3, 5), (5, 1), torch.float64, "cpu").nbytes == 120
    assert Aval((), (), torch.bool, "cpu").nbytes == 1
    assert Aval((0, 5), (5, 1), torch.float32, "cpu").nbytes == 0


def test_a_shape_is_a_tuple_of_sizes() -> None:
    assert sf.ShapeDtype([2, 3]).shape == (2, 3)
    with pytest.raises((sf.ShardError, TypeError), match="ShapeDtype"):
        sf.ShapeDtype("no shape")


def test_records_print_also_where_their_module_has_a_compat_of_its_own() -> None:
    """attrs 26 looks for its `_compat` among the names of the module of the class."""
    assert "shape=(2,)" in repr(sf.ShapeDtype((2,)))
    assert "('dp',)" in repr(MeshAxes(("dp",), (2,)))
    steps = agreed.Steps("save", Texts())
    assert repr(steps) == "Steps(where='save', texts=Texts(group=None))"
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        x = torch.ones(4)
        lowered = sf.shard(lambda x: x.sum(), mesh, sf.P("dp"), sf.P()).lower(x)
        assert "Transfer(" in repr(lowered.transfers)
