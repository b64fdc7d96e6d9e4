"""How manual axes shard the values of a shard_map, and what does not fit."""

from __future__ import annotations

from typing import Any

import pytest

import shardfn as sf
from shardfn.capture.shard_map import axis_names
from shardfn.capture.shard_map.placements import shard_texts

AXES = (("dp", 2), ("tp", 3))


@pytest.fixture(autouse=True)
def _scope():
    with sf.fake_world(6), axis_names.scope(sf.make_mesh((2, 3), ("dp", "tp")), "cpu", False):
        yield


def cut(shape: Any, spec: Any, what: str = "in_placements", axes: Any = AXES) -> Any:
    return shard_texts("shard_map(f)", what, axes, ("x",), (shape,), (spec,), ())[0]


def names(*parts: Any) -> Any:
    return "names", parts


FITTING = [
    ((4, 6), names("dp", "tp"), ("dp:2=0,tp:3=1", "", 0)),
    ((12,), names(("dp", "tp")), ("dp:2=0,tp:3=0", "", 0)),
    ((4, 6), None, ("dp:2=,tp:3=", "", 0)),
    (None, None, ("", "", 0)),
    ((4, 6), ("placements", (("S", 1), ("R",))), ("dp:2=1,tp:3=", "", 0)),
]


@pytest.mark.parametrize(("shape", "spec", "wanted"), FITTING, ids=str)
def test_a_placement_as_text(shape: Any, spec: Any, wanted: Any) -> None:
    assert cut(shape, spec) == wanted


def test_a_result_may_be_partial() -> None:
    sums = ("placements", (("P", "sum"), ("R",)))
    assert cut((4,), sums, "out_placements") == ("dp:2=,tp:3=", "dp", 0)
    means = ("placements", (("P", "avg"), ("P", "avg")))
    assert cut((4,), means, "out_placements") == ("dp:2=,tp:3=", "dp,tp", 6)
    with pytest.raises(sf.PlacementError, match="only a result can be Partial"):
        cut((4,), sums)
    with pytest.raises(sf.PlacementError, match="only a sum or a mean can be Partial"):
        cut((4,), ("placements", (("P", "max"), ("R",))), "out_placements")


WRONG = [
    (
        (5,),
        names("dp"),
        "dim 0 has size 5, which axis dp cannot shard into 2 equal chunks; pad it by 1",
    ),
    (
        (10,),
        names(("dp", "tp")),
        "dim 0 has size 10, 5 of it on a rank, which axis tp cannot shard into 3 equal chunks; "
        "pad it by 2",
    ),
    ((4,), names("pp"), "names axis 'pp'; the mesh has (dp=2, tp=3)"),
]


@pytest.mark.parametrize(("shape", "spec", "text"), WRONG, ids=str)
def test_a_placement_that_does_not_fit_is_refused(shape: Any, spec: Any, text: str) -> None:
    with pytest.raises(sf.PlacementError) as caught:
        cut(shape, spec)
    assert text in str(caught.value) and caught.value.arg_path == "x"


def test_an_axis_that_is_not_manual_is_refused() -> None:
    with pytest.raises(sf.PlacementError, match="is not in the axis_names of this shard_map"):
        cut((4, 6), names(None, "tp"), axes=AXES[:1])


def test_mismatches_of_trees_come_first() -> None:
    with pytest.raises(sf.TreeError, match="the placements do not match the tree\n  lacks"):
        shard_texts("shard_map(f)", "in_placements", AXES, (), (), (), ("lacks ['w']",))
