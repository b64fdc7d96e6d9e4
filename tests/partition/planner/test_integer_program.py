"""The integer program finds the least price: on random programs it equals a search over all
combinations of strategies.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from effort import EFFORT

import shardfn as sf
from shardfn import P
from shardfn.partition.planner.axis_problem import AxisProblem, Strategy
from shardfn.partition.planner.integer_program import gap_of
from shardfn.partition.planner.observed import Observed
from shardfn.partition.planner.supplies import IMPOSSIBLE, Supply
from shardfn.partition.propagate import walked
from shardfn.partition.propagation.values import Placed
from shardfn.partition.propagation.walk import Walk

N = 64
MOST = 20_000  # combinations
Tensors = list[torch.Tensor]

# Every op takes and gives matrices of N x N.
OPS: dict[str, Callable[[Tensors], torch.Tensor]] = {
    "product": lambda xs: xs[0] @ xs[1],
    "sum": lambda xs: xs[0] + xs[1],
    "relu": lambda xs: xs[0].relu(),
    "transpose": lambda xs: xs[0].T,
    "softmax": lambda xs: xs[0].softmax(0),
    "rows": lambda xs: xs[0].sum(1, keepdim=True).expand(N, N) + xs[1],
}
PLACES = [P(), P("x"), P(None, "x")]


def drawn(seed: int, ops: int) -> tuple[Callable[..., Any], list[P]]:
    """A program of so many ops over three arguments, and the placements of the arguments."""
    chance = random.Random(seed)
    names = [chance.choice(list(OPS)) for _ in range(ops)]
    reads = [[chance.randrange(3 + k) for _ in "ab"] for k in range(ops)]

    def program(*arguments: torch.Tensor) -> torch.Tensor:
        values = list(arguments)
        for name, (first, second) in zip(names, reads, strict=True):
            values.append(OPS[name]([values[first], values[second]]))
        return values[-1]

    return program, [chance.choice(PLACES) for _ in range(3)]


def problem(seed: int, ops: int, n: int) -> AxisProblem:
    program, places = drawn(seed, ops)
    with sf.fake_world(n):
        mesh = sf.make_mesh((n,), ("x",))
        sharded = sf.shard(program, mesh, tuple(places), backend="aten")
        traced = sharded.trace(*[sf.ShapeDtype((N, N)) for _ in places])
        axes, *marks = traced.placements()
        walk = Walk(axes, "program")
        chosen = walked(walk, traced.program, *marks)
        observed = Observed(walk, traced.program, chosen)
        before = {
            node: Placed([()] * len(call.ins), [()] * len(call.outs))
            for node, (call, _, _) in walk.chosen.items()
        }
        return AxisProblem(observed, 0, before)


def price_of(found: AxisProblem, taken: set[int]) -> float:
    """The price of one combination, by the cheapest moves of each value on its own."""
    costs = found.program.costs
    supplies = reversed(found.supplies.found.values())
    distinct = {supply.description(): supply for supply in supplies}
    return sum(costs[v] for v in taken) + sum(
        moves(supply, taken) for supply in distinct.values()
    )


def moves(supply: Supply, taken: set[int]) -> float:
    """The cheapest moves of a value to all placements that its readers need, phase by phase."""
    (made,) = (
        marks
        for marks, by in supply.made.items()
        if by is None or taken.intersection(by)
    )
    total = 0.0
    for phase in {at for _, at in supply.reads}:
        needed = {
            marks
            for (marks, at), groups in supply.reads.items()
            if at == phase
            and any(group is None or taken.intersection(group) for group in groups)
        } - {made}
        total += min(by_way_of(supply, made, needed))
    return total


def by_way_of(supply: Supply, made: Any, needed: set[Any]) -> Iterator[float]:
    """The price of moving each by itself, and that of gathering the value first."""
    everywhere = (*made[:-1], "R")
    if everywhere not in needed:
        yield sum(supply.price(made, target) for target in needed)
    gathered = supply.price(made, everywhere)
    yield gathered + sum(
        min(supply.price(made, target), supply.price(everywhere, target))
        for target in needed - {everywhere}
    )


def combinations(found: AxisProblem) -> list[list[Strategy]]:
    return list(found.strategies.values())


@pytest.mark.parametrize("seed", range(40 * EFFORT))
def test_it_equals_a_search_over_all_combinations(seed: int) -> None:
    found = problem(seed, ops=2 + seed % 5, n=2 + seed % 3)
    choices = combinations(found)
    count = 1
    for strategies in choices:
        count *= len(strategies)
    if count > MOST:
        pytest.skip(f"{count} combinations")
    least = min(
        price_of(found, {s.variable for s in combination})
        for combination in itertools.product(*choices)
    )
    decided = found.solve()
    assert decided is not None
    taken = {
        s.variable
        for node, strategies in found.strategies.items()
        for s in strategies
        if s.placed == decided[node]
    }
    assert len(taken) == len(choices)
    assert price_of(found, taken) == pytest.approx(least, rel=1e-6)
    assert least < IMPOSSIBLE


def test_larger_programs_are_solved_within_wider_gaps() -> None:
    counts = (1, 2_000, 2_001, 10_000, 10_001, 10**6)
    gaps = [gap_of(count) for count in counts]
    assert gaps == [1e-9, 1e-9, 2e-3, 2e-3, 0.1, 0.1]
