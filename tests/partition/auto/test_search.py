"""The placements that are compared, and their order; no other placements are cheaper."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import shardfn as sf
from bench.planner import chosen
from shardfn.hardware import H100, SENT
from shardfn.partition.auto.free_arguments import free_arguments_of, shards
from shardfn.partition.auto.search import ABOUT, Candidate, Search, ranked, with_hardware_links
from shardfn.partition.planner import axis_problem
from shardfn.partition.planner.inline_loops import inlined
from shardfn.partition.planner.integer_program import IntegerProgram
from shardfn.partition.planner.plan_price import PlanPrice
from shardfn.types import Cost, MeshAxes


def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
    return (torch.relu(x @ p["up"]) @ p["down"]).square().mean()


def step(p: Any, x: torch.Tensor) -> Any:
    value, g = sf.value_and_grad(loss)(p, x)
    return sf.tree_map(lambda a, b: a - 0.1 * b, p, g), value


def search(rows: int, width: int, hidden: int, sizes: tuple[int, ...]) -> Search:
    shapes = {"up": (width, hidden), "down": (hidden, width)}
    params = {name: sf.ShapeDtype(shape) for name, shape in shapes.items()}
    return search_of(step, params, sf.ShapeDtype((rows, width)), sizes)


def search_of(fn: Any, params: Any, x: Any, sizes: tuple[int, ...]) -> Search:
    program = sf.jit(fn).trace(params, x).program
    axes = MeshAxes(("dp", "tp")[: len(sizes)], sizes)
    outs = [None] * len(program.out_paths)
    unknowns = free_arguments_of(program, axes, [None] * len(program.in_paths), outs)
    flat = inlined(program)
    return Search(program, flat, unknowns, axes, with_hardware_links(axes), (), "global")


CASES = {
    "many rows": (65536, 512, 2048),
    "few rows": (64, 4096, 16384),
    "in between": (8192, 2048, 2048),
}


@pytest.mark.parametrize("case", CASES)
def test_no_other_placements_take_less_time(case: str) -> None:
    found = search(*CASES[case], (8,))
    best = found.candidates(None)[0].price.total
    options = [shards(x.meta["val"], (), (8,)) for x in found.unknowns.holders]
    every = [found.candidate(marks).price.total for marks in itertools.product(*options)]
    assert len(every) == 27
    assert best <= ABOUT * min(every)


def test_few_rows_and_wide_layers_are_tensor_parallel() -> None:
    best = search(*CASES["few rows"], (8,)).candidates(None)[0]
    up, down, _ = best.placements
    assert (up, down) == ((1,), (0,))


def test_few_tokens_of_wide_experts_travel_to_them() -> None:
    """That takes less time than the tensor parallel experts of the integer program."""
    half = lambda *shape: sf.ShapeDtype(shape, torch.bfloat16)
    params = {"router": half(1024, 8), "up": half(8, 1024, 4096), "down": half(8, 4096, 1024)}
    step = chosen.sgd(chosen.experts)
    found = search_of(step, params, half(256, 1024), (4,))
    best = found.candidates(None)[0]
    _, *rest = best.placements
    assert rest == [(0,), (0,), (0,)]
    tensor = found.candidate(((1,), (2,), (1,), ("R",)))
    assert best.price.total < tensor.price.total
    assert len(found.starts()) == 2
    assert len(search(64, 8, 16, (4,)).starts()) == 1


def test_on_two_axes_many_rows_are_data_parallel() -> None:
    best = search(*CASES["many rows"], (4, 2)).candidates(None)[0]
    assert best.placements[2] == (0, 0)


def test_limits_leave_room_to_later_axes_or_do_not() -> None:
    found = search(64, 8, 8, (4, 2))
    assert found.growing_limits(10.0) == (20.0, 10.0)
    assert found.equal_limits(10.0) == (10.0, 10.0)


@pytest.mark.parametrize("why", ["time is up", "too large"])
def test_textbook_placements_are_compared_when_there_is_no_solution(
    monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    if why == "time is up":
        monkeypatch.setattr(IntegerProgram, "solve", lambda program: None)
    else:
        monkeypatch.setattr(axis_problem, "MOST_WAYS", 1)
    found = search(64, 8, 16, (4,))
    books = {(("R",), ("R",), (0,)), ((1,), (0,), (0,)), ((1,), (0,), ("R",))}
    assert {*found.textbook()} == books
    rows = {candidate.placements for candidate in found.candidates(None)}
    assert rows and rows <= books
    assert found.is_late


def priced(sent: float, nbytes: float) -> Candidate:
    plan: Any = None
    return Candidate(((sent,),), plan, PlanPrice(sent, nbytes, 0.0))


def test_of_about_equal_times_the_fewest_bytes_are_first() -> None:
    a, b, c = priced(100.0, 9.0), priced(104.0, 5.0), priced(120.0, 1.0)
    assert ranked([c, a, b]) == [b, a, c]


def test_axes_without_links_have_those_of_the_hardware() -> None:
    inside, between = with_hardware_links(MeshAxes(("dp", "tp"), (4, 8))).costs[::-1]
    assert inside == Cost(H100.latency * SENT, 1.0)
    assert between.byte > 1.0
    known = MeshAxes(("dp",), (4,), (Cost(7.0, 2.0),))
    assert with_hardware_links(known) is known
