"""Placements of the tensors that a checkpoint is read into."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardfn as sf
from shardfn import P

TREE = {"w": torch.arange(6.0).reshape(2, 3), "epoch": 3, "b": torch.ones(4)}


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return sf.save(tmp_path, TREE, step=5)


def test_placements_that_do_not_fit(folder: str) -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        with pytest.raises(sf.PlacementError, match=r"load: b: "):
            sf.load(folder, TREE, mesh, P(None, "dp"))
        with pytest.raises(sf.TreeError, match="does not match the tree"):
            sf.load(folder, TREE, mesh, {"w": P()})
        with pytest.raises(sf.PlacementError, match="and no mesh"):
            sf.load(folder, TREE, None, P())
    with sf.fake_world(2, numerics=False), pytest.raises(sf.FakeValueError, match="no values"):
        sf.load(folder, TREE)


def test_a_dtensor_in_the_tree_keeps_its_placements(tmp_path: Path) -> None:
    with sf.fake_world(3):
        mesh = sf.make_mesh((3,), ("dp",))
        x = sf.distribute({"w": torch.arange(7.0)}, mesh, P("dp"))
        sf.save(tmp_path, x)
        like = sf.distribute({"w": torch.zeros(7)}, mesh, P("dp"))
        loaded = sf.load(tmp_path, like)["w"]
        assert loaded.placements == x["w"].placements
        assert torch.equal(sf.full(loaded), torch.arange(7.0))
        assert not sf.full(like["w"]).any()  # nothing is written in place
