"""The two speeds of tests: what a test reaches decides its markers, and the fifth is fixed."""

from __future__ import annotations

import functools
import subprocess
from typing import Any

import pytest
from ranks import run_ranks

from tests.conftest import SLOW, SWEEPS, TESTS, is_kept, markers, needs


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


@pytest.mark.parametrize("entries", [SLOW, SWEEPS], ids=["slow", "sweeps"])
def test_every_listed_test_exists(entries: set[str]) -> None:
    gone = []
    for entry in sorted(entries):
        path, _, name = entry.partition("::")
        text = (TESTS.parent / path).read_text()
        if f"def {name.rpartition('.')[2]}(" not in text:
            gone.append(entry)
    assert not gone


def test_a_sweep_is_split_between_two_commands(
    request: pytest.FixtureRequest,
) -> None:
    """Each case of a sweep runs in `make test` or in `make sweeps`, never in neither."""
    for item in request.session.items:
        swept = item.nodeid.partition("[")[0] in SWEEPS
        assert ("sweep" in markers(item)) == (swept and not is_kept(item.nodeid))
