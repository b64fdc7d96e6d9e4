"""One rank's graph of a plan: its inputs, its own ops, and which ranks share it."""

from __future__ import annotations

import itertools
from typing import Any

import pieces
import pytest
import torch

import shardfn as sf
from shardfn import P
from shardfn.partition import Plan, emit, local_sizes
from shardfn.types import MeshPlacements
from tests.support.stages.graphs import op_of
from tests.support.stages.local_graphs import text
from tests.support.stages.plans import planned

X, W = torch.ones(5, 4), torch.ones(4, 6)


def local(plan: Plan, *coordinates: int) -> torch.fx.Graph:
    names = tuple(f"group:{a}" for a in plan.axes.names)
    return emit(plan, coordinates, names, "cpu")


def shapes(graph: torch.fx.Graph) -> list[Any]:
    return [tuple(n.meta["val"].shape) for n in graph.find_nodes(op="placeholder")]


def test_the_inputs_are_a_coordinate_for_each_axis_and_then_the_local_tensors() -> None:
    plan = planned(lambda x, w: [x @ w], (X, W), [(0, "R"), ("R", 1)], sizes=(2, 3))
    graph = local(plan, 1, 0)
    names = [n.name for n in graph.find_nodes(op="placeholder")]
    assert names == ["coord_a", "coord_b", "x1", "x2"]
    assert shapes(graph) == [(), (), (2, 4), (4, 2)]
    assert text(graph, plan.axes) == "%mm = mm(%x0, %x1): f32[5@a, 6@b]\nreturn %mm"


def test_ranks_with_shards_of_equal_sizes_share_a_graph() -> None:
    plan = planned(lambda x: [x * 2], (X,), [(0,)], sizes=(3,))
    keys = [*local_sizes(plan, [(c,) for c in range(3)]).values()]
    assert keys[0] == keys[1] != keys[2], "5 rows over 3 ranks: 2, 2, 1"
    moved = planned(lambda x: [x.roll(1, 0)], (X,), [(0,)], sizes=(3,))
    first, _, last = local_sizes(moved, [(0,), (1,), (2,)]).values()
    assert first != last


def sized(graph: torch.fx.Graph) -> list[Any]:
    """The ops of a graph, with their constants and the sizes of their values."""
    constant = lambda x: torch.fx.node.map_arg(x, lambda n: n.name)
    return [
        (op_of(n), repr(constant((n.args, n.kwargs))), str(n.meta.get("val"))) for n in graph.nodes
    ]


MOVED = ((0, "R"), ("R", 0), (1, "R"), ("R", 1), (0, 1), (1, 0), (0, 0), ("R", "R"))


@pytest.mark.parametrize("rows", [5, 6, 7])
def test_ranks_with_equal_keys_have_equal_graphs(rows: int) -> None:
    x = torch.ones(rows, 3)
    ranks = list(itertools.product(range(2), range(2)))
    for before, after in itertools.product(MOVED, MOVED):
        plan = planned(lambda x: [x], (x,), [before], outs=[after], sizes=(2, 2))
        keys = local_sizes(plan, ranks)
        graphs = {c: sized(local(plan, *c)) for c in ranks}
        for a, b in itertools.combinations(ranks, 2):
            assert keys[a] != keys[b] or graphs[a] == graphs[b], (before, after, a, b)


def test_sizes_that_neither_inputs_nor_results_have_are_in_the_keys() -> None:
    inside = lambda x: sf.constrain(sf.constrain(x, P("a", "b")) * 2, P())
    with sf.fake_world(4):
        mesh = sf.make_mesh((2, 2), ("a", "b"))
        for x in (torch.rand(5, 4), torch.rand(4, 5), torch.rand(3, 3)):
            step = sf.shard(inside, mesh, (P(),), backend="aten")
            assert torch.equal(sf.full(step(x)), x * 2)


def test_an_input_lies_in_memory_as_the_global_value_does() -> None:
    turned = torch.ones(4, 6).t()
    plan = planned(lambda x: [x * 2], (turned,), [(0,)])
    (_, x) = local(plan, 0).find_nodes(op="placeholder")
    assert (x.meta["val"].shape, x.meta["val"].stride()) == ((3, 4), (1, 3))


def test_a_constant_is_made_at_the_size_of_the_shard() -> None:
    plan = planned(lambda x: [x + torch.ones(5, 4)], (X,), [(0,)])
    for coordinate, rows in ((0, 3), (1, 2)):
        graph = local(plan, coordinate)
        (made,) = [n for n in graph.nodes if op_of(n) == "full"]
        assert made.meta["val"].shape == (rows, 4)


def test_a_node_knows_its_line_its_phase_and_its_step() -> None:
    plan = planned(lambda x: [(x * 2).exp()], (X,), [(0,)], backward=["exp"])
    calls = [n for n in local(plan, 0).nodes if n.op == "call_function"]
    about = [(n.meta["source"], n.meta["phase"], n.meta["step"]) for n in calls]
    assert about == [("model.py:mul", "forward", 0), ("model.py:exp", "backward", 1)]


def test_a_view_is_of_the_local_size() -> None:
    ins: list[MeshPlacements] = [(0,)]
    plan = planned(lambda x: [x.view(2, 3, 4)], (torch.ones(6, 4),), ins)
    run = pieces.run_plan(plan, [pieces.cut(torch.arange(24.0).view(6, 4), (0,), (2,))])
    whole = torch.arange(24.0).view(2, 3, 4)
    assert all(torch.equal(got, wanted) for got, wanted in zip(run[0], whole.chunk(2), strict=True))
