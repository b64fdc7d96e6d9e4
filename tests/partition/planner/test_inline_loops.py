"""One step in place of each loop, and both branches in place of a cond: they compute the same, and
their ops are planned with those around them.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

import shardfn as sf
from shardfn import P
from shardfn.ops.loops import Loop
from shardfn.partition.planner.inline_loops import inlined
from shardfn.partition.planner.plan_price import plan_price

planning = importlib.import_module("shardfn.partition.propagate")
T, B, S, V, D = 5, 18, 30, 50, 16


def loss(p: Any, rows: torch.Tensor) -> torch.Tensor:
    """Features are sharded, where rows would be better from the start of each step."""

    def step(c: torch.Tensor, tokens: torch.Tensor) -> Any:
        h = p["table"][tokens]
        for _ in range(3):
            h = (h.flatten(0, 1) @ p["v"]).tanh().view(h.shape).softmax(-1)
        return c + h.square().sum(), h.sum()

    c, sums = sf.scan(step, p["v"].new_zeros(()), rows)
    return c + sums.sin().sum()


def nested(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    def outer(c: torch.Tensor, row: torch.Tensor) -> Any:
        inner = lambda a, b: (a + b.sin() @ w, a.sum())
        last, sums = sf.scan(inner, c, row)
        return last, sums

    c, sums = sf.scan(outer, x[0, 0], x)
    return c.square().sum() + sums.sum()


def mixed(h: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        h = (h.flatten(0, 1) @ v).tanh().view(h.shape).softmax(-1)
    return h


def branched(p: Any, rows: torch.Tensor) -> torch.Tensor:
    """Rows are better in one branch, and do no harm in the other."""
    h = p["table"][rows[0]]
    yes = lambda h: mixed(h, p["v"])
    no = lambda h: h.sin().softmax(-1)
    return sf.cond(rows[0, 0, 0] % 2 == 0, yes, no, h).square().sum()


def turned(p: Any, rows: torch.Tensor) -> torch.Tensor:
    """A cond in a while loop."""

    def turn(c: Any) -> Any:
        i, total = c
        return i + 1, total + branched(p, (rows + i) % V)

    start = torch.zeros((), dtype=torch.int64), p["v"].sum()
    _, total = sf.while_loop(lambda c: c[0] < len(rows), turn, start)
    return total


def given(steps: int = T) -> tuple[Any, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    drawn = lambda *shape: torch.randn(shape, generator=generator).double()
    rows = torch.randint(0, V, (steps, B, S), generator=generator)
    return dict(table=drawn(V, D), v=drawn(D, D)), rows


def loops(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    return [node for node in graph.nodes if isinstance(node.target, Loop)]


@pytest.mark.parametrize("transform", [sf.jit, sf.grad], ids=["value", "grad"])
def test_of_loops_of_one_step_it_computes_the_same(transform: Any) -> None:
    x = torch.linspace(-1, 1, 9, dtype=torch.float64).view(1, 1, 3, 3)
    p, rows = given(1)
    calls = [(loss, (p, rows)), (nested, (x[0, 0], x)), (branched, (p, rows))]
    calls.append((branched, (p, (rows + 1) % V)))  # whose truth is another one
    if transform is sf.jit:
        calls.append((turned, (p, rows)))
    for fn, args in calls:
        program = transform(fn).trace(*args).program
        flat = inlined(program)
        assert loops(program.graph.graph)
        assert not loops(flat.program.graph.graph)
        flat.program.graph.graph.lint()
        wanted, got = (
            torch.fx.Interpreter(of.graph).run(*tree_leaves(args)) for of in (program, flat.program)
        )
        for a, b in zip(wanted, got, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-12)


def test_the_ops_of_a_body_count_as_often_as_they_run() -> None:
    x = torch.ones(2, 3, 4, 4)
    program = sf.jit(nested).trace(x[0, 0], x).program
    flat = inlined(program)
    counts = {
        flat.originals[node].name: flat.computed(node)
        for node in flat.program.graph.graph.nodes
        if node in flat.originals and node.name.startswith(("mm", "sin"))
    }
    assert set(counts.values()) == {2 * 3}
    assert len(flat.edges) == 4
    assert all(flat.computed(node) == 0 for node in flat.edges)
    assert sorted(map(flat.made, flat.edges)) == [1, 2, 2, 6]
    names = [node.name for node in program.graph.graph.find_nodes(op="placeholder")]
    assert {x.name for x in flat.rows} & set(names)


def test_a_program_without_loops_stays_as_it_is() -> None:
    program = sf.jit(lambda x: x * 2).trace(torch.ones(3)).program
    assert inlined(program).program is program


GRAD = sf.value_and_grad
CASES = {
    "a scan, even": (GRAD(loss), (4,)),
    "a scan, uneven": (GRAD(loss), (3,)),
    "a scan on two axes": (GRAD(loss), (2, 2)),
    "a cond, uneven": (GRAD(branched), (4,)),
    "a cond in a while loop on two axes": (turned, (2, 2)),
}


@pytest.mark.parametrize("case", CASES)
def test_the_ops_of_bodies_are_planned_at_once(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fn, sizes = CASES[case]
    monkeypatch.setattr(planning, "WORTH", 2.0**15)
    p, rows = given()
    names = ("x", "y")[: len(sizes)]
    with sf.fake_world(4 if len(sizes) == 2 else sizes[0]):
        mesh = sf.make_mesh(sizes, names)
        places = (dict(table=P(None, "x"), v=P()), P())
        price = {}
        for planner in ("greedy", "global"):
            step = sf.shard(fn, mesh, places, planner=planner, backend="aten")
            low = step.lower(p, rows)
            graph = low.traced.program.graph.graph
            price[planner] = plan_price(low.partition, graph)
        got = sf.full(step(p, rows))
    assert price["global"].nbytes < 0.3 * price["greedy"].nbytes
    wanted = fn(p, rows)
    for a, b in zip(tree_leaves(got), tree_leaves(wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_a_carry_enters_a_step_as_it_leaves_one() -> None:
    """Those of one shape are placed alike, in the forward and in the backward."""
    w, x = sf.ShapeDtype((3, 64, 64)), sf.ShapeDtype((96, 64))

    def layers(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        c, _ = sf.scan(lambda c, w: (c + (c @ w).softmax(-1), None), x, w)
        return c.square().sum()

    with sf.fake_world(4, numerics=False):
        mesh = sf.make_mesh((4,), ("x",))
        step = sf.shard(sf.grad(layers), mesh, (P(None, None, "x"), P(None, "x")))
        traced = step.trace(w, x)
        flat = inlined(traced.program)
        axes, ins, outs, _ = traced.placements()
        walk = planning.Walk(axes, "f")
        placed = planning.run_walk(walk, flat.program, ins, outs, ())
        observed = planning.ObservedWalk(walk, flat.program, placed, flat)
        decided = planning.solve_axes(observed)
    edges = [decided[node] for node in flat.edges if node in decided]
    assert len(edges) > 2
    assert len({tuple(placed.outs) for placed in edges}) == 1
    advice = flat.advice(decided)
    (marks,) = edges[0].outs
    assert advice.carries == {(96, 64): marks}
