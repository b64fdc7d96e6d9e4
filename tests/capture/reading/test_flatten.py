"""Dynamo's graph as a graph of ATen ops: its inputs are the arguments, what is closed over, the
state of random calls if there are any, and constants.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn.capture import Captured, capture
from tests.support.stages.graphs import op_of

X = torch.arange(3.0)
W = torch.tensor([2.0, 3.0, 5.0])


def captured(fn: Any, *args: Any) -> Captured:
    return capture(fn, "f", args, {}, [f"x{i}" for i in range(len(args))])


def values(made: Captured, *args: torch.Tensor) -> list[torch.Tensor]:
    return list(made.program.graph(*args, *made.closed_over))


def inputs(made: Captured) -> int:
    return len(made.program.graph.graph.find_nodes(op="placeholder"))


def test_closed_over_tensors_and_constants_follow_the_arguments() -> None:
    def fn(x: Any, tree: Any) -> Any:
        scaled = tree["y"] * W + torch.tensor([1.0, 0.0, 7.0])
        return {"sum": x + scaled, "n": 3, "same": x}

    made = captured(fn, X, {"y": X + 1})
    assert inputs(made) == 4 and made.closed_over[0] is W
    assert made.program.out_paths == ("result['sum']", "result['same']")
    total, same = values(made, X, X + 1)
    assert torch.equal(total, fn(X, {"y": X + 1})["sum"])
    assert torch.equal(same, X)
    assert made.outside.draws == 0


def test_random_calls_draw_from_a_state_that_is_an_input() -> None:
    made = captured(lambda x: x + torch.rand(3) + torch.rand(3), X)
    assert made.outside.draws == 2 and inputs(made) == 2
    names = [op_of(n) for n in made.program.graph.graph.nodes]
    assert "rand" not in names and names.count("random_bits") == 2


def test_a_write_in_place_is_one_to_a_copy() -> None:
    def fn(x: Any) -> Any:
        y = x * 1
        y[1:] += 10
        return y

    made = captured(fn, X)
    assert inputs(made) == 1
    (out,) = values(made, X)
    assert out.tolist() == [0, 11, 12] and X.tolist() == [0, 1, 2]


def test_the_leaves_that_a_gradient_reaches_are_known() -> None:
    w, v = (torch.ones(3, requires_grad=True) for _ in range(2))

    def fn(x: Any) -> Any:
        with torch.no_grad():
            y = v * 2
        return x * w + y

    outside = captured(fn, X).outside
    assert [outside.tensors[i] is w for i in outside.lost()] == [True]


def test_a_result_that_is_no_tensor_of_ours_is_refused() -> None:
    class Odd(torch.Tensor):
        pass

    odd = X.as_subclass(Odd)
    with pytest.raises(sf.CaptureError, match="Odd"):
        captured(lambda x: odd, X)
