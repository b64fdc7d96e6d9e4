"""The steps of a plan, those of loops and branches included."""

from __future__ import annotations

from typing import Any

import torch

import shardfn as sf
from shardfn import P
from shardfn.inspect.everywhere import largest_unasked, outside, work_of

STEPS, ROWS, FEATURES = 5, 6, 4
W = torch.ones(STEPS, FEATURES, FEATURES)
X = torch.ones(ROWS, FEATURES)


def scanned(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A branch in each step, and a product after the last."""

    def step(c: torch.Tensor, w: torch.Tensor) -> Any:
        return sf.cond(c.sum() > 0, lambda c: c.softmax(-1) @ w, torch.sin, c), None

    c, _ = sf.scan(step, x, w)
    return c @ c.T


def centred(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    step = lambda c, w: (c - c.mean(0, keepdim=True), None)
    return sf.scan(step, x, w)[0]


def lowered(fn: Any) -> Any:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        return sf.shard(fn, mesh, (P(), P("dp"))).lower(W, X)


def test_the_work_of_a_body_counts_as_often_as_it_runs() -> None:
    low = lowered(scanned)
    flops = [flops for _, _, flops in work_of(low.partition)]
    last = 2 * ROWS * ROWS * FEATURES
    inside = STEPS * 2 * ROWS * FEATURES * FEATURES
    assert sorted(flops) == sorted([last / 2, inside / 2])


def test_the_inputs_of_bodies_lead_to_the_arguments() -> None:
    low = lowered(scanned)
    graph = low.traced.program.graph.graph
    around = outside(graph)
    node = next(x for _, x, _ in work_of(low.partition) if x.graph is not graph)
    reached = {node}
    for _ in range(9):
        reached |= {y for x in reached for y in around.get(x) or x.all_input_nodes}
    assert reached.issuperset(graph.find_nodes(op="placeholder"))


def test_what_a_body_sends_is_listed() -> None:
    low = lowered(centred)
    graph = low.traced.program.graph.graph
    steps = [step for step, _ in largest_unasked(low.partition, graph)]
    assert any(step.node.graph is not graph for step in steps)
