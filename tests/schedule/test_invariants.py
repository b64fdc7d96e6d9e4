"""The verifier of each stage: real programs keep every invariant, and each broken one is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch.fx import Graph, Node

import shardfn as sf
from shardfn import P, schedule
from shardfn.ops.placement import REDISTRIBUTE
from shardfn.partition import Plan
from shardfn.partition import plan as steps
from shardfn.schedule.check import LOCAL_GRAPH, check, check_plan, check_program
from tests.support.stages.local_graphs import AXES, add, redistributed

aten = torch.ops.aten
W, X = torch.ones(6, 6), torch.ones(4, 6)


def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return F.softmax(F.dropout(x @ w, 0.0).relu() @ w, -1).square().sum()


def repeated(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return sf.scan(lambda c, _: ((c @ w).tanh(), None), x, torch.zeros(3))[0].sum()


def by_hand(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    total = lambda w, x: sf.psum((x @ w).sum(), "dp")
    return sf.shard_map(total, in_placements=(P(), P("dp")), out_placements=P())(w, x)


PROGRAMS: dict[str, tuple[Callable[..., Any], Any]] = {
    "data parallel": (sf.bucketed_grad(loss), (P(), P("dp"))),
    "fully sharded": (sf.grad(loss), (P("dp"), P("dp"))),
    "columns": (sf.value_and_grad(loss), (P(None, "dp"), P())),
    "scan": (sf.grad(repeated), (P("dp"), P("dp"))),
    "shard_map": (sf.grad(by_hand), (P(), P("dp"))),
    "sort": (lambda w, x: x[torch.argsort(w.sum(0))[:4] % 4].sum(), (P("dp"), P("dp"))),
}


@pytest.mark.parametrize("case", PROGRAMS)
def test_every_stage_of_a_program_keeps_its_invariants(case: str) -> None:
    fn, places = PROGRAMS[case]
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        lowered = sf.shard(fn, mesh, places).lower(W, X)
        check_program(lowered.traced.program.graph.graph)
        check_plan(lowered.partition)
        for program in lowered.programs.values():
            check(program.graph, program.axes, LOCAL_GRAPH)


def names(break_it: Callable[[], Any]) -> str:
    """The invariant that an error names."""
    with pytest.raises(AssertionError) as error:
        break_it()
    return str(error.value).rpartition("invariant ")[2]


def local(change: Callable[[Graph, Node, Node], Any]) -> Callable[[], None]:
    """Check a rank's graph of one collective after a change of the graph."""

    def run() -> None:
        graph = redistributed((0, "R"), [(("R", "R"), "forward")])
        (started,) = [n for n in graph.nodes if "collective" in n.meta]
        change(graph, started, next(iter(started.users)))
        check(graph, AXES, LOCAL_GRAPH)

    return run


def program(change: Callable[[Graph, Node], Any]) -> Callable[[], None]:
    """Check a captured graph after a change of the graph."""

    def run() -> None:
        graph = schedule.copied(sf.jit(loss).trace(W, X).program.graph.graph)
        (product, *_) = [n for n in graph.nodes if n.target is aten.mm.default]
        change(graph, product)
        check_program(graph)

    return run


def plan(change: Callable[[Plan], Plan]) -> Callable[[], None]:
    """Check a plan after a change of it."""

    def run() -> None:
        with sf.fake_world(2):
            mesh = sf.make_mesh((2,), ("dp",))
            lowered = sf.shard(sf.grad(repeated), mesh, (P("dp"), P("dp"))).lower(W, X)
            check_plan(change(lowered.partition))

    return run


def with_graphs(kind: type, change: Callable[[Any], Any]) -> Callable[[Plan], Plan]:
    """Change the first step of a kind that reads something."""

    def run(plan: Plan) -> Plan:
        (first, *_) = [x for x in plan.steps if isinstance(x, kind) and x.read]
        changed = tuple(change(x) if x is first else x for x in plan.steps)
        return attrs.evolve(plan, steps=changed)

    return run


def elsewhere(slot: steps.Slot) -> steps.Slot:
    return attrs.evolve(slot, number=10_000)


BROKEN: dict[str, tuple[Callable[[], None], str]] = {
    "a target that is no op": (local(lambda g, s, w: setattr(s.args[0], "target", len)), "target"),
    "a write in place": (local(lambda g, s, w: add(g, aten.add_.Tensor, w, 1)), "functional"),
    "a mesh as a constant": (local(lambda g, s, w: setattr(w, "kwargs", {"m": AXES})), "constants"),
    "an unknown phase": (local(lambda g, s, w: w.meta.update(phase="later")), "phase"),
    "a value that is missing": (local(lambda g, s, w: w.meta.pop("val")), "value"),
    "a record that is missing": (local(lambda g, s, w: s.meta.pop("collective")), "record"),
    "a second reader": (local(lambda g, s, w: add(g, aten.neg.default, s)), "wait"),
    "a prim that is left": (local(lambda g, s, w: setattr(w, "target", REDISTRIBUTE)), "wait"),
    "an axis too few": (local(lambda g, s, w: w.meta.update(type=((6,), ("R",)))), "placements"),
    "a dim that is not there": (
        local(lambda g, s, w: w.meta.update(type=((6,), (1, "R")))),
        "placements",
    ),
    "an input that is no tensor": (
        program(lambda g, n: next(iter(g.nodes)).meta.update(val=3)),
        "input",
    ),
    "a collective before partition": (
        program(lambda g, n: setattr(n, "target", torch.ops._c10d_functional.all_reduce.default)),
        "no collective",
    ),
    "a write in a captured graph": (
        program(lambda g, n: setattr(n, "target", aten.add_.Tensor)),
        "functional",
    ),
    "a slot that nobody makes": (
        plan(with_graphs(steps.Apply, lambda x: attrs.evolve(x, ins=tuple(map(elsewhere, x.ins))))),
        "order",
    ),
    "a result that nobody makes": (
        plan(lambda x: attrs.evolve(x, outs=tuple(map(elsewhere, x.outs)))),
        "outs",
    ),
    "moves that do not arrive": (
        plan(with_graphs(steps.Redistribute, lambda x: attrs.evolve(x, moves=()))),
        "moves",
    ),
    "a collective that does not exist": (
        plan(
            with_graphs(
                steps.Redistribute,
                lambda x: attrs.evolve(
                    x, moves=tuple(attrs.evolve(m, kind="broadcast") for m in x.moves)
                ),
            )
        ),
        "collective",
    ),
    "a body without a plan": (
        plan(with_graphs(steps.Nested, lambda x: attrs.evolve(x, plans=()))),
        "graphs",
    ),
    "an argument too many": (
        plan(with_graphs(steps.Apply, lambda x: attrs.evolve(x, ins=x.ins * 9))),
        "arguments",
    ),
    "two reductions in one value": (
        plan(
            with_graphs(
                steps.Apply,
                lambda x: attrs.evolve(
                    x, outs=tuple(attrs.evolve(s, placements=("sum", "max")) for s in x.outs)
                ),
            )
        ),
        "placements",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_invariant_is_named(case: str) -> None:
    break_it, name = BROKEN[case]
    assert names(break_it) == name


def test_a_step_of_lower_checks_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Plan] = []
    monkeypatch.setattr("shardfn.schedule.schedule_plan.check_plan", checked.append)
    with sf.fake_world(2):
        lowered = sf.shard(loss, sf.make_mesh((2,), ("dp",)), (P(), P("dp"))).lower(W, X)
    assert checked == [lowered.partition]
    assert schedule.check_plan is check_plan
