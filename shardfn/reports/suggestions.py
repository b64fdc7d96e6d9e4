"""Placements of arguments and results with which a collective is not sent.

Each is found by planning the program with it, and then lowered: the collective is gone, and the
step sends less in no more time, or its arguments take less.
"""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
from torch.fx import Node

from ..byte_sizes import human_bytes
from ..collectives import ALL_GATHER, ALL_REDUCE
from ..durations import human_seconds
from ..hardware import Hardware
from ..inspect.arguments import Arguments, Changes, placed_on
from ..inspect.transfers import communicating_moves
from ..ops.nodes import args_of
from ..ops.placement import ALIGN
from ..partition import layout, plan
from ..partition.auto import fused_op_cost
from ..partition.planner import op_cost
from ..partition.planner.plan_price import PlanPrice, plan_price
from ..partition.planner.start_costs import parameter_slots, with_hardware_links, with_links
from ..partition.propagate import propagate, run_walk
from ..partition.propagation.values import NO_ADVICE
from ..partition.propagation.walk import Walk
from ..partition.redistribute import Move
from ..patterns import general
from ..placement import P, spec_of
from ..placement_table import argument_placements
from ..runtime.stages import Lowered, lowered_as
from ..source_text import shape_of_path
from .collectives import SentByLine, others_of
from .program import ops_of

ARGUMENTS = 4  # arguments near an op that are tried
SHOWN = 3  # changes in a text; the page lists all
ROWS = 12  # collectives for which placements are looked for
LOWERED = 2  # attempts for one of them that are lowered, the cheapest first
OPS = 10_000  # of all plans that are made; a large program is planned less often
LARGE = 150  # ops of a program whose other ops stay as they are: a plan of all takes long
ABOUT = 1.02  # of a price or a size, that counts as no more
COMPUTES = 1.1  # of what a rank computes: ops on each element of what is no longer sharded
LESS = 0.999  # of the bytes that are sent, that counts as fewer
SMALLER = 0.8  # of the arguments of a rank, that counts as a smaller share
LEFT = 0.1  # of the bytes of a line's collectives, that may still be sent
Key = tuple[Any, ...]  # kind, axis, line and module of moves


@attrs.frozen
class Change:
    """Another placement of an argument or a result.

    Args:
        path: of it.
        before: its placement now.
        after: the other one.
        nbytes: of the global value.
    """

    path: str
    before: P
    after: P
    nbytes: int

    def __str__(self) -> str:
        return f"{self.path} at {self.after} in place of {self.before}"


@attrs.frozen(eq=False)
class Suggestion:
    """Placements with which a collective is not sent.

    Args:
        arguments: the arguments that are placed otherwise.
        results: the results that are placed otherwise.
        in_placements: of all arguments, as `shard` takes them.
        held: the bytes of a rank's arguments, before and after.
        sent: the payload of a rank's collectives, as lowered before and after.
        seconds: of a step, as lowered before and after.
        peak: the bytes of a rank at its peak, before and after.
    """

    arguments: tuple[Change, ...]
    results: tuple[Change, ...]
    in_placements: tuple[Any, ...] | dict[str, Any] = attrs.field(repr=False)
    held: tuple[int, int]
    sent: tuple[int, int]
    seconds: tuple[float, float]
    peak: tuple[int, int]

    @property
    def is_worth(self) -> bool:
        """Whether a rank holds a smaller share of arguments, or sends less in no more time."""
        (took, takes), (sent, sends), (held, holds) = self.seconds, self.sent, self.held
        return holds < SMALLER * held or (sends < LESS * sent and takes <= ABOUT * took)

    @property
    def saves(self) -> str:
        """What a step saves with the placements, and what it takes for that, as text."""
        figures = [
            (self.seconds, human_seconds, "a step takes {}"),
            (self.sent, human_bytes, "a rank sends {}"),
            (self.held, human_bytes, "its arguments take {}"),
            (self.peak, human_bytes, "its peak is {}"),
        ]
        changes = {"less": list[str](), "more": list[str]()}
        for (before, after), human, text in figures:
            word = "less" if after < LESS * before else "more" if after > before / LESS else ""
            if word:
                changes[word].append(f"{text.format(human(abs(before - after)))} {word}")
        more = f", but {' and '.join(changes['more'])}" if changes["more"] else ""
        return " and ".join(changes["less"]) + more

    def __str__(self) -> str:
        texts = self.changes
        others = len(texts) - SHOWN
        return " and ".join([*texts[:SHOWN], *([others_of(others)] if others > 0 else [])])

    @property
    def changes(self) -> list[str]:
        """The changes as text, that of the largest values first. Those of equal layers are one."""
        rows = collections.defaultdict[str, list[Change]](list)
        for x in (*self.arguments, *self.results):
            rows[str(attrs.evolve(x, path=general(x.path)))].append(x)
        largest = sorted(rows.items(), key=lambda row: -sum(x.nbytes for x in row[1]))
        return [text if len(same) > 1 else str(same[0]) for text, same in largest]


@attrs.frozen(eq=False)
class Planned:
    """The program with some placements of its inputs and results.

    Args:
        plan: its plan.
        price: of the plan.
        sent: the bytes that a rank sends for the collectives of each line.
        held: the bytes of a rank's arguments.
    """

    plan: plan.Plan
    price: PlanPrice
    sent: dict[Key, int]
    held: int


@attrs.frozen
class Figures:
    """What a lowered step sends and takes.

    Args:
        sent: the payload of a rank's collectives.
        seconds: of a step.
        peak: the bytes of a rank at its peak.
    """

    sent: int
    seconds: float
    peak: int

    @classmethod
    def of(cls, lowered: Lowered, hardware: Hardware) -> Figures:
        """Return the figures of a step."""
        sent = sum(x.nbytes for x in lowered.explain().collectives)
        return cls(sent, lowered.time(hardware).total, lowered.memory.peak)


def key_of_row(row: SentByLine) -> Key:
    """Return what the collectives of one line, in equal modules, have in common."""
    return row.kind, row.axis, row.source, shape_of_path(row.first_module)


def key_of_move(chosen: plan.Plan, step: plan.Sending, move: Move) -> Key:
    """Return the same of a move of a plan."""
    meta = step.node.meta
    axis = chosen.axes.names[move.axis]
    return move.kind, axis, meta.get("source"), shape_of_path(meta.get("module"))


def suggestions(
    lowered: Lowered, sent: Sequence[SentByLine], hardware: Hardware
) -> dict[SentByLine, Suggestion]:
    """Look for placements that spare collectives.

    Args:
        lowered: the step.
        sent: the collectives by line, the most expensive first.
        hardware: whose links send.

    Returns:
        The suggestions that there are.
    """
    search = _Search.of(lowered, hardware)
    if search is None:
        return {}
    found = {}
    tries = max(2, OPS // (ops_of(lowered.traced.program.graph.graph) + 1))
    for row in sorted(sent, key=search.is_of_parameter)[:ROWS]:
        attempts = [*search.attempts(row)][:tries]
        tries -= len(attempts)
        if best := search.best(row, attempts):
            found[row] = best
    return found


@attrs.frozen(eq=False)
class _Search:
    """A search for placements under which a program sends less."""

    lowered: Lowered
    hardware: Hardware
    near: Arguments
    moves: dict[Key, list[tuple[plan.Sending, Move]]]
    is_large: bool

    @classmethod
    def of(cls, lowered: Lowered, hardware: Hardware) -> _Search | None:
        """Prepare the search; None for the stages of a pipeline, which are placed by the user."""
        chosen = lowered.partition
        graph = lowered.traced.program.graph.graph
        if chosen.stage_axis is not None or lowered.backward is not None:
            return None
        moves = collections.defaultdict[Key, list[tuple[plan.Sending, Move]]](list)
        for step, move in communicating_moves(chosen):
            moves[key_of_move(chosen, step, move)].append((step, move))
        near = Arguments(graph, chosen, len(lowered.traced.placed.tensors))
        return cls(lowered, hardware, near, dict(moves), ops_of(graph) > LARGE)

    @property
    def chosen(self) -> plan.Plan:
        """The plan of the step as it is."""
        return self.lowered.partition

    @functools.cached_property
    def now(self) -> Planned:
        """The step as it is."""
        return _planned(self.lowered, self.hardware, self.chosen)

    @functools.cached_property
    def figures(self) -> Figures:
        """The figures of the step as it is."""
        return Figures.of(self.lowered, self.hardware)

    def moves_of(self, row: SentByLine) -> list[tuple[plan.Sending, Move]]:
        """Return the moves of the plan that some collectives carry out. A bucket without a line
        carries gradients of several.
        """
        if row.source is not None or not row.buckets:
            return self.moves.get(key_of_row(row), [])
        return [
            (step, move)
            for (kind, axis, *_), moves in self.moves.items()
            for step, move in moves
            if (kind, axis) == (row.kind, row.axis) and step.node.target is ALIGN
        ]

    def is_of_parameter(self, row: SentByLine) -> bool:
        """Return whether collectives gather parameters, which is mostly meant."""
        return any(step.source.number in self.parameters for step, _ in self.moves_of(row))

    @functools.cached_property
    def parameters(self) -> set[int]:
        """The slots that hold parameters, by number."""
        return parameter_slots(self.chosen, self.lowered.traced.program.graph.graph)

    def attempts(self, row: SentByLine) -> Iterator[tuple[Changes, Changes]]:
        """Yield placements of arguments, and of results, that may spare collectives."""
        moves = self.moves_of(row)
        if not moves:
            return
        step, move = moves[0]
        if step.node.op == "output":
            yield from self.other_results(moves)
        elif step.node.target is ALIGN and move.kind in (ALL_REDUCE, ALL_GATHER):
            yield from self.sharded_parameters(moves)
        if not step.implicit:
            return
        seen = set()
        for i in dict.fromkeys(
            [*self.near.nearest(step.node, ARGUMENTS), *self.near.data(ARGUMENTS)]
        ):
            for changes in self.other_placements(i, move.axis):
                if (identity := tuple(changes.items())) not in seen:
                    seen.add(identity)
                    yield changes, {}

    def other_results(
        self, moves: Sequence[tuple[plan.Sending, Move]]
    ) -> Iterator[tuple[Changes, Changes]]:
        """Yield the results left at the placements that they have before they are sent."""
        before = {step.target.number: step.source.placements for step, _ in moves}
        outs = enumerate(self.chosen.outs)
        changes = {i: before[slot.number] for i, slot in outs if slot.number in before}
        if changes and not any(
            isinstance(m, str) and m != "R" for x in changes.values() for m in x
        ):
            yield {}, changes

    def sharded_parameters(
        self, moves: Sequence[tuple[plan.Sending, Move]]
    ) -> Iterator[tuple[Changes, Changes]]:
        """Yield the parameters of some gradients sharded over the axis of their reduction, with
        their state: on the first dim that divides, or on the last.
        """
        axis = moves[0][1].axis
        gradients = [step.node for step, _ in moves if step.node.target is ALIGN]
        numbers = [i for node in gradients for i in self.parameter_of(node)]
        for k in (0, -1):
            changes: Changes = {}
            for i in dict.fromkeys(numbers):
                options = [x for x in self.other_placements(i, axis) if x[i][axis] != "R"]
                changes |= options[k] if options else {}
            yield changes, {}

    def parameter_of(self, gradient: Node) -> list[int]:
        """Return the number of the argument whose gradient a node redistributes."""
        parameter = args_of(gradient)[1]
        return [i for i, x in enumerate(self.near.inputs) if x is parameter]

    def other_placements(self, i: int, axis: int) -> Iterator[Changes]:
        """Yield other placements of an argument over a mesh axis, and of those that follow it:
        other dims, another axis for its dim, replicated. Arguments of equal layers are placed so
        too, and then the one alone.
        """
        marks, sizes = self.chosen.ins[i].placements, self.chosen.axes.sizes
        options = [*self.near.on_dims(i, axis)]
        mark = marks[axis]
        if mark != "R":
            freed = placed_on(marks, axis, "R")
            free = [k for k, other in enumerate(marks) if other == "R" and sizes[k] > 1]
            others = [*(placed_on(freed, k, mark) for k in free), freed]
            options += [x for x in others if self.near.fits(i, x)]
        equal = self.equal_arguments(i)
        for other in options:
            for numbers in ([*equal, i], [i]) if equal else ([i],):
                placed = self.near.with_followers(dict.fromkeys(numbers, other))
                yield {k: x for k, x in placed.items() if k < self.near.count}

    def equal_arguments(self, i: int) -> list[int]:
        """Return the arguments of other layers that are what this one is in its layer."""
        paths, ins = self.lowered.traced.program.in_paths, self.chosen.ins
        kind = lambda k: (general(paths[k]), tuple(ins[k].value.shape), ins[k].placements)
        return [k for k in range(self.near.count) if k != i and kind(k) == kind(i)]

    def best(
        self, row: SentByLine, attempts: Sequence[tuple[Changes, Changes]]
    ) -> Suggestion | None:
        """Return the attempt that spares the collectives of a line and takes least, of the first
        few that are lowered; None if none does.
        """
        found: list[tuple[float, int, Planned, Changes, Changes]] = []
        keys = {key_of_move(self.chosen, step, move) for step, move in self.moves_of(row)}
        before = sum(self.now.sent.get(k, 0) for k in keys)
        if not before:
            return None
        for ins, outs in attempts:
            planned = self.planned(ins, outs)
            is_spared = sum(planned.sent.get(k, 0) for k in keys) <= LEFT * before
            if is_spared and self.may_be_better(planned):
                found.append((planned.price.total, planned.held, planned, ins, outs))
        cheapest = sorted(found, key=lambda row: row[:2])[:LOWERED]
        lowered = (self.suggestion(ins, outs, planned) for *_, planned, ins, outs in cheapest)
        return next((x for x in lowered if x is not None), None)

    def planned(self, ins: Changes, outs: Changes) -> Planned:
        """Plan the program with other placements."""
        traced = self.lowered.traced
        axes, before, results, unreduced = traced.placements()
        inputs: list[Any] = [ins.get(i, marks) for i, marks in enumerate(before)]
        outputs = [None if i in outs else marks for i, marks in enumerate(results)]
        if self.is_large:  # each op as it is placed now, where that is known
            walk = Walk(with_links(axes), traced.program.name, self.chosen.advice or NO_ADVICE)
            chosen = run_walk(walk, traced.program, inputs, outputs, unreduced)
        else:
            planner = traced.request.planner
            chosen = propagate(traced.program, axes, inputs, outputs, unreduced, planner)
        return _planned(self.lowered, self.hardware, chosen)

    def may_be_better(self, other: Planned) -> bool:
        """Return whether a step sends fewer bytes, or holds a smaller share of its arguments and
        sends no more; and computes and holds no more. What it takes is known when it is lowered.
        """
        now = self.now
        sends_less = other.price.nbytes < LESS * now.price.nbytes
        holds_less = other.held < SMALLER * now.held
        is_no_more = (
            other.price.computed <= COMPUTES * now.price.computed,
            other.price.nbytes <= ABOUT * now.price.nbytes,
            other.held <= ABOUT * now.held,
        )
        return all(is_no_more) and (sends_less or holds_less)

    def suggestion(self, ins: Changes, outs: Changes, planned: Planned) -> Suggestion | None:
        """Return the placements as the user writes them, with what the lowered step saves; None if
        they are not worth it.
        """
        traced, now = self.lowered.traced, self.figures
        placed, program = traced.placed, traced.program
        axes = self.chosen.axes
        text = lambda slot, marks: spec_of(marks, slot.value.dim(), axes)
        change = lambda path, slot, marks: Change(
            path, text(slot, slot.placements), text(slot, marks), op_cost.nbytes(slot.value)
        )
        rows = [(program.in_paths[i], self.chosen.ins[i], marks) for i, marks in ins.items()]
        results = [(program.out_paths[i], self.chosen.outs[i], marks) for i, marks in outs.items()]
        marks = tuple(ins.get(i, marks) for i, marks in enumerate(placed.marks))
        then = Figures.of(lowered_as(traced, planned.plan, marks), self.hardware)
        suggestion = Suggestion(
            tuple(change(*row) for row in rows),
            tuple(change(*row) for row in results),
            argument_placements(attrs.evolve(placed, marks=marks)).in_placements,
            (self.now.held, planned.held),
            (now.sent, then.sent),
            (now.seconds, then.seconds),
            (now.peak, then.peak),
        )
        return suggestion if suggestion.is_worth else None


def _planned(lowered: Lowered, hardware: Hardware, chosen: plan.Plan) -> Planned:
    """Return a plan with its price."""
    over = attrs.evolve(chosen, axes=with_hardware_links(chosen.axes, hardware))
    graph = lowered.traced.program.graph.graph
    price = plan_price(over, graph, fused_op_cost.in_bytes)
    sent: dict[Key, int] = collections.defaultdict(int)
    for step, move in communicating_moves(chosen):
        sent[key_of_move(chosen, step, move)] += op_cost.nbytes(step.source.value)
    here = lowered.traced.placed.coordinate
    held = 0
    for slot in chosen.ins:
        shape = layout.local_shape(slot.value.shape, slot.placements, chosen.axes.sizes, here)
        held += slot.value.element_size() * math.prod(shape)
    return Planned(chosen, price, dict(sent), held)
