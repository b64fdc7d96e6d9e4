"""The choice of placements on one mesh axis as an integer program.

Known are the placements on the axes before this one. Of a program with arguments g, ops o, results
k and values v:

    minimise    sum_{o,s} cost(o, s) x(o, s)  +  sum_{v,a,b,f} price(v, a, b) m(v, a, b, f)

    x(o, s)        0 or 1: op o takes strategy s, which says where it reads and makes values
    d(g, a)        0 or 1: argument g enters at placement a
    r(k, a)        0 or 1: result k leaves at placement a
    m(v, a, b, f)  0 or 1: value v is moved from placement a to b, for its readers of phase f
    w(v, a, b, q)  0 or more: reader q finds v at b, which was made at a

cost(o, s) is the time in which the busiest rank computes the op (`op_cost`), and price(v, a, b)
that of the cheapest collectives (`Supply.price`), both in bytes that a rank could send in that
time. A value is made at a by those x or d that say so: made(v, a) is their sum, or 1 if a is the
only placement that there is. What is fixed has a domain of one, and needs no variable.

    (1) sum_s x(o, s) = 1, sum_a d(g, a) = 1, sum_a r(k, a) = 1
            each op has one strategy, each argument and each free result one placement:
            `add_op`, `argument_domain`, `result_domain`
    (2) sum_a w(v, a, b, q) >= sum of the x, d or r by which q reads v at b
            a reader finds each value where it needs it: `Supplies.satisfy`
    (3) w(v, a, b, q) <= sum of the m(v, a, b, f), the f of q, for b other than a
            what is found elsewhere than it was made was moved: `Supplies.satisfy`
    (4) sum_b w(v, a, b, q) <= made(v, a)
            it was made where the way starts: `Supplies.satisfy`
    (5) m(v, a, b, f) <= m(v, a, R, f) for a slice b of the gathered value
            only what was gathered can be sliced: `Supplies.sliced`
    (6) sum of the x(o, s) that make a  =  sum of the x(p, s) that make a
            the ops o and p at the ends of loops place carries of one shape alike:
            `place_carries_alike`
    (7) sum of bytes(v, a) made(v, a) + bytes(v, b) m(v, a, b, f) over all alive at t  <=  limit
            the memory of a rank at each moment t: `limit_memory`. Without a limit of bytes, the
            least limit is the objective.

Not rows, but variables that two share: ops that look alike take one strategy (`strategies_of`), an
argument that follows a parameter and the gradient of that parameter have its d (`argument_domain`,
`gradient_domain`), values that are made and read alike have one m (`Supplies.connect`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import NamedTuple

import attrs
import torch
from torch.fx import Node

from ...ops.nodes import args_of
from ...ops.placement import ALIGN
from ...types import PENDING, Mark, Marks, MeshAxes
from .. import layout
from ..auto.moments import Moments
from ..auto.unknowns import Unknowns
from ..propagation.values import Placed
from . import work
from .equal_ops import kinds_of
from .integer_program import IntegerProgram
from .observed import Key, Observed
from .share import share_of
from .starts import timed
from .strategies import fitting, on_axis, share
from .supplies import OneOf, Supplies, Supply

# Ways of values between two placements. With more of them a solver takes minutes, so strided shards
# are left out: views of windows of an image have dozens.
MOST_WAYS = 150_000
INFINITE = float("inf")

# The placements that a value may have, each with its variable; None for the only one.
Domain = Mapping[Marks, int | None]


@attrs.frozen
class Decided:
    """The placements on the first axes: of ops, of free arguments, and of results by position."""

    ops: Mapping[Node, Placed]
    inputs: Mapping[Node, Marks]
    results: Mapping[int, Marks]


@attrs.frozen(eq=False)
class Free:
    """What is decided together with the ops.

    Args:
        arguments: those without a placement.
        moments: at which memory is limited.
        limit: bytes of a rank. None: the least possible is looked for.
    """

    arguments: Unknowns
    moments: Moments
    limit: float | None


class Strategy(NamedTuple):
    """One strategy of an op, and the variable that says whether it is taken."""

    variable: int
    placed: Placed  # on the axes up to this one


class Alive(NamedTuple):
    """Bytes that a rank has from one node to another if a variable is 1, or always."""

    variable: int | None
    nbytes: float
    first: int
    last: int


def undecided(observed: Observed) -> Decided:
    """What a plan is to place, on no axis yet."""
    ops = {}
    for node, chosen in observed.chosen.items():
        call = chosen.call
        if call.outs:
            ops[node] = Placed([()] * len(call.ins), [()] * len(call.outs))
    return Decided(ops, {}, {})


class AxisProblem:
    """The integer program of one axis.

    Args:
        observed: the walk that chose one op at a time.
        axis: the mesh axis.
        before: what is decided on earlier axes. Other ops stay as they were.
        free: arguments and memory, where these are not given.
        in_bytes: the time of an op on one device, in bytes that a rank sends meanwhile.
    """

    def __init__(
        self,
        observed: Observed,
        axis: int,
        before: Decided,
        free: Free | None = None,
        in_bytes: Callable[[Node], float] = work.in_bytes,
    ) -> None:
        self.observed, self.axis, self.before = observed, axis, before
        self.free, self.in_bytes = free, in_bytes
        self.walk, self.axes = observed.walk, observed.walk.axes
        self.kinds = kinds_of(observed, self.placed_before)
        self.is_narrow = False  # without strided shards that the walk did not choose
        self.state()
        if self.is_too_large:
            self.is_narrow = True
            self.state()
        if not self.is_too_large:
            self.supplies.connect()
            if free is not None:
                self.limit_memory(free.moments, free.limit)

    def state(self) -> None:
        """State the problem, but for the moves of values and memory."""
        self.program = IntegerProgram()
        self.supplies = Supplies(self.program)
        self.strategies: dict[Node, list[Strategy]] = {}
        # the variables of ops and of arguments that are alike
        self.shared: dict[Hashable, list[int]] = {}
        self.arguments: dict[Node, Domain] = {}
        self.results: dict[int, Domain] = {}
        self.position = 0  # of the node that is added
        for position, node in enumerate(self.observed.nodes):
            self.position = position
            self.add(node)
        self.position = len(self.observed.nodes)
        self.read_results()
        self.place_carries_alike()
        self.is_too_large = self.supplies.ways() > MOST_WAYS

    def solve(self) -> Decided | None:
        """The placements on the axes up to this one. None if none are found in time, or if the
        program is too large.
        """
        values = None if self.is_too_large else self.program.solve()
        if values is None:
            return None
        taken = lambda options: (x for v, x in options if v is None or values[v])
        ops = {node: x for node, options in self.strategies.items() for x in taken(options)}
        return Decided(
            ops,
            {node: x for node, d in self.arguments.items() for x in taken(_options(d))},
            {k: x for k, d in self.results.items() for x in taken(_options(d))},
        )

    # The nodes of the program

    def add(self, node: Node) -> None:
        """Add a node: an argument, a gradient, an op whose strategy is free, or another one,
        whose placements stay as they were.
        """
        found = self.fitting(node) if node in self.before.ops else []
        if node.op == "placeholder":
            for key, value in self.observed.results(node):
                usual = next(iter(value.slots))
                self.arguments[node] = domain = self.argument_domain(node, usual)
                self.add_value(key, value.fake, usual, domain)
        elif node.target is ALIGN:
            gradient = self.observed.key(args_of(node)[0])
            for key, value in self.observed.results(node):
                self.add_gradient(node, gradient, key, value.fake, next(iter(value.slots)))
        elif found:
            self.add_op(node, found)
        else:
            for key, marks in self.observed.needs(node):
                self.read(key, _phase(node), {marks: None})
            for key, value in self.observed.results(node):
                if value.slots:
                    marks = next(iter(value.slots))
                    self.add_value(key, value.fake, marks, {self.upto_axis(marks): None})

    def argument_domain(self, node: Node, usual: Marks) -> Domain:
        """The placements that an argument may have; of one that is given, that of the walk.
        Arguments that are alike share their variables.
        """
        unknowns = self.free and self.free.arguments
        leader = unknowns and unknowns.leader(node)
        if unknowns is None or leader is None or node.op != "placeholder":
            return {self.upto_axis(usual): None}
        fixed = unknowns.fixed(leader)
        if fixed is not None:
            return {self.upto_axis(fixed): None}
        before = self.before.inputs.get(node, ())
        candidates = unknowns.candidates(leader, before)
        variables = self.one_of(("argument", self.kinds[leader], before), len(candidates))
        return dict(zip(candidates, variables, strict=True))

    def add_gradient(
        self, node: Node, gradient: Key, key: Key, fake: torch.Tensor, marks: Marks
    ) -> None:
        """A gradient is read at the placement of its parameter, and made at it.

        Args:
            node: that places it.
            gradient: as it is made.
            key: as it is placed.
            fake: its value.
            marks: where the walk placed it.
        """
        domain = self.gradient_domain(node, fake, marks)
        self.read(gradient, _phase(node), _read_at(domain))
        self.add_value(key, fake, marks, domain)

    def gradient_domain(self, node: Node, fake: torch.Tensor, marks: Marks) -> Domain:
        """The placements of a gradient: those of its parameter, if these are free and it has the
        same shape.
        """
        known = self.walk.unaligned.get(node)
        parameter = known.like if known is not None else args_of(node)[1]
        domain = self.arguments.get(parameter, {})
        has_same_shape = parameter.meta["val"].shape == fake.shape
        return domain if _is_free(domain) and has_same_shape else {self.upto_axis(marks): None}

    def fitting(self, node: Node) -> list[Placed]:
        """The placements that an op may take."""
        chosen = self.observed.chosen[node]
        supplies = map(self.supplies.found.get, self.observed.inputs(node))
        held = [{marks[-1] for marks in supply.made} if supply else set() for supply in supplies]
        found = fitting(self.walk, node, chosen, self.before.ops[node], held)
        if not self.is_narrow:
            return found
        usual = on_axis(chosen.placed, self.axis)
        known = {mark for marks in usual for mark in marks}
        return [x for x in found if known.issuperset(_strided(x, self.axis))]

    def add_op(self, node: Node, found: list[Placed]) -> None:
        """Add an op that may be placed so."""
        kind = (self.kinds[node], tuple(map(_hashable, found)))
        strategies = list(map(Strategy, self.one_of(kind, len(found)), found))
        self.strategies[node] = strategies
        self.add_costs(node, strategies)
        self.add_reads(node, strategies)
        results = self.observed.results(node)
        for position, (key, value) in enumerate(results):
            made = _by_placement((s.placed.outs[position], s.variable) for s in strategies)
            usual = next(iter(value.slots), ())
            self.supply(key, value.fake, usual).made.update(made)
        for key, fake, marks in self.observed.aligned(node):
            self.add_gradient(node, results[0][0], key, fake, marks)

    def one_of(self, kind: Hashable, count: int) -> list[int]:
        """Variables of which one is 1. What is alike shares them."""
        if kind not in self.shared:
            variables = [self.program.variable(0.0) for _ in range(count)]
            self.program.one_of(variables)
            self.shared[kind] = variables
        return self.shared[kind]

    def placed_before(self, node: Node) -> Hashable:
        """The placements of a node on earlier axes, and all of them if they stay."""
        if node in self.before.ops:
            return _hashable(self.before.ops[node])
        if node.op == "placeholder" and self.free and self.free.arguments.leader(node) is not None:
            return self.before.inputs.get(node, ())
        results = self.observed.results(node)
        return tuple(next(iter(value.slots), None) for _, value in results)

    def add_costs(self, node: Node, strategies: list[Strategy]) -> None:
        """Each strategy costs what the busiest rank computes, and 1 if the walk chose another:
        among equals the choice of the walk is taken.
        """
        usual = on_axis(self.observed.chosen[node].placed, self.axis)
        alone = self.op_cost(node)
        call = self.observed.chosen[node].call
        for variable, placed in strategies:
            price = alone * share(self.walk, call, placed, self.axis)
            differs = on_axis(placed, self.axis) != usual
            self.program.costs[variable] += price + (1.0 if differs else 0.0)

    def op_cost(self, node: Node) -> float:
        """The time of an op, as often as it runs, on a rank that has its share by the other
        axes.
        """
        call, _, usual = self.observed.chosen[node]
        cost = self.in_bytes(node) * self.observed.flat.computed(node)
        for axis in range(len(self.axes.sizes)):
            if axis != self.axis:
                placed = self.before.ops[node] if axis < self.axis else usual
                cost *= share(self.walk, call, placed, axis)
        return cost

    def add_reads(self, node: Node, strategies: list[Strategy]) -> None:
        """Each strategy reads each input at one placement."""
        keys = self.observed.inputs(node)
        for position, key in enumerate(keys):
            readers = _by_placement((s.placed.ins[position], s.variable) for s in strategies)
            self.read(key, _phase(node), {marks: tuple(v) for marks, v in readers.items()})
        if len(keys) == 1:
            self.move_after(node, keys[0], strategies)

    def move_after(self, node: Node, key: Key, strategies: list[Strategy]) -> None:
        """In a large program, move the result of an op in place of its input, where nothing else
        reads the input and the result is not larger.
        """
        supply = self.supplies.found.get(key)
        source, _ = key
        is_read_once = len(source.users) == 1
        if supply is None or not is_read_once or not self.observed.is_large:
            return
        if work.nbytes(node.meta["val"]) <= work.nbytes(source.meta["val"]):
            passes = {placed.ins[0] for _, placed in strategies}
            supply.passes = {marks for marks in passes if marks[-1] != "R"}

    # Values, and who reads them

    def supply(self, key: Key, fake: torch.Tensor, usual: Marks) -> Supply:
        """Add a value, which the walk had at these placements."""
        axes = timed(self.axes, is_ahead=key in self.observed.ahead)
        end = self.axis + 1
        upto = MeshAxes(axes.names[:end], axes.sizes[:end], axes.costs[:end])
        of_others = 1.0
        for mark, n in zip(usual[end:], axes.sizes[end:], strict=False):
            if not isinstance(mark, str):
                of_others /= n
        times = self.observed.flat.made(key[0])
        supply = Supply(fake, upto, of_others, later=axes.sizes[end:], times=times)
        self.supplies.found[key] = supply
        return supply

    def add_value(self, key: Key, fake: torch.Tensor, usual: Marks, domain: Domain) -> None:
        """Add a value that is made at one placement of a domain."""
        made = {marks: None if v is None else [v] for marks, v in domain.items()}
        self.supply(key, fake, usual).made.update(made)

    def read(self, key: Key, phase: str, groups: Mapping[Marks, OneOf]) -> None:
        """Add a reader of a value. A value that is made where it is read needs none.

        Args:
            key: the value.
            phase: of the reader.
            groups: the placements at which it may read, with the variables of each.
        """
        supply = self.supplies.found.get(key)
        if supply is None:
            return
        # each phase gathers a parameter for itself
        when = phase if self.observed.is_early(key) else ""
        upto = {self.upto_axis(marks): group for marks, group in groups.items()}
        supply.reads.append((when, upto))
        for marks in upto:
            place = (marks, when)
            first, _ = supply.spans.setdefault(place, (self.position, self.position))
            supply.spans[place] = first, self.position

    def upto_axis(self, marks: Marks) -> Marks:
        """The placements on the axes up to this one."""
        return marks[: self.axis + 1]

    # Results and carries

    def read_results(self) -> None:
        """The results leave where the walk had them, or where they may."""
        for position, (key, marks) in enumerate(self.observed.leaving):
            domain = self.result_domain(position, key, marks)
            if domain:
                self.read(key, "backward", _read_at(domain))

    def result_domain(self, position: int, key: Key, marks: Marks) -> Domain:
        """The placements at which a result may leave: those of the parameter that it follows, or
        where it is made, and replicated.
        """
        unknowns = self.free and self.free.arguments
        if unknowns is None or unknowns.leaving[position] is not None:
            return {marks: None}
        leader = unknowns.followers.leader(self.observed.returned[position])
        if leader is not None and unknowns.leader(leader) is not None:
            return self.arguments[leader]
        supply = self.supplies.found.get(key)
        if supply is None:
            return {}
        before = self.before.results.get(position, ())
        places = dict.fromkeys(
            made
            for made in [(*before, "R"), *supply.made]
            if isinstance(made[-1], (str, int)) and made[-1] not in PENDING and made[:-1] == before
        )
        variables = self.one_of(("result", position), len(places))
        self.results[position] = dict(zip(places, variables, strict=True))
        return self.results[position]

    def place_carries_alike(self) -> None:
        """A carry enters each step as it leaves the one before. Carries of one shape are placed
        alike.
        """
        first_of: dict[tuple[int, ...], dict[Marks, list[int]]] = {}
        for node in self.observed.flat.edges:
            strategies = self.strategies.get(node, ())
            made = _by_placement((s.placed.outs[0], s.variable) for s in strategies)
            if not made:
                continue
            first = first_of.setdefault(tuple(node.meta["val"].shape), made)
            for marks in dict.fromkeys((*first, *made)):
                self.program.at_most(made.get(marks, ()), first.get(marks, ()), 0.0)
                self.program.at_most(first.get(marks, ()), made.get(marks, ()), 0.0)

    # Memory

    def limit_memory(self, moments: Moments, limit: float | None) -> None:
        """At each moment, the bytes alive are at most the limit, or as few as possible."""
        least = None if limit is not None else self.program.minimise_size()
        unit = limit or self.bytes_of_arguments()
        if unit == INFINITE:
            return
        rows = [*self.alive_values(moments), *self.alive_moves()]
        for moment in moments.chosen:
            terms: dict[int, float] = defaultdict(float)
            room = 0.0 if limit is None else 1.0
            for variable, nbytes, first, last in rows:
                if not first <= moment <= last:
                    continue
                if variable is None:
                    room -= nbytes / unit
                else:
                    terms[variable] += nbytes / unit
            if least is not None:
                terms[least] = -1.0
            self.program.between(-INFINITE, terms.items(), room)

    def bytes_of_arguments(self) -> float:
        """The bytes of all arguments."""
        return float(max(sum(work.nbytes(node.meta["val"]) for node in self.arguments), 1))

    def alive_values(self, moments: Moments) -> Iterator[Alive]:
        """The memory of values where they are made."""
        for (node, _), supply in self.supplies.found.items():
            if not moments.is_owner(node):
                continue
            span = moments.span(node)
            for marks, variables in supply.made.items():
                nbytes = self.local_bytes(supply, marks)
                for variable in variables or (None,):
                    yield Alive(variable, nbytes, *span)

    def alive_moves(self) -> Iterator[Alive]:
        """The memory of values where they were moved to, between their readers there."""
        for move in self.supplies.moved:
            nbytes = self.local_bytes(move.supplies[0], move.target)
            for supply in move.supplies:
                for span in supply.spans_at(move.target, move.phase):
                    yield Alive(move.variable, nbytes, *span)

    def local_bytes(self, supply: Supply, marks: Marks) -> float:
        """The bytes of a value on one rank."""
        nbytes = float(work.nbytes(supply.fake))
        for axis in range(len(marks)):
            nbytes *= share_of([(supply.fake, marks)], self.axes.sizes, axis)
        return nbytes


def _options(domain: Domain) -> Iterator[tuple[int | None, Marks]]:
    """The variable of each placement of a domain."""
    for marks, variable in domain.items():
        yield variable, marks


def _is_free(domain: Domain) -> bool:
    """Whether there is a choice."""
    return any(variable is not None for variable in domain.values())


def _read_at(domain: Domain) -> dict[Marks, OneOf]:
    """A reader at any placement of a domain."""
    return {marks: None if v is None else (v,) for marks, v in domain.items()}


def _by_placement(pairs: Iterable[tuple[Marks, int]]) -> dict[Marks, list[int]]:
    """The variables of each placement."""
    found: dict[Marks, list[int]] = defaultdict(list)
    for marks, variable in pairs:
        found[marks].append(variable)
    return found


def _strided(placed: Placed, axis: int) -> Iterator[Mark]:
    """The strided shards of an op on one axis."""
    for marks in on_axis(placed, axis):
        yield from (mark for mark in marks if layout.outer_of(mark) > 1)


def _hashable(placed: Placed) -> Hashable:
    return tuple(placed.ins), tuple(placed.outs)


def _phase(node: Node) -> str:
    return node.meta.get("phase", "forward")
