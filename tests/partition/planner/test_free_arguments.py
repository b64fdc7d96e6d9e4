"""The placements of arguments on one axis, chosen with those of all ops under a limit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn.partition.auto import fused_op_cost
from shardfn.partition.auto.free_arguments import data_parallel, free_arguments_of
from shardfn.partition.auto.memory_peaks import MemoryPeaks
from shardfn.partition.auto.search import with_hardware_links
from shardfn.partition.planner.axis_problem import AxisProblem, Free, undecided
from shardfn.partition.planner.observed_walk import ObservedWalk
from shardfn.partition.propagate import run_walk
from shardfn.partition.propagation.walk import Walk
from shardfn.types import MeshAxes, MeshPlacements
from tests.partition.auto.test_parameter_groups import momentum

ROWS, WIDTH = 65536, 1024
PARAMS = {k: sf.ShapeDtype((WIDTH, WIDTH)) for k in "vw"}
X = sf.ShapeDtype((ROWS, WIDTH))


def problem(limit: float | None, **given: MeshPlacements) -> AxisProblem:
    """The integer program of a step of momentum on one axis of 4 ranks."""
    program = sf.jit(momentum).trace(PARAMS, PARAMS, X).program
    axes = with_hardware_links(MeshAxes(("dp",), (4,)))
    rows = [given.get(path[0] + path[3:4]) for path in program.in_paths]
    outs = [None] * len(program.out_paths)
    unknowns = free_arguments_of(program, axes, rows, outs)
    walk = Walk(axes, program.name)
    first = run_walk(walk, program, data_parallel(unknowns), outs, ())
    observed = ObservedWalk(walk, program, first)
    moments = MemoryPeaks(program.graph.graph, observed.nodes)
    return AxisProblem(
        observed, 0, undecided(observed), Free(unknowns, moments, limit), fused_op_cost.in_bytes
    )


def chosen(limit: float | None, **given: MeshPlacements) -> list[Any]:
    found = problem(limit, **given).solve()
    assert found is not None
    return [marks[0] for marks in found.inputs.values()]


def test_without_a_limit_a_parameter_that_the_backward_reads_is_replicated() -> None:
    """The first one is not read there, so a gather and a reduce-scatter are no more than an
    all-reduce, and its update is sharded.
    """
    v, w, m, n, x = chosen(float("inf"))
    assert (w, n, x) == ("R", "R", 0)
    assert v == m != "R"


def test_state_and_parameter_are_sharded_alike_where_memory_is_short() -> None:
    p, q, m, n, x = chosen(1.001 * least())
    assert (p, q) == (m, n) and "R" not in (p, q) and x == 0


def least() -> float:
    """The least bytes that the program needs, by the integer program."""
    found = problem(None)
    assert found.solve() is not None
    low, high = 1.0, 2.0**40
    while high > 1.0001 * low:
        middle = (low * high) ** 0.5
        fits = problem(middle).solve() is not None
        low, high = (low, middle) if fits else (middle, high)
    return high


def test_below_the_least_memory_there_is_no_solution() -> None:
    found = problem(1000.0)
    assert found.solve() is None
    assert found.program.is_impossible


def test_what_is_given_stays_and_its_state_follows() -> None:
    assert chosen(float("inf"), pv=(1,)) == [1, "R", 1, "R", 0]


def test_tensors_are_local_bytes() -> None:
    found = problem(float("inf"))
    *_, x = found.arguments
    supply = found.supplies.found[x, 0]
    nbytes = ROWS * WIDTH * torch.float32.itemsize
    assert found.local_bytes(supply, ("R",)) == nbytes
    assert found.local_bytes(supply, (0,)) == pytest.approx(nbytes / 4)
