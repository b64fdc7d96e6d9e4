"""Advice for the ops of a program: on every axis, or none if time is up."""

from __future__ import annotations

import logging

import pieces
import pytest
import torch

from shardfn.partition.planner import integer_program
from shardfn.partition.planner.advice import advise
from shardfn.partition.planner.observed import Observed
from shardfn.partition.propagate import walked
from shardfn.partition.propagation.walk import Walk
from tests.support.stages.plans import program_of


def seen() -> Observed:
    program = program_of(
        lambda x, w: [(x @ w).tanh()], torch.ones(8, 4), torch.ones(4, 6)
    )
    walk = Walk(pieces.mesh_axes((2, 3)), "f")
    ins = [(0, "R"), ("R", 1)]
    return Observed(walk, program, walked(walk, program, ins, [None], ()))


def test_each_op_has_a_placement_on_every_axis() -> None:
    found = {node.name: placed for node, placed in advise(seen()).items()}
    assert found["mm"].ins == [(0, "R"), ("R", 1)]
    assert found["mm"].outs == found["tanh"].ins == [(0, 1)]


def test_when_time_is_up_there_is_no_advice_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    monkeypatch.setattr(
        integer_program.IntegerProgram, "solve", lambda program: None
    )
    log = logging.getLogger("shardfn")
    log.addHandler(handler)
    try:
        assert advise(seen()) == {}
    finally:
        log.removeHandler(handler)
    assert said == [
        "f: the placements on axis a were not planned within 60 s; each op takes its cheapest "
        'strategy, as with planner="greedy"'
    ]
