"""Bodies: which inputs of Dynamo's graph are entered, closed over or sizes, and which result is
which.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from shardfn.capture.control_flow import bodies
from shardfn.capture.control_flow.bodies import Entered, Region

A, B, C = torch.tensor(2.0), torch.tensor(3.0), torch.tensor(5.0)


def graph(order: list[int]) -> torch.fx.GraphModule:
    """The body 10 a + b, a c, n of inputs c, b, n, a, with its results in some order."""
    made = torch.fx.Graph()
    c, b, n, a = (made.placeholder(name) for name in "cbna")
    run = lambda a, b, c, n: [10 * a + b, a * c, torch.tensor(float(n))]
    every = made.call_function(run, (a, b, c, n))
    outs = [made.call_function(operator.getitem, (every, k)) for k in order]
    made.output(tuple(outs))
    return torch.fx.GraphModule(torch.nn.Module(), made)


def region(order: list[int], replay: Any = torch.fx.Interpreter) -> Region:
    given = [C, Entered(1, B), 7, Entered(0, A)]
    return Region(graph(order), given, replay)


def test_inputs_are_entered_closed_over_or_sizes() -> None:
    made = region([0, 1, 2])
    assert made.entered == {1: 1, 3: 0} and made.sizes == {2: 7}
    assert [x is C for x in made.free] == [True]
    assert [float(x) for x in made([A, B], [C])] == [23.0, 10.0, 7.0]
    assert [float(x) for x in made([B, A], [A])] == [32.0, 6.0, 7.0]


def test_results_have_the_order_of_leave() -> None:
    made = region([2, 0, 1])
    assert [float(x) for x in made([A, B], [C])] == [23.0, 10.0, 7.0]
    wrapped = bodies.wrap(torch.fx.Interpreter, graph([2, 0, 1]), C, B, 7, A)
    assert [left.number for left in wrapped] == [2, 0, 1]
    assert len({id(left.region) for left in wrapped}) == 1


def test_a_body_runs_with_grad_mode_on() -> None:
    modes: list[bool] = []

    class Replay(torch.fx.Interpreter):
        def run(self, *xs: Any) -> Any:
            modes.append(torch.is_grad_enabled())
            return super().run(*xs)

    with torch.no_grad():
        region([0, 1, 2], Replay)([A, B], [C])
    assert modes == [True]


def test_values_enter_by_their_position_when_the_graph_is_replayed() -> None:
    entered = bodies.entering(None, [B, A])
    assert [(x.number, x.value) for x in entered] == [(0, B), (1, A)]
    assert bodies.leaving(None, [A, B]) == [A, B]


def test_marks_are_copies() -> None:
    for mark in (bodies.enter, bodies.inside, bodies.leave):
        (out,) = mark([A])
        assert out is not A and torch.equal(out, A)
