"""Calls of blocks whose results only the caller reads run after the program, on values that the
program does not change meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import shardfn as sf
from shardfn import _compat, _tree
from shardfn.compile.repeats import CALL, outline, split_last_calls
from tests.support.outlined import outlined, run_calls, run_outlined

COPIES = 6
D = 5


def rows(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def block(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Ten ops that compute."""
    y = torch.tanh(w * x) * 2 - w
    return torch.sin(y) + torch.exp(-y.square()) - torch.cos(w * y)


def states() -> list[torch.Tensor]:
    return [rows(k, D, D) for k in range(COPIES)]


def last_calls(fn: Callable[..., Any], *args: Any, donate: Any = ()) -> int:
    """The number of last calls of a function whose program gives what the function gives."""
    lowered = sf.jit(fn, donate_argnums=donate).lower(*args)
    expected = _tree.leaves(fn(*args))
    results = run_outlined(lowered, [x.clone() for x in _tree.leaves(args)])
    for result, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(result, wanted, rtol=0, atol=0)
    last = split_last_calls(outlined(lowered)[0])
    return 0 if last is None else len(last.calls)


def updated(state: Any, x: torch.Tensor) -> Any:
    return [block(w, x) for w in state]


@pytest.mark.parametrize("donate", [(), 0])
def test_all_calls_but_the_first_of_a_kind_are_last(donate: Any) -> None:
    assert last_calls(updated, states(), rows(9, D, D), donate=donate) == COPIES - 1


def test_a_call_whose_result_the_program_reads_is_not_last() -> None:
    def fn(state: Any, x: torch.Tensor) -> Any:
        new = updated(state, x)
        return new, new[3].sum()

    assert last_calls(fn, states(), rows(9, D, D)) == COPIES - 2


def test_a_call_that_reads_what_the_program_writes_is_not_last() -> None:
    def fn(x: torch.Tensor, state: Any) -> Any:
        return x + 1, updated(state, x)

    assert last_calls(fn, rows(9, D, D), states(), donate=0) == 0
    assert last_calls(fn, rows(9, D, D), states()) == COPIES - 1


def test_a_donated_value_that_is_returned_as_it_was_too_is_right_when_compiled() -> None:
    def fn(state: Any, x: torch.Tensor) -> Any:
        return updated(state, x), [w.t() for w in state[:2]], state[-1]

    last_calls(fn, states(), rows(9, D, D), donate=0)
    got = sf.jit(fn, donate_argnums=0)(states(), rows(9, D, D))
    torch.testing.assert_close(got, fn(states(), rows(9, D, D)))


def test_calls_whose_results_are_returned_twice_are_not_last() -> None:
    def fn(state: Any, x: torch.Tensor) -> Any:
        y = x @ x
        new = updated(state, y)
        return new, y, new[1:3], y, x

    assert 0 < last_calls(fn, states(), rows(9, D, D)) < COPIES - 1
    got = _tree.leaves(sf.jit(fn)(states(), rows(9, D, D)))
    torch.testing.assert_close(got, _tree.leaves(fn(states(), rows(9, D, D))))


def test_a_donated_count_that_only_its_own_call_reads_is_written_after_it() -> None:
    def fn(state: Any, x: torch.Tensor) -> Any:
        return [(block(w, x) / (n + 1), n + 1) for w, n in state]

    numbered = lambda: [(w, torch.tensor(3.0 + k)) for k, w in enumerate(states())]
    assert last_calls(fn, numbered(), rows(9, D, D), donate=0) >= COPIES - 2
    got = sf.jit(fn, donate_argnums=0)(numbered(), rows(9, D, D))
    torch.testing.assert_close(got, fn(numbered(), rows(9, D, D)))


def test_donated_counts_that_are_exchanged_are_right() -> None:
    def fn(counts: Any, state: Any) -> Any:
        a, b = counts
        return (b, a), [block(w, a) for w in state]

    counts = (torch.tensor(2.0, dtype=torch.float64), torch.tensor(3.0, dtype=torch.float64))
    wanted = fn(counts, states())
    got = sf.jit(fn, donate_argnums=0)(tuple(x.clone() for x in counts), states())
    torch.testing.assert_close(got, wanted)


def test_a_number_that_is_copied_of_an_input_is_copied_before_the_program_writes_to_it() -> None:
    def fn(count: torch.Tensor, many: torch.Tensor, *state: torch.Tensor) -> list[torch.Tensor]:
        new = [block(w, count) for w in state]
        count.copy_(many[0])
        many.copy_(many * 2)
        return [*new, count, many]

    values = [torch.tensor(3.0, dtype=torch.float64), rows(7, D), *states()]
    graph, kinds = outline(make_fx(fn, tracing_mode="fake")(*values).graph)
    wanted = fn(*(x.clone() for x in values))
    got = run_calls(graph, kinds, [x.clone() for x in values])
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def test_two_kinds_have_last_calls() -> None:
    def fn(state: Any, other: Any, x: torch.Tensor) -> Any:
        return updated(state, x), [block(w, x[:, :3]) for w in other]

    other = [w[:, :3].clone() for w in states()]
    assert last_calls(fn, states(), other, rows(9, D, D)) == 2 * (COPIES - 1)


def test_compiled_code_runs_last_calls_after_the_program_and_is_loaded_again() -> None:
    def step(state: Any, x: torch.Tensor) -> Any:
        value, grads = sf.value_and_grad(lambda s: sum(w.sin().sum() for w in s) * x.sum())(state)
        new = [block(w, g + x) for w, g in zip(state, grads, strict=True)]
        return new, value

    args = states(), rows(9, D, D)
    wanted = step(*args)
    run = sf.jit(step, donate_argnums=0)
    compiled = run.compile(*args)
    code = compiled.code
    _, last = code.split("program = call")
    assert last.count("block_0([") == COPIES - 1
    assert "del " in last
    torch.testing.assert_close(run([w.clone() for w in args[0]], args[1]), wanted)
    again = _compat.Rerun(_compat.Generated(code), "again")
    results = again([*(w.clone() for w in args[0]), args[1]])
    torch.testing.assert_close([*results], [*wanted[0], wanted[1]])


def test_the_program_keeps_one_call_of_each_kind() -> None:
    lowered = sf.jit(updated).lower(states(), rows(9, D, D))
    graph, kinds = outlined(lowered)
    assert split_last_calls(graph) is not None
    numbers = [node.args[2] for node in graph.nodes if node.target is CALL]
    assert sorted(numbers) == sorted(kinds)
