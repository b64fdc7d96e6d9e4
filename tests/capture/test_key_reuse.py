"""A key that is used twice is an error under SHARDFN_CHECK=1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import P, random
from shardfn.errors import ShardError

KEY = random.key(0)
X = torch.ones(4, 3)


@pytest.fixture(autouse=True)
def _checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDFN_CHECK", "1")


def _twice(key: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    a = random.uniform(key, (3,))
    b = random.normal(key, (3,))
    return x + a + b


def _same_part(key: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    keys = random.split(key)
    return random.dropout(keys[0], x) + random.dropout(keys[0], 2 * x)


def _after_split(key: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    parts = random.split(key)
    return random.dropout(key, x) + random.dropout(parts[1], x)


def _constants(key: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return random.dropout(random.key(3), x) + random.dropout(random.key(3), x)


def _in_each_step(key: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return sf.scan(lambda c, r: (c + random.dropout(key, r), r), x[0], x)[0]


def _carried(key: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    def step(c: Any, r: torch.Tensor) -> Any:
        key, total = c
        return (key, total + random.dropout(key, r)), r

    return sf.scan(step, (key, x[0]), x)[0][1]


def _carried_after_two_equal_carries(key: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    def step(c: Any, r: torch.Tensor) -> Any:
        one, _, key = c
        total = one + random.dropout(key, r)
        return (total, total, key), r

    return sf.scan(step, (x[0], x[0], key), x)[0][1]


def _after_a_branch(key: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y = sf.cond(x.sum() > 0, lambda x: random.dropout(key, x), lambda x: x * 1, x)
    return random.dropout(key, y)


def _folded_alike(key: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    one, two = random.fold_in(key, 1), random.fold_in(key, 1)
    return random.dropout(one, x) + random.dropout(two, x)


WRONG = [
    _twice,
    _same_part,
    _after_split,
    _constants,
    _in_each_step,
    _carried,
    _carried_after_two_equal_carries,
    _after_a_branch,
    _folded_alike,
]


def _split(key: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    a, b, c = random.split(key, 3)
    y = random.dropout(a, x) + random.gamma(b, 2.0, (3,)) + random.beta(c, 1.0, 2.0)
    return y + random.normal(random.fold_in(key, 7)) * random.uniform(random.fold_in(key, 8))


def _split_in_each_step(key: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    def step(c: Any, r: torch.Tensor) -> Any:
        key, total = c
        key, now = random.split(key)
        return (key, total + random.dropout(now, r)), r

    return sf.scan(step, (key, x[0]), x)[0][1]


def _keys_of_steps(key: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    keys = random.split(key, 4)
    return sf.scan(lambda c, r: (c + random.dropout(*r), None), x[0], (keys, x))[0]


def _in_either_branch(key: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return sf.cond(
        x.sum() > 0, lambda x: random.dropout(key, x), lambda x: x * random.uniform(key, (3,)), x
    )


def _recomputed(key: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return sf.checkpoint(lambda x: random.dropout(key, x).tanh().sum())(x)


RIGHT = [_split, _split_in_each_step, _keys_of_steps, _in_either_branch, _recomputed]
AROUND: dict[str, Callable[[Any], Any]] = {
    "jit": lambda f: sf.jit(f, backend="aten"),
    "grad": lambda f: sf.jit(sf.grad(lambda key, x: f(key, x).sum(), argnums=1), backend="aten"),
    "vmap": lambda f: sf.jit(
        lambda key, x: sf.vmap(f, in_axes=(0, None))(random.split(key, 2), x), backend="aten"
    ),
}


def _lines(fn: Callable[..., Any]) -> range:
    first = fn.__code__.co_firstlineno
    return range(first, first + 12)


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("fn", WRONG, ids=lambda f: f.__name__[1:])
def test_a_key_used_twice_is_an_error_with_both_lines(fn: Any, around: str) -> None:
    with pytest.raises(ShardError, match=r"a key is used twice: at .* and at") as e:
        AROUND[around](fn)(KEY, X)
    places = str(e.value).split("twice: at ")[1].split("\n")[0].split(" and at ")
    for place in places:
        file, _, line = place.rpartition(":")
        assert file.endswith("test_key_reuse.py")
        assert int(line) in _lines(fn), place


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("fn", RIGHT, ids=lambda f: f.__name__[1:])
def test_keys_that_are_split_may_be_used(fn: Any, around: str) -> None:
    AROUND[around](fn)(random.split(random.key(0))[0], X)


def test_two_calls_of_a_program_need_two_keys() -> None:
    step = sf.jit(_split, backend="aten")
    key = random.key(9)
    step(key, X)
    with pytest.raises(ShardError, match=r"jit\(_split\): a key is used twice: at") as e:
        step(key, X)
    assert str(e.value).count("test_key_reuse.py:") == 3
    keys = random.split(random.key(10))
    step(keys[0], X)
    step(keys[1], X)
    with pytest.raises(ShardError, match="a key is used twice"):
        random.uniform(keys[1])
    with sf.fake_world(2):
        sharded = sf.shard(_split, sf.make_mesh((2,), ("dp",)), (P(), P("dp")))
        other = random.key(11)
        sharded(other, X)
        with pytest.raises(ShardError, match="a key is used twice"):
            sharded(other, X)


def test_under_shard() -> None:
    with sf.fake_world(4):
        mesh = sf.make_mesh((4,), ("dp",))
        with pytest.raises(ShardError, match="a key is used twice"):
            sf.shard(_twice, mesh, (P(), P("dp")))(KEY, X)
        sf.shard(_split, mesh, (P(), P("dp")))(random.key(12), X)


def test_without_the_setting_it_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHARDFN_CHECK")
    sf.jit(lambda key, x: _twice(key, x), backend="aten")(KEY, X)


def test_outside_of_a_captured_function() -> None:
    key = random.key(5)
    random.uniform(key)
    with pytest.raises(ShardError, match="random: a key is used twice") as caught:
        random.normal(key)
    assert str(caught.value).count("test_key_reuse.py:") == 3  # both lines, and "at"
    keys = random.split(random.key(6))
    random.uniform(keys[0])
    random.uniform(keys[1])
    with pytest.raises(ShardError, match="a key is used twice"):
        random.split(keys[1])
    keys[0, 0] += 1  # other keys now
    random.uniform(keys[0])
    with pytest.raises(ShardError, match="a key is used twice"):
        random.gamma(keys[0], 2.0)
    random.fold_in(key, 3)
