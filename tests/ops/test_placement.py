"""Prims that carry placements: identities whose derivatives keep or undo the placements."""

from __future__ import annotations

import torch
from torch import Tensor

from shardfn.ops import placement
from tests.support.stages.graphs import calls, graph_of

X = torch.arange(6.0, dtype=torch.float64).view(3, 2)


def specs(graph: torch.fx.Graph) -> list[object]:
    """The placements of each redistribution, in order."""
    return [node.args[1] for node in calls(graph, "prim_redistribute")]


HALF, SINGLE = torch.bfloat16, torch.float32


def retyped(x: Tensor) -> Tensor:
    return placement.moved(x, "a=S0", "a=S1", HALF, SINGLE)


def test_a_moved_dtensor_is_cast_before_and_its_gradient_before_and_after() -> None:
    loss = lambda x: (retyped(x) / 3).sum()
    gradient = graph_of(torch.func.grad(loss), X)
    casts = [n.kwargs["dtype"] for n in calls(gradient, "_to_copy")]
    assert casts == [HALF, SINGLE, X.dtype]
    assert specs(gradient) == ["a;", ";a"]
    third = torch.tensor(1 / 3, dtype=HALF).to(X.dtype)
    assert torch.equal(torch.func.grad(loss)(X), third.expand_as(X))
