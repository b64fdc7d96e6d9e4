"""The two speeds of tests: what a test reaches decides its markers, and the fifth is fixed."""

from __future__ import annotations

import functools
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest
from ranks import run_ranks

from tests.conftest import (
    LONG,
    SLOW,
    SWEEPS,
    TESTS,
    is_kept,
    left_out,
    needs,
    of_sweeps,
    row_of,
    runs_op_by_op,
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


LISTED = {"slow": SLOW, "sweeps": set(SWEEPS)}


def test_every_long_file_exists() -> None:
    assert [file for file in LONG if not (TESTS.parent / file).exists()] == []
    assert len(set(LONG)) == len(LONG)


@pytest.mark.parametrize("entries", LISTED.values(), ids=list(LISTED))
def test_every_listed_test_exists(entries: set[str]) -> None:
    gone = []
    for entry in sorted(entries):
        path, _, name = entry.partition("::")
        text = (TESTS.parent / path).read_text()
        if name and f"def {name.rpartition('.')[2]}(" not in text:
            gone.append(entry)
    assert not gone


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_each_worker_begins_with_some_of_the_long_files(workers: int) -> None:
    files = [f"tests/test_{k // 4}.py" for k in range(400)]
    files[100:116] = files[300:316] = LONG[:16]
    order = spread(list(range(400)), files, workers)
    assert sorted(order) == list(range(400))
    begun = []
    for k in range(workers):
        part = order[k * 400 // workers : (k + 1) * 400 // workers]
        is_long = [files[item] in LONG for item in part]
        count = sum(is_long)
        assert all(is_long[:count])
        begun.append({files[item] for item in part[:count]})
    assert sum(map(len, begun)) == len(LONG[:16]), "one worker has all of a file"
    assert max(map(len, begun)) - min(map(len, begun)) <= 1


KEPT = (8, 9)  # of 21 cases


def test_of_each_sweep_a_fixed_twentieth_stays() -> None:
    cases = [f"tests/test_a.py::test_b[{n}]" for n in range(21)]
    swept = left_out([*cases, "tests/test_a.py::test_alone"])
    assert [case for case in cases if case not in swept] == [
        f"tests/test_a.py::test_b[{n}]" for n in KEPT
    ]
    assert "tests/test_a.py::test_alone" in swept
    assert left_out(reversed(cases)) == left_out(cases)


def test_a_sweep_has_a_share_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = of_sweeps(["tests/test_a.py::test_b 3", "tests/test_a.py::test_c"])
    assert [*rows.values()] == [3, 20]
    monkeypatch.setattr("tests.conftest.SWEEPS", rows)
    cases = [f"tests/test_a.py::test_b[{n}]" for n in range(7)]
    assert len(left_out(cases)) == 7 - 3
    compiled = [f"tests/test_a.py::test_b[{n}-inductor]" for n in range(7)]
    assert {*compiled} < left_out(cases + compiled)


def test_a_sweep_may_have_no_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.conftest.SWEEPS", of_sweeps(["tests/test_a.py::test_b 0"]))
    cases = [f"tests/test_a.py::test_b[{n}]" for n in range(7)]
    assert left_out(cases) == {*cases}


def test_a_file_has_a_share_of_its_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = of_sweeps(["tests/test_a.py 2", "tests/test_a.py::test_b 3"])
    monkeypatch.setattr("tests.conftest.SWEEPS", rows)
    functions = [f"tests/test_a.py::test_{n}-inductor" for n in range(9)]
    cases = [f"tests/test_a.py::test_b[{n}]" for n in range(7)]
    swept = left_out(functions + cases)
    assert len(swept & {*functions}) == 9 - 5
    assert len(swept & {*cases}) == 7 - 3


def test_inductor_compiles_where_a_test_names_it_or_is_about_compiled_code() -> None:
    def is_op_by_op(path: str, *markers: str) -> bool:
        item: Any = SimpleNamespace(path=TESTS.parent / path)
        item.get_closest_marker = lambda name: name in markers or None
        return runs_op_by_op(item)

    assert is_op_by_op("tests/laws/test_a.py") and is_op_by_op("tests/random/test_a.py", "slow")
    assert not is_op_by_op("tests/laws/test_a.py", "inductor")
    assert not is_op_by_op("tests/laws/test_a.py", "ranks")
    assert not is_op_by_op("tests/compile/test_a.py")


def test_nothing_but_sweeps_is_left_out(request: pytest.FixtureRequest) -> None:
    for item in request.session.items:
        is_swept = item.get_closest_marker("sweep") is not None
        assert not is_swept or row_of(item.nodeid) in SWEEPS
