"""Names of collectives: mesh axes and mapped dims, their sizes and indices."""

from __future__ import annotations

import torch

from shardfn.capture.shard_map import axis_names
from shardfn.transforms.sharding import _axis_names as names

MIXED = [("dp", 2, axis_names.MESH), ("i", 3, 1), ("tp", 4, axis_names.MESH)]


def test_mesh_axes_and_samples_are_told_apart() -> None:
    assert names.mapped(MIXED) == [("i", 3, 1)]
    assert names.mesh_axes(MIXED) == "dp,tp"
    assert names.count(MIXED) == 24 and names.count([]) == 1


def test_leaves_are_mapped_in_their_tree() -> None:
    tree = {"a": 1, "b": [torch.ones(2), 3]}
    found = names.leafwise(lambda x: x * 2, tree)
    assert (found["a"], found["b"][1]) == (2, 6) and found["b"][0].tolist() == [2, 2]
    assert names.leafwise(lambda x: x + 1, 3) == 4
    assert names.tensor(3).dtype == torch.int64


def test_one_slice_keeps_its_dim() -> None:
    x = torch.arange(6).view(2, 3)
    assert names.chosen(x, 1, torch.tensor(2)).tolist() == [[2], [5]]


def test_the_first_name_counts_slowest_and_values_are_stacked_so() -> None:
    x = torch.arange(6.0).view(2, 3)
    both = [("i", 2, 1), ("j", 3, 2)]
    nested = lambda fn: torch.func.vmap(torch.func.vmap(fn))
    gathered = nested(lambda v: names.stacked(v, both))(x)
    assert torch.equal(gathered, torch.arange(6.0).expand(2, 3, 6))
