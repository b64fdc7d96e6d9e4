"""A pullback of `vjp` or a push of `linearize` that is made outside of a captured function works
inside, under every transform, with the random numbers of its value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from worlds import simulated

import shardfn as sf
from shardfn import P, random
from shardfn.errors import CaptureError

F64 = torch.float64
Tensor = torch.Tensor
Fn = Callable[[Any], Any]

W = torch.tensor([0.6, 0.9, 1.2, 1.4], dtype=F64)
COTANGENTS = torch.eye(4, dtype=F64)


def plain(w: Tensor) -> Tensor:
    return w.sin() * w.sum()


def drawn(w: Tensor) -> Tensor:
    return torch.dropout(w.sin(), 0.5, train=True) * w.sum() * torch.rand_like(w)


def scanned(w: Tensor) -> Tensor:
    return sf.scan(lambda c, _: (torch.dropout(c, 0.5, True) * w + 0.1, None), w, length=5)[0]


FUNCTIONS: dict[str, Fn] = {f.__name__: f for f in (plain, drawn, scanned)}


def linear(fn: Fn, kind: str) -> tuple[Fn, Tensor]:
    """A linear function from outside, and its values at the rows of a unit matrix."""
    if kind == "push":
        _, push = sf.linearize(fn, W)
        return push, torch.stack([push(g) for g in COTANGENTS])
    _, pull = sf.vjp(fn, W)
    return lambda g: pull(g)[0], torch.stack([pull(g)[0] for g in COTANGENTS])


def uses(linear: Fn) -> dict[str, Fn]:
    """Functions of the unit matrix that apply it to each row."""
    zero = torch.zeros((), dtype=F64)
    random_between = lambda g: (torch.rand(3), linear(g), torch.rand(3))[1]
    return {
        "jit": lambda rows: torch.stack([sf.jit(linear)(g) for g in rows]),
        "vmap": sf.vmap(linear, randomness="same"),
        "among other draws": lambda rows: torch.stack([sf.jit(random_between)(g) for g in rows]),
        "scan": sf.jit(lambda rows: sf.scan(lambda c, g: (c, linear(g)), zero, rows)[1]),
        "cond": sf.jit(
            lambda rows: torch.stack(
                [sf.cond(g.sum() > 0, linear, lambda g: g * 0, g) for g in rows.unbind()]
            )
        ),
        "jvp": lambda rows: torch.stack(
            [sf.jvp(linear, (rows[0],), (g,))[1] for g in rows.unbind()]
        ),
        "jacobian": lambda rows: sf.jacrev(linear)(rows[0]).T,
    }


@pytest.mark.parametrize("use", uses(plain))
@pytest.mark.parametrize("kind", ["pull", "push"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_in_a_captured_function(name: str, kind: str, use: str) -> None:
    fn, wanted = linear(FUNCTIONS[name], kind)
    assert_close(uses(fn)[use](COTANGENTS), wanted)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_on_two_ranks(name: str) -> None:
    fn, wanted = linear(FUNCTIONS[name], "pull")
    with simulated(a=2) as mesh:
        mapped = sf.vmap(fn, randomness="same")
        assert_close(sf.full(sf.shard(mapped, mesh, P("a"))(COTANGENTS)), wanted)


def test_the_numbers_are_those_of_the_value() -> None:
    """Dropout is linear: its pullback of the argument is its value."""
    for _ in range(4):
        value, pull = sf.vjp(lambda w: torch.dropout(w, 0.5, train=True), W)
        assert_close(pull(W)[0], value)
        assert_close(sf.jit(lambda g, pull=pull: pull(g)[0])(W), value)


def test_what_is_drawn_around_does_not_change() -> None:
    pull, _ = linear(drawn, "pull")
    draws = sf.jit(lambda g: (torch.rand(3), torch.rand(3)))
    around = sf.jit(lambda g: (torch.rand(3), pull(g), torch.rand(3)))
    random.state.seed(3)
    first, second = draws(W)
    random.state.seed(3)
    assert_close(around(W)[::2], (first, second))


def test_samples_that_ask_for_other_numbers_are_refused() -> None:
    pull, _ = linear(drawn, "pull")
    with pytest.raises(CaptureError, match='randomness="same"'):
        sf.vmap(pull, randomness="different")(COTANGENTS)
    no_numbers, wanted = linear(plain, "pull")
    assert_close(sf.vmap(no_numbers, randomness="different")(COTANGENTS), wanted)
