"""Donated arguments across calls: an error gives them back, and no result is an object that anybody
still refers to.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from typing import Any

import pytest
import torch
from support.stages.native import on_way, way

import shardfn as sf
from shardfn import P, _compat
from tests.support.stages.one_rank import mesh

__all__ = ["mesh", "way"]
pytestmark = pytest.mark.usefixtures("way")
X = torch.arange(3.0, dtype=torch.float64)


@torch.library.custom_op("shardfn_tests::positive", mutates_args=())
def positive(x: torch.Tensor) -> torch.Tensor:
    if bool((x < 0).any()):
        raise ValueError("a negative number")
    return x.clone()


@positive.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def step(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x + 1, y * 2


def donating(fn: Any = step, backend: str = "aten") -> Any:
    return sf.jit(fn, backend=backend, donate_argnums=(0, 1))


def is_gone(x: torch.Tensor) -> bool:
    with pytest.raises(sf.ShardError, match="was donated to this call"):
        x.sum()
    return True


def test_an_error_in_the_run_gives_the_memory_back() -> None:
    fn = donating(lambda x, y: (positive(x), y * 2))
    fn(X.clone(), X.clone())
    x, y = X - 1, X.clone()
    for _ in range(2):
        with pytest.raises(ValueError, match="a negative number"):
            fn(x, y)
        assert x.equal(X - 1) and y.equal(X) and type(x) is type(y) is torch.Tensor
    x.add_(1)
    assert fn(x, y)[1].equal(X * 2) and is_gone(x) and is_gone(y)


@pytest.mark.parametrize("backend", ["aten", "inductor"])
def test_a_donated_tensor_that_is_held_stays_gone(backend: str) -> None:
    fn, state, held = donating(backend=backend), (X.clone(), X.clone()), []
    for k in range(6):
        if k % 2:
            held += state
        state = fn(*state)
    assert all(map(is_gone, held))
    assert state[0].equal(X + 6) and state[1].equal(X * 64)


def test_a_donated_tensor_with_a_weak_reference_or_an_attribute_is_no_later_result() -> None:
    fn, state = donating(), (X.clone(), X.clone())
    state[0].tag = "mine"  # pyright: ignore[reportAttributeAccessIssue]
    before = state[1]
    state = fn(*state)
    watched = weakref.ref(before)
    del before
    for _ in range(3):
        state = fn(*state)
        assert not any(vars(x) for x in state)
        assert watched() is None


def test_results_are_tensors_that_autograd_does_not_know() -> None:
    fn = donating()
    x = torch.nn.Parameter(X.clone(), requires_grad=False)
    y = X.clone().requires_grad_()
    y.grad = X.clone()
    y.requires_grad_(False)
    out = fn(x, y)
    assert out[0].equal(X + 1) and out[1].equal(X * 2) and is_gone(x) and is_gone(y)
    for result in out:
        assert type(result) is torch.Tensor
        assert result.grad is None and not result.requires_grad


def test_more_tensors_than_in_the_last_calls() -> None:
    fn = sf.jit(lambda d: {k: x + 1 for k, x in d.items()}, backend="aten")
    one, two = {"a": X}, {"a": X, "b": X}
    for given in (one, one, one, two, two, two, one):
        out = fn(given)
        assert out.keys() == given.keys() and out["a"].equal(X + 1)


def test_other_tensors_of_the_same_shape_are_another_signature() -> None:
    fn = sf.jit(lambda x: x * 2, backend="aten")
    plain = torch.ones(2, 2, dtype=torch.float64)
    for _ in range(3):
        fn(plain)
    followed = plain.clone().requires_grad_()
    fn(followed).sum().backward()
    assert followed.grad is not None
    with torch.no_grad():
        assert not fn(followed).requires_grad
    assert fn(plain.t()).equal(plain * 2) and fn(plain.float()).dtype == torch.float32
    with torch.inference_mode():
        assert fn(plain).equal(plain * 2)


def test_an_argument_that_the_backward_needs_is_refused_by_name() -> None:
    w = torch.ones(3, dtype=torch.float64, requires_grad=True)
    fn = sf.jit(lambda x: (x * w).sum(), backend="aten", donate_argnums=0)
    with pytest.raises(sf.ShardError, match="the backward of the call needs the value"):
        fn(X.clone())
    with torch.no_grad():
        assert fn(X.clone()) == X.sum()
    other = sf.jit(lambda x: (x + w).sum(), backend="aten", donate_argnums=0)
    x = X.clone()
    other(x).backward()
    assert is_gone(x) and w.grad is not None


def placed_step(mesh: Any, fn: Any = step) -> tuple[Any, Any]:
    """A step that donates DTensors, and those."""
    places = (P("a"), P("a"))
    run = sf.shard(fn, mesh, places, places, donate_argnums=(0, 1), backend="aten")
    return run, sf.distribute((X, X), mesh, P("a"))


def test_donated_dtensors_that_are_held_stay_gone(mesh: Any) -> None:
    run, state = placed_step(mesh)
    held: list[Any] = []
    for k in range(6):
        if k % 2:
            held += state
        if k == 4:
            held.append(state[0]._local_tensor)
        state = run(*state)
        assert not any(vars(x) for x in state)
        assert [x._version for x in state] == [0, 0]
    assert all(map(is_gone, held))
    a, b = sf.full(state)
    assert a.equal(X + 6) and b.equal(X * 64)
    with pytest.raises(sf.ShardError, match="was donated to this call"):
        run(*held[:2])


def test_an_error_gives_the_memory_of_dtensors_back(mesh: Any) -> None:
    run, state = placed_step(mesh, lambda x, y: (positive(x), y * 2))
    for _ in range(3):
        state = run(*state)
    negative = sf.distribute((X - 1, X), mesh, P("a"))
    for _ in range(2):
        with pytest.raises(ValueError, match="a negative number"):
            run(*negative)
    a, b = sf.full(negative)
    assert a.equal(X - 1) and b.equal(X)
    assert sf.full(run(*state))[1].equal(X * 16)


def test_a_dtensor_with_an_attribute_or_a_written_one_is_no_later_result(mesh: Any) -> None:
    run, state = placed_step(mesh)
    for _ in range(3):
        state[0].tag = "mine"
        state[1].add_(1)
        state = run(*state)
        assert not any(vars(x) for x in state)
        assert [x._version for x in state] == [0, 0]
    assert sf.full(state)[1].equal(((X + 1) * 2 + 1) * 2 * 2 + 2)


def test_results_of_another_shape_or_class_than_the_donated(mesh: Any) -> None:
    def fn(x: Any, y: Any) -> Any:
        return {"flat": y.sum(), "y": y + x, "n": 3, "x": x.float()}

    run = sf.shard(fn, mesh, (P("a"), P()), donate_argnums=(0,), backend="aten")
    y = sf.distribute(X, mesh, P())
    for k in range(4):
        out = run(sf.distribute(X + k, mesh, P("a")), y)
        assert out["n"] == 3 and sf.full(out["y"]).equal(X + X + k)
        assert sf.full(out["flat"]) == X.sum()
        assert sf.full(out["x"]).equal((X + k).float())


def test_one_of_two_threads_donates_a_tensor() -> None:
    fn = donating(lambda x, y: (x + 1, y + 1))
    fn(*fn(X.clone(), X.clone()))

    def call(row: list[Any], *given: Any) -> None:
        try:
            row.append(fn(*given)[0])
        except sf.ShardError as error:
            assert "was donated to this call" in str(error)

    for _ in range(20):
        x, found = X.clone(), list[Any]()
        threads = [threading.Thread(target=call, args=(found, x, X.clone())) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 1 and found[0].equal(X + 1) and is_gone(x)


def test_a_thousand_calls_hold_no_more_than_ten(mesh: Any) -> None:
    plain, state = donating(), (X.clone(), X.clone())
    placed, state_of_ranks = placed_step(mesh)
    shared = state_of_ranks[0]._spec

    def calls(count: int) -> tuple[int, int]:
        nonlocal state, state_of_ranks
        for _ in range(count):
            state, state_of_ranks = plain(*state), placed(*state_of_ranks)
        gc.collect()
        return len(gc.get_objects()), sys.getrefcount(shared)

    before = calls(10)
    after = calls(1000)
    assert after[0] - before[0] < 50 and after[1] == before[1]


def test_later_calls_are_exchanged_by_cpp_where_it_is(
    way: str, mesh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[bool] = []
    original = _compat.calls.exchanged

    def noted(*given: Any) -> Any:
        found = original(*given)
        answers.append(found is not None)
        return found

    monkeypatch.setattr(_compat.calls, "exchanged", noted)
    for fn, state in ((donating(), (X.clone(), X.clone())), placed_step(mesh)):
        answers.clear()
        for _ in range(4):
            state = fn(*state)
        assert answers[-1] is (way == "c++")


def test_both_kinds_of_functions_take_turns() -> None:
    fn, state = donating(), (X.clone(), X.clone())
    for k in range(6):
        with on_way(("python", "c++")[k % 2]):
            state = fn(*state)
    assert state[0].equal(X + 6) and state[1].equal(X * 64)


@pytest.mark.parametrize("backend", ["aten", "inductor"])
def test_an_expanded_tensor_is_refused_before_anything_is_written(backend: str) -> None:
    fn = sf.jit(lambda a: a * 2, backend=backend, donate_argnums=0)
    base = torch.ones(1)
    with pytest.raises(sf.ShardError, match="elements of the donated argument share memory"):
        fn(base.expand(3))
    assert base.tolist() == [1.0]
    assert fn(base.expand(3).contiguous()).tolist() == [2.0] * 3


def test_a_tensor_that_compiled_code_keeps_for_autograd_is_refused_by_name() -> None:
    fn = sf.jit(lambda a: a * 2, backend="inductor", donate_argnums=0)
    with pytest.raises(sf.ShardError, match="an autograd graph") as caught:
        fn(torch.ones(3).requires_grad_())
    assert "argument a" in str(caught.value)
    assert fn(torch.ones(3)).tolist() == [2.0] * 3
