"""The backend that runs a graph as it is, and outputs in the memory of donated inputs."""

from __future__ import annotations

from typing import Any

import torch

from shardfn.compile.backends import BACKENDS, aten, donate
from tests.support.stages.graphs import graph_of

X, Y = torch.arange(4.0), torch.ones(4)


def module(fn: Any, *args: torch.Tensor) -> torch.fx.GraphModule:
    return torch.fx.GraphModule(torch.nn.Module(), graph_of(fn, *args))


def test_a_run_takes_its_inputs_and_lets_them_go() -> None:
    run = aten(module(lambda x, y: [x + y, x], X, Y))
    inputs = [X.clone(), Y]
    first, second = run(inputs)
    assert inputs == [], "so that memory can be freed"
    assert first.tolist() == [1, 2, 3, 4] and second.tolist() == X.tolist()


def test_a_run_is_not_followed_by_autograd() -> None:
    run = aten(module(lambda x: [x * 2], X))
    assert not run([X.clone().requires_grad_()])[0].requires_grad


def test_an_output_is_written_into_a_donated_input() -> None:
    graph = donate(module(lambda x, y: [x + y, y * 2], X, Y), {0: 0})
    run = aten(graph, donated=[0])
    given, kept = X.clone(), Y.clone()
    first, second = run([given, kept])
    assert first.data_ptr() == given.data_ptr() and given.tolist() == [1, 2, 3, 4]
    assert second.tolist() == [2.0] * 4 and kept.tolist() == [1.0] * 4


def test_outputs_that_read_a_donated_input_are_computed_before_it_is_written() -> None:
    graph = donate(module(lambda x: [x + 1, x * 10, x], X), {0: 0})
    run = aten(graph, donated=[0])
    first, second, third = run([X.clone()])
    assert first.tolist() == [1, 2, 3, 4]
    assert second.tolist() == [0, 10, 20, 30] and third.tolist() == X.tolist()


def test_the_backends() -> None:
    assert set(BACKENDS) == {"aten", "inductor"}
