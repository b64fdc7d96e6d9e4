"""A walk as the planner reads it: values, readers, and what stays as it is."""

from __future__ import annotations

from typing import Any

import pieces
import torch

from shardfn.buckets import BucketOptions
from shardfn.ops.placement import prim_align, prim_redistribute
from shardfn.partition.planner.observed_walk import SUM, ObservedWalk
from shardfn.partition.propagate import run_walk
from shardfn.partition.propagation.walk import Walk
from shardfn.types import MeshPlacements
from tests.support.stages.plans import program_of

X, W = torch.ones(8, 4), torch.ones(4, 6)


def observed(
    fn: Any, args: Any, ins: list[MeshPlacements], sizes: tuple[int, ...] = (2,)
) -> ObservedWalk:
    program = program_of(fn, *args)
    walk = Walk(pieces.mesh_axes(sizes), "f")
    outs = [None] * len(program.out_paths)
    return ObservedWalk(walk, program, run_walk(walk, program, ins, outs, ()))


def named(found: ObservedWalk) -> dict[str, torch.fx.Node]:
    return {node.name: node for node in found.nodes}


def test_an_item_of_several_results_is_a_value_of_its_op() -> None:
    found = observed(lambda x: list(torch.max(x, 1)), (X,), [(0,)])
    assert list(named(found)) == ["x_1", "max_1"]
    op = named(found)["max_1"]
    assert [key for key, _ in found.results(op)] == [(op, 0), (op, 1)]
    assert [key for key, _ in found.leaving] == [(op, 0), (op, 1)]


def test_a_reader_reads_each_tensor_argument() -> None:
    found = observed(lambda x, w: [x @ w], (X, W), [(0,), ("R",)])
    nodes = named(found)
    assert found.read_by(nodes["mm"]) == [(nodes["x_1"], 0), (nodes["w_1"], 0)]
    assert found.is_early((nodes["x_1"], 0))
    assert not found.is_early((nodes["mm"], 0))


def test_a_constraint_needs_the_placement_that_it_asks_for() -> None:
    fn = lambda x: [prim_redistribute(x.exp(), ";a")]
    found = observed(fn, (torch.ones(8, 4),), [(0,)])
    nodes = named(found)
    assert list(found.needs(nodes["prim_redistribute"])) == [((nodes["exp"], 0), (1,))]


def test_sums_of_gradients_are_one_value_before_they_are_placed() -> None:
    def step(w: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
        options = BucketOptions("w", 1, 1).text
        grads = [prim_align(x.t() @ (x + i), w, options) for i in (1, 2)]
        return [grads[0] + grads[1]]

    found = observed(step, (torch.ones(4, 4), X), [("R",), (0,)])
    nodes = named(found)
    assert "prim_align" not in nodes, "each is placed with the sum"
    (total,) = [n for n in found.nodes if found.is_sum(n)]
    assert found.inputs(total) == [(nodes["mm"], 0), (nodes["mm_1"], 0)]
    assert [key for key, _ in found.results(total)] == [(total, SUM)]
    assert (total, SUM) in found.gradients()


def test_small_programs_are_planned_op_by_op() -> None:
    assert not observed(lambda x: [x + 1], (X,), [(0,)]).is_large
