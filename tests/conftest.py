"""Three speeds of tests: which tests need real ranks, Inductor or a process of their own, which
ones `make quick` runs, and which cases of the large sweeps `make test` leaves to `make sweeps`.
Kernels compiled by one test are cached for the others of the same run.

A test is marked for what it reaches: its function, its fixtures, and the functions of the tests
that those name.
"""

from __future__ import annotations

import functools
import gc
import inspect
import itertools
import os
import shutil
import sys
import tempfile
import types
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import pytest

# Before torch is imported. The workers share the cores, and threads of torch that wait for each
# other on a core that is not free spin: two threads took 2.5 times the processor time of one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# As on the machines that judge a change: Inductor refuses more where this is set.
os.environ.setdefault("CI", "true")
# Inductor compiles and loads a library for each instruction set to see whether the compiler knows
# it, in every new cache, and starts a Python to load it again in every new process. Whether the
# processor has it is still asked.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

TESTS = Path(__file__).resolve().parent
OURS = f"{TESTS}{os.sep}"
LAWS = [  # folders and files in which nearly every test captures a program
    *(
        TESTS / name
        for name in (
            "capture",
            "conformance",
            "laws",
            "models",
            "partition",
            "schedule",
            "training/optim",
            "transforms",
        )
    ),
    *(TESTS / "training").glob("test_*.py"),
]
KEPT_OF_LAWS = 5  # make quick runs one law of so many
KEPT_OF_SWEEPS = 20  # make test runs one case of a sweep of so many, where its line has no number
OP_BY_OP = [  # folders whose tests speak of values: Inductor compiles only where a test names it
    *(TESTS / name for name in ("capture", "dtensors", "laws", "models")),
    *(TESTS / name for name in ("random", "training", "transforms")),
]
NEEDS = {  # the name of a function or module, and the marker of the tests that reach it
    "run_ranks": "ranks",
    "outcomes": "ranks",
    "shardfn_demo.runs": "ranks",
    "subprocess": "slow",
}


def listed(name: str) -> list[str]:
    """The test functions or files that a file of tests/ lists, one a line."""
    lines = (TESTS / name).read_text().splitlines()
    return [line for line in lines if not line.startswith("#")]


def of_sweeps(lines: Iterable[str]) -> dict[str, int]:
    """Of how many cases of each sweep `make test` runs one, by function or file."""
    rows = (line.partition(" ") for line in lines)
    return {function: int(number or KEPT_OF_SWEEPS) for function, _, number in rows}


SLOW = set(listed("slow.txt"))
SWEEPS = of_sweeps(listed("sweeps.txt"))
LONG = listed("long.txt")
CACHE = "TORCHINDUCTOR_CACHE_DIR"
# No test finds what an earlier run has compiled. Those of the folder set one of their own.
os.environ["SHARDFN_CACHE_DIR"] = ""
collect_ignore = ["runtime/warm.py"]  # it holds no test, and compiles when imported
T = TypeVar("T")
_made = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    if CACHE not in os.environ:  # set for the workers of this run, which inherit it
        config.stash[_made] = os.environ[CACHE] = tempfile.mkdtemp(prefix="kernels-")
    if config.option.markexpr == "quick":
        _skip_inductor()


def pytest_unconfigure(config: pytest.Config) -> None:
    if folder := config.stash.get(_made, None):
        del os.environ[CACHE]
        shutil.rmtree(folder, ignore_errors=True)


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    cases = [item.nodeid for item in items]
    swept = left_out(case for case in cases if row_of(case) in SWEEPS)
    for item in items:
        for name in sorted(markers(item, swept)):
            item.add_marker(name)


@pytest.hookimpl(tryfirst=True)  # before a worker tells which tests it has
def pytest_collection_finish(session: pytest.Session) -> None:
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0"))
    if workers:
        files = [item.nodeid.partition("::")[0] for item in session.items]
        session.items[:] = spread(session.items, files, workers)
    gc.freeze()  # modules and collected tests live to the end: no need to search them
    gc.set_threshold(200_000, 20, 20)  # graphs are large, and most live for one test


def spread(items: list[T], files: list[str], workers: int) -> list[T]:
    """The items in an order in which each worker begins with some of the long files.

    Args:
        items: in their order. Each worker starts with one of so many equal parts of the result.
        files: that of each item.
        workers: how many there are.
    """
    rest = [x for x, file in zip(items, files, strict=True) if file not in LONG]
    result: list[T] = []
    for k in range(workers):
        size = (len(items) - len(result)) // (workers - k)
        own = set(LONG[k::workers])
        first = [x for x, file in zip(items, files, strict=True) if file in own]
        more = max(size - len(first), 0)
        result += first + rest[:more]
        rest = rest[more:]
    return result + rest


@pytest.fixture(autouse=True)
def _own_plans(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that patches something shares no plan of a program with others."""
    patches = "monkeypatch" in request.fixturenames
    if patches:
        _forget_plans()
    yield
    if patches:
        _forget_plans()


@pytest.hookimpl(tryfirst=True)  # before fixtures of a module
def pytest_runtest_setup(item: pytest.Item) -> None:
    from shardfn.compile import BACKENDS, aten, inductor

    BACKENDS["inductor"] = aten if runs_op_by_op(item) else inductor


def runs_op_by_op(item: pytest.Item) -> bool:
    """Whether programs of a test run op by op unless they say another backend: it speaks of
    values, and does not name Inductor.
    """
    is_named = item.get_closest_marker("inductor") or item.get_closest_marker("ranks")
    return not is_named and any(map(item.path.is_relative_to, OP_BY_OP))


def _forget_plans() -> None:
    plans = sys.modules.get("shardfn.partition.plan_cache")
    for known in list(plans._known) if plans is not None else ():
        known.clear()


def _skip_inductor() -> None:
    """Skip a test at the moment when it asks Inductor for kernels."""
    from shardfn import _compat

    def skip(*_: Any) -> NoReturn:
        pytest.skip("compiles with Inductor")

    _compat.inductor = skip


def markers(item: pytest.Item, swept: Collection[str]) -> set[str]:
    """Those of `ranks`, `inductor`, `slow`, `laws`, `quick`, `sweep` and `property` that hold of a
    test.

    Args:
        item: the test.
        swept: the cases of sweeps that `make test` leaves out.
    """
    names: set[str] = set()
    if isinstance(item, pytest.Function):  # not the example of a docstring
        params = item.callspec.params if hasattr(item, "callspec") else {}
        names |= needs(_functions(item), params)
    if function_of(item.nodeid) in SLOW:
        names.add("slow")
    if item.nodeid in swept:
        names.add("sweep")
    fast = not names
    if is_law(item):
        names.add("laws")
    if fast and ("laws" not in names or is_kept(item.nodeid)):
        names.add("quick")
    if getattr(getattr(item, "function", None), "is_hypothesis_test", False):
        names.add("property")
    return names


def is_law(item: pytest.Item) -> bool:
    """Whether a test is one case of many, or stands in a folder of laws."""
    return _is_in_laws(item.path) or hasattr(item, "callspec")


@functools.cache  # all tests of a file stand in one folder
def _is_in_laws(file: Path) -> bool:
    return any(file.is_relative_to(folder) for folder in LAWS)


def is_kept(nodeid: str) -> bool:
    """Whether a law is in the fixed fifth: the same one at every run and on every machine."""
    return _hash(nodeid) % KEPT_OF_LAWS == 0


def left_out(cases: Iterable[str]) -> set[str]:
    """The cases of sweeps that `make test` does not run: the same ones at every run and on every
    machine. Of each function or file it runs a share, rounded up, and none of a function of one
    case or with a zero. The cases of a function that Inductor compiles come last.
    """
    found: set[str] = set()
    for row, group in itertools.groupby(sorted(cases, key=row_of), row_of):
        ordered = sorted(group, key=lambda case: ("inductor" in case and "::" in row, _hash(case)))
        of = SWEEPS.get(row, KEPT_OF_SWEEPS)
        kept = -(-len(ordered) // of) if of and len(ordered) > 1 else 0
        found |= set(ordered[kept:])
    return found


def row_of(nodeid: str) -> str:
    """The row of sweeps.txt of a case: that of its function, or that of its file."""
    function = function_of(nodeid)
    file = nodeid.partition("::")[0]
    return file if file in SWEEPS and function not in SWEEPS else function


def function_of(nodeid: str) -> str:
    """The test function of a case."""
    return nodeid.partition("[")[0]


def _hash(nodeid: str) -> int:
    return zlib.crc32(nodeid.encode())


def needs(functions: list[types.FunctionType], params: Mapping[str, Any]) -> set[str]:
    """Those of `ranks`, `inductor` and `slow` that a case of a test needs by what it reaches.

    Args:
        functions: the test and its fixtures.
        params: of the case.
    """
    found = _needed(tuple(functions))
    asked = [value for value in params.values() if isinstance(value, str)]
    # A case of another backend names this one only to compare.
    is_other = params.get("backend", "inductor") != "inductor"
    if is_other and "inductor" not in asked:
        return set(found - {"inductor"})
    return found | {"inductor"} if "inductor" in asked else set(found)


@functools.cache  # all cases of a test reach the same
def _needed(functions: tuple[types.FunctionType, ...]) -> frozenset[str]:
    """The markers of what functions reach."""
    found: set[str] = set()
    for value in _reached(functions):
        if isinstance(value, types.FunctionType | types.ModuleType):
            found |= {NEEDS[name] for name in [value.__name__] if name in NEEDS}
        elif isinstance(value, str) and value == "inductor":
            found.add("inductor")
    return frozenset(found)


def _functions(item: pytest.Function) -> list[types.FunctionType]:
    """A test's own function and those of its fixtures."""
    fixtures = item._fixtureinfo.name2fixturedefs.values()
    found = [item.function, *(fixture[-1].func for fixture in fixtures)]
    return [f for f in map(inspect.unwrap, found) if _is_ours(f)]


def _reached(functions: tuple[types.FunctionType, ...]) -> list[Any]:
    """The globals and string constants that functions name, and those that the tests' functions
    among these name.
    """
    waiting = list(functions)
    seen: set[types.CodeType] = set()
    found: list[Any] = []
    while waiting:
        function = inspect.unwrap(waiting.pop())
        if function.__code__ in seen:
            continue
        seen.add(function.__code__)
        named = list(_named(function.__code__, function.__globals__))
        found += named
        waiting += [value for value in named if _is_ours(value)]
    return found


def _named(code: types.CodeType, names: dict[str, Any]) -> Iterator[Any]:
    yield from (names[name] for name in code.co_names if name in names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _named(constant, names)
        elif isinstance(constant, tuple):
            yield from (part for part in constant if isinstance(part, str))
        elif isinstance(constant, str):
            yield constant


def _is_ours(value: Any) -> bool:
    """Whether a value is a function of the tests, with a cache or without."""
    if isinstance(value, functools._lru_cache_wrapper):
        value = inspect.unwrap(value)
    if not isinstance(value, types.FunctionType):
        return False
    return value.__code__.co_filename.startswith(OURS)
