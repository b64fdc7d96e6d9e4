"""The first calls run op by op, later ones compiled: on all ranks from the same call on, with the
bits of a run that compiled first.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from stagings import counts

import shardfn as sf
from shardfn import P
from shardfn._compat.compilations.undisturbed import SettingsChanged
from shardfn.errors import ShardError
from shardfn.runtime.warmup import Switch, Warming, runner, switch
from tests.support.ranks import run_ranks

X = torch.arange(6.0)


def test_calls_run_op_by_op_until_the_program_is_compiled() -> None:
    go_on = threading.Event()

    def compile_now() -> Any:
        assert go_on.wait(30)
        return lambda inputs: ["compiled"]

    warming = Warming(lambda inputs: ["op by op"], compile_now, Switch("f"))
    assert warming.thread.ident is None, "the first call has the processors to itself"
    assert warming([]) == warming([]) == ["op by op"]
    go_on.set()
    warming.thread.join()
    assert warming([]) == warming([]) == ["compiled"] and warming.is_warm


def test_an_error_of_the_compiler_is_raised_by_the_next_call() -> None:
    def compile_now() -> Any:
        raise ShardError("no compiler")

    warming = Warming(lambda inputs: [], compile_now, Switch("f"))
    assert warming([]) == []
    warming.thread.join()
    with pytest.raises(ShardError, match="no compiler"):
        warming([])


def test_if_settings_change_meanwhile_the_next_call_compiles() -> None:
    tries: list[bool] = []

    def compile_now() -> Any:
        tries.append(threading.current_thread() is threading.main_thread())
        if len(tries) < 3:
            raise SettingsChanged
        return lambda inputs: ["compiled"]

    warming = Warming(lambda inputs: ["op by op"], compile_now, Switch("f"))
    assert warming([]) == ["op by op"]
    warming.thread.join()
    assert warming([]) == ["op by op"], "the second try was disturbed as well"
    while warming([]) == ["op by op"]:
        warming.thread.join()
    assert tries == [False, True, True] and warming.is_warm


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Warming]:
    """Those that calls make in a test."""
    found: list[Warming] = []

    class Noted(Warming):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            found.append(self)

    monkeypatch.setattr("shardfn.runtime.stages.compiling.Warming", Noted)
    return found


def test_calls_under_a_default_dtype_of_their_own_keep_it_compiled(made: list[Warming]) -> None:
    fn = lambda i: i / 3 + i.sin()
    warm, i = sf.jit(fn, warmup="aten"), torch.arange(5)

    def called() -> torch.Tensor:
        torch.set_default_dtype(torch.float64)
        try:
            return warm(i)
        finally:
            torch.set_default_dtype(torch.float32)

    while not (made and made[0].is_warm):
        found = called()
        assert found.dtype == torch.float64
        torch.testing.assert_close(found, i.double() / 3 + i.double().sin())
        made[0].thread.join()
    assert called().dtype == torch.float64


def test_nothing_is_compiled_under_settings_that_are_not_those_of_the_call(
    made: list[Warming], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = "shardfn.runtime.stages.compiling.process_settings"
    monkeypatch.setattr(settings, lambda: ("those of another call",))
    warm = sf.jit(lambda x: x.tan() - 2, warmup="aten")
    torch.testing.assert_close(warm(X), X.tan() - 2)
    made[0].thread.join()
    assert made[0].is_disturbed and made[0].compiled is None


def test_numbers_that_are_drawn_while_it_compiles_do_not_come_again(made: list[Warming]) -> None:
    fn = lambda x: x.sin() * 3 - x.cos() * 5  # of no other test, so that Inductor compiles it
    before = counts["compilations"]
    warm = sf.jit(fn, warmup="aten")
    torch.manual_seed(3)
    drawn = [torch.rand(())]
    while not (made and made[0].is_warm):
        torch.testing.assert_close(warm(X), fn(X))
        made[0].thread.join(0.01)
        drawn.append(torch.rand(()))
    assert counts["compilations"] > before
    torch.manual_seed(3)
    assert drawn == [torch.rand(()) for _ in drawn]


def step(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() * x).sum() + x.cos()


def on_ranks(_: None) -> tuple[Any, ...]:
    mesh = sf.make_mesh((2,), ("dp",), device_type="cpu")
    made: list[Warming] = []

    class Noted(Warming):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardfn.runtime.stages.compiling.Warming", Noted)
        warm = sf.shard(step, mesh, P("dp"), P(), warmup="aten")
        results = [sf.full(warm(X)) for _ in range(3)]
        made[0].thread.join()  # it needs no further call to agree
        calls = len(results)
        while not made[0].is_warm:
            results.append(sf.full(warm(X)))
            calls += 1
    first = made[0].switch.first
    now = sf.full(warm(X))
    compiled = sf.full(sf.shard(step, mesh, P("dp"), P())(X))
    return first, calls, results[0], now, compiled


def test_all_ranks_switch_at_the_same_call_and_have_the_compilers_bits() -> None:
    (first, calls, *a), (other, others, *b) = run_ranks(2, on_ranks, None)
    assert first == other >= 3, "the first calls run op by op"
    assert calls == others == first + 1
    for early, now, compiled in (a, b):
        torch.testing.assert_close(early, step(X))
        assert torch.equal(now, compiled)


def test_a_call_that_autograd_follows_and_compile_are_compiled_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("it warms up")

    monkeypatch.setattr(runner.Warming, "__init__", refuse)
    warm = sf.jit(step, warmup="aten")
    assert torch.equal(warm.compile(X)(X), warm(X))
    plain = sf.jit(step, backend="aten", warmup="aten")
    torch.testing.assert_close(plain(X), step(X))


def test_donated_arguments_are_donated_before_and_after_the_switch() -> None:
    def update(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return w - 0.1 * (w * x).sin()

    warm = sf.jit(update, warmup="aten", donate_argnums=0)
    w, expected = torch.ones(6), torch.ones(6)
    for _ in range(2):
        given, w = w, warm(w, X)
        expected = update(expected, X)
        with pytest.raises(ShardError, match="donated"):
            _ = given + 1
    for thread in threading.enumerate():
        if thread.name.startswith("shardfn compiles jit(update)"):
            thread.join()
    for _ in range(2):
        given, w = w, warm(w, X)
        expected = update(expected, X)
        with pytest.raises(ShardError, match="donated"):
            _ = given + 1
    torch.testing.assert_close(w, expected)


def test_an_unknown_warmup_is_named() -> None:
    with pytest.raises(ShardError, match="warmup is 'eager'"):
        sf.jit(step, warmup="eager")
    with pytest.raises(ShardError, match="needed: one of None, aten"):
        sf.shard(step, warmup=True)
    assert switch.AHEAD > 0
