"""Compiled programs for many sizes: graphs that differ in sizes alone share one compilation."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from .. import _compat
from ..collectives import our_ops
from .backends import Runner
from .separate import separate
from .skeletons import Formulas, Row, Skeleton, arguments_at, formulas, skeleton_of

log = logging.getLogger("shardfn")
ROWS = 8  # graphs whose ints a family remembers
PROGRAMS = 4  # programs with symbols in one family


@attrs.frozen(eq=False)
class Shared:
    """A program that was compiled with symbols for sizes."""

    formulas: Formulas
    conditions: _compat.Sizes
    runner: Runner

    def serves(self, skeleton: Skeleton) -> bool:
        """Whether it computes a graph: the ints fit, and keep the compiler's conditions."""
        if not self.formulas.fits(skeleton.ints):
            return False
        names = dict.fromkeys(range(len(skeleton.places)), "input")
        return self.conditions.misfit(_layouts(skeleton), names) is None


@attrs.define(eq=False)
class Family:
    """Graphs of one skeleton: the ints of those that were met, and programs for many of them."""

    rows: list[Row] = attrs.field(factory=list)
    programs: list[Shared] = attrs.field(factory=list)
    takes_symbols: bool = True  # until the compiler has refused them

    def serving(self, skeleton: Skeleton) -> Shared | None:
        """The program that computes a graph, if there is one."""
        return next((p for p in self.programs if p.serves(skeleton)), None)

    def formulas(self, skeleton: Skeleton) -> Formulas | None:
        """Formulas for the ints of a graph and of those that were met before: of all, or of the
        last one. None if there are none, or enough programs.
        """
        if not self.takes_symbols or len(self.programs) == PROGRAMS:
            return None
        met = [row for row in self.rows if row != skeleton.ints]
        for others in (met, met[-1:]):
            found = formulas([*others, skeleton.ints], skeleton.places)
            if found is not None:
                return found
        return None


@attrs.define(eq=False)
class Families:
    """The compiled programs of one function that was captured for many sizes, by skeleton."""

    known: dict[Any, Family] = attrs.field(factory=dict)

    def runner(
        self,
        graph: torch.fx.GraphModule,
        donated: Sequence[int],
        compile_own: Callable[[], Runner],
        note: Callable[[], None],
    ) -> Runner:
        """The compiled program of a graph.

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
        family = self.known.setdefault((skeleton.key, tuple(donated)), Family())
        program = family.serving(skeleton)
        if program is not None:
            return program.runner
        found = family.formulas(skeleton)
        family.rows = [*family.rows[1 - ROWS :], skeleton.ints]
        if found is None:
            return compile_own()
        note()
        program = _shared(graph, skeleton, found, donated)
        if program is None or not program.serves(skeleton):
            family.takes_symbols = False
            return compile_own()
        family.programs.append(program)
        return program.runner


def _shared(
    graph: torch.fx.GraphModule, skeleton: Skeleton, found: Formulas, donated: Sequence[int]
) -> Shared | None:
    """A program for all graphs of a skeleton whose ints are formulas, compiled from one of them.
    None if the compiler takes no symbols there.
    """
    try:
        return _compiled(graph, skeleton, found, donated)
    except Exception as error:  # the graph is compiled for its own sizes instead
        log.info("not compiled with symbols for sizes: %s", error)
        return None


def _compiled(
    graph: torch.fx.GraphModule, skeleton: Skeleton, found: Formulas, donated: Sequence[int]
) -> Shared:
    """A graph, compiled with symbols in place of the sizes that formulas start from."""
    symbols = _compat.Symbols([skeleton.ints[i] for i in found.bases])
    ints = found.at(symbols.sizes)
    inputs = _inputs(graph.graph, symbols, ints)
    given = arguments_at(graph.graph, skeleton, ints)
    runner = _compat.inductor(
        _compat.Sized(graph, given).run,
        inputs,
        lambda lowered: separate(lowered, donated),
        our_ops(),
    )
    return Shared(found, symbols.conditions(inputs), runner)


def _inputs(
    graph: torch.fx.Graph, symbols: _compat.Symbols, ints: Sequence[Any]
) -> list[torch.Tensor]:
    """Fake inputs with symbols for sizes."""
    feed = iter(ints)
    made = []
    for holder in graph.find_nodes(op="placeholder"):
        like = holder.meta["val"]
        shape = [next(feed) for _ in range(like.dim())]
        stride = [next(feed) for _ in range(like.dim())]
        made.append(symbols.empty(like, shape, stride))
    return made


def _layouts(skeleton: Skeleton) -> dict[int, tuple[Row, Row]]:
    """The shape and the strides of each input."""
    found: dict[int, tuple[Row, Row]] = {}
    start = 0
    for k, dims in enumerate(skeleton.places):
        middle = start + dims
        end = middle + dims
        found[k] = skeleton.ints[start:middle], skeleton.ints[middle:end]
        start = end
    return found
