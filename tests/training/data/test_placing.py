"""A batch as DTensors: shards, devices, what does not fit."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
from message import without_line

import shardfn as sf
from shardfn import P
from shardfn.training.data import placing
from shardfn.training.data.sources import Batch


@pytest.fixture
def mesh() -> Any:
    with sf.fake_world(6):
        yield sf.make_mesh((3, 2), ("dp", "tp"))


def test_a_batch_is_sharded_as_distribute_shards_it(mesh: Any) -> None:
    tree = {"x": torch.arange(28.0).view(7, 4).t().t(), "n": 3, "s": torch.ones(())}
    where = {"x": P("dp", "tp"), "n": None, "s": P()}
    found = placing.placed(Batch(tree, 0), mesh, where)
    wanted = sf.distribute(tree, mesh, where)
    assert found["n"] == 3
    for key in ("x", "s"):
        assert found[key].placements == wanted[key].placements
        assert torch.equal(sf.full(found[key]), tree[key])
    tree["x"].zero_()
    assert sf.full(found["x"]).sum() > 0
    other = collections.UserDict(x=torch.ones(2))
    assert list(placing.placed(Batch(other, 0), mesh, P())) == ["x"]


def test_a_stage_alone_has_its_batch(mesh: Any) -> None:
    tree = {"x": torch.arange(28.0).view(7, 4), "y": torch.arange(7)}
    where = {"x": P("dp", tp=0), "y": P("dp", tp=1)}
    found = placing.placed(Batch(tree, 0), mesh, where)
    for key, stage in (("x", 0), ("y", 1)):
        assert torch.equal(sf.full(found[key]), tree[key])
        rows = [shard.shape[0] for shard in found[key].to_local().shards]
        assert rows[stage::2] == [3, 3, 1] and rows[1 - stage :: 2] == [0, 0, 0]
    assert placing.rows_of(where) == P("dp")


def test_rows_of_one_rank_become_the_global_batch() -> None:
    with sf.fake_world(6, numerics=False):
        mesh = sf.make_mesh((3, 2), ("dp", "tp"))
        batch = Batch(torch.ones(3, 4), 0, rows=7, mine=3)
        x = placing.placed(batch, mesh, P("dp", "tp"))
        assert x.shape == (7, 4) and x.to_local().shape == (3, 2)
        none = placing.placed(Batch(torch.ones(1, 4), 0, rows=1, mine=0), mesh, P("dp"))
        assert none.shape == (1, 4) and none.to_local().shape == (0, 4)
        assert placing.share_of(7, P("dp"), mesh) == [0, 1, 2]


def test_the_placement_of_rows() -> None:
    assert placing.rows_of(P("dp", "tp")) == P("dp")
    assert placing.rows_of({"x": P(("dp", "tp")), "y": P(("dp", "tp"), None)}) == P(("dp", "tp"))
    for where in (P(), P(None, "tp"), {"x": P("dp"), "y": P()}, None, {}):
        assert placing.rows_of(where) is None


WRONG: dict[str, tuple[Batch, Any, str]] = {
    "dims": (
        Batch({"x": torch.ones(())}, 0),
        P("dp"),
        "loader: batch['x']: P('dp') names dim 0 of a tensor with 0 dims, shape ()\n  try: "
        "give placements that fit each tensor",
    ),
    "a tree": (
        Batch({"x": torch.ones(2)}, 0),
        {"y": P("dp")},
        "loader: the placements do not match a batch",
    ),
    "rows": (
        Batch({"x": torch.ones(5), "y": ["a"]}, 0, rows=7, mine=3),
        P("dp"),
        "loader: batch['x']: float32[5] must have the 3 rows that were read from the dataset\n  "
        "batch['y'][0]: 'a' is not a tensor, so it has no rows\n  try: give placements that "
        "fit each tensor; or rows=False, with which each rank reads the global batch",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit(case: str, mesh: Any) -> None:
    batch, where, text = WRONG[case]
    with pytest.raises(sf.ShardError) as error:
        placing.placed(batch, mesh, where)
    assert without_line(error.value).startswith(text)


def test_a_dtensor_is_refused(mesh: Any) -> None:
    x = sf.distribute(torch.ones(2), mesh, P("dp"))
    with pytest.raises(sf.PlacementError, match="a DTensor, which has placements already"):
        placing.placed(Batch(x, 0), mesh, P("dp"))


def test_shapes_as_text() -> None:
    tree = {str(i): torch.ones(2, i) for i in range(10)}
    text = placing.shapes_of(Batch(tree, 0, rows=4, mine=2))
    assert text.startswith("batch['0'] float32[*, 0], ")
    assert text.endswith(", and 2 more")
