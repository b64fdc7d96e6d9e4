"""Loops, branches and pipelines inside a function that the user compiles with torch.compile have
the values that they have outside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardfn as sf

X = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)


def pipelined(x: torch.Tensor) -> Any:
    loss = lambda w, x: (x * w).square().mean()
    return sf.pipelined_grad(loss, 3)(torch.ones(1, dtype=torch.float64), x)


CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "scan": lambda x: sf.scan(lambda c, row: (c + row, c * row), x[0], x),
    "map": lambda x: sf.map(lambda row: row * 2, x),
    "cond": lambda x: sf.cond(x.sum() < 0, torch.sin, torch.cos, x),
    "while_loop": lambda x: sf.while_loop(lambda c: c.sum() < 100, lambda c: c * 2, x),
    "pipelined_grad": pipelined,
}


@pytest.mark.parametrize("name", CALLS)
def test_values_are_those_outside_of_it(name: str) -> None:
    call = CALLS[name]
    torch._dynamo.reset()
    compiled = torch.compile(call, backend="eager")
    torch.testing.assert_close(compiled(X), call(X), rtol=0, atol=0)
