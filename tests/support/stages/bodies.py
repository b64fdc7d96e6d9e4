"""Bodies of control-flow ops made without Dynamo, and the graph of a function that has such ops."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardfn import _compat
from shardfn.capture import aten_trace
from shardfn.capture.control_flow.bodies import BodyGraph, BodyResult, EnteringTensor
from shardfn.capture.reading.capture_settings import Settings, tracing


def body(
    fn: Callable[..., Any], entering: int, leaving: int, free: Sequence[torch.Tensor] = ()
) -> list[BodyResult]:
    """A body as Dynamo's graph gives it: fn(*entering, *closed-over values) -> list of results."""
    graph = torch.fx.Graph()
    count = entering + len(free)
    xs = tuple(graph.placeholder(f"x{i}") for i in range(count))
    every = graph.call_function(fn, xs)
    outs = [graph.call_function(operator.getitem, (every, k)) for k in range(leaving)]
    graph.output(tuple(outs))
    given = [EnteringTensor(i, torch.empty(0)) for i in range(entering)]
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    region = BodyGraph(module, [*given, *free], torch.fx.Interpreter)
    return [BodyResult(region, k) for k in range(leaving)]


def lowered(fn: Callable[..., Any], *args: torch.Tensor) -> torch.fx.GraphModule:
    """The graph of a function of tensors that returns a list of them, traced as a capture does."""
    mode = _compat.fake_mode()
    with tracing(Settings(name="f"), mode, _compat.Memo()):
        inputs = [mode.from_tensor(x) for x in args]
        paths = [f"x{i}" for i in range(len(args))]
        module = aten_trace.functional_graph(fn, inputs, "f", paths)
    module.recompile()
    return module


def loops(graph: torch.fx.Graph, kind: type) -> list[Any]:
    """The loops of a kind that a graph runs."""
    return [n.target for n in graph.nodes if isinstance(n.target, kind)]
