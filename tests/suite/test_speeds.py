"""The two speeds of tests: what a test reaches decides its markers, and the fifth is fixed."""

from __future__ import annotations

import functools
import subprocess
from typing import Any

import pytest
from ranks import run_ranks

from tests.conftest import (
    LONG,
    SLOW,
    SWEEPS,
    TESTS,
    function_of,
    is_kept,
    left_out,
    needs,
    spread,
)


def plain() -> None: ...


def on_ranks() -> Any:
    return deeper()


def deeper() -> Any:
    return run_ranks(1, plain)


@functools.cache
def once() -> Any:
    return run_ranks(1, plain)


def on_ranks_once() -> Any:
    return once()


def compiling() -> Any:
    return dict(backend="inductor")


def starting() -> Any:
    return subprocess.run(["true"], check=True)


REACHED = [
    (plain, {}, set()),
    (plain, {"backend": "aten"}, set()),
    (plain, {"backend": "inductor"}, {"inductor"}),
    (on_ranks, {}, {"ranks"}),
    (on_ranks_once, {}, {"ranks"}),
    (compiling, {}, {"inductor"}),
    (compiling, {"backend": "aten"}, set()),
    (starting, {}, {"slow"}),
]


@pytest.mark.parametrize("case", range(len(REACHED)))
def test_a_test_needs_what_its_functions_reach(case: int) -> None:
    function, params, wanted = REACHED[case]
    assert needs([function], params) == wanted


def test_a_fixed_fifth_is_kept() -> None:
    kept = [n for n in range(10_000) if is_kept(f"tests/test_a.py::test_b[{n}]")]
    assert 1900 < len(kept) < 2100
    assert kept[:3] == [0, 2, 4]


LISTED = {"slow": SLOW, "sweeps": SWEEPS, "long": LONG}


@pytest.mark.parametrize("entries", LISTED.values(), ids=list(LISTED))
def test_every_listed_test_exists(entries: set[str]) -> None:
    gone = []
    for entry in sorted(entries):
        path, _, name = entry.partition("::")
        text = (TESTS.parent / path).read_text()
        if f"def {name.rpartition('.')[2]}(" not in text:
            gone.append(entry)
    assert not gone


@pytest.mark.parametrize("count", [0, 3, 10, 11, 12, 13])
def test_each_worker_begins_with_some_of_the_long_tests(count: int) -> None:
    items = list(range(40))
    is_long = [item >= 40 - count for item in items]
    order = spread(items, is_long, 4)
    assert sorted(order) == items
    for k in range(4):
        part = order[k * 10 : (k + 1) * 10]
        own = sum(item >= 40 - count for item in part)
        assert own in (count // 4, -(-count // 4))
        assert all(item >= 40 - count for item in part[:own])


TENTH = (8, 9)  # of eleven cases


def test_of_each_sweep_a_fixed_tenth_stays() -> None:
    cases = [f"tests/test_a.py::test_b[{n}]" for n in range(11)]
    swept = left_out([*cases, "tests/test_a.py::test_alone"])
    assert [case for case in cases if case not in swept] == [
        f"tests/test_a.py::test_b[{n}]" for n in TENTH
    ]
    assert "tests/test_a.py::test_alone" in swept
    assert left_out(reversed(cases)) == left_out(cases)


def test_nothing_but_sweeps_is_left_out(request: pytest.FixtureRequest) -> None:
    for item in request.session.items:
        is_swept = item.get_closest_marker("sweep") is not None
        assert not is_swept or function_of(item.nodeid) in SWEEPS
