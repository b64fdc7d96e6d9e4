"""Law: torch.distributed.checkpoint reads what sf.save writes, and sf.load what it writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import run_ranks
from torch.distributed.tensor import DTensor

import shardfn as sf
from shardfn import P
from tests.support.checkpoint_trees import TREE, assert_equal

W, B = torch.arange(21.0).reshape(7, 3), torch.arange(5.0).to(torch.complex128)


def _tree(w: torch.Tensor, b: torch.Tensor, epoch: Any) -> Any:
    """A tree with a shard of an uneven dim on each rank, and values that all ranks have."""
    mesh = sf.make_mesh((torch.distributed.get_world_size(),), ("dp",))
    sharded = sf.distribute({"w": w, "turned": w.T}, mesh, P("dp"))
    return {"params": {**sharded, "b": b}, "epoch": epoch}


def _values(tree: Any) -> Any:
    """A tree as plain tensors."""
    return sf.tree_map(lambda x: x.full_tensor() if isinstance(x, DTensor) else x, tree)


WANTED = {"params": {"w": W, "turned": W.T, "b": B}, "epoch": 3}


def _written_here(folder: str) -> Any:
    sf.save(folder, _tree(W, B, 3))
    other = _tree(torch.zeros_like(W), torch.zeros_like(B), 0)
    dcp.load(other, checkpoint_id=f"{folder}/step-00000000")
    return _values(other)


def _written_by_dcp(folder: str) -> Any:
    dcp.save(_tree(W, B, 3), checkpoint_id=folder)
    return _values(sf.load(folder, _tree(torch.zeros_like(W), torch.zeros_like(B), 0)))


@pytest.mark.parametrize("both", [_written_here, _written_by_dcp])
def test_two_ranks_and_then_one_read_what_two_ranks_wrote(
    tmp_path: Path, both: Callable[[str], Any]
) -> None:
    for values in run_ranks(2, both, str(tmp_path)):
        assert_equal(values, WANTED)
    assert_equal(sf.load(tmp_path, WANTED), WANTED)
    with sf.fake_world(3):
        like = sf.tree_map(_shape, WANTED)
        mesh = sf.make_mesh((3,), ("dp",))
        assert_equal(sf.full(sf.load(tmp_path, like, mesh, P("dp"))), WANTED)


def _shape(x: Any) -> Any:
    return sf.ShapeDtype(x.shape, x.dtype) if isinstance(x, torch.Tensor) else x


def test_one_process_in_both_directions(tmp_path: Path) -> None:
    written = sf.save(tmp_path / "ours", TREE)
    other = sf.tree_map(lambda x: torch.zeros_like(x) if isinstance(x, torch.Tensor) else 0, TREE)
    dcp.load(other, checkpoint_id=written)
    assert_equal(other, TREE)
    dcp.save(TREE, checkpoint_id=tmp_path / "dcp")
    assert_equal(sf.load(tmp_path / "dcp", TREE), TREE)


def test_a_fake_world_writes_what_dcp_reads(tmp_path: Path) -> None:
    with sf.fake_world(6):
        mesh = sf.make_mesh((2, 3), ("dp", "tp"))
        written = sf.save(tmp_path, {"w": sf.distribute(W, mesh, P("tp", "dp"))})
    other = {"w": torch.zeros_like(W)}
    dcp.load(other, checkpoint_id=written)
    assert torch.equal(other["w"], W)


def test_the_state_of_an_object_is_one_value_and_its_tensors(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    written = sf.save(tmp_path, {"optimizer": optimizer})
    name = "optimizer.state.0.momentum_buffer"
    other = {"optimizer": None, name: torch.zeros(3, 2)}
    dcp.load(other, checkpoint_id=written)
    assert other["optimizer"]["param_groups"][0]["lr"] == 0.1
    assert torch.equal(other[name], torch.ones(3, 2))


def test_a_value_of_dcp_that_is_not_read_may_be_anything(tmp_path: Path) -> None:
    dcp.save({"w": W, "x": numpy.float64}, checkpoint_id=tmp_path)
    assert torch.equal(sf.load(tmp_path, {"w": W}, strict=False)["w"], W)
    with pytest.raises(sf.CheckpointError, match="UnpicklingError"):
        sf.load(tmp_path, {"w": W, "x": 0})
