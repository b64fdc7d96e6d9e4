"""A scan and its derivatives as ops, over bodies made without Dynamo, against a Python loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardfn.capture.control_flow.scan import Scanned, scanned
from shardfn.ops.loops import Scan
from tests.support.stages.bodies import body, loops, lowered

torch.manual_seed(0)
W = torch.rand(2, dtype=torch.float64)
C = torch.rand(2, dtype=torch.float64)
XS = torch.rand(3, 2, dtype=torch.float64)
Tensors = list[torch.Tensor]


def step(c: Any, n: Any, x: Any, w: Any) -> Tensors:
    """Carries c and a count n; returns them and one output."""
    return [c.sin() * w + x, n + 1, c * x + n]


def ours(w: Any, c: Any, xs: Any, reverse: bool = False) -> Tensors:
    init = [c, torch.zeros((), dtype=torch.int64)]
    return scanned(body(step, 3, 3, [w]), init, [xs], len(xs), reverse)


def plain(w: Any, c: Any, xs: Any, reverse: bool = False) -> Tensors:
    n = torch.zeros((), dtype=torch.int64)
    order = range(len(xs))
    ys = []
    for i in reversed(order) if reverse else order:
        c, n, y = step(c, n, xs[i], w)
        ys.append(y)
    return [c, n, torch.stack(ys[::-1] if reverse else ys)]


def total(fn: Callable[..., Tensors]) -> Callable[..., torch.Tensor]:
    """A number that depends on the carry and on the outputs."""
    return lambda *xs: fn(*xs)[0].square().sum() + fn(*xs)[2].sin().sum()


def agree(fn: Callable[..., Any], *args: torch.Tensor) -> torch.fx.Graph:
    """Compare fn(ours) and fn(plain), and return the graph of the first."""
    module = lowered(lambda *xs: list(fn(ours)(*xs)), *args)
    torch.testing.assert_close(module(*args), list(fn(plain)(*args)))
    return module.graph


@pytest.mark.parametrize("reverse", [False, True])
def test_a_scan_is_one_op(reverse: bool) -> None:
    run = lambda fn: lambda *xs: fn(*xs, reverse)
    (scan,) = loops(agree(run, W, C, XS), Scan)
    assert (scan.consts, scan.carries, scan.length) == (1, 2, 3)
    assert scan.reverse is reverse and scan.transposes is None


def test_the_reverse_derivative_is_a_scan_the_other_way() -> None:
    grads = lambda fn: torch.func.grad(total(fn), argnums=(0, 1, 2))
    every = loops(agree(grads, W, C, XS), Scan)
    backward = [s for s in every if s.transposes]
    assert [s.reverse for s in every if not s.transposes] == [False, False]
    assert backward and all(s.reverse for s in backward)
    assert {s.transposes for s in backward} == {(1, 2, 1)}


def test_the_forward_derivative_carries_the_tangents() -> None:
    def push(fn: Any) -> Any:
        floats = lambda *xs: (fn(*xs)[0], fn(*xs)[2])
        return lambda *xs: torch.func.jvp(floats, xs, (W.cos(), C + 1, XS.exp()))[1]

    every = loops(agree(push, W, C, XS), Scan)
    assert 3 in {s.carries for s in every}, "the carry, the count and a tangent"


def test_a_second_derivative() -> None:
    inner = lambda fn: lambda w: torch.func.grad(total(fn))(w, C, XS).sum()
    agree(lambda fn: lambda w: [torch.func.grad(inner(fn))(w)], W)


DIMS = [(0, None, None), (None, 0, None), (None, None, 1), (0, 1, 2)]


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_a_batched_scan_has_the_samples_results(dims: Any) -> None:
    def stacked(x: torch.Tensor, dim: int | None) -> torch.Tensor:
        return x if dim is None else torch.stack([x, x + 1, x * 2], dim)

    args = [stacked(x, d) for x, d in zip((W, C, XS), dims, strict=True)]
    batched = lambda fn: torch.func.vmap(lambda *xs: tuple(fn(*xs)), dims)
    (scan,) = loops(agree(batched, *args), Scan)
    assert scan.length == 3


def test_a_scan_of_no_steps_returns_what_enters() -> None:
    empty = XS[:0]
    module = lowered(lambda c: ours(W, c, empty), C)
    carry, count, ys = module(C)
    assert torch.equal(carry, C) and int(count) == 0 and ys.shape == (0, 2)


def test_parts_are_constants_carries_and_rows() -> None:
    scan = Scanned(lambda: [], 2, 1, 5, False)
    assert scan.parts("abcde") == (["a", "b"], ["c"], ["d", "e"])
