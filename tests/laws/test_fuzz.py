"""The fuzzers try every row of their tables, and notice a wrong value and an unnamed error."""

from __future__ import annotations

import itertools
import math
import time
from typing import Any

import attrs
import pytest
import torch
from programs import Drawn

import shardfn as sf
from shardfn import P
from tests.faults import bad_specs, fuzz, random_programs
from tests.faults.nests import ROWS
from tests.faults.random_programs import Case, Layout, differences, leaves

SEED = 923354173
SECONDS = 10.0  # of programs and of random trees
TREES = 6  # of them a second
DRAWN = Drawn(
    mesh={"a": 2},
    inputs={"x0": ((3, 4), P("a")), "x1": ((4, 5), P(None, "a"))},
    indices={},
    lines=("y = torch.tanh(x0) @ x1", "z = sf.constrain(y, P('a')).sum(0)"),
    result="z",
    out=None,
)
WITHOUT = attrs.evolve(DRAWN, lines=("z = torch.tanh(x0) @ x1",))
LAYOUTS = (Layout({"a": 2}, (P("a"), P(None, "a"))), Layout({"a": 3}, (P(None, "a"), P("a"))))
PLAIN = Case(DRAWN, ("checkpoint",), (0, 1), (torch.float64,) * 2, LAYOUTS)
REFUSED = {"custom_vjp", "while_loop"}  # in the other mode of differentiation


def wrong(case: Case) -> list[str]:
    return [said for said in differences(case, leaves(case.plain())) if said]


@pytest.mark.parametrize("row", ROWS)
def test_each_row_equals_torch(row: str) -> None:
    drawn = WITHOUT if row == "shard_map" else DRAWN
    assert not wrong(attrs.evolve(PLAIN, drawn=drawn, nest=(row,)))


@pytest.mark.parametrize(
    "dtypes", [(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.float64, torch.float32)]
)
def test_rows_nest_in_any_dtype(dtypes: tuple[torch.dtype, ...]) -> None:
    lines = ("y = torch.tanh(x0.to(x1.dtype)) @ x1", "z = y.sum(0)")
    drawn = attrs.evolve(DRAWN, lines=lines)
    nest = ("scan", "grad", "vmap")
    assert not wrong(attrs.evolve(PLAIN, drawn=drawn, nest=nest, dtypes=dtypes))


@pytest.mark.parametrize(
    "change", [lambda x: x * (1 + 1e-6), lambda x: x * torch.nan, lambda x: x.float()]
)
def test_a_wrong_value_is_noticed(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    right = PLAIN.plain()
    monkeypatch.setattr(Case, "sharded", lambda case: [right, change(right)])
    (said,) = wrong(PLAIN)
    assert "{'a': 3}" in said and "result 0 is" in said


def test_a_program_without_a_stable_value_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ("y = torch.sin(1e13 * (x0 @ x1))",)
    drawn = attrs.evolve(DRAWN, lines=lines, result="y")
    case = attrs.evolve(PLAIN, drawn=drawn, layouts=LAYOUTS[:1])
    monkeypatch.setattr(Case, "sharded", lambda case: [torch.zeros(()).double()])
    assert not wrong(case)


def test_cases_have_uneven_and_empty_shards_dtypes_and_nests() -> None:
    found = _cases(300)
    assert {name for case in found for name in case.nest} == set(ROWS)
    assert max(len(case.nest) for case in found) == 3
    assert {x for case in found for x in case.dtypes} == set(random_programs.RTOL)
    sizes = [
        (size, math.prod(layout.mesh.values()))
        for case in found
        for layout in case.layouts
        for shape, _ in case.drawn.inputs.values()
        for size in shape
    ]
    assert any(1 < size < ranks for size, ranks in sizes)
    assert any(size > ranks > 1 and size % ranks for size, ranks in sizes)


def _cases(count: int) -> list[Case]:
    found: list[Case] = []
    given = random_programs.hypothesis.given(random_programs.cases())
    drawn = random_programs.settings(max_examples=count, database=None, deadline=None)
    random_programs.hypothesis.seed(1)(drawn(given(lambda case: found.append(case))))()
    return found


def test_a_run_counts_its_programs() -> None:
    assert random_programs.run(0.0, 1) == {}


def test_a_failure_at_the_end_of_its_time_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.chain([0.0] * 4, itertools.repeat(9.0))
    monkeypatch.setattr(random_programs, "differences", lambda *_: ["wrong"])
    monkeypatch.setattr(Case, "plain", lambda case: None)
    with pytest.raises(AssertionError, match="seed 7: wrong"):
        random_programs.run(1.0, 7, clock=lambda: next(ticks))


def test_a_failure_is_made_smaller_for_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """After that only programs that have failed run again, so that hypothesis can show one."""
    clock, tried = itertools.count(0.0, 10.0), list[Case]()

    def wrong(case: Case, wanted: Any) -> list[str]:
        tried.append(case)
        return ["wrong"]

    monkeypatch.setattr(random_programs, "differences", wrong)
    monkeypatch.setattr(Case, "plain", lambda case: None)
    with pytest.raises(AssertionError, match="seed 7: wrong"):
        random_programs.run(1e3, 7, clock=lambda: next(clock))
    assert len({repr(case) for case in tried}) < 6


def test_an_unnamed_error_of_a_random_tree_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise AttributeError("'list' object has no attribute 'parts'")

    monkeypatch.setattr(sf, "distribute", fail)
    found = bad_specs.failures(1, 2, ["distribute"])
    assert [row.error.split(":")[0] for row in found] == ["AttributeError"] * 2


def test_programs_and_specs_of_a_seed() -> None:
    """The start of `make fuzz` with a seed that has found a wrong value."""
    start = time.monotonic()
    trees = bad_specs.failures(SEED, int(SECONDS * TREES))
    left = SECONDS - (time.monotonic() - start)
    tried = fuzz.programs(max(left, SECONDS / 2), SEED)
    assert not trees
    assert not tried.failure, tried.failure
