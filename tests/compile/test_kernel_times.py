"""The time of fused kernels: bytes that they read and write, against counts by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn.compile.kernel_times import kernel_seconds, prices_as_run
from shardfn.partition.planner import op_cost
from tests.support.stages.graphs import graph_of

CARD = sf.Hardware("a card", flops=1e30, flops32=1e30, memory=1.0, link=1.0, latency=0.0)
X, Y, W = torch.ones(6, 7), torch.ones(6, 7), torch.ones(7, 7)
ONE = 4.0 * 6 * 7  # bytes of a tensor, and the seconds in which they are moved
SQUARE = 4.0 * 7 * 7

PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...], float]] = {
    "a chain reads its inputs and writes its end": (
        lambda x, y: [((x * y).exp() + x).sin()], (X, Y), 3 * ONE),
    "an input that two chains read is read once": (lambda x: [x.sin(), x.cos()], (X,), 3 * ONE),
    "a norm is one kernel": (
        lambda x: [x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1)], (X,), 2 * ONE),
    "a product reads what is written for it": (
        lambda x, w: [(x.sin() @ w).cos()], (X, W), 2 * ONE + (2 * ONE + SQUARE) + 2 * ONE),
    "a view is read as far as it reaches": (lambda x: [x[:2].sin()], (X,), 2 * ONE / 3),
    "parts of a concatenation are written to their place": (
        lambda x, y: [torch.cat([x.sin(), y.cos()])], (X, Y), 4 * ONE),
    "arguments are copied into a concatenation": (
        lambda x, y: [torch.cat([x, y.cos()])], (X, Y), 4 * ONE),
}  # fmt: skip


@pytest.mark.parametrize("case", PROGRAMS)
def test_kernels_move_the_bytes_that_they_share(case: str) -> None:
    fn, args, wanted = PROGRAMS[case]
    seconds = kernel_seconds(graph_of(fn, *args), CARD)
    assert sum(seconds.values()) == pytest.approx(wanted)


def test_fusing_never_takes_longer() -> None:
    fn, args, _ = PROGRAMS["a norm is one kernel"]
    graph = graph_of(fn, *args)
    alone = sum(op_cost.seconds(x, CARD) for x in graph.nodes if x.op == "call_function")
    assert sum(kernel_seconds(graph, CARD).values()) < 0.4 * alone


def test_a_compiled_program_is_fused_and_another_is_not() -> None:
    chain = lambda x: x.sin().cos().exp()
    shape = sf.ShapeDtype((6, 7))
    took = lambda backend: sf.jit(chain, backend=backend).lower(shape).time(CARD).total
    assert took("inductor") == pytest.approx(2 * ONE)
    assert took("aten") == pytest.approx(6 * ONE)
    assert prices_as_run("aten") is None and prices_as_run("inductor") is kernel_seconds
