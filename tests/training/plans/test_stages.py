"""The strategy "pipeline": a stage for each parameter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

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


def tied(params: Any, ids: torch.Tensor) -> torch.Tensor:
    """A loss whose head is its embedding; `scale` is the first parameter and is read last."""
    h = torch.nn.functional.embedding(ids, params["embedding"])
    for layer in params["layers"]:
        h = h + torch.relu(h @ layer["w"]) @ layer["v"]
    return (h @ params["embedding"].t()).mean() * params["scale"]


def of_tied(layers: int, words: int) -> dict[str, Any]:
    block = {"w": sf.ShapeDtype((64, 256)), "v": sf.ShapeDtype((256, 64))}
    ends = {"scale": sf.ShapeDtype(()), "embedding": sf.ShapeDtype((words, 64))}
    return {**ends, "layers": [block for _ in range(layers)]}


def stages_of(tree: dict[str, Any], mesh: Any, stages: Any) -> tuple[list[int], int, int]:
    """The stages of (the layers, the embedding, the scale)."""
    plan = sf.strategy("pipeline", tree, mesh, stages=stages).params
    layers = [layer["w"].stages["pp"] for layer in plan["layers"]]
    return layers, plan["embedding"].stages["pp"], plan["scale"].stages["pp"]


def test_stages_of_a_traced_function_follow_its_work_and_the_order_of_its_reads() -> None:
    ids = sf.ShapeDtype((64, 128), torch.int64)
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("pp",))
        # the head of 2,048 words takes as long as two layers, by its traffic
        large, small, widest = of_tied(5, 1024), of_tied(4, 2), of_tied(5, 2048)
        by_work = stages_of(widest, mesh, sf.jit(tied).trace(widest, ids))
        assert by_work == ([0, 0, 0, 0, 1], 0, 1)
        assert stages_of(large, mesh, "even") == ([0, 1, 1, 1, 1], 0, 0)
        assert stages_of(small, mesh, sf.jit(tied).trace(small, ids)) == ([0, 0, 1, 1], 0, 1)


def test_stages_of_a_loop_count_all_its_turns() -> None:
    def looped(params: Any, x: torch.Tensor) -> torch.Tensor:
        for weights in params.values():
            x = sf.scan(lambda h, w: (torch.relu(h @ w), None), x, weights)[0]
        return x.sum()

    depths = {"a": 6, "b": 2, "c": 2, "d": 2}
    tree = {name: sf.ShapeDtype((n, 64, 64)) for name, n in depths.items()}
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("pp",))
        traced = sf.jit(looped).trace(tree, sf.ShapeDtype((4096, 64)))
        plan = sf.strategy("pipeline", tree, mesh, stages=traced).params
    assert [place.stages["pp"] for place in plan.values()] == [0, 1, 1, 1]


def test_a_traced_function_of_other_parameters_is_refused() -> None:
    traced = sf.jit(tied).trace(of_tied(2, 8), sf.ShapeDtype((4, 8), torch.int64))
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("pp",))
        with pytest.raises(sf.PlacementError) as error:
            sf.strategy("pipeline", of_tied(1, 9), mesh, stages=traced)
    text = str(error.value)
    assert "embedding: (9, 64) in params, but (8, 64) in jit(tied)" in text
    assert "layers.1.w: not there in params, but (64, 256) in jit(tied)" in text
    assert "try: stages=sf.jit(loss_fn).trace(params, batch)" in text


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"chunks": 0}, "chunks: it is 0\n  needed: a number of stages, 1 or more"),
        ({"order": "x"}, 'order: it is \'x\'\n  needed: "loop" or "v"'),
        ({"order": "v"}, 'chunks is 1, but order="v" needs two stages per pipeline rank'),
        ({"chunks": 3}, "4 layers for 6 stages\n  needed: a layer for each stage"),
        ({"stages": 3}, 'it is 3\n  needed: "even", a traced function, or a dict from patterns'),
        ({"stages": {"**": 2}}, "'**' is for stage 2, but the stages are 0 to 1"),
        ({"stages": {"layers.**": 0}}, "embedding is on no stage\n  head is on no stage"),
        ({"axis": "tp"}, "axis names 'tp', but the mesh has (pp=2)"),
    ],
)
def test_what_does_not_fit_is_named(options: dict[str, Any], text: str) -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("pp",))
        with pytest.raises(sf.PlacementError) as error:
            sf.strategy("pipeline", params(2), mesh, **options)
    assert text in str(error.value)
