"""Parameters that placements are for: paths, sizes, ties, and axes that exist."""

from __future__ import annotations

import pieces
import pytest
import torch
from torch.distributed.tensor import Shard

import shardfn as sf
from shardfn import P
from shardfn.plans.leaves import assumed_axes, check_fit, checked_axes, params_of

AXES = pieces.mesh_axes((2, 3))
TREE = {"w": torch.ones(4, 6, dtype=torch.float16), "n": 3, "l": [sf.ShapeDtype((5,))]}


def test_constants_have_no_leaf_and_trees_are_filled_by_path() -> None:
    params = params_of("f", TREE)
    assert [(leaf.path, leaf.shape) for leaf in params.tensors] == [("w", (4, 6)), ("l.0", (5,))]
    assert params.tensors[0].nbytes == 48
    assert params.filled({"w": 1, "l.0": 2}) == {"w": 1, "n": None, "l": [2]}


def test_a_tied_parameter_has_all_of_its_names() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    module[1].weight = module[0].weight
    tree = dict(module.named_parameters())
    leaves = {leaf.path: leaf.names for leaf in params_of("f", tree, module).tensors}
    assert leaves["0.weight"] == ("0.weight", "1.weight")
    assert leaves["1.bias"] == ("1.bias",)


def test_other_arguments_are_refused() -> None:
    with pytest.raises(sf.TreeError, match="f, params: a list"):
        params_of("f", [torch.ones(2)])
    with pytest.raises(sf.TreeError, match="f, module: a int"):
        params_of("f", TREE, 3)


def test_axes_come_in_the_order_of_the_mesh() -> None:
    assert checked_axes("f", AXES, ("b", "a")) == ("a", "b")
    assert checked_axes("f", AXES, "b") == ("b",)
    assert checked_axes("f", None, ("z", "y")) == ("z", "y")
    with pytest.raises(sf.PlacementError, match="it names 'z'; the mesh has"):
        checked_axes("f", AXES, ("a", "z"))
    with pytest.raises(sf.PlacementError, match="f, axis: it is 3"):
        checked_axes("f", AXES, 3)


def test_every_placement_that_does_not_fit_is_listed() -> None:
    leaves = params_of("f", TREE).tensors
    check_fit("f", leaves, {"w": P("a", "b"), "l.0": None}, AXES)
    with pytest.raises(sf.PlacementError) as caught:
        check_fit("f", leaves, {"w": P("z"), "l.0": P("a", "b")}, AXES)
    text = str(caught.value)
    assert "w: " in text and "l.0: " in text


def test_without_a_mesh_the_axes_are_those_that_a_placement_names() -> None:
    assert assumed_axes(P("dp", ("tp", "pp"))).names == ("dp", "tp", "pp")
    assert assumed_axes(P("tp*3", ("dp*2", "pp"))).names == ("tp", "dp", "pp")
    assert assumed_axes([Shard(0), Shard(1)]).names == ("axis 0", "axis 1")
