"""Two flips around a cumulative op are one op of the program."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import shardfn as sf

X = torch.arange(6.0, dtype=torch.float64).reshape(2, 3)


def read_twice(x: torch.Tensor) -> torch.Tensor:
    return x.flip(1) + x


JOINED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "reverse_cumsum": lambda x: x.flip(1).cumsum(1).flip(1),
    "reverse_cumsum of -1": lambda x: x.flip(-1).cumsum(1).flip([1]),
    "reverse_logcumsumexp": lambda x: x.flip(0).logcumsumexp(0).flip(0),
}
APART: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "another dim": lambda x: x.flip(0).cumsum(1).flip(0),
    "two dims": lambda x: x.flip(0, 1).cumsum(1).flip(0, 1),
    "read twice": lambda x: read_twice(x.flip(1).cumsum(1)),
    "in a dtype": lambda x: x.flip(1).cumsum(1, dtype=torch.float32).flip(1),
    "another op": lambda x: x.flip(1).cumprod(1).flip(1),
    "one flip": lambda x: x.cumsum(1).flip(1),
}


def ops(fn: Callable[[torch.Tensor], torch.Tensor]) -> list[str]:
    """The ops of the program of a function, which computes what the function does."""
    torch.testing.assert_close(sf.full(sf.jit(fn, backend="aten")(X)), fn(X), rtol=0, atol=0)
    graph = sf.jit(fn).trace(X).program.graph.graph
    return [
        node.target.overloadpacket.__name__ for node in graph.nodes if node.op == "call_function"
    ]


@pytest.mark.parametrize("name", JOINED)
def test_flips_around_a_cumulative_op_are_joined(name: str) -> None:
    assert ops(JOINED[name]) == [name.split(maxsplit=1)[0]]


@pytest.mark.parametrize("name", APART)
def test_other_flips_stay(name: str) -> None:
    assert not [op for op in ops(APART[name]) if op.startswith("reverse")]
