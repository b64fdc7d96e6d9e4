"""Loops in compiled programs: each graph of a loop is compiled once, and Python code outside of
it runs the steps.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from .. import _compat
from ..ops.debug import has_effect
from ..ops.loops import Loop, apart, driven
from .text import Unwritable, devices_of, loop_text

Graphs = Sequence[Callable[..., Any]]
# by the number in the compiled code; the programs that call them keep them alive
_compiled: weakref.WeakValueDictionary[int, Compiled] = weakref.WeakValueDictionary()
OWN = 2**62  # the first number of loops without a text, which this process alone knows
_numbers = itertools.count(OWN)


@attrs.frozen(eq=False)
class Compiled:
    """A loop whose graphs are compiled."""

    number: int
    loop: Loop
    runners: tuple[Callable[[list[torch.Tensor]], list[torch.Tensor]], ...]
    shapes: tuple[torch.Tensor, ...]  # fake results

    @property
    def is_own(self) -> bool:
        """Whether only this process knows its number."""
        return self.number >= OWN

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        own = driven(
            self.loop,
            tensors,
            lambda which, inputs: [x.contiguous() for x in self.runners[which](list(inputs))],
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


@torch.library.custom_op("shardfn::run_showing_loop", mutates_args=())
def run_showing_loop(tensors: list[torch.Tensor], number: int) -> list[torch.Tensor]:
    """As `run_loop`, of a loop that shows values: it runs though nothing may read its results, and
    in order.
    """
    return _compiled[number](tensors)


@run_showing_loop.register_fake
def _(tensors: list[torch.Tensor], number: int) -> list[torch.Tensor]:
    return run_loop(tensors, number)


SHOWING = torch.ops.shardfn.run_showing_loop.default
_compat.keep_effects(SHOWING)


def outlined(
    module: torch.fx.GraphModule, compile_graph: Callable[[torch.fx.Graph], Any]
) -> list[Compiled]:
    """Compile the bodies of a graph's loops, and replace each loop by a call. Returns the
    compiled loops.
    """
    loops = []
    for node in module.graph.nodes:
        if not isinstance(node.target, Loop):
            continue
        number = _number_of(node)
        compiled = _compiled.get(number)
        if compiled is None:
            runners = tuple(compile_graph(graph) for graph in node.target.graphs)
            shapes = tuple(node.meta["val"])
            compiled = Compiled(number, node.target, runners, shapes)
            _compiled[number] = compiled
        run = SHOWING if has_effect(node) else torch.ops.shardfn.run_loop.default
        node.target, node.args = (run, (list(node.args), number))
        loops.append(compiled)
    if loops:
        module.recompile()
    return loops


def _number_of(node: torch.fx.Node) -> int:
    """The number of a loop: equal for equal ones, in every process."""
    try:
        text = loop_text(node.target)
        devices = devices_of(node.all_input_nodes)
        said = json.dumps([text, len(node.args), devices])
    except Unwritable:
        return next(_numbers)
    depends = f"{said}\n{_compat.environment()}"
    return int.from_bytes(hashlib.sha256(depends.encode()).digest()[:7], "little")


def keep(loops: Sequence[Compiled]) -> None:
    """Called when the program of some loops is gone: until then, they are kept."""
