"""Loops in compiled programs: each graph of a loop is compiled once, and Python code outside of
it runs the steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from ..ops.loops import Loop, apart, driven

Graphs = Sequence[Callable[..., Any]]
_numbers = itertools.count()
_compiled: dict[
    int, Compiled
] = {}  # by the number in the compiled code; a program drops its own loops


@attrs.frozen(eq=False)
class Compiled:
    """A loop whose graphs are compiled."""

    loop: Loop
    runners: tuple[Callable[[list[torch.Tensor]], list[torch.Tensor]], ...]
    shapes: tuple[torch.Tensor, ...]  # fake results

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        own = driven(
            self.loop,
            tensors,
            lambda which, inputs: [
                x.contiguous() for x in self.runners[which](list(inputs))
            ],
        )
        return apart(own, tensors)


@torch.library.custom_op("shardfn::run_loop", mutates_args=())
def run_loop(tensors: list[torch.Tensor], number: int) -> list[torch.Tensor]:
    """Run the compiled loop of that number."""
    return _compiled[number](tensors)


@run_loop.register_fake
def _(tensors: list[torch.Tensor], number: int) -> list[torch.Tensor]:
    return [
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        for x in _compiled[number].shapes
    ]


def outlined(
    module: torch.fx.GraphModule, compile_graph: Callable[[torch.fx.Graph], Any]
) -> list[int]:
    """Compile the bodies of a graph's loops, and replace each loop by a call. Returns the
    numbers of the compiled loops.
    """
    numbers = []
    for node in module.graph.nodes:
        if not isinstance(node.target, Loop):
            continue
        runners = tuple(compile_graph(graph) for graph in node.target.graphs)
        number = next(_numbers)
        _compiled[number] = Compiled(node.target, runners, tuple(node.meta["val"]))
        node.target, node.args = (
            torch.ops.shardfn.run_loop.default,
            (list(node.args), number),
        )
        numbers.append(number)
    module.recompile()
    return numbers


def forget(numbers: Sequence[int]) -> None:
    """Drop compiled loops that are no longer called."""
    for number in numbers:
        _compiled.pop(number, None)
