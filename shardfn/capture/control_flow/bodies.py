"""Regions: functions that Dynamo reads as graphs of their own, so that a loop or a branch can
be made of them.

In a traced function `region(fn, xs)` stands for one run of fn, `leave` marks what it returns,
and an ending, such as that of a scan, says what is to become of it; the ending's results have
the right shapes while Dynamo reads. When its graph is replayed, regions are not run: the ending
is given them as functions of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ... import _compat


class Region:
    """A graph as a function of what entered it and of what it closes over.

    Args:
        graph: Dynamo's.
        given: what is known of each of its inputs: `Entered`, or the tensor that it closes over.
        replay: runs such a graph.
    """

    def __init__(
        self,
        graph: torch.fx.GraphModule,
        given: Sequence[Any],
        replay: Callable[..., Any],
    ) -> None:
        self.graph, self.replay = graph, replay
        self.entered = {
            i: x.number for i, x in enumerate(given) if isinstance(x, Entered)
        }
        self.free = [x for x in given if not isinstance(x, Entered)]
        (output,) = graph.graph.find_nodes(op="output")
        self.order = [
            node.args[1] for node in output.args[0]
        ]  # of each result, which one of `leave`'s it is

    def __call__(
        self, entered: Sequence[torch.Tensor], free: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        feed = iter(free)
        count = len(self.graph.graph.find_nodes(op="placeholder"))
        inputs = [
            entered[self.entered[i]] if i in self.entered else next(feed)
            for i in range(count)
        ]
        # an autograd.Function turns it off where it runs, and a graph with grad in it relies on
        # it
        with torch.enable_grad():
            outs = self.replay(self.graph).run(*inputs)
        return [
            x
            for _, x in sorted(
                zip(self.order, outs, strict=True), key=lambda pair: pair[0]
            )
        ]


class Entered:
    """The number-th tensor that enters a region, and one value of it."""

    def __init__(self, number: int, value: torch.Tensor) -> None:
        self.number, self.value = number, value


class Left:
    """The number-th result of a region."""

    def __init__(self, region: Region, number: int) -> None:
        self.region, self.number = region, number


def enter(xs: list[torch.Tensor]) -> list[torch.Tensor]:
    """What enters a region; Dynamo leaves this whole, so that each can be told from what is
    closed over.
    """
    return [x.clone() for x in xs]


def inside(xs: list[torch.Tensor]) -> list[torch.Tensor]:
    """What entered, as values of the region's own graph: of others, Dynamo reads x.T in the
    graph around it (torch 2.13).
    """
    return [x.clone() for x in xs]


def leave(xs: list[torch.Tensor]) -> list[torch.Tensor]:
    """What a region returns."""
    return [x.clone() for x in xs]


@_compat.read_by_dynamo
def region(fn: Callable[..., Any], xs: list[torch.Tensor]) -> Any:
    """One run of a function of tensors that returns what `leave` gave it, in any tree; only
    inside a traced function.
    """
    return (
        _compat.wrapped(lambda *ys: fn(*inside(list(ys))), *enter(xs))
        if xs
        else _compat.wrapped(fn)
    )


def wrap(
    replay: Callable[..., Any], graph: torch.fx.GraphModule, *given: Any
) -> tuple[Left, ...]:
    """A region instead of its results, where Dynamo's graph is replayed."""
    made = Region(graph, given, replay)
    return tuple(Left(made, k) for k in made.order)


def entering(replay: Callable[..., Any], xs: list[torch.Tensor]) -> list[Entered]:
    """`enter`, where Dynamo's graph is replayed."""
    return [Entered(i, x) for i, x in enumerate(xs)]


def leaving(replay: Callable[..., Any], xs: list[Any]) -> list[Any]:
    """`leave` or `inside`, where Dynamo's graph is replayed."""
    return list(xs)
