"""Placements of the tensors that a checkpoint is read into."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardfn as sf
from shardfn import P
from tests.support.checkpoint_trees import assert_equal
from tests.support.worlds import simulated

TREE = {"w": torch.arange(6.0).reshape(2, 3), "epoch": 3, "b": torch.ones(4)}


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return sf.save(tmp_path, TREE, step=5)


def test_placements_that_do_not_fit(folder: str) -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        with pytest.raises(sf.PlacementError, match=r"load: b: "):
            sf.load(folder, TREE, mesh, P(None, "dp"))
        with pytest.raises(sf.TreeError, match="do not match the given tree"):
            sf.load(folder, TREE, mesh, {"w": P()})
        with pytest.raises(sf.PlacementError, match="but no mesh"):
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


W = torch.arange(35.0).reshape(5, 7)
LAYOUTS = [
    ({"pp": 2}, P(pp=1)),
    ({"pp": 4}, P(pp=sf.Stage(2, chunk=1))),
    ({"pp": 2, "tp": 2}, P("tp", pp=0)),
    ({"tp": 3, "pp": 2}, P(None, "tp", pp=1)),
    ({"dp": 2, "pp": 2, "tp": 2}, P(("dp", "tp"), pp=0)),
    ({"dp": 4}, P("dp")),
    ({"dp": 1}, P()),
]


@pytest.mark.parametrize(("axes", "spec"), LAYOUTS, ids=str)
@pytest.mark.parametrize(("to", "other"), LAYOUTS, ids=str)
def test_a_stage_is_loaded_on_another_stage_and_without_one(
    axes: dict[str, int], spec: P, to: dict[str, int], other: P, tmp_path: Path
) -> None:
    tree = {"w": W, "number": torch.tensor(3), "wide": torch.ones(2, dtype=torch.complex64)}
    with simulated(**axes) as mesh:
        stages = P(**spec.stages)
        placed = sf.distribute(tree, mesh, {"w": spec, "number": stages, "wide": stages})
        sf.save(tmp_path, placed)
        assert_equal(sf.full(sf.load(tmp_path, placed)), tree)
    with simulated(**to) as mesh:
        stages = P(**other.stages)
        like = {name: sf.ShapeDtype(x.shape, x.dtype) for name, x in tree.items()}
        wanted = {"w": other, "number": stages, "wide": stages}
        loaded = sf.load(tmp_path, like, mesh, wanted)
        as_placed = sf.distribute(tree, mesh, wanted)
        for name in tree:
            assert loaded[name].placements == as_placed[name].placements
            assert_equal(loaded[name].to_local().shards, as_placed[name].to_local().shards)
    assert_equal(sf.load(tmp_path, tree), tree)


def test_a_stage_is_saved_in_the_background_and_read_from_safetensors(tmp_path: Path) -> None:
    with simulated(pp=2, tp=2) as mesh:
        placed = sf.distribute({"w": W}, mesh, P("tp", pp=1))
        sf.save(tmp_path / "steps", placed, background=True).wait()
        assert_equal(sf.full(sf.load(tmp_path / "steps", placed)), {"w": W})
        sf.save_safetensors(tmp_path / "model", placed)
        assert_equal(sf.full(sf.load_safetensors(tmp_path / "model", placed)), {"w": W})
