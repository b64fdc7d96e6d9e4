"""Loops and branches in a plan: placements of their inputs and results, and nested plans."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn.ops.loops import Branch, Scan, While
from shardfn.partition import plan as steps
from shardfn.partition.propagation.loops import walk_loops
from shardfn.types import MeshPlacements
from tests.support.stages.graphs import graph_of
from tests.support.stages.plans import graph_with_loop, planned, told

W, C, ROWS = torch.ones(4, 4), torch.ones(6, 4), torch.ones(3, 6, 4)


def nested(loop: Any, args: Any, ins: list[MeshPlacements]) -> tuple[steps.Plan, steps.Nested]:
    plan = planned(graph_with_loop(loop, *args), args, ins)
    (step,) = [s for s in plan.steps if isinstance(s, steps.Nested)]
    return plan, step


def marks(slots: Any) -> list[MeshPlacements]:
    return [slot.placements for slot in slots]


def test_rows_of_a_scan_are_sharded_one_dim_deeper() -> None:
    body = graph_of(lambda w, c, x: [(c @ w) + x, c + 1], W, C, ROWS[0])
    plan, step = nested(Scan((body,), 1, 1, 3), (W, C, ROWS), [("R",), (0,), (1,)])
    assert marks(step.ins) == [("R",), (0,), (1,)]
    assert marks(step.outs) == [(0,), (1,)]
    assert told(step.plans[0]) == [
        "apply mm: 0, R -> 0",
        "apply add: 0, 0 -> 0",
        "apply add_1: 0 -> 0",
    ]
    assert not any(line.startswith("redistribute") for line in told(plan))


def test_a_sharded_dim_of_steps_is_gathered_before_the_loop() -> None:
    body = graph_of(lambda c, x: [c + x], C, ROWS[0])
    plan, step = nested(Scan((body,), 0, 1, 3), (C, ROWS), [("R",), (0,)])
    assert marks(step.ins)[1] != (0,)
    assert any("by all_gather" in line or "all_to_all" in line for line in told(plan))


def test_a_carry_leaves_every_step_as_it_entered() -> None:
    """The product shards the carry by columns, so the carry that enters is sharded so."""
    body = graph_of(lambda w, c: [(c @ w).sin()], W, C)
    _, step = nested(Scan((body,), 1, 1, 3), (W, C), [("R",), (0,)])
    inner = step.plans[0]
    assert marks(inner.ins)[1] == marks(inner.outs)[0] == marks(step.outs)[0]


def test_a_while_loop_has_a_plan_for_its_condition() -> None:
    condition = graph_of(lambda c: [c.sum() < 20], C)
    body = graph_of(lambda c: [c * 2], C)
    _, step = nested(While((condition, body), 0, 1), (C,), [(0,)])
    assert len(step.plans) == 2
    assert told(step.plans[1]) == ["apply mul: 0 -> 0"]
    last = told(step.plans[0])
    assert any("all_reduce" in line for line in last), "every rank decides alike"
    assert marks(step.plans[0].outs) == [("R",)]


def test_both_branches_leave_their_results_alike() -> None:
    yes, no = (graph_of(lambda x: [x + 1], C), graph_of(lambda x: [x @ x.t() @ x], C))
    _, step = nested(Branch((yes, no), 1), (C, torch.tensor(True)), [(0,), ("R",)])
    first, second = (marks(plan.outs) for plan in step.plans)
    assert first == second == marks(step.outs)


@pytest.mark.parametrize(("begins_with_the_carry", "count"), [(False, 1), (True, 2)])
def test_a_scan_in_a_loop_is_placed_once_for_equal_inputs(
    begins_with_the_carry: bool, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The outer carry is zeros, first tried as a sum and then sharded as its rows are."""
    placed: list[torch.fx.Node] = []
    visited: list[torch.fx.Node] = []
    place, nest = walk_loops._scan_placed, walk_loops._nest

    def noted(walk: Any, node: torch.fx.Node, values: Any) -> Any:
        placed.append(node)
        return place(walk, node, values)

    def nested(walk: Any, node: torch.fx.Node, *rest: Any) -> None:
        visited.append(node)
        nest(walk, node, *rest)

    monkeypatch.setattr(walk_loops, "_scan_placed", noted)
    monkeypatch.setattr(walk_loops, "_nest", nested)

    def rows(w: torch.Tensor, xs: torch.Tensor) -> torch.Tensor:
        inner = lambda c, x: (torch.tanh(c @ w) + x, None)
        first = lambda c, x: c if begins_with_the_carry else x[0]
        outer = lambda c, x: (c + sf.scan(inner, first(c, x), x)[0], None)
        return sf.scan(outer, torch.zeros(6, 4), xs)[0]

    w, xs = torch.randn(4, 4), torch.randn(3, 2, 6, 4)
    with sf.fake_world(2):
        ins = (None, sf.P(None, None, "dp"))
        sharded = sf.shard(rows, sf.make_mesh((2,), ("dp",)), ins, backend="aten")
        torch.testing.assert_close(sf.full(sharded(w, xs)), rows(w, xs))
    (inner,) = {node for node in visited if visited.count(node) > 1}
    assert visited.count(inner) == 2 and placed.count(inner) == count
