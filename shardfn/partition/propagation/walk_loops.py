"""Loops and branches placed: their graphs are walked like the Program itself, until what leaves
a run fits what enters it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import attrs
import torch

from ...errors import PlacementError, problem
from ...ops.loops import Branch, Loop, Scan, While
from ...placements import describe
from ...types import PENDING, Mark, Marks
from .. import layout, rules
from .. import plan as steps
from . import deferred
from .values import Value

ROUNDS = 6  # after so many walks over a loop's graph its carries are brought back in every run
CONSTRAIN = "prim_redistribute"


def nest(walk: Any, node: torch.fx.Node) -> None:
    """Place a loop and everything in it.

    Args:
        walk: over the graph that the loop stands in.
        node: of the loop.

    Raises:
        PlacementError: a carry that is constrained to another placement than it enters with.
    """
    loop, values = node.target, [walk.values[x] for x in node.args]
    ins, outs, plans, kinds, after = PLACE[type(loop)](walk, node, loop, values)
    source = [
        walk.redistribute(v, m, node, implicit=True)
        for v, m in zip(values, ins, strict=True)
    ]
    made = [
        walk.slot(fake, marks)
        for fake, marks in zip(node.meta["val"], outs, strict=True)
    ]
    walk.steps.append(steps.Nested(node, tuple(source), tuple(made), tuple(plans)))
    walk.values[node] = [
        walk.valued(slot, varies) for slot, varies in zip(made, kinds, strict=True)
    ]
    for k, marks in after.items():
        slot = walk.redistribute(walk.values[node][k], marks, node, implicit=False)
        walk.values[node][k] = walk.valued(slot, kinds[k])


# inputs, results, graphs, what varies, and where some results go at once
Placed = tuple[
    list[Marks],
    list[Marks],
    list[steps.Plan],
    list[frozenset[str]],
    dict[int, Marks],
]


class Inside:
    """A walk over the graph of a loop, whose inputs are placed so.

    Args:
        around: the walk over the graph that the loop stands in.
        graph: one of the loop's.
        ins: the marks of its inputs.
        values: what comes in at first.
        later: gradients that stay Partial.
    """

    def __init__(
        self,
        around: Any,
        graph: torch.fx.Graph,
        ins: Sequence[Marks],
        values: Sequence[Value],
        later: Collection[torch.fx.Node] = (),
    ) -> None:
        self.walk = around.fresh()
        self.walk.later = later
        holders, (self.output,) = (
            graph.find_nodes(op="placeholder"),
            graph.find_nodes(op="output"),
        )
        self.ins = tuple(
            self.walk.enter(holder, marks, None)
            for holder, marks in zip(holders, ins, strict=True)
        )
        for holder, value in zip(holders, values, strict=True):
            self.walk.values[holder].varies = value.varies
        for node in graph.nodes:
            if node.op == "call_function":
                self.walk.visit(node)

    def results(self) -> list[Value]:
        """What the graph returns."""
        return [self.walk.values[x] for x in self.output.args[0]]

    def varies(self) -> list[frozenset[str]]:
        """Over which axes the results are each rank's own."""
        return [value.varies for value in self.results()]

    def only_moved_to(self, k: int) -> Marks | None:
        """Where an input is brought in every run, if that is all that is done with it: once,
        before the loop, will do.
        """
        slot = self.ins[k]
        readers = [step for step in self.walk.steps if slot in step.read]
        found = {
            step.target.marks if isinstance(step, steps.Redistribute) else None
            for step in readers
        }
        marks = found.pop() if len(found) == 1 else None
        return (
            None
            if marks is None
            or any(m in PENDING or layout.halo(m) != (0, 0) for m in marks)
            else marks
        )

    def finished(self, outs: Sequence[Marks]) -> steps.Plan:
        """The plan, once it is known how the results leave."""
        pairs = zip(self.output.args[0], outs, strict=True)
        slots = tuple(
            self.walk.redistribute(
                self.walk.values[x], marks, self.output, implicit=True
            )
            for x, marks in pairs
        )
        needed = steps.needed(self.walk.steps, slots)
        return steps.Plan(
            self.walk.axes,
            needed,
            self.ins,
            slots,
            tuple(self.walk.gradients.values()),
        )


def _scan(walk: Any, node: torch.fx.Node, scan: Scan, values: list[Any]) -> Placed:
    end = scan.consts + scan.carries
    consts, init = (
        [natural(v, walk.axes) for v in values[: scan.consts]],
        values[scan.consts : end],
    )
    rows = [
        _without_rows(natural(v, walk.axes), v.fake.shape, walk.axes.sizes)
        for v in values[end:]
    ]
    carries, consts, inner, after = _settle(
        walk, node, scan.graphs[0], consts, init, rows, values
    )
    results = inner.results()
    ys = [
        _reduced_to(natural(r, walk.axes), r, inner, len(consts) + len(carries))
        for r in results[scan.carries :]
    ]
    plan = inner.finished([*carries, *ys])
    ins = [*consts, *carries, *map(_stacked, rows)]
    return ins, [*carries, *map(_stacked, ys)], [plan], inner.varies(), after


def _while(
    walk: Any, node: torch.fx.Node, loop: While, values: list[Any]
) -> Placed:
    consts = [natural(v, walk.axes) for v in values[: loop.consts]]
    init = values[loop.consts :]
    carries, consts, body, after = _settle(
        walk, node, loop.graphs[1], consts, init, [], values
    )
    test = Inside(walk, loop.graphs[0], [*consts, *carries], values)
    plans = [test.finished([_whole(walk)]), body.finished(carries)]
    return [*consts, *carries], carries, plans, body.varies(), after


def _branch(
    walk: Any, node: torch.fx.Node, branch: Branch, values: list[Any]
) -> Placed:
    ins = [natural(v, walk.axes) for v in values[:-1]]
    walks = [Inside(walk, graph, ins, values[:-1]) for graph in branch.graphs]
    pairs = zip(*(w.results() for w in walks), strict=True)
    outs = [_agreed(walk, *pair) for pair in pairs]
    varies = [
        a | b | values[-1].varies
        for a, b in zip(*(w.varies() for w in walks), strict=True)
    ]
    return [*ins, _whole(walk)], outs, [w.finished(outs) for w in walks], varies, {}


PLACE: dict[type[Loop], Callable[..., Placed]] = {
    Scan: _scan,
    While: _while,
    Branch: _branch,
}


def _settle(
    walk: Any,
    node: torch.fx.Node,
    graph: torch.fx.Graph,
    consts: list[Marks],
    init: Sequence[Any],
    rows: list[Marks],
    values: list[Any],
) -> tuple[list[Marks], list[Marks], Inside, dict[int, Marks]]:
    """Placements of the carries with which every run leaves them as they came, those of the
    constants, and the walk that found them.

    A carry that starts as zeros may be a Partial sum throughout: what a loop adds up is reduced
    once, after it. Gradients that are added to such a carry, or returned as rows, are not reduced
    in a run; which results hold them comes last, and where those go after the loop.
    """
    zeros = [v.fill is not None and v.fill[1] == 0 for v in init]
    later = deferred.deferrable(graph, len(consts), zeros)
    around = dict(zip(graph.find_nodes(op="placeholder"), consts, strict=False))
    while True:
        carries, found, inner = _fixed(
            walk, node, graph, consts, init, rows, values, later
        )
        after, n = deferred.placements(inner.walk, later, around), len(carries)
        terms = [
            (k, natural(inner.walk.values[g], walk.axes)) for g, k in later.items()
        ]
        wrong = {
            k
            for k, m in terms
            if k < n and not deferred.stays_partial(m, carries[k])
        }
        wrong |= {
            k
            for k, m in terms
            if k >= n and not deferred.stays_replicated(m, after[k])
        }
        if not wrong:
            partial = {k for k, m in terms if any(mark in PENDING for mark in m)}
            whole = {
                k: m if k < n else _stacked(m)
                for k, m in after.items()
                if k in partial
            }
            return carries, found, inner, whole
        later = {g: k for g, k in later.items() if k not in wrong}


def _fixed(
    walk: Any,
    node: torch.fx.Node,
    graph: torch.fx.Graph,
    consts: list[Marks],
    init: Sequence[Any],
    rows: list[Marks],
    values: list[Any],
    later: Collection[torch.fx.Node],
) -> tuple[list[Marks], list[Marks], Inside]:
    """The fixed point of the placements of carries and constants."""
    carries = [_first_try(v, walk) for v in init]
    inner = Inside(walk, graph, [*consts, *carries, *rows], values, later)
    for _ in range(ROUNDS):
        results = inner.results()[: len(carries)]
        left = [natural(r, walk.axes) for r in results]
        _refuse_changed(walk, node, graph, init, carries, left, len(consts))
        moved = [
            _entering(v, c, after)
            for v, c, after in zip(init, carries, left, strict=True)
        ]
        gathered = [
            inner.only_moved_to(k) or marks for k, marks in enumerate(consts)
        ]
        if (moved, gathered) == (carries, consts):
            break
        carries, consts = moved, gathered
        inner = Inside(walk, graph, [*consts, *carries, *rows], values, later)
    return carries, consts, inner


def _first_try(init: Any, walk: Any) -> Marks:
    """How a carry enters at first: zeros as a pending sum, which a run that does more than add
    to it reduces.
    """
    if init.fill is not None and init.fill[1] == 0:
        return tuple(
            "R" if name in init.varies else "sum" for name in walk.axes.names
        )
    return _plain(natural(init, walk.axes))


def _entering(init: Any, marks: Marks, left: Marks) -> Marks:
    """How a carry is to enter, given how a run leaves it: as that, where it can be had before
    the first run.
    """
    zeros = init.fill is not None and init.fill[1] == 0
    wanted = [
        m if m not in PENDING or (zeros and m == "sum") else old
        for m, old in zip(left, marks, strict=True)
    ]
    pending = {m for m in wanted if m in PENDING}
    return marks if len(pending) > 1 else _plain(tuple(wanted))


def _refuse_changed(
    walk: Any,
    node: torch.fx.Node,
    graph: torch.fx.Graph,
    init: Sequence[Any],
    carries: list[Marks],
    left: list[Marks],
    first: int,
) -> None:
    """Refuse a carry that the function constrains to another placement than it was given."""
    (output,) = graph.find_nodes(op="output")
    starts = node.args[first : first + len(carries)]
    rows = zip(output.args[0], starts, init, carries, left, strict=False)
    for k, (result, start, value, marks, after) in enumerate(rows):
        asked = (
            getattr(result.target, "_opname", "") == CONSTRAIN
            and value.fill is None
        )
        committed = (
            start.op == "placeholder"
            or getattr(start.target, "_opname", "") == CONSTRAIN
        )
        if (
            asked
            and committed
            and marks != after
            and natural(value, walk.axes) == marks
        ):
            before, then = describe(marks, walk.axes), describe(after, walk.axes)
            source = result.meta.get("source")
            fix = (
                "constrain what enters the loop to the placement with which the function "
                "leaves it, or drop the constraint inside"
            )
            got = f"carry {k} enters placed {before} and leaves placed {then}"
            text = problem(
                f"{walk.name}, {node.target}",
                got,
                needed="one placement for every run",
                fix=fix,
                source=source,
            )
            raise PlacementError(text, placements=after, source=source, fix=fix)


def natural(value: Any, axes: Any) -> Marks:
    """A value's placement as it fell, pending sums included."""
    if value.fill is not None and not value.slots:
        return ("R",) * len(axes.sizes)
    return tuple(
        layout.without_halo(m) if isinstance(m, tuple) else m
        for m in next(iter(value.slots))
    )


def _plain(marks: Marks) -> Marks:
    """In plain chunks: what enters a loop again and again is not cut in units."""
    return tuple(layout.split(m)[0] if isinstance(m, tuple) else m for m in marks)


def _whole(walk: Any) -> Marks:
    return ("R",) * len(walk.axes.sizes)


def _shifted(mark: Mark, by: int) -> Mark:
    cut = layout.split(mark)
    return mark if cut is None else layout.joined(cut[0] + by, cut[1])


def _stacked(marks: Marks) -> Marks:
    """The placement of rows, stacked, of which each is placed so."""
    return tuple(_shifted(m, 1) for m in marks)


def _without_rows(
    marks: Marks, shape: Sequence[int], sizes: Sequence[int]
) -> Marks:
    """The placement of one row: no axis may cut the rows from each other."""
    marks = tuple(
        "R" if layout.split(m) and layout.cut_of(m)[0] == 0 else m for m in marks
    )
    whole = layout.canonical(shape, marks, sizes)
    return tuple(_shifted(m, -1) for m in whole or ("R",) * len(marks))


def _reduced_to(marks: Marks, result: Any, inner: Any, first: int) -> Marks:
    """Where a row of results stays: a pending sum of a row that is cut, as a gradient of fully
    sharded layers is, is cut alike.
    """
    shape = tuple(result.fake.shape)
    alike = [s.marks for s in inner.ins[first:] if tuple(s.value.shape) == shape]
    for row in alike:
        found = tuple(
            r if m in PENDING and not isinstance(r, str) else m
            for m, r in zip(marks, row, strict=True)
        )
        if found != marks and inner.walk.reaches(result, found):
            return found
    return marks


def _agreed(walk: Any, yes: Any, no: Any) -> Marks:
    """One placement for a result of two branches: a sum that is pending in both stays so, and
    is reduced once, behind them.
    """
    first, second = _leaving(yes, walk.axes), _leaving(no, walk.axes)
    if yes.fill is not None or no.fill is not None:
        constant, other, marks = (
            (yes, no, second) if yes.fill is not None else (no, yes, first)
        )
        fits = other.fill is None and all(
            rules.fill_fits(constant.fill[1], m) for m in marks
        )
        return _plain(marks) if fits else _settled(marks)
    if first == second:
        return first
    if _plain(first) == _plain(second):
        return _plain(first)
    return _settled(
        tuple(a if a == b else "R" for a, b in zip(first, second, strict=True))
    )


def _leaving(value: Any, axes: Any) -> Marks:
    """A result of a branch as it fell; reduced, where the branch has it reduced as well."""
    reduced = (
        s.marks
        for s in value.readable("backward")
        if not any(m in PENDING for m in s.marks)
    )
    marks = natural(value, axes)
    if value.fill is None and any(m in PENDING for m in marks):
        marks = next(
            (
                tuple(
                    layout.without_halo(m) if isinstance(m, tuple) else m for m in r
                )
                for r in reduced
            ),
            marks,
        )
    return marks


def _settled(marks: Marks) -> Marks:
    return tuple("R" if m in PENDING else m for m in _plain(marks))


def evolved(loop: Loop, graphs: Sequence[torch.fx.Graph], coordinates: int) -> Loop:
    """The loop with the graphs of one rank, which take the rank's coordinates first."""
    return attrs.evolve(
        loop, graphs=tuple(graphs), consts=loop.consts + coordinates
    )
