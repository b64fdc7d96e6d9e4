"""Loops in compiled programs: each graph of a loop is compiled once, and an opaque op runs the
steps from Python.
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
from ..ops.loops import Loop, drive_loop, unaliased
from ..ops.pipeline import Pipeline
from .text import Unwritable, devices_of, loop_text

Graphs = Sequence[Callable[..., Any]]
# by the number in the compiled code; the programs that call them keep them alive
_compiled: weakref.WeakValueDictionary[int, CompiledLoop] = weakref.WeakValueDictionary()
FIRST_LOCAL_NUMBER = 2**62  # of loops without a text, which this process alone knows
_numbers = itertools.count(FIRST_LOCAL_NUMBER)


@attrs.frozen(eq=False)
class CompiledLoop:
    """A loop whose graphs are compiled, with the number by which compiled code finds it."""

    number: int
    loop: Loop
    runners: tuple[Callable[[list[torch.Tensor]], list[torch.Tensor]], ...]
    shapes: tuple[torch.Tensor, ...]  # fake results

    @property
    def is_own(self) -> bool:
        """Return whether only this process knows the loop's number."""
        return self.number >= FIRST_LOCAL_NUMBER

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        # compiled code may hand over a tensor in other strides than its graph said
        own = drive_loop(self.loop, [x.contiguous() for x in tensors], self.run_graph)
        return unaliased(own, tensors)

    def run_graph(self, which: int, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run one of the graphs."""
        outs = self.runners[which](list(inputs))
        return outs if isinstance(self.loop, Pipeline) else [x.contiguous() for x in outs]


@torch.library.custom_op("shardfn::run_loop", mutates_args=())
def run_loop(tensors: list[torch.Tensor], number: int) -> list[torch.Tensor]:
    """Run the compiled loop with this number: the op in compiled code."""
    return _compiled[number](tensors)


@run_loop.register_fake
def _(tensors: list[torch.Tensor], number: int) -> list[torch.Tensor]:
    return [
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        for x in _compiled[number].shapes
    ]


@torch.library.custom_op("shardfn::run_showing_loop", mutates_args=())
def run_showing_loop(tensors: list[torch.Tensor], number: int) -> list[torch.Tensor]:
    """Run a loop that shows values: as `run_loop`, but in order, and also if nothing reads its
    results.
    """
    return _compiled[number](tensors)


@run_showing_loop.register_fake
def _(tensors: list[torch.Tensor], number: int) -> list[torch.Tensor]:
    return run_loop(tensors, number)


RUN_LOOP = torch.ops.shardfn.run_loop.default
SHOWING = torch.ops.shardfn.run_showing_loop.default
_compat.keep_effects(SHOWING)


def compile_loops(
    module: torch.fx.GraphModule, compile_graph: Callable[[torch.fx.Graph, dict[int, int]], Any]
) -> list[CompiledLoop]:
    """Compile the bodies of a graph's loops, and replace each loop by a call of `run_loop`. Return
    the compiled loops.
    """
    loops = []
    for node in module.graph.nodes:
        if not isinstance(node.target, Loop):
            continue
        number = _number_of(node)
        compiled = _compiled.get(number)
        if compiled is None:
            loop = node.target
            pairs = [loop.sums_of(i) for i in range(len(loop.graphs))]
            runners = tuple(map(compile_graph, loop.graphs, pairs))
            shapes = tuple(node.meta["val"])
            compiled = CompiledLoop(number, node.target, runners, shapes)
            _compiled[number] = compiled
        communicates = isinstance(node.target, Pipeline)
        run = SHOWING if communicates or has_effect(node) else RUN_LOOP
        node.target, node.args = (run, (list(node.args), number))
        loops.append(compiled)
    if loops:
        module.recompile()
    return loops


def _number_of(node: torch.fx.Node) -> int:
    """Return the number of a loop: a hash of its text, equal for equal loops in every process. A
    pipeline has a number of its own: its text does not say which ranks its messages go to.
    """
    if isinstance(node.target, Pipeline):
        return next(_numbers)
    try:
        text = loop_text(node.target)
        devices = devices_of(node.all_input_nodes)
        program = json.dumps([text, len(node.args), devices])
    except Unwritable:
        return next(_numbers)
    key = f"{program}\n{_compat.environment()}"
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "little")


def release_loops(loops: Sequence[CompiledLoop]) -> None:
    """Do nothing. As the finalizer of a program, it holds the loops of the program until the
    program is gone.
    """
