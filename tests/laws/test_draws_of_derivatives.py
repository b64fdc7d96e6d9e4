"""A derivative that recomputes a body draws the numbers of its value again, whatever vmap is
around the one, the other or both; samples of a loop draw from one state; a loop's condition and
step draw numbers of their own.
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
from tests.support.ranks import run_ranks

F64 = torch.float64
Tensor = torch.Tensor
Fn = Callable[[Any], Any]

W = torch.tensor([0.6, 0.9, 1.2, 1.4], dtype=F64)
WS = torch.stack([W, W * 0.9, W * 1.1])
COTANGENTS = torch.eye(4, dtype=F64)


def dropped(x: Tensor) -> Tensor:
    return torch.dropout(x, 0.5, train=True)


def scanned(w: Tensor) -> Tensor:
    return sf.scan(lambda c, _: (dropped(c) * w + 0.1, None), w, length=5)[0]


def looped(w: Tensor) -> Tensor:
    step = lambda c: (dropped(c[0]) * w + 0.1, c[1] + 1)
    return sf.while_loop(lambda c: c[1] < 5, step, (w, torch.tensor(0)))[0]


def branched(w: Tensor) -> Tensor:
    return sf.cond(w.sum() > 4, lambda w: dropped(w) * w, lambda w: dropped(w.sin()), w)


def branched_in_scan(w: Tensor) -> Tensor:
    step = lambda c, _: (sf.cond(c.sum() > 2, lambda c: dropped(c) * w, lambda c: c + 1, c), None)
    return sf.scan(step, w, length=4)[0]


def scanned_in_branch(w: Tensor) -> Tensor:
    return sf.cond(w.sum() > 4, scanned, lambda w: dropped(w) * 2, w)


def differentiated_in_scan(w: Tensor) -> Tensor:
    step = lambda c, _: (sf.grad(lambda c: (dropped(c) ** 2 * w).sum())(c) + 0.1, None)
    return sf.scan(step, w, length=3)[0]


def mapped_in_scan(w: Tensor) -> Tensor:
    of_rows = sf.vmap(lambda a, b: dropped(a) * b, randomness="different")
    return sf.scan(lambda c, _: (of_rows(c, w) + 0.1, None), w, length=3)[0]


def pushed_in_scan(w: Tensor) -> Tensor:
    step = lambda c, _: (sf.jvp(lambda c: dropped(c.sin()) * w, (c,), (w,))[1] + 0.1, None)
    return sf.scan(step, w, length=3)[0]


def checkpointed(w: Tensor) -> Tensor:
    return sf.checkpoint(lambda w: dropped(w.sin()) * w)(w)


BODIES: dict[str, Fn] = {
    f.__name__: f
    for f in (
        scanned,
        looped,
        branched,
        branched_in_scan,
        scanned_in_branch,
        differentiated_in_scan,
        mapped_in_scan,
        pushed_in_scan,
        checkpointed,
    )
}
NO_LOOPS = [name for name in BODIES if name != "looped"]


def seeded_by(seed: int, fn: Fn, x: Tensor) -> Any:
    random.state.seed(seed)
    return sf.jit(fn, backend="aten")(x)


def seeded(fn: Fn, x: Tensor) -> Any:
    return seeded_by(3, fn, x)


def each_pulled(fn: Fn) -> Fn:
    """The rows of the Jacobian, by one pullback in a Python loop."""

    def run(w: Tensor) -> Tensor:
        _, pull = sf.vjp(fn, w)
        return torch.stack([pull(g)[0] for g in COTANGENTS])

    return run


def mapped_pull(fn: Fn, randomness: str) -> Fn:
    def run(w: Tensor) -> Tensor:
        _, pull = sf.vjp(fn, w)
        return sf.vmap(lambda g: pull(g)[0], randomness=randomness)(COTANGENTS)

    return run


@pytest.mark.parametrize("randomness", ["different", "same", "error"])
@pytest.mark.parametrize("name", BODIES)
def test_a_pullback_under_vmap_draws_the_numbers_of_its_value(name: str, randomness: str) -> None:
    fn = BODIES[name]
    assert_close(seeded(mapped_pull(fn, randomness), W), seeded(each_pulled(fn), W))


@pytest.mark.parametrize("name", BODIES)
def test_so_does_jacrev(name: str) -> None:
    fn = BODIES[name]
    assert_close(seeded(sf.jacrev(fn), W), seeded(each_pulled(fn), W))


@pytest.mark.parametrize("name", BODIES)
def test_so_does_the_tangent_of_a_pullback(name: str) -> None:
    """A pullback is linear: its tangent along a cotangent is its value there."""

    def pushed(w: Tensor) -> Tensor:
        _, pull = sf.vjp(BODIES[name], w)
        tangent = lambda g: sf.jvp(lambda g: pull(g)[0], (g,), (g,))[1]
        return sf.vmap(tangent, randomness="different")(COTANGENTS)

    assert_close(seeded(pushed, W), seeded(each_pulled(BODIES[name]), W))


@pytest.mark.parametrize("name", NO_LOOPS)
def test_a_pullback_inside_of_each_sample(name: str) -> None:
    fn = BODIES[name]
    of_each = lambda fn: sf.vmap(fn, randomness="different")
    wanted = seeded(of_each(each_pulled(fn)), WS)
    assert len({tuple((x != 0).flatten().tolist()) for x in wanted}) > 1  # numbers of their own
    assert_close(seeded(of_each(mapped_pull(fn, "different")), WS), wanted)
    assert_close(seeded(of_each(sf.jacrev(fn)), WS), wanted)


@pytest.mark.parametrize("name", NO_LOOPS)
def test_a_sample_has_the_gradient_of_its_value(name: str) -> None:
    fn = sf.vmap(BODIES[name], randomness="different")

    def of_sample(w: Tensor) -> tuple[Tensor, Tensor]:
        value, pull = sf.vjp(BODIES[name], w)
        return value, pull(torch.ones_like(value))[0]

    value, gradient = seeded(sf.vmap(of_sample, randomness="different"), WS)
    assert_close(value, seeded(fn, WS))
    assert_close(gradient, seeded(sf.grad(lambda ws: fn(ws).sum()), WS))


@pytest.mark.parametrize("name", BODIES)
def test_forward_and_reverse_mode_of_samples_agree(name: str) -> None:
    fn = lambda ws: (sf.vmap(BODIES[name], randomness="different")(ws) ** 2).sum()
    tangent = torch.linspace(-1, 1, 12, dtype=F64).reshape(3, 4)
    pushed = seeded(lambda ws: sf.jvp(fn, (ws,), (tangent,))[1], WS)
    assert_close((seeded(sf.grad(fn), WS) * tangent).sum(), pushed)


@pytest.mark.parametrize("name", BODIES)
def test_on_two_ranks(name: str) -> None:
    both = sf.value_and_grad(lambda ws: sf.vmap(BODIES[name], randomness="different")(ws).sum())
    wanted = seeded(both, WS)
    with simulated(a=2) as mesh:
        random.state.seed(3)
        found = sf.shard(both, mesh, P("a"), backend="aten")(WS)
        assert_close(tuple(map(sf.full, found)), wanted)


def of_ranks() -> list[Tensor]:
    mesh = sf.make_mesh((2,), ("a",))
    found = []
    for fn in BODIES.values():
        random.state.seed(3)
        value = sf.shard(sf.vmap(fn, randomness="different"), mesh, P("a"), backend="aten")(WS)
        found.append(sf.full(value))
    return found


def test_on_two_real_ranks() -> None:
    wanted = [seeded(sf.vmap(fn, randomness="different"), WS) for fn in BODIES.values()]
    for found in run_ranks(2, of_ranks):
        assert_close(found, wanted)


@pytest.mark.parametrize("name", ["scan", "while_loop", "cond"])
@pytest.mark.parametrize("inner", ["grad", "jvp", "vmap"])
def test_a_body_with_a_transform_that_draws(name: str, inner: str) -> None:
    """Training steps in a loop. The next program is none the worse for the state being found to be
    missing inside of a transform.
    """
    square = lambda c: (dropped(c) ** 2).sum()
    ones = torch.ones(4, dtype=F64)
    fn = {
        "grad": lambda c: c - sf.grad(square)(c) / 2,
        "jvp": lambda c: c - sf.jvp(lambda c: dropped(c), (c,), (c,))[1],
        "vmap": lambda c: c - sf.vmap(dropped, randomness="different")(c),
    }[inner]
    body = {
        "scan": lambda c: sf.scan(lambda c, _: (fn(c), None), c, length=1)[0],
        "while_loop": lambda c: sf.while_loop(lambda c: c.sum() > 3.9, fn, c),
        "cond": lambda c: sf.cond(c.sum() > 3.9, fn, lambda c: c, c),
    }[name]
    found = torch.cat([seeded_by(seed, body, ones) for seed in range(4)])
    kept, left = (-3.0, 1.0) if inner == "grad" else (-1.0, 1.0)
    assert set(found.tolist()) == {kept, left}
    assert_close(sf.jit(sf.grad(lambda x: (x**2).sum()), backend="aten")(ones), 2 * ones)


def shrunk(x: Tensor) -> Tensor:
    return sf.while_loop(lambda x: x.sum() > 0.01, lambda x: x * torch.rand_like(x), x)


def test_samples_of_a_loop_draw_the_same_numbers() -> None:
    found = seeded(sf.vmap(shrunk, randomness="same"), WS)
    assert_close(found, torch.stack([seeded(shrunk, w) for w in WS]))


def test_or_different_ones() -> None:
    equal = torch.ones(5, 4, dtype=F64)
    of_samples = sf.vmap(shrunk, randomness="different")
    assert len(seeded(of_samples, equal).unique()) == 20
    twice = sf.vmap(of_samples, randomness="different")
    assert len(seeded(twice, equal.reshape(5, 2, 2)).unique()) == 20


def test_a_derivative_of_a_drawing_loop_under_vmap_is_refused() -> None:
    of_each = sf.vmap(sf.grad(lambda w: looped(w).sum()), randomness="different")
    with pytest.raises(CaptureError, match="draw random numbers, and its derivative is under vmap"):
        seeded(of_each, WS)


def test_the_condition_and_the_step_draw_numbers_of_their_own() -> None:
    """If a step drew what its condition did, it would draw no number over a half."""

    def run(n: Tensor) -> Tensor:
        goes_on = lambda c: (c[0] < n) & (torch.rand((), dtype=F64) < 0.5)
        step = lambda c: (c[0] + 1, torch.maximum(c[1], torch.rand((), dtype=F64)))
        start = torch.tensor(0), torch.zeros((), dtype=F64)
        return sf.while_loop(goes_on, step, start)[1]

    random.state.seed(3)
    program = sf.jit(run, backend="aten")
    drawn = torch.stack([program(torch.tensor(4)) for _ in range(60)])
    assert drawn.max() > 0.5
