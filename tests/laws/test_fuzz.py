"""The fuzzer tries every row of its table, and notices a wrong value."""

from __future__ import annotations

import itertools
import random
import time
from typing import Any

import attrs
import pytest
import torch
from programs import Drawn

from shardfn import P
from tests.faults import random_programs
from tests.faults.random_programs import NESTS, Case, difference

SECONDS = 10.0  # of processor time
DRAWN = Drawn(
    mesh={"a": 2},
    inputs={"x0": ((3, 4), P("a")), "x1": ((4, 5), P(None, "a"))},
    indices={},
    lines=("y = torch.tanh(x0) @ x1", "z = sf.constrain(y, P('a')).sum(0)"),
    result="z",
    out=None,
)


@pytest.mark.parametrize("nest", NESTS)
def test_each_row_equals_torch(nest: str) -> None:
    assert difference(Case(DRAWN, nest)) is None


@pytest.mark.parametrize("wrong", [lambda x: x * (1 + 1e-6), lambda x: x * torch.nan])
def test_a_wrong_value_is_noticed(monkeypatch: pytest.MonkeyPatch, wrong: Any) -> None:
    right = Case(DRAWN, "value").plain()
    monkeypatch.setattr(Case, "sharded", lambda case: wrong(right))
    said = difference(Case(DRAWN, "value"))
    assert said is not None and said.startswith("result 0 is")


def test_a_program_without_a_stable_value_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = ("y = torch.sin(1e13 * (x0 @ x1))",)
    case = Case(attrs.evolve(DRAWN, lines=lines, result="y"), "value")
    monkeypatch.setattr(Case, "sharded", lambda case: torch.zeros(()).double())
    assert difference(case) is None


def test_a_run_counts_its_programs() -> None:
    assert random_programs.run(0.0, 1) == {}


def test_a_failure_at_the_end_of_its_time_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ticks = itertools.chain([0.0] * 4, itertools.repeat(9.0))
    monkeypatch.setattr(random_programs, "difference", lambda case: "wrong")
    monkeypatch.setattr(Case, "plain", lambda case: None)
    with pytest.raises(AssertionError, match="seed 7, .*: wrong"):
        random_programs.run(1.0, 7, clock=lambda: next(ticks))


def test_random_programs_of_a_fresh_seed_equal_torch() -> None:
    seed = random.SystemRandom().randrange(2**32)
    try:
        counts = random_programs.run(SECONDS, seed, time.process_time)
    except Exception as error:
        error.add_note(f"again: make fuzz SECONDS=600 SEED={seed}")
        raise
    assert counts["right"] >= 1
