"""Bodies: functions that Dynamo traces into graphs of their own, from which control-flow ops
are made.

In a traced function, `run_body(fn, xs)` stands for one run of the body fn, and `mark_results`
marks its results. A control-flow op of control_flow_ops.py, such as `scan`, takes the run. While
Dynamo traces, the results of that op only have the right shapes. When Dynamo's graph is replayed,
bodies are not run: the op takes them as functions of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ... import _compat
from ...ops.nodes import args_of, returned_by


class BodyGraph:
    """Dynamo's graph of a body, as a function of its entering and its closed-over values.

    Args:
        graph: Dynamo's.
        given: for each of its inputs, `EnteringTensor`, the closed-over tensor, or a size.
        replay: runs such a graph.
    """

    def __init__(
        self, graph: torch.fx.GraphModule, inputs: Sequence[Any], replay: Callable[..., Any]
    ) -> None:
        self.graph, self.replay = graph, replay
        self.entered = {i: x.number for i, x in enumerate(inputs) if isinstance(x, EnteringTensor)}
        # the sizes that Dynamo has read as symbols
        self.sizes = {i: x for i, x in enumerate(inputs) if isinstance(x, int)}
        self.free = [x for x in inputs if not isinstance(x, (EnteringTensor, int))]
        # for each result, its index among those of `mark_results`
        self.order = [args_of(node)[1] for node in returned_by(graph.graph)]

    def __call__(
        self, entered: Sequence[torch.Tensor], free: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        feed = iter(free)
        count = len(self.graph.graph.find_nodes(op="placeholder"))
        known = {i: entered[number] for i, number in self.entered.items()}
        known |= self.sizes
        inputs = [known[i] if i in known else next(feed) for i in range(count)]
        # an autograd.Function turns grad mode off while it runs, but a graph with grad inside
        # needs it
        with torch.enable_grad():
            outs = self.replay(self.graph).run(*inputs)
        return [x for _, x in sorted(zip(self.order, outs, strict=True), key=lambda pair: pair[0])]


class BodyWithSums:
    """A body that carries sums, from one whose results after its carries are their terms.

    Args:
        region: that body.
        carries: the number of its carries.
        sums: the number of sums.
    """

    def __init__(self, region: BodyGraph, carries: int, sums: int) -> None:
        self.region, self.carries, self.sums = region, carries, sums
        self.free = region.free

    def __call__(
        self, entered: Sequence[torch.Tensor], free: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        start, end = self.carries, self.carries + self.sums
        outs = self.region([*entered[:start], *entered[end:]], free)
        terms = zip(entered[start:end], outs[start:end], strict=True)
        sums = [s if _compat.is_zero_tensor(x) else s + x for s, x in terms]
        return [*outs[:start], *sums, *outs[end:]]


class EnteringTensor:
    """A tensor that enters a body: its index, and one value of it."""

    def __init__(self, number: int, value: torch.Tensor) -> None:
        self.number, self.value = number, value


class BodyResult:
    """A result of a body, by its index."""

    def __init__(self, region: BodyGraph, number: int) -> None:
        self.region, self.number = region, number


def mark_entering(xs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Mark the values that enter a body, in the graph around it. Dynamo keeps this call, which
    tells them from closed-over values.
    """
    return [x.clone() for x in xs]


def mark_inputs(xs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Mark the entering values inside of the body's own graph. Otherwise Dynamo traces x.T into the
    outer graph (torch 2.13).
    """
    return [x.clone() for x in xs]


def mark_results(xs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Mark the results of a body."""
    return [x.clone() for x in xs]


@_compat.read_by_dynamo
def run_body(fn: Callable[..., Any], xs: list[torch.Tensor]) -> Any:
    """One run of a body. The function takes tensors, and returns the results of `mark_results` in
    any tree. Only inside a traced function.
    """
    return (
        _compat.wrapped(lambda *ys: fn(*mark_inputs(list(ys))), *mark_entering(xs))
        if xs
        else _compat.wrapped(fn)
    )


def replay_body(
    replay: Callable[..., Any], graph: torch.fx.GraphModule, *inputs: Any
) -> tuple[BodyResult, ...]:
    """When Dynamo's graph is replayed: a body as a function, in place of its results."""
    body = BodyGraph(graph, inputs, replay)
    return tuple(BodyResult(body, k) for k in body.order)


def replay_entering(replay: Callable[..., Any], xs: list[torch.Tensor]) -> list[EnteringTensor]:
    """When Dynamo's graph is replayed: the entering values with their indices."""
    return [EnteringTensor(i, x) for i, x in enumerate(xs)]


def replay_marked(replay: Callable[..., Any], xs: list[Any]) -> list[Any]:
    """When Dynamo's graph is replayed: the values that `mark_results` or `mark_inputs` takes."""
    return list(xs)
