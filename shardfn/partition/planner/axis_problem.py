"""The choice of placements on one mesh axis as an integer program.

Known are the placements on the axes before this one. Of a program with arguments g, ops o, results
k and values v:

    minimise    sum_{o,s} cost(o, s) x(o, s)  +  sum_{v,a,b,f} price(v, a, b) m(v, a, b, f)

    x(o, s)        0 or 1: op o takes strategy s, which says where it reads and makes values
    d(g, a)        0 or 1: argument g enters at placement a
    r(k, a)        0 or 1: result k leaves at placement a
    m(v, a, b, f)  0 or 1: value v is moved from placement a to b, for its readers of phase f
    w(v, a, b, q)  0 or more: reader q finds v at b, which was made at a

cost(o, s) is the time in which the busiest rank computes the op (`op_cost`) and sends what travels
inside of it (`Prices.inside`), and price(v, a, b)
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
from ...types import PARTIAL_KINDS, AxisPlacement, MeshAxes, MeshPlacements
from .. import layout
from ..auto.free_arguments import FreeArguments
from ..auto.memory_peaks import MemoryPeaks
from ..propagation.redistribution_prices import Prices
from ..propagation.values import Placed
from . import op_cost
from .equal_ops import kinds_of
from .integer_program import IntegerProgram
from .observed_walk import Key, ObservedWalk
from .op_strategies import fitting, on_axis, share
from .share import share_of
from .start_costs import with_start_costs
from .value_moves import OneOf, Supplies, Supply

# Ways of values between two placements. With more of them a solver takes minutes, so strided shards
# are left out: views of windows of an image have dozens.
MOST_WAYS = 150_000
INFINITE = float("inf")

# The placements that a value may have, each with its variable; None for the only one.
Domain = Mapping[MeshPlacements, int | None]


@attrs.frozen
class Decided:
    """The placements chosen so far: of ops, of free arguments, of results by position."""

    ops: Mapping[Node, Placed]
    inputs: Mapping[Node, MeshPlacements]
    results: Mapping[int, MeshPlacements]


@attrs.frozen(eq=False)
class Free:
    """The arguments and the memory limit that are decided together with the ops.

    Args:
        arguments: those without a placement.
        moments: at which memory is limited.
        limit: bytes of a rank. None: the least possible is looked for.
    """

    arguments: FreeArguments
    moments: MemoryPeaks
    limit: float | None


class Strategy(NamedTuple):
    """One strategy of an op, and the 0-1 variable that takes it."""

    variable: int
    placed: Placed  # on the axes up to this one


class Alive(NamedTuple):
    """Bytes that are alive between two node positions, always or if a variable is 1."""

    variable: int | None
    nbytes: float
    first: int
    last: int


def undecided(observed: ObservedWalk) -> Decided:
    """Return the ops of an observed walk that have a choice, with no axis decided."""
    ops = {}
    for node, chosen in observed.chosen.items():
        call = chosen.call
        if call.outs:
            ops[node] = Placed([()] * len(call.ins), [()] * len(call.outs))
    return Decided(ops, {}, {})


class AxisProblem:
    """The integer program that chooses all placements on one mesh axis.

    Args:
        observed: the walk that chose one op at a time.
        axis: the mesh axis.
        before: what is decided on earlier axes. Other ops stay as they were.
        free: arguments and memory, where these are not given.
        in_bytes: the time of an op on one device, in bytes that a rank sends meanwhile.
    """

    def __init__(
        self,
        observed: ObservedWalk,
        axis: int,
        before: Decided,
        free: Free | None = None,
        in_bytes: Callable[[Node], float] = op_cost.in_bytes,
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
        """Add variables and constraints for all nodes; moves and memory follow later."""
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
        """Solve the program. Returns the placements up to this axis; None if it is too large or
        time is up.
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
        """Add one node: an argument, a gradient, an op with a choice, or an op whose placements
        are fixed.
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
            for key, placements in self.observed.needs(node):
                self.read(key, _phase(node), {placements: None})
            for key, value in self.observed.results(node):
                if value.slots:
                    placements = next(iter(value.slots))
                    self.add_value(key, value.fake, placements, {self.upto_axis(placements): None})

    def argument_domain(self, node: Node, usual: MeshPlacements) -> Domain:
        """Return the placements that an argument may have, each with its variable."""
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
        self, node: Node, gradient: Key, key: Key, fake: torch.Tensor, placements: MeshPlacements
    ) -> None:
        """Add the step that places a gradient like its parameter: it reads and makes it there.

        Args:
            node: that places it.
            gradient: as it is made.
            key: as it is placed.
            fake: its value.
            placements: where the walk placed it.
        """
        domain = self.gradient_domain(node, fake, placements)
        self.read(gradient, _phase(node), _read_at(domain))
        self.add_value(key, fake, placements, domain)

    def gradient_domain(self, node: Node, fake: torch.Tensor, placements: MeshPlacements) -> Domain:
        """Return the placements of a gradient: those of its parameter, if these are free and
        shapes agree.
        """
        known = self.walk.unplaced.get(node)
        parameter = known.like if known is not None else args_of(node)[1]
        domain = self.arguments.get(parameter, {})
        has_same_shape = parameter.meta["val"].shape == fake.shape
        return domain if _is_free(domain) and has_same_shape else {self.upto_axis(placements): None}

    def fitting(self, node: Node) -> list[Placed]:
        """List the placements that an op may take on this axis."""
        chosen = self.observed.chosen[node]
        supplies = map(self.supplies.found.get, self.observed.inputs(node))
        held = [
            {placements[-1] for placements in supply.made} if supply else set()
            for supply in supplies
        ]
        found = fitting(self.walk, node, chosen, self.before.ops[node], held)
        if not self.is_narrow:
            return found
        usual = on_axis(chosen.placed, self.axis)
        known = {placement for placements in usual for placement in placements}
        return [x for x in found if known.issuperset(_strided(x, self.axis))]

    def add_op(self, node: Node, found: list[Placed]) -> None:
        """Add an op: one variable for each of its strategies, with its costs, reads and results."""
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
        for key, fake, placements in self.observed.aligned(node):
            self.add_gradient(node, results[0][0], key, fake, placements)

    def one_of(self, kind: Hashable, count: int) -> list[int]:
        """Return variables of which exactly one is 1; equal ops and arguments share them."""
        if kind not in self.shared:
            variables = [self.program.variable(0.0) for _ in range(count)]
            self.program.one_of(variables)
            self.shared[kind] = variables
        return self.shared[kind]

    def placed_before(self, node: Node) -> Hashable:
        """Return the placements of a node on earlier axes, which tell otherwise equal nodes
        apart.
        """
        if node in self.before.ops:
            return _hashable(self.before.ops[node])
        if node.op == "placeholder" and self.free and self.free.arguments.leader(node) is not None:
            return self.before.inputs.get(node, ())
        results = self.observed.results(node)
        return tuple(next(iter(value.slots), None) for _, value in results)

    def add_costs(self, node: Node, strategies: list[Strategy]) -> None:
        """Price each strategy by the compute of its busiest rank; the first walk's choice wins
        ties.
        """
        usual = on_axis(self.observed.chosen[node].placed, self.axis)
        alone = self.op_cost(node)
        prices = Prices(with_start_costs(self.axes, is_ahead=False), early=1.0)
        times = self.observed.flat.computed(node)
        call = self.observed.chosen[node].call
        for variable, placed in strategies:
            price = alone * share(self.walk, call, placed, self.axis)
            price += times * prices.inside(call, placed.ins, self.axis)
            differs = on_axis(placed, self.axis) != usual
            self.program.costs[variable] += price + (1.0 if differs else 0.0)

    def op_cost(self, node: Node) -> float:
        """Return the compute time of an op on one rank, given how the other axes shard it."""
        call, _, usual = self.observed.chosen[node]
        cost = self.in_bytes(node) * self.observed.flat.computed(node)
        for axis in range(len(self.axes.sizes)):
            if axis != self.axis:
                placed = self.before.ops[node] if axis < self.axis else usual
                cost *= share(self.walk, call, placed, axis)
        return cost

    def add_reads(self, node: Node, strategies: list[Strategy]) -> None:
        """Require each input of an op at the placement that its strategy reads."""
        keys = self.observed.inputs(node)
        for position, key in enumerate(keys):
            readers = _by_placement((s.placed.ins[position], s.variable) for s in strategies)
            self.read(
                key, _phase(node), {placements: tuple(v) for placements, v in readers.items()}
            )
        if len(keys) == 1:
            self.move_after(node, keys[0], strategies)

    def move_after(self, node: Node, key: Key, strategies: list[Strategy]) -> None:
        """In a large program, let the only reader of a value move its smaller result instead of
        the value.
        """
        supply = self.supplies.found.get(key)
        source, _ = key
        is_read_once = len(source.users) == 1
        if supply is None or not is_read_once or not self.observed.is_large:
            return
        if op_cost.nbytes(node.meta["val"]) <= op_cost.nbytes(source.meta["val"]):
            passes = {placed.ins[0] for _, placed in strategies}
            supply.passes = {placements for placements in passes if placements[-1] != "R"}

    # Values, and who reads them

    def supply(self, key: Key, fake: torch.Tensor, usual: MeshPlacements) -> Supply:
        """Add a value: where it may be made, and what moving it costs."""
        axes = with_start_costs(self.axes, is_ahead=key in self.observed.ahead)
        end = self.axis + 1
        upto = MeshAxes(axes.names[:end], axes.sizes[:end], axes.costs[:end])
        of_others = 1.0
        for placement, n in zip(usual[end:], axes.sizes[end:], strict=False):
            if not isinstance(placement, str):
                of_others /= n
        times = self.observed.flat.made(key[0])
        supply = Supply(fake, upto, of_others, later=axes.sizes[end:], times=times)
        self.supplies.found[key] = supply
        return supply

    def add_value(
        self, key: Key, fake: torch.Tensor, usual: MeshPlacements, domain: Domain
    ) -> None:
        """Add a value that is made at one placement of a domain."""
        made = {placements: None if v is None else [v] for placements, v in domain.items()}
        self.supply(key, fake, usual).made.update(made)

    def read(self, key: Key, phase: str, groups: Mapping[MeshPlacements, OneOf]) -> None:
        """Add a reader of a value; a constant needs none.

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
        upto = {self.upto_axis(placements): group for placements, group in groups.items()}
        supply.reads.append((when, upto))
        for placements in upto:
            place = (placements, when)
            first, _ = supply.spans.setdefault(place, (self.position, self.position))
            supply.spans[place] = first, self.position

    def upto_axis(self, placements: MeshPlacements) -> MeshPlacements:
        """Cut placements to the axes up to this one."""
        return placements[: self.axis + 1]

    # Results and carries

    def read_results(self) -> None:
        """Require each result of the program at a placement that it may have."""
        for position, (key, placements) in enumerate(self.observed.leaving):
            domain = self.result_domain(position, key, placements)
            if domain:
                self.read(key, "backward", _read_at(domain))

    def result_domain(self, position: int, key: Key, placements: MeshPlacements) -> Domain:
        """Return the placements that a result may have, each with its variable."""
        unknowns = self.free and self.free.arguments
        if unknowns is None or unknowns.leaving[position] is not None:
            return {placements: None}
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
            if isinstance(made[-1], (str, int))
            and made[-1] not in PARTIAL_KINDS
            and made[:-1] == before
        )
        variables = self.one_of(("result", position), len(places))
        self.results[position] = dict(zip(places, variables, strict=True))
        return self.results[position]

    def place_carries_alike(self) -> None:
        """Require that carries of one shape have equal placements at both ends of a loop."""
        first_of: dict[tuple[int, ...], dict[MeshPlacements, list[int]]] = {}
        for node in self.observed.flat.edges:
            strategies = self.strategies.get(node, ())
            made = _by_placement((s.placed.outs[0], s.variable) for s in strategies)
            if not made:
                continue
            first = first_of.setdefault(tuple(node.meta["val"].shape), made)
            for placements in dict.fromkeys((*first, *made)):
                self.program.at_most(made.get(placements, ()), first.get(placements, ()), 0.0)
                self.program.at_most(first.get(placements, ()), made.get(placements, ()), 0.0)

    # Memory

    def limit_memory(self, moments: MemoryPeaks, limit: float | None) -> None:
        """Limit the bytes alive at each chosen position, or minimise them."""
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
        """Return the bytes of all arguments."""
        return float(max(sum(op_cost.nbytes(node.meta["val"]) for node in self.arguments), 1))

    def alive_values(self, moments: MemoryPeaks) -> Iterator[Alive]:
        """Yield the memory of values where they are made."""
        for (node, _), supply in self.supplies.found.items():
            if not moments.is_owner(node):
                continue
            span = moments.span(node)
            for placements, variables in supply.made.items():
                nbytes = self.local_bytes(supply, placements)
                for variable in variables or (None,):
                    yield Alive(variable, nbytes, *span)

    def alive_moves(self) -> Iterator[Alive]:
        """Yield the memory of moved values, from their first reader to their last."""
        for move in self.supplies.moved:
            nbytes = self.local_bytes(move.supplies[0], move.target)
            for supply in move.supplies:
                for span in supply.spans_at(move.target, move.phase):
                    yield Alive(move.variable, nbytes, *span)

    def local_bytes(self, supply: Supply, placements: MeshPlacements) -> float:
        """Return the bytes of a value on one rank."""
        nbytes = float(op_cost.nbytes(supply.fake))
        for axis in range(len(placements)):
            nbytes *= share_of([(supply.fake, placements)], self.axes.sizes, axis)
        return nbytes


def _options(domain: Domain) -> Iterator[tuple[int | None, MeshPlacements]]:
    """Yield each placement of a domain after its variable."""
    for placements, variable in domain.items():
        yield variable, placements


def _is_free(domain: Domain) -> bool:
    """Return whether a domain has more than a fixed placement."""
    return any(variable is not None for variable in domain.values())


def _read_at(domain: Domain) -> dict[MeshPlacements, OneOf]:
    """Describe a reader that takes any placement of a domain."""
    return {placements: None if v is None else (v,) for placements, v in domain.items()}


def _by_placement(pairs: Iterable[tuple[MeshPlacements, int]]) -> dict[MeshPlacements, list[int]]:
    """Group variables by placement."""
    found: dict[MeshPlacements, list[int]] = defaultdict(list)
    for placements, variable in pairs:
        found[placements].append(variable)
    return found


def _strided(placed: Placed, axis: int) -> Iterator[AxisPlacement]:
    """Yield the strided shards among an op's placements on one axis."""
    for placements in on_axis(placed, axis):
        yield from (placement for placement in placements if layout.block_count(placement) > 1)


def _hashable(placed: Placed) -> Hashable:
    """Return the placements of an op as a hashable key."""
    return tuple(placed.ins), tuple(placed.outs)


def _phase(node: Node) -> str:
    """Return the phase of a node: forward or backward."""
    return node.meta.get("phase", "forward")
