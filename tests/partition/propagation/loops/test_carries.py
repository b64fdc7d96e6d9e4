"""The placements of carries: a fixed point, with Partial sums from zeros and hoisted moves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn.ops.loops import Scan
from shardfn.ops.placement import prim_redistribute
from shardfn.partition import plan as steps
from shardfn.types import MeshPlacements
from tests.support.stages.graphs import graph_of
from tests.support.stages.plans import graph_with_loop, planned, told

W, C = torch.ones(4, 4), torch.ones(6, 4)
ROWS = torch.ones(3, 6, 4)


def scanned(body: Any, args: Any, ins: list[MeshPlacements], consts: int = 0) -> steps.Plan:
    rows = [x[0] if x.dim() == 3 else x for x in args]
    graph = graph_of(body, *rows)
    loop = Scan((graph,), consts, 1, 3)
    return planned(graph_with_loop(loop, *args), args, ins)


def inside(plan: steps.Plan) -> steps.Plan:
    (step,) = [s for s in plan.steps if isinstance(s, steps.Nested)]
    return step.plans[0]


def test_a_loop_invariant_gather_happens_once_before_the_loop() -> None:
    body = lambda w, c: [(c @ w).sin()]
    plan = scanned(body, (W, C), [(0,), (0,)], consts=1)
    assert "by all_gather" in told(plan)[0], "of w"
    assert not any("redistribute" in line for line in told(inside(plan)))


def test_a_sum_over_ranks_that_starts_at_zero_is_reduced_after_the_loop() -> None:
    graph = graph_of(lambda c, x: [c + x.t() @ x], W, ROWS[0])
    whole = graph_with_loop(Scan((graph,), 0, 1, 3), W, ROWS)
    holder, *_ = whole.nodes
    (node,) = [n for n in whole.nodes if isinstance(n.target, Scan)]
    with whole.inserting_before(node):
        zeros = whole.call_function(torch.ops.aten.zeros_like.default, (holder,))
    zeros.meta["val"] = holder.meta["val"]
    node.args = (zeros, node.args[1])
    plan = planned(whole, (W, ROWS), [("R",), (1,)])
    assert not any("all_reduce" in line for line in told(inside(plan)))
    assert sum("all_reduce" in line for line in told(plan)) == 1


def test_a_carry_that_is_constrained_elsewhere_is_refused_with_both_placements() -> None:
    body = lambda c: [prim_redistribute(c * 2, ";a")]
    with pytest.raises(sf.PlacementError) as caught:
        scanned(body, (C,), [(0,)])
    text = str(caught.value)
    assert text.startswith(
        "f, scan: carry 0 enters a step placed Shard(dim=0) on a and leaves it placed "
        "Shard(dim=1) on a\n"
    )
