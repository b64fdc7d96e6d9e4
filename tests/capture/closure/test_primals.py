"""Closed-over tensors as primals: the code inside a derivative reads the wrapped tensor."""

from __future__ import annotations

import torch

from shardfn.capture.closure.primals import derivative_of, follow_primals
from shardfn.ops import placement


def _wrap_for_grad(x, level):
    return x


def _grad_increment_nesting():
    return 1


def _grad_decrement_nesting():
    return 1


def test_code_between_the_levels_reads_the_wrapped_tensor() -> None:
    graph = torch.fx.Graph()
    w = graph.placeholder("w")
    primal = graph.call_function(placement.primal, (w,))
    graph.call_function(_grad_increment_nesting)
    wrapped = graph.call_function(_wrap_for_grad, (primal, 1))
    inside = graph.call_function(torch.exp, (w,))
    graph.call_function(_grad_increment_nesting)
    deeper = graph.call_function(torch.sin, (w,))
    graph.call_function(_grad_decrement_nesting)
    graph.call_function(_grad_decrement_nesting)
    outside = graph.call_function(torch.cos, (w,))
    graph.output([inside, deeper, outside])
    follow_primals(torch.fx.GraphModule(torch.nn.Module(), graph))
    assert inside.args == deeper.args == (wrapped,)
    assert outside.args == wrapped.args[:1] == (w,)
    assert primal not in graph.nodes


def test_a_derivative_knows_which_results_and_primals_move() -> None:
    v, w = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    found = derivative_of([(v * 2).sum(), torch.ones(1), v + 1], [v, w])
    assert found.results == (True, False, True)
    assert found.primals == ((0, 2), ())
