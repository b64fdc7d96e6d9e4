"""sf.fsdp: the largest free dim that the axis divides, on top of other placements."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

import shardfn as sf
from shardfn import P, ShapeDtype


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    with sf.fake_world(6):
        yield sf.make_mesh((3, 2), ("dp", "tp"))


# shape, axis, base -> placement
CASES: dict[str, tuple[tuple[int, ...], Any, Any, P]] = {
    "the largest": ((6, 9), "dp", None, P(None, "dp")),
    "the first of equals": ((6, 6), "dp", None, P("dp")),
    "the largest that divides": ((6, 7), "dp", None, P("dp")),
    "the largest, where none divides": ((5, 7), "dp", None, P(None, "dp")),
    "a vector": ((7,), "dp", None, P("dp")),
    "a scalar": ((), "dp", None, P()),
    "one element": ((1, 1), "dp", None, P()),
    "two axes": ((4, 6), ("dp", "tp"), None, P(None, ("dp", "tp"))),
    "two axes in mesh order": ((4, 6), ("tp", "dp"), None, P(None, ("dp", "tp"))),
    "a free dim": ((2, 9), "dp", P(None, "tp"), P("dp", "tp")),
    "no free dim": ((8,), "dp", P("tp"), P("tp")),
    "the axis is taken": ((6, 6), "dp", P(None, "dp"), P(None, "dp")),
    "one of the axes is taken": ((6, 9), ("dp", "tp"), P("tp"), P("tp", "dp")),
    "torch's placements": ((6, 9), "dp", [Replicate(), Shard(1)], P("dp", "tp")),
    "the free axes": ((6, 9), None, P("tp"), P("tp", "dp")),
    "blocks": ((6, 9), "dp", P("tp*3"), P("tp*3", "dp")),
    "blocks, and the free axes": ((6, 9), None, P("tp*3"), P("tp*3", "dp")),
    "a stage": ((6, 9), "dp", P(tp=1), P(None, "dp", tp=1)),
    "a stage, and the free axes": ((6, 9), None, P(tp=1), P(None, "dp", tp=1)),
    "a second stage of a coordinate": (
        (6, 9),
        None,
        [Replicate(), sf.Stage(1, chunk=1)],
        P(None, "dp", tp=sf.Stage(1, chunk=1)),
    ),
    "the axis has stages": ((6, 9), ("dp", "tp"), P(tp=0), P(None, "dp", tp=0)),
    "another order": ((6, 6), "dp", P(("tp", "dp")), P(("tp", "dp"))),
    "all axes": ((5, 12), None, None, P(None, ("dp", "tp"))),
}


@pytest.mark.parametrize("case", CASES)
def test_which_dim_is_sharded(case: str, mesh: Any) -> None:
    shape, axis, base, wanted = CASES[case]
    where = sf.fsdp({"w": ShapeDtype(shape)}, mesh, axis=axis, base=base)
    assert where == {"w": wanted}


def test_small_parameters_keep_their_placement(mesh: Any) -> None:
    params = {"w": ShapeDtype((5, 50)), "b": ShapeDtype((249,)), "c": 3}
    base = {"w": P(), "b": P("tp"), "c": None}
    where = sf.fsdp(params, mesh, axis="dp", min_bytes="1KB", base=base)
    assert where == {"w": P(None, "dp"), "b": P("tp"), "c": None}
    assert sf.fsdp(params, mesh, axis="dp", min_bytes=997)["b"] == P()
    assert sf.fsdp(params, mesh, axis="dp", min_bytes=996)["b"] == P("dp")


def test_it_joins_a_tensor_parallel_plan(mesh: Any) -> None:
    params = {"up.weight": torch.ones(8, 6), "down.weight": torch.ones(6, 8)}
    plan = {"up": "colwise", "down": "rowwise"}
    tp = sf.placements(params, plan, axis="tp", mesh=mesh)
    where = sf.fsdp(params, mesh, base=tp)
    assert where == {"up.weight": P("tp", "dp"), "down.weight": P("dp", "tp")}


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "an axis that the mesh lacks": (
        {"axis": "pp"},
        "fsdp, axis: axis names 'pp', but the mesh has (dp=3, tp=2)",
    ),
    "no axis is free": (
        {"base": P("dp", "tp")},
        "fsdp, axis: the placements in base shard over every axis of the mesh (dp=3, tp=2)",
    ),
    "a base that does not fit": (
        {"base": P("dp", "tp", None)},
        "fsdp, base: w: P('dp', 'tp', None) names dim 2",
    ),
    "a base of other names": (
        {"base": {"v": P()}},
        "fsdp, base: base does not match the parameters",
    ),
    "a Partial base": (
        {"base": [Partial(), Replicate()]},
        "w: [Partial(sum), Replicate()] is Partial, but a parameter is a global value",
    ),
    "bytes": ({"min_bytes": "many"}, "fsdp, min_bytes: 'many' is not a number of"),
    "negative bytes": ({"min_bytes": -1}, "fsdp, min_bytes: -1 is not positive"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_named(case: str, mesh: Any) -> None:
    more, message = BAD[case]
    with pytest.raises(sf.ShardError, match=re.escape(message)):
        sf.fsdp({"w": ShapeDtype((6, 9))}, mesh, **more)


def test_it_needs_a_mesh_and_a_dict(mesh: Any) -> None:
    with pytest.raises(sf.PlacementError, match="fsdp, mesh: a NoneType"):
        sf.fsdp({}, None)
    with pytest.raises(sf.TreeError, match="fsdp, params: a Tensor"):
        sf.fsdp(torch.ones(2), mesh)


def test_other_trees_than_dicts_are_told_what_to_write(mesh: Any) -> None:
    params = [torch.ones(4), (torch.ones(6, 8),)]
    with pytest.raises(sf.TreeError, match="a list") as caught:
        sf.fsdp(params, mesh)
    fix, _, where = str(caught.value.fix).partition(", and read the placements at ")
    tree = eval(fix, {"params": params})
    found = eval(f"sf.fsdp(tree, mesh){where}", {"sf": sf, "tree": tree, "mesh": mesh})
    assert found == [P(("dp", "tp")), (P(("dp", "tp")),)]
    strategy = eval(f"sf.strategy('zero3', tree, mesh).params{where}", {**locals(), "sf": sf})
    assert strategy == [P("dp"), (P("dp"),)]

    module = torch.nn.Linear(6, 8)
    for given in (module, module.parameters()):
        with pytest.raises(sf.TreeError) as caught:
            sf.strategy("zero3", given, mesh)
        fix = str(caught.value.fix)
        assert set(sf.fsdp(eval(fix, {"module": module}), mesh)) == {"weight", "bias"}
