"""The integer program finds the least price: on random programs it equals a search over all
combinations of strategies.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import torch
from effort import EFFORT

import shardfn as sf
from shardfn import P
from shardfn.partition.planner import integer_program
from shardfn.partition.planner.axis_problem import AxisProblem, undecided
from shardfn.partition.planner.integer_program import IntegerProgram, gap_of
from shardfn.partition.planner.observed_walk import ObservedWalk
from shardfn.partition.planner.value_moves import IMPOSSIBLE, Supply
from shardfn.partition.propagate import run_walk
from shardfn.partition.propagation.walk import Walk

N = 64
MOST = 10_000_000  # combinations
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
        chosen = run_walk(walk, traced.program, *marks)
        observed = ObservedWalk(walk, traced.program, chosen)
        return AxisProblem(observed, 0, undecided(observed))


def prices(found: AxisProblem) -> np.ndarray:
    """The price of every combination of strategies, one dim for each op: what the ops cost, and
    the cheapest moves of each value on its own.
    """
    ops = list(found.strategies.values())
    total = np.zeros([len(strategies) for strategies in ops])
    for k, strategies in enumerate(ops):
        costs = [found.program.costs[s.variable] for s in strategies]
        total += spread(np.array(costs), [k], len(ops))
    op_of = {s.variable: k for k, op in enumerate(ops) for s in op}
    distinct = {supply.description(): supply for supply in found.supplies.found.values()}
    for supply in distinct.values():
        groups = [*supply.made.values(), *(g for _, r in supply.reads for g in r.values())]
        read = sorted({op_of[v] for group in groups for v in group or ()})
        table = np.zeros([len(ops[k]) for k in read])
        for at in np.ndindex(table.shape):
            taken = {ops[k][i].variable for k, i in zip(read, at, strict=True)}
            table[at] = moves(supply, taken)
        total += spread(table, read, len(ops))
    return total


def spread(table: np.ndarray, dims: list[int], count: int) -> np.ndarray:
    """A table over some dims as one over all of them."""
    shape = [1] * count
    for dim, n in zip(dims, table.shape, strict=True):
        shape[dim] = n
    return table.reshape(shape)


def moves(supply: Supply, taken: set[int]) -> float:
    """The cheapest moves of a value to all placements that its readers need, phase by phase."""
    (made,) = (marks for marks, by in supply.made.items() if by is None or taken.intersection(by))
    total = 0.0
    for phase in {at for at, _ in supply.reads}:
        needed = {
            marks
            for at, groups in supply.reads
            for marks, group in groups.items()
            if at == phase and (group is None or taken.intersection(group))
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


@pytest.mark.parametrize("seed", range(40 * EFFORT))
def test_it_equals_a_search_over_all_combinations(seed: int) -> None:
    found = problem(seed, ops=2 + seed % 7, n=2 + seed % 3)
    ops = list(found.strategies.items())
    if math.prod(len(strategies) for _, strategies in ops) > MOST:
        pytest.skip("too many combinations")
    every = prices(found)
    decided = found.solve()
    assert decided is not None
    taken = tuple(
        [s.placed for s in strategies].index(decided.ops[node]) for node, strategies in ops
    )
    assert every[taken] == pytest.approx(every.min(), rel=1e-6)
    assert every.min() < IMPOSSIBLE


def triangles(count: int) -> IntegerProgram:
    """Three of which two neighbours differ: the relaxation leaves all of them open."""
    program = IntegerProgram()
    first = [program.variable(1.0) for _ in range(3 * count)]
    for k in range(0, 3 * count, 3):
        for pair in ((k, k + 1), (k + 1, k + 2), (k, k + 2)):
            taken = [(first[i], 1.0) for i in pair]
            program.between(1.0, taken, float("inf"))
    return program


def test_a_small_program_is_searched_where_the_relaxation_leaves_it_open() -> None:
    for count in (1, 7):
        assert sum(triangles(count).solve() or ()) == 2 * count


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The searches of the solver, the relaxation first."""
    noted: list[Any] = []

    class Noting(integer_program._Minimum):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            noted.append(self)

    monkeypatch.setattr(integer_program, "_Minimum", Noting)
    return noted


SIZES = {  # the gaps, and the size above which a program is large
    "middle": ({0: 2e-3}, 6_000),
    "large": ({0: 0.05}, 0),
}


@pytest.mark.parametrize("size", SIZES)
def test_of_the_solutions_that_are_found_the_cheapest_is_taken(
    size: str, monkeypatch: pytest.MonkeyPatch, searches: list[Any]
) -> None:
    """In a large program too, though not each is searched to the end."""
    gaps, large = SIZES[size]
    several = 0
    for seed in range(20):
        found = problem(seed, ops=8, n=2 + seed % 3)
        least = found.program.solve()
        assert least is not None
        exact = math.fsum(np.array(found.program.costs)[least])
        with monkeypatch.context() as patch:
            patch.setattr(integer_program, "GAPS", gaps)
            patch.setattr(integer_program, "LARGE", large)
            searches.clear()
            taken = found.program.solve()
        assert taken is not None
        got = math.fsum(np.array(found.program.costs)[taken])
        kept = [x for x in searches[1:] if x.values is not None] or searches
        assert taken == min(kept, key=lambda x: x.cost).taken
        assert got >= exact * (1 - 1e-6)
        if size == "middle":
            assert got <= exact * (1 + 2 * gaps[0])
        several += len(searches) > 1
    assert several > 5


def test_where_no_choice_of_the_relaxation_is_a_solution_all_are_searched(
    monkeypatch: pytest.MonkeyPatch, searches: list[Any]
) -> None:
    program = IntegerProgram()
    first, second, third = (program.variable(cost) for cost in (1.0, 1.0, 9.0))
    program.one_of([first, second, third])
    program.between(0.0, [(first, 1.0), (second, -1.0)], 0.0)
    monkeypatch.setattr(integer_program, "GAPS", {0: 0.05})
    monkeypatch.setattr(integer_program, "LARGE", 0)
    assert program.solve() == [False, False, True]
    assert [x.values is None for x in searches] == [False, True, False]
    assert not program.is_impossible and not program.is_late


def test_a_contradiction_is_no_lack_of_time() -> None:
    program = IntegerProgram()
    x = program.variable(1.0)
    program.between(1.0, [(x, 1.0)], 1.0)
    program.between(0.0, [(x, 1.0)], 0.0)
    assert program.solve() is None
    assert program.is_impossible and not program.is_late


def test_larger_programs_are_solved_within_wider_gaps() -> None:
    counts = (1, 3_000, 3_001, 6_000, 6_001, 10**6)
    gaps = [gap_of(count) for count in counts]
    assert gaps == [1e-9, 1e-9, 2e-3, 2e-3, 0.05, 0.05]


def split() -> IntegerProgram:
    """A program whose search has many nodes: numbers to split into halves, thrice at once."""
    chance, program = random.Random(1), IntegerProgram()
    variables = [program.variable(0.0) for _ in range(24)]
    for _ in range(3):
        weights = [chance.randrange(100) for _ in variables]
        more, less = program.size(1.0), program.size(1.0)
        half = sum(weights) // 2
        terms = [*zip(variables, weights, strict=True), (more, 1.0), (less, -1.0)]
        program.between(half, terms, half)
    return program


def test_a_search_ends_after_a_number_of_nodes_and_not_of_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[dict[str, Any]] = []
    milp = scipy.optimize.milp

    def seen(*args: Any, **kwargs: Any) -> Any:
        given.append({**kwargs["options"]})
        return milp(*args, **kwargs)

    monkeypatch.setattr(scipy.optimize, "milp", seen)
    for work, nodes in ((1, 1), (78 * 64, 64)):
        monkeypatch.setattr(integer_program, "WORK", work)
        program = split()
        assert program.solve() is None
        assert program.is_late
        assert given[-1]["node_limit"] == nodes
        assert given[-1]["time_limit"] == 600.0
