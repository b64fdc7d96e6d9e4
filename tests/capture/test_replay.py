"""Dynamo's graph run again: tangents of the value's dtype."""

from __future__ import annotations

import torch

from shardfn.capture.replay import Replay, _of_one_dtype
from tests.support.stages.graphs import graph_of

X = torch.ones(2)


def module() -> torch.fx.GraphModule:
    return torch.fx.GraphModule(torch.nn.Module(), graph_of(lambda x: [x.sin() + 1], X))


def test_a_tangent_has_the_dtype_of_its_value() -> None:
    value, tangent = _of_one_dtype(X.half(), X)
    assert tangent is not None and tangent.dtype == torch.float16
    same = X.clone()
    assert _of_one_dtype(X, same)[1] is same and _of_one_dtype(X, None) == (X, None)
    assert value.dtype == torch.float16


def test_a_plain_graph_runs_as_it_is() -> None:
    (got,) = Replay(module()).run(X)
    torch.testing.assert_close(got, X.sin() + 1)
