"""Advice for the ops of a program: on every axis, or none if time is up."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pieces
import pytest
import torch

from shardfn.partition.planner import axis_problem, integer_program
from shardfn.partition.planner.observed_walk import ObservedWalk
from shardfn.partition.planner.solve_axes import solve_axes
from shardfn.partition.propagate import run_walk
from shardfn.partition.propagation.walk import Walk
from tests.support.stages.plans import program_of


def seen() -> ObservedWalk:
    program = program_of(lambda x, w: [(x @ w).tanh()], torch.ones(8, 4), torch.ones(4, 6))
    walk = Walk(pieces.mesh_axes((2, 3)), "f")
    ins = [(0, "R"), ("R", 1)]
    return ObservedWalk(walk, program, run_walk(walk, program, ins, [None], ()))


def test_each_op_has_a_placement_on_every_axis() -> None:
    found = {node.name: placed for node, placed in solve_axes(seen()).items()}
    assert found["mm"].ins == [(0, "R"), ("R", 1)]
    assert found["mm"].outs == found["tanh"].ins == [(0, 1)]


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What the log says."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    log = logging.getLogger("shardfn")
    log.addHandler(handler)
    yield lines
    log.removeHandler(handler)


def test_when_time_is_up_there_is_no_advice_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.setattr(integer_program.IntegerProgram, "solve", lambda program: None)
    assert solve_axes(seen()) == {}
    assert said == [
        "f: the placements on axis a were not planned within the search limits; shardfn takes "
        'the cheapest strategy of each op, as with planner="greedy"'
    ]


def test_a_program_that_is_too_large_is_not_planned_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.setattr(axis_problem, "MOST_WAYS", 1)
    assert solve_axes(seen()) == {}
    assert said == [
        "f: the program is too large to plan the placements on axis a as a whole; shardfn "
        'takes the cheapest strategy of each op, as with planner="greedy"'
    ]


def test_without_a_proof_the_best_is_taken_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    solve = integer_program.IntegerProgram.solve

    def late(program: integer_program.IntegerProgram) -> Any:
        values = solve(program)
        program.is_late = True
        return values

    monkeypatch.setattr(integer_program.IntegerProgram, "solve", late)
    assert solve_axes(seen())
    assert said[0] == (
        "f: the placements on axis a could not be proved cheapest within the search limits; "
        "shardfn uses the best placements found"
    )


def test_a_program_that_cannot_be_planned_at_once_is_not_called_late(
    monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    def impossible(program: integer_program.IntegerProgram) -> None:
        program.is_impossible = True

    monkeypatch.setattr(integer_program.IntegerProgram, "solve", impossible)
    assert solve_axes(seen()) == {}
    assert said == [
        "f: the placements on axis a cannot be planned as a whole; shardfn takes the cheapest "
        'strategy of each op, as with planner="greedy"'
    ]
