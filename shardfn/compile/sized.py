"""Programs compiled once for many sizes: local graphs that differ in sizes alone share one
compilation with symbols.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from .. import _compat
from ..collectives import custom_collective_ops
from .backends import Runner
from .separate import separate
from .skeletons import Formulas, Row, Skeleton, arguments_with, formulas, skeleton_of

log = logging.getLogger("shardfn")
ROWS = 8  # graphs whose ints a family remembers
PROGRAMS = 4  # programs with symbols in one family


@attrs.frozen(eq=False)
class SymbolicProgram:
    """A program that was compiled with symbols for sizes, and the conditions under which it is
    valid.
    """

    formulas: Formulas
    conditions: _compat.Sizes
    runner: Runner

    def serves(self, skeleton: Skeleton) -> bool:
        """Return whether the program computes a graph: the ints fit, and keep the compiler's
        conditions.
        """
        if not self.formulas.fits(skeleton.ints):
            return False
        names = dict.fromkeys(range(len(skeleton.places)), "input")
        return self.conditions.misfit(_input_layouts(skeleton), names) is None


@attrs.define(eq=False)
class Family:
    """The graphs of one skeleton: the sizes met so far, and the symbolic programs for many of
    them.
    """

    rows: list[Row] = attrs.field(factory=list)
    programs: list[SymbolicProgram] = attrs.field(factory=list)
    takes_symbols: bool = True  # until the compiler has refused them

    def program_for(self, skeleton: Skeleton) -> SymbolicProgram | None:
        """Return the symbolic program that computes a graph, or None."""
        return next((p for p in self.programs if p.serves(skeleton)), None)

    def formulas(self, skeleton: Skeleton) -> Formulas | None:
        """Find formulas for the ints of a graph and of all earlier ones, or of the last one. None
        if there are none, or there are enough programs.
        """
        if not self.takes_symbols or len(self.programs) == PROGRAMS:
            return None
        earlier = [row for row in self.rows if row != skeleton.ints]
        for others in (earlier, earlier[-1:]):
            common = formulas([*others, skeleton.ints], skeleton.places)
            if common is not None:
                return common
        return None


@attrs.define(eq=False)
class Families:
    """The compiled programs of one function that was captured for many sizes, by skeleton."""

    by_skeleton: dict[Any, Family] = attrs.field(factory=dict)

    def runner(
        self,
        graph: torch.fx.GraphModule,
        donated: Sequence[int],
        compile_own: Callable[[], Runner],
        note: Callable[[], None],
    ) -> Runner:
        """Return the compiled program of a graph.

        The first graph of a skeleton is compiled for its sizes, as if it were alone. The second
        is compiled with symbols for the sizes in which they differ. Each later one whose ints
        are those of the symbolic program, for its sizes, runs that.

        Args:
            graph: functional ATen, the inputs as placeholders.
            donated: the donated inputs.
            compile_own: compiles the graph for its sizes alone.
            note: counts a compilation with symbols.
        """
        skeleton = skeleton_of(graph.graph)
        if skeleton is None:
            return compile_own()
        family = self.by_skeleton.setdefault((skeleton.key, tuple(donated)), Family())
        program = family.program_for(skeleton)
        if program is not None:
            return program.runner
        formulas = family.formulas(skeleton)
        family.rows = [*family.rows[1 - ROWS :], skeleton.ints]
        if formulas is None:
            return compile_own()
        note()
        program = _try_compile_symbolic(graph, skeleton, formulas, donated)
        if program is None or not program.serves(skeleton):
            family.takes_symbols = False
            return compile_own()
        family.programs.append(program)
        return program.runner


def _try_compile_symbolic(
    graph: torch.fx.GraphModule, skeleton: Skeleton, formulas: Formulas, donated: Sequence[int]
) -> SymbolicProgram | None:
    """Compile a program for all graphs of a skeleton whose ints are formulas. None if the compiler
    refuses symbols.
    """
    try:
        return _compile_symbolic(graph, skeleton, formulas, donated)
    except Exception as error:  # the graph is compiled for its own sizes instead
        log.info("the program is not compiled for symbolic sizes: %s", error)
        return None


def _compile_symbolic(
    graph: torch.fx.GraphModule, skeleton: Skeleton, formulas: Formulas, donated: Sequence[int]
) -> SymbolicProgram:
    """Compile a graph with symbols in place of the sizes that formulas start from."""
    symbols = _compat.Symbols([skeleton.ints[i] for i in formulas.bases])
    ints = formulas.at(symbols.sizes)
    inputs = _symbolic_inputs(graph.graph, symbols, ints)
    arguments = arguments_with(graph.graph, skeleton, ints)
    source = _compat.Source(
        _compat.Sized(graph, arguments).run, inputs, lambda lowered: separate(lowered, donated)
    )
    runner = _compat.inductor(source, custom_collective_ops())
    return SymbolicProgram(formulas, symbols.conditions(inputs), runner)


def _symbolic_inputs(
    graph: torch.fx.Graph, symbols: _compat.Symbols, ints: Sequence[Any]
) -> list[torch.Tensor]:
    """Build fake inputs with symbols for sizes."""
    feed = iter(ints)
    inputs = []
    for placeholder in graph.find_nodes(op="placeholder"):
        like = placeholder.meta["val"]
        shape = [next(feed) for _ in range(like.dim())]
        stride = [next(feed) for _ in range(like.dim())]
        inputs.append(symbols.empty(like, shape, stride))
    return inputs


def _input_layouts(skeleton: Skeleton) -> dict[int, tuple[Row, Row]]:
    """Return the shape and the strides of each input."""
    layouts: dict[int, tuple[Row, Row]] = {}
    start = 0
    for k, dims in enumerate(skeleton.places):
        middle = start + dims
        end = middle + dims
        layouts[k] = skeleton.ints[start:middle], skeleton.ints[middle:end]
        start = end
    return layouts
