"""Flat lists of tensors, of which the floating ones are differentiated, with functions and
graphs on them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ... import _compat
from ...ops.nodes import remove_unread
from ...random import ambient

Body = Callable[..., Sequence[torch.Tensor]]  # a function of flat tensors


def is_float(x: torch.Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def floats_of(xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [x for x in xs if is_float(x)]


def with_floats(
    tensors: Sequence[torch.Tensor], floats: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The list of tensors with its floating ones replaced by others."""
    feed = iter(floats)
    return [next(feed) if is_float(x) else x for x in tensors]


def for_floats(
    tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    """A list with a value for each floating tensor, and None for every other one."""
    feed = iter(values)
    return [next(feed) if is_float(x) else None for x in tensors]


def split(
    xs: Sequence[torch.Tensor], sizes: Sequence[int], loose: bool = False
) -> list[list[torch.Tensor]]:
    """Split a list into parts of these sizes."""
    feed = iter(xs)
    parts = [[next(feed) for _ in range(n)] for n in sizes]
    assert loose or next(feed, None) is None
    return parts


def move_constants(graph: torch.fx.Graph, count: int, position: int) -> None:
    """Move the constants, which are the last inputs, to after the first `count` inputs."""
    holders = graph.find_nodes(op="placeholder")
    for holder in holders[len(holders) - count :] if position < len(holders) - count else ():
        holders[position].prepend(holder)


def add_inputs(graph: torch.fx.Graph, position: int, examples: Sequence[torch.Tensor]) -> None:
    """Add inputs to a graph that nothing reads."""
    holders = graph.find_nodes(op="placeholder")
    before = (
        holders[position]
        if position < len(holders)
        else next(n for n in graph.nodes if n.op != "placeholder")
    )
    for x in examples:
        with graph.inserting_before(before):
            holder = graph.placeholder("unread")
        holder.target = holder.name  # generated code names an input by its target
        holder.meta["val"] = x


def body_with_random_state(body: Body) -> Body:
    """The body with one more input, last: the state that its random calls draw from."""

    def run(*xs: torch.Tensor) -> Sequence[torch.Tensor]:
        *others, state = xs
        with ambient.drawing_from(ambient.Traced(state)):
            return body(*others)

    return run


class NumberedBody:
    """A body with one more input, last: the state before the first step, and the number of the
    step. Its random calls go on from those of the steps before, as if the steps stood one after
    the other.
    """

    STRIDE = 2**31 - 1  # stands for the calls of a step, which are known once it is traced

    def __init__(self, body: Body) -> None:
        self.body, self.calls = body, 0

    def __call__(self, *xs: torch.Tensor) -> Sequence[torch.Tensor]:
        *others, row = xs
        source = ambient.Traced(ambient.state_of_step(row, self.STRIDE))
        with ambient.drawing_from(source):
            outs = self.body(*others)
        self.calls = source.calls
        return outs

    def settle(self, graph: torch.fx.Graph) -> None:
        """Put the number of calls of a step where it was not known."""
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor):
            if self.STRIDE in node.args:
                node.args = tuple(self.calls if x == self.STRIDE else x for x in node.args)
        remove_unread(graph)


def randomness_of(info: Any, origin: frozenset[int], derived: bool) -> str:
    """The randomness with which vmap runs a body, in the vmap rule of an autograd.Function.

    A derivative that recomputes values draws their numbers again. If the values were computed
    outside of this vmap, as by a pullback under vmap, all samples have the same ones.

    Args:
        info: the information about the vmap that torch gives to the rule.
        origin: the levels of the vmaps around the values.
        derived: whether the body is that of a derivative.
    """
    level = (_compat.level() or 0) + 1  # of this vmap, inside of which the rule does not run
    return "same" if derived and level not in origin else info.randomness


def vmapped_body(
    body: Body, dims: tuple[int | None, ...], size: int, randomness: str = "error"
) -> Body:
    """The body under vmap, with the batch dim first in every result."""
    if all(d is None for d in dims):
        return lambda *xs: [x.expand(size, *x.shape) for x in body(*xs)]
    return torch.func.vmap(lambda *xs: tuple(body(*xs)), in_dims=dims, randomness=randomness)
