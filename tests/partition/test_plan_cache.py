"""`lower`, `compile` and a call share a plan, as long as all that it depends on is the same."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import P
from shardfn.partition import plan_cache, propagate, rules
from shardfn.partition.plan_cache import PLANS, PROGRAMS, cached_plan
from shardfn.partition.rule_api.op_record import Op
from shardfn.types import Cost, IfPartial, MeshAxes
from tests.support.stages.plans import program_of

ATEN = torch.ops.aten
X, W = torch.ones(8, 4), torch.ones(4, 6)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The arguments of the plans that are made."""
    noted: list[Any] = []

    def noting(*args: Any) -> Any:
        noted.append(args)
        return propagate(*args)

    monkeypatch.setattr(plan_cache, "propagate", noting)
    return noted


def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (x @ w).square().mean()


def test_lower_compile_and_a_call_make_one_plan(made: list[Any]) -> None:
    w = torch.linspace(-1.0, 1.0, 15, dtype=torch.float64).view(5, 3)
    x = torch.linspace(0.0, 1.0, 35, dtype=torch.float64).view(7, 5)
    wanted = torch.func.grad(loss)(w, x)
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        place = lambda ins: sf.shard(sf.grad(loss), mesh, ins, backend="aten")
        step = place((P(), P("dp")))
        first = step.lower(w, x)
        assert step.lower(w, x).text() == first.text()
        step.trace(w, x).lower(cap=8)
        step.compile(w, x)
        torch.testing.assert_close(sf.full(step(w, x)), wanted)
        assert len(made) == 1
        place((P("dp"), P("dp"))).lower(w, x)
        assert len(made) == 2
        sf.clear_cache()
        step.lower(w, x)
        assert len(made) == 3


def test_placements_that_are_chosen_are_not_planned_again(made: list[Any]) -> None:
    w, x = sf.ShapeDtype((64, 64)), sf.ShapeDtype((256, 64))
    with sf.fake_world(4, numerics=False):
        mesh = sf.make_mesh((4,), ("dp",))
        step = sf.shard(sf.grad(loss), mesh, sf.auto, memory="1MiB")
        step.lower(w, x)
        tried = len(made)
        step.lower(w, x)
        step.compile(w, x)
    assert len(made) == tried
    given = [str(args[1:]) for args in made]
    assert len(set(given)) == tried


def changes() -> Iterator[tuple[str, Any, Any]]:
    """For each thing that a plan depends on: two values of it."""
    plain = dict(
        axes=MeshAxes(("dp",), (2,)), ins=[("R",), (0,)], outs=[None], to=(),
        planner="greedy",
    )  # fmt: skip
    slow = MeshAxes(("dp",), (2,), (Cost(1.0, 9.0),))
    others = dict(
        axes=[slow, MeshAxes(("tp",), (2,)), MeshAxes(("dp",), (3,))],
        ins=[[(0,), ("R",)]],
        outs=[[("R",)], [IfPartial(("R",))]],
        planner=["global"],
    )  # fmt: skip
    for name, values in others.items():
        for value in values:
            yield name, plain, {**plain, name: value}


@pytest.mark.parametrize("name,one,other", [*changes()])
def test_a_plan_depends_on_each_argument(name: str, one: Any, other: Any) -> None:
    program = program_of(lambda x, w: [x @ w], X, W)
    first = cached_plan(program, *one.values())
    assert cached_plan(program, *one.values()) is first
    assert cached_plan(program, *other.values()) is not first
    assert cached_plan(program, *one.values()) is first


def tables() -> dict[str, dict[Any, Any]]:
    """Every table of rules, by where it is written."""
    every = (rules, rules.fills, *rules.FAMILIES)
    return {
        f"{file.__name__.rpartition('.')[2]}.{name}": table
        for file in every
        for name, table in vars(file).items()
        if isinstance(table, dict) and name.isupper() and table
    }


@pytest.mark.parametrize("where", sorted(tables()))
def test_a_plan_is_made_anew_where_a_row_of_a_table_differs(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = program_of(lambda x, w: [x @ w], X, W)
    args = MeshAxes(("dp",), (2,)), [("R",), (0,)], [None]
    first = cached_plan(program, *args)
    table = tables()[where]
    with monkeypatch.context() as patch:
        patch.setitem(table, object(), Op(lambda call: []))
        assert cached_plan(program, *args) is not first
    assert cached_plan(program, *args) is first


def test_a_plan_is_made_anew_for_other_rules() -> None:
    """Of a user's rule, and of a row of a table, each is followed."""
    program = program_of(lambda x: [x.sort().values], X)
    args = MeshAxes(("dp",), (2,)), [(0,)], [None]
    place = lambda: cached_plan(program, *args).outs[0].placements
    assert place() == (0,)
    with pytest.MonkeyPatch.context() as patch:
        alone = lambda call: [(("R",), ("R", "R"))]
        patch.setitem(rules.OPS, ATEN.sort.default, Op(alone))
        assert place() == ("R",)
    assert place() == (0,)
    removed = sf.rule(ATEN.sort.default, lambda op: [(("R",), ("R", "R"))])
    assert place() == ("R",)
    removed.remove()
    assert place() == (0,)


def test_plans_are_bounded_and_go_with_their_program() -> None:
    fn = lambda x: [x * 2]
    programs = [program_of(fn, X) for _ in range(PROGRAMS + 3)]
    for program in programs:
        for n in range(2, PLANS + 5):
            cached_plan(program, MeshAxes(("dp",), (n,)), [(0,)], [None])
    held = plan_cache._known
    assert len(held) == PROGRAMS
    kept = [len(x.graph.meta[plan_cache.HELD].plans) for x in programs]
    assert kept == [0] * 3 + [PLANS] * PROGRAMS
    last = weakref.ref(programs.pop())
    del program
    gc.collect()
    assert last() is None
    assert len(held) == PROGRAMS - 1


def test_a_function_that_is_gone_leaves_no_program() -> None:
    sf.clear_cache()
    gc.collect()
    before = len(plan_cache._known)
    for k in range(1, 5):
        sf.grad(lambda x, k=k: (x * k).sum())(X)
    gc.collect()
    assert len(plan_cache._known) <= before
