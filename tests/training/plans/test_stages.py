"""The strategy "pipeline": a stage for each parameter."""

from __future__ import annotations

from typing import Any

import pytest

import shardfn as sf
from shardfn import P, Stage


def params(layers: int) -> dict[str, Any]:
    block = {"w": sf.ShapeDtype((8, 32)), "v": sf.ShapeDtype((32, 8))}
    ends = {"embedding": sf.ShapeDtype((32, 8)), "head": sf.ShapeDtype((8, 32))}
    return {
        "embedding": ends["embedding"],
        "layers": [block for _ in range(layers)],
        "head": ends["head"],
    }


def test_stages_are_even_and_in_the_order_of_the_parameters() -> None:
    with sf.fake_world(4):
        plan = sf.strategy("pipeline", params(6), sf.make_mesh((4,), ("pp",)))
    stages = [layer["w"].stages["pp"] for layer in plan.params["layers"]]
    assert stages == sorted(stages)
    assert {stages.count(s) for s in range(4)} <= {1, 2}
    assert plan.params["embedding"] == P(pp=0)
    assert plan.params["head"] == P(pp=3)
    assert plan.grads == plan.params == plan.state


def test_chunks_go_round_or_there_and_back() -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("pp",))
        loop = sf.strategy("pipeline", params(2), mesh, chunks=2).params
        back = sf.strategy("pipeline", params(2), mesh, chunks=2, order="v").params
    both = [[x["layers"][i]["w"].stages["pp"] for i in range(2)] for x in (loop, back)]
    assert both == [[1, Stage(0, chunk=1)], [1, Stage(1, chunk=1)]]
    assert (loop["head"], back["head"]) == (P(pp=Stage(1, chunk=1)), P(pp=Stage(0, chunk=1)))


def test_patterns_and_a_base() -> None:
    with sf.fake_world(4):
        mesh = sf.make_mesh((2, 2), ("dp", "pp"))
        base = sf.strategy("zero3", params(2), mesh)
        stages = {"embedding": 0, "layers.0.*": 0, "**": 1}
        plan = sf.strategy("pipeline", params(2), mesh, base=base, stages=stages)
    assert plan.params["layers"][0]["v"] == P("dp", pp=0)
    assert plan.params["layers"][1]["w"] == P(None, "dp", pp=1)
    assert plan.batch == P("dp")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"chunks": 0}, "chunks: it is 0\n  needed: a number of stages, 1 or more"),
        ({"order": "x"}, 'order: it is \'x\'\n  needed: "loop" or "v"'),
        ({"order": "v"}, '1 stages a coordinate, and order="v" goes there and back'),
        ({"chunks": 3}, "4 layers for 6 stages\n  needed: a layer for each stage"),
        ({"stages": 3}, 'it is 3\n  needed: "even", or a dict of patterns to numbers of stages'),
        ({"stages": {"**": 2}}, "'**' is for stage 2, and there are the stages 0 to 1"),
        ({"stages": {"layers.**": 0}}, "embedding is on no stage\n  head is on no stage"),
        ({"axis": "tp"}, "it names 'tp'; the mesh has (pp=2)"),
    ],
)
def test_what_does_not_fit_is_named(options: dict[str, Any], text: str) -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("pp",))
        with pytest.raises(sf.PlacementError) as error:
            sf.strategy("pipeline", params(2), mesh, **options)
    assert text in str(error.value)
