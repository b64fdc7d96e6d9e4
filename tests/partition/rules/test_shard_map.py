"""Prims of per-rank code that a rank computes alone."""

from __future__ import annotations

import pieces
import torch

from shardfn import _compat, partition
from shardfn.ops import shard_map
from shardfn.ops.prims import CALLS
from shardfn.partition.emission.graph_builder import Builder
from tests.support.stages.graphs import shown

assert partition  # it fills the rows


def lowered(call: object, *constants: object, tensor: bool = True) -> str:
    """The ops by which a rank computes a prim, on a mesh of 2 x 3."""
    mode = _compat.FakeTensorMode()
    b = Builder(pieces.mesh_axes((2, 3)), (0, 0), mode, "cpu", ("ga", "gb"))
    with mode:
        x = b.placeholder("x", torch.empty(4))
        args = [x, *constants] if tensor else list(constants)
        lower = CALLS[call].lower
        assert lower is not None
        b.graph.output(lower(b, args, {}, []))
    return shown(b.graph)


def test_a_sum_of_equal_terms_is_a_multiple() -> None:
    one = lowered(shard_map.psum, "b", False)
    assert one == "mul_tensor = mul(x, 3)\nreturn [mul_tensor]"
    assert "mul(x, 6)" in lowered(shard_map.psum, "a,b", False)


def test_the_extremum_of_equal_values_is_the_value() -> None:
    assert lowered(shard_map.extremum, "a", "max") == "return [x]"


def test_the_index_of_a_rank_is_its_coordinate_in_memory_of_its_own() -> None:
    assert lowered(shard_map.axis_index, "b", "cpu", tensor=False) == (
        "clone_default = clone(coord_b)\nreturn [clone_default]"
    )
