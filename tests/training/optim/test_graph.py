"""torch's step on copies of tensors inside a graph: once for each kind of parameter."""

from __future__ import annotations

import torch

from shardfn.training.optim import graph as steps
from shardfn.training.optim.graph import without_copies
from tests.support.stages.graphs import calls, graph_of

F64 = torch.float64


def test_whole_numbers_are_counted_in_float64() -> None:
    copied = steps._copied({"step": torch.tensor(3), "mask": torch.tensor([1])})
    assert copied["step"].dtype == F64 and copied["mask"].dtype == torch.int64
    kept = steps._kept(copied, {"step": torch.tensor(0)})
    assert kept["step"].dtype == torch.int64 and int(kept["step"]) == 3


def test_copies_are_dropped_where_the_layout_is_the_same() -> None:
    aten = torch.ops.aten

    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        same = aten.clone.default(x)
        turned = aten.clone.default(x.t(), memory_format=torch.contiguous_format)
        return [aten.copy.default(same, x + 1), turned]

    graph = graph_of(fn, torch.ones(2, 3))
    without_copies(graph)
    graph.lint()
    assert not calls(graph, "copy") and len(calls(graph, "clone")) == 1
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    x = torch.arange(6.0).view(2, 3)
    torch.testing.assert_close(module(x), [x + 1, x.t()])
