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
ROWS = 8  # sizes whose ints a family remembers


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
    """Graphs of one skeleton: the ints of those that were met, and a program for them all."""

    rows: list[Row] = attrs.field(factory=list)
    shared: Shared | None = None


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
        if family.shared is not None and family.shared.serves(skeleton):
            return family.shared.runner
        family.rows = [*family.rows[-ROWS:], skeleton.ints]
        shared = _shared(graph, skeleton, family.rows, donated)
        if shared is None:
            return compile_own()
        note()
        if not shared.serves(skeleton):
            return compile_own()
        family.shared = shared
        return shared.runner


def _shared(
    graph: torch.fx.GraphModule,
    skeleton: Skeleton,
    rows: Sequence[Row],
    donated: Sequence[int],
) -> Shared | None:
    """A program for all graphs of a skeleton, compiled from one of them. None if their ints have
    no simple formulas, or the compiler takes no symbols there.
    """
    found = formulas(rows, skeleton.places) if len(set(rows)) > 1 else None
    if found is None:
        return None
    symbols = _compat.Symbols([skeleton.ints[i] for i in found.bases])
    ints = found.at(symbols.sizes)
    inputs = _inputs(graph.graph, symbols, ints)
    given = arguments_at(graph.graph, skeleton, ints)
    try:
        runner = _compat.inductor(
            _compat.Sized(graph, given).run,
            inputs,
            lambda lowered: separate(lowered, donated),
            our_ops(),
        )
    except Exception as error:  # the graph is compiled for its own sizes instead
        log.info("not compiled with symbols for sizes: %s", error)
        return None
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
