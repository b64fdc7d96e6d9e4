"""A softmax, and the ops that stand in its place, compute the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardfn.compile.kernels.decomposed import DECOMPOSED, decompose
from tests.support.stages.graphs import graph_of

aten = torch.ops.aten
X, Y = torch.randn(3, 5, 7).double(), torch.randn(3, 5, 7).double()
CALLS: dict[Any, tuple[Any, ...]] = {
    aten._softmax.default: (X, 1, False),
    aten._softmax_backward_data.default: (X, Y, -1, torch.float64),
    aten._log_softmax.default: (X, 2, False),
    aten._log_softmax_backward_data.default: (X, Y, 0, torch.float64),
}


@pytest.mark.parametrize("op", DECOMPOSED)
def test_the_ops_compute_what_the_softmax_does(op: Any) -> None:
    args = CALLS[op]
    tensors = [x for x in args if isinstance(x, torch.Tensor)]
    rest = args[len(tensors) :]
    graph = graph_of(lambda *xs: [op(*xs, *rest)], *tensors)
    decompose(graph)
    assert not graph.find_nodes(op="call_function", target=op)
    (result,) = torch.fx.Interpreter(torch.fx.GraphModule(torch.nn.Module(), graph)).run(*tensors)
    torch.testing.assert_close(result, op(*args))
