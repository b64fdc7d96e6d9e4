"""The mesh axes that a group stands for, and the reductions and sources of a collective."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardfn as sf
from shardfn.capture.dtensors import groups
from shardfn.capture.dtensors.checks import NeedsRanks
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


def test_axes_of_groups_by_all_of_their_names(inside: Any) -> None:
    axes = lambda group: groups.axes_of_group("f", group)
    assert axes(None) == axes(dist.group.WORLD) == axes(inside) == BOTH
    assert axes(list(range(6))) == BOTH
    assert axes(inside["tp"]) == axes((inside, "tp")) == axes((inside, 1)) == ("tp",)
    for name in BOTH:
        group = inside.get_group(name)
        assert axes(group) == axes(group.group_name) == (name,)


def test_axes_of_a_mesh_or_of_one_dim_of_it(inside: Any) -> None:
    axes = lambda dim: groups.axes_of_mesh("f", inside, dim)
    assert (axes(None), axes("dp"), axes(1)) == (BOTH, ("dp",), ("tp",))


def test_a_flattened_axis_stands_for_those_of_the_mesh(inside: Any) -> None:
    flat = inside._flatten("every")
    assert groups.axes_of_mesh("f", flat, None) == BOTH
    assert groups.axes_of_group("f", flat.get_group()) == BOTH


def test_ranks_that_are_no_axis_are_refused(inside: Any) -> None:
    with pytest.raises(sf.CaptureError) as caught:
        groups.axes_of_group("all_reduce", [0, 1])
    text = str(caught.value)
    assert "its group is [0, 1], that of no axis of (dp=2, tp=3)" in text
    assert "mesh.get_group(axis)" in text


def test_outside_of_the_code_of_one_rank_the_mesh_is_named(mesh: Any) -> None:
    with axis_names.scope(None, "cpu", may_be_of_ranks=True):
        for group in (mesh, mesh.get_group("tp")):
            with pytest.raises(NeedsRanks) as caught:
                groups.axes_of_group("f", group)
            assert caught.value.mesh == mesh


def test_an_axis_that_is_not_manual_is_refused(mesh: Any) -> None:
    with axis_names.scope(mesh, "cpu"):
        axis_names.enter_mesh("f", mesh, ("dp",))
        assert groups.axes_of_mesh("f", mesh, "dp") == ("dp",)
        with pytest.raises(NeedsRanks):
            groups.axes_of_mesh("f", mesh, "tp")


def test_reductions_by_torchs_names_and_ours() -> None:
    ops = dist.ReduceOp
    pairs = {"sum": ops.SUM, "avg": ops.AVG, "max": ops.MAX, "min": ops.MIN, "product": ops.PRODUCT}
    for name, op in pairs.items():
        for spelling in (op, name, name.upper()):
            assert groups.reduction("f", spelling, torch.float32) == name
    assert groups.reduction("f", ops.BAND, torch.int64) == "band"
    with pytest.raises(sf.CaptureError, match="one of sum, avg, max, min"):
        groups.reduction("f", "median", torch.float32)


def test_a_reduction_of_another_dtype_is_refused() -> None:
    with pytest.raises(sf.CaptureError, match="op is band, of torch.float32"):
        groups.reduction("f", dist.ReduceOp.BAND, torch.float32)


def test_splits_must_be_equal() -> None:
    groups.check_splits("f", None, (2, 2), ())
    with pytest.raises(sf.CaptureError) as caught:
        groups.check_splits("f", None, (2, 1))
    assert "split sizes [2, 1]" in str(caught.value)


def test_a_source_is_a_number_in_the_group(inside: Any) -> None:
    assert groups.source_of("f", None, 4, None) == 4
    assert groups.source_of("f", inside.get_group("tp"), None, 2) == 2
    with pytest.raises(sf.CaptureError) as caught:
        groups.source_of("broadcast", inside.get_group("tp"), 2, None)
    text = str(caught.value)
    assert "src is 2, a rank of the world, in a group over tp" in text
    assert "group_src=2" in text
