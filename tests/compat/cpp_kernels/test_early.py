"""Kernels whose compilation starts while others are written."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch._inductor import async_compile
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.exc import CppCompileError

import shardfn as sf
from shardfn._compat.cpp_kernels import early, units
from shardfn._compat.cpp_kernels.early import read
from shardfn._compat.cpp_kernels.source import Kernel

X = torch.linspace(-2, 2, 35, dtype=torch.float64).reshape(5, 7)


def several(x: torch.Tensor, seed: int) -> tuple[torch.Tensor, ...]:
    """Kernels apart: a product of matrices stands between any two."""
    y = x.sin() * seed
    for _ in range(3):
        y = (y @ y.mT @ y).softmax(1)
    return y, x.cos() * seed


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What happens in a compilation in which each kernel is worth a compiler."""
    said: list[str] = []
    folder = str(tmp_path_factory.mktemp("kernels"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", folder)
    monkeypatch.setattr(early, "LEAST", 1)
    monkeypatch.setattr(async_compile, "get_compile_threads", lambda: 2)
    monkeypatch.setattr(units, "_kernels", {})
    monkeypatch.setattr(CppPythonBindingsCodeCache, "cache", {})
    start, define = units.start, PythonWrapperCodegen.define_kernel

    def started(kernels: dict[str, Kernel], pool: Any) -> Any:
        said.append("early" if isinstance(pool, early.Early) else "at the end")
        return start(kernels, pool)

    def defined(*args: Any, **kwargs: Any) -> Any:
        said.append("written")
        return define(*args, **kwargs)

    monkeypatch.setattr(units, "start", started)
    monkeypatch.setattr(PythonWrapperCodegen, "define_kernel", defined)
    sf.clear_cache()
    return said


def test_a_kernel_is_compiled_before_the_last_is_written(events: list[str]) -> None:
    found = sf.jit(lambda x: several(x, 2), backend="inductor")(X)
    for got, wanted in zip(found, several(X, 2), strict=True):
        torch.testing.assert_close(got, wanted)
    assert events.index("early") < len(events) - 1 - events[::-1].index("written")
    assert not units.started
    known = dict(units._kernels)
    events.clear()
    sf.clear_cache()
    sf.jit(lambda x: (*several(x, 2), x + 1), backend="inductor")(X)
    new = units._kernels.keys() - known.keys()
    assert 0 < len(events) - events.count("written") <= len(new)


def test_a_unit_that_the_compiler_refuses_is_compiled_one_by_one(
    events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(units, "unit", lambda kernels: f"broken {kernels!r}")
    found = sf.jit(lambda x: several(x, 3), backend="inductor")(X)
    for got, wanted in zip(found, several(X, 3), strict=True):
        torch.testing.assert_close(got, wanted)
    assert "early" in events and not units._kernels and not units.started


def test_a_compiler_that_cannot_start_says_so_at_the_end(
    events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(CppPythonBindingsCodeCache, "load_async", full)
    with pytest.raises(Exception, match="no space left on device"):
        sf.jit(lambda x: several(x, 4), backend="inductor")(X)
    assert "early" in events and not units.started
    monkeypatch.undo()
    assert torch.isfinite(sf.jit(lambda x: several(x, 4), backend="inductor")(X)[0]).all()


def test_a_program_that_is_given_up_leaves_no_unit(
    events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def given_up(*_: Any) -> None:
        raise CppCompileError(["g++"], "given up")

    monkeypatch.setattr(units.Batch, "functions", given_up)
    with pytest.raises(Exception, match="Inductor cannot compile"):
        sf.jit(lambda x: several(x, 5), backend="inductor")(X)
    assert "early" in events and not units.started


def test_one_compiler_thread_compiles_at_the_end(
    events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_compile, "get_compile_threads", lambda: 1)
    sf.jit(lambda x: several(x, 6), backend="inductor")(X)
    assert "early" not in events and "at the end" in events


class Busy:
    """A pool whose work ends when it is told to."""

    def __init__(self) -> None:
        self.work: list[Future[Any]] = []

    def submit(self, *job: Any) -> Future[Any]:
        self.work.append(Future())
        return self.work[-1]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The keys of the units for which a compiler is asked."""
    said: list[list[str]] = []

    def start(kernels: dict[str, Kernel], pool: Any) -> units.Unit:
        said.append([*kernels])
        return units.Unit([*kernels], lambda: None, [pool.submit(list)])

    monkeypatch.setattr(units, "start", start)
    monkeypatch.setattr(units, "_take", lambda unit: None)
    monkeypatch.setattr(units, "missing", lambda kernels: {x.text[:1]: x for x in kernels})
    monkeypatch.setattr(units, "started", [])
    monkeypatch.setattr(async_compile, "get_compile_threads", lambda: 2)
    return said


def call(letter: str, length: int) -> str:
    """The line that asks for a kernel of so many characters."""
    text = letter * length + '\nextern "C" void kernel(float*)'
    return f"async_compile.cpp_pybinding(['float*'], {text!r})"


def test_a_unit_takes_the_first_kernels_up_to_a_length(
    asked: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early, "LEAST", 100)
    monkeypatch.setattr(early, "MOST", 300)
    pool = Busy()
    begun = early.Early(pool)  # pyright: ignore[reportArgumentType]
    begun.add(call("a", 50))
    assert not asked
    begun.add(call("b", 900))
    assert asked == [["a"]], "what is longer than a unit may be is left for the end"
    for letter, length in (("c", 100), ("d", 500)):
        begun.add(call(letter, length))
    assert len(asked) == 1, "a compiler is running"
    pool.work[0].set_result(None)
    begun.add(call("e", 10))
    assert asked[1:] == [["b"]], "but it does not wait for ever"
    assert [*begun.waiting] == ["c", "d", "e"]


@pytest.mark.parametrize("is_done", [False, True])
def test_a_compiler_that_still_runs_counts_as_one(asked: list[list[str]], is_done: bool) -> None:
    job: Future[Any] = Future()
    if is_done:
        job.set_result(None)
    units.started.append(units.Unit(["a"], lambda: None, [job]))
    kernels = {name: Kernel((), name * k) for k, name in enumerate("abcd", 1)}
    units._compile(kernels)
    assert sorted(map(sorted, asked)) == ([["b", "c"], ["d"]] if is_done else [["b", "c", "d"]])


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("async_compile.cpp_pybinding(['float*'], r'''a\n''')", Kernel(("float*",), "a\n")),
        ("async_compile.triton('k', '''a''')", None),
        ("async_compile.cpp_pybinding", None),
        ("cpp_pybinding(['float*'], '')", None),
        ("async_compile.cpp_pybinding(['float*'], '', x=1)", None),
        ("# a comment\nkernel = 1", None),
    ],
)  # fmt: skip
def test_the_kernel_is_read_from_the_line_that_asks_for_it(
    text: str, wanted: Kernel | None
) -> None:
    assert read(text) == wanted
