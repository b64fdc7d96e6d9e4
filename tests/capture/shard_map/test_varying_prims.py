"""How the prims vary: over which axes a result does, and over which an argument has to."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn.capture.shard_map import varying_prims
from shardfn.capture.shard_map.gradients import axes_in, needed_by_prim
from shardfn.ops import shard_map

GRAPH = torch.fx.Graph()
X = GRAPH.placeholder("x")


class Kinds:
    """Arguments that all vary over some axes."""

    def __init__(self, *axes: str) -> None:
        self.axes = frozenset(axes)

    def flat(self, x: Any) -> frozenset[str]:
        return self.axes


def call(target: Any, *constants: Any, **kwargs: Any) -> torch.fx.Node:
    return GRAPH.call_function(target, (X, *constants), kwargs)


RESULTS = [
    (shard_map.psum, ("a", False), {"a", "b"}, {"b"}),
    (shard_map.vary, ("a",), {"b"}, {"a", "b"}),
    (shard_map.all_gather, ("a", 2, 0), {"a"}, set()),
    (shard_map.all_to_all, ("a", 2, 0, 1), {"a"}, {"a"}),
    (shard_map.own_piece, ("a", 2, 0), set(), {"a"}),
    (shard_map.to_local, ("a:2=0,b:3=",), set(), {"a"}),
]


@pytest.mark.parametrize(("target", "constants", "before", "after"), RESULTS)
def test_the_result_of_a_prim(target, constants, before, after) -> None:
    node = call(target, *constants)
    assert axes_in(varying_prims.result(Kinds(*before), node)) == frozenset(after)


def test_a_sum_needs_terms_of_its_axes_and_a_view_of_the_global_value_nothing() -> None:
    assert axes_in(needed_by_prim(call(shard_map.psum, "a,b", False))) == {"a", "b"}
    assert needed_by_prim(call(shard_map.own_piece, "a", 2, 0)) == frozenset()


def test_a_result_that_varies_where_it_must_not_is_refused() -> None:
    node = call(shard_map.from_local, "a:2=0,b:3=", where="shard_map(f): result[1]")
    assert axes_in(varying_prims.result(Kinds("a"), node)) == frozenset()
    with pytest.raises(sf.PlacementError) as caught:
        varying_prims.result(Kinds("a", "b"), node)
    text = str(caught.value)
    assert text.startswith(
        "shard_map(f): result[1] varies over b, and its out_placements require it to be "
        "invariant over it"
    )
    assert "psum or pmean it over b" in text and caught.value.arg_path == "result[1]"
