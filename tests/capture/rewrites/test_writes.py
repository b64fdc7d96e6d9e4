"""In-place ops of a graph become ops without writes, or the graph is left to functionalization."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn.capture import trace

X, Y = (torch.randn(3, 3, generator=torch.Generator().manual_seed(k)) for k in (1, 2))
Program = Callable[[torch.Tensor, torch.Tensor], Any]


def chained(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = x + 1
    z.add_(y, alpha=2).mul_(x).clamp_(0, 1)
    w = torch.zeros(3, 3, dtype=torch.float64)
    w.copy_(z).pow_(2)
    return z - w


def moving_average(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    mean = y.clone()
    seen = mean * 2
    mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
    return mean + seen


def through_a_view(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = x.clone()
    z[0] = y[1]
    return z


def seen_by_a_view(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = x.clone()
    row = z[0]
    z.add_(y)
    return row * 2


def into_out(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.empty(3, 3)
    torch.add(x, y, out=out)
    return out


def by_part(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    first, second, _ = x.clone().unbind()
    first.add_(y[0])
    return first + second


@pytest.mark.parametrize(
    ("fn", "is_enough"),
    [
        (chained, True),
        (moving_average, True),
        (through_a_view, False),
        (seen_by_a_view, False),
        (into_out, False),
        (by_part, False),
    ],
)
def test_a_graph_is_traced_again_only_for_writes_that_other_names_see(
    fn: Program, is_enough: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[bool] = []
    without = trace.without_writes
    monkeypatch.setattr(trace, "without_writes", lambda *a: found.append(without(*a)) or found[-1])
    torch.testing.assert_close(sf.jit(fn, backend="aten")(X, Y), fn(X, Y))
    assert found == [is_enough]


def test_the_graph_is_the_one_that_functionalization_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    def ops(fn: Program) -> list[Any]:
        traced = sf.grad(lambda x, y: fn(x, y).sum()).trace(X, Y)
        nodes = traced.program.graph.graph.nodes
        called = [n for n in nodes if n.op == "call_function"]
        return [(n.target, n.meta["phase"], n.meta["val"].stride()) for n in called]

    for fn in (chained, moving_average):
        found = ops(fn)
        with monkeypatch.context() as patch:
            patch.setattr(trace, "without_writes", lambda *_: False)
            assert found == ops(fn)
