"""One walk over a Program: the placements of its values, and the steps that make them.

A `Walk` visits the nodes of a graph in their order. The table in handlers.py says which function
places a node of which kind; most ops have none of their own, and take the cheapest strategy of
their sharding rule, one mesh axis after the other (`Walk.apply`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from ... import _compat
from ...ops import shard_map
from ...ops.debug import DEBUG
from ...ops.loops import Loop
from ...ops.nodes import args_of
from ...ops.placement import REDISTRIBUTE
from ...ops.prims import CALLS, PRIMS
from ...ops.random_bits import RANDOM_BITS
from ...placement import is_said
from ...types import PENDING, REDUCTIONS, IfPartial, Mark, Marks, MeshAxes
from .. import layout, plan, rules
from ..redistribute import Move, route
from ..rule_api.checked import answered, failed
from ..rule_api.strategy import Choice, OpCall, arguments, replicated, tensors
from . import refusals
from .decompose import is_cut, written_out
from .likeness import likeness
from .lookahead import Ahead
from .partial import ends, means
from .prices import INFINITE, Prices
from .sorted_rows.kinds import OwnRows, SortedRows
from .units import fit, with_units
from .values import (
    NO_ADVICE,
    Advice,
    Placed,
    Unaligned,
    Value,
    View,
    at_one_placement,
    is_made_again,
    is_numbered,
    is_partial,
    settled,
)

EXPAND = torch.ops.aten.expand.default
OWN_TERM = CALLS[shard_map.own_term].op
READ_ANYWHERE = {RANDOM_BITS, REDISTRIBUTE}  # prims that read a value at any placement

Local = Callable[..., Any]  # how a rank runs an op (emission/emit.py)
Slots = list[plan.Slot]


def op_name(node: Node) -> str:
    """The name of a node's op, without its overload."""
    return getattr(node.target, "_opname", getattr(node.target, "__name__", ""))


class Price(NamedTuple):
    """The sort key of a strategy on one mesh axis: bytes first."""

    nbytes: float  # bytes moved, each weighted by how much of it is exposed
    shared_partial: float  # 1 where a Partial stays unreduced that other ops read too
    resharded: float  # outputs whose sharding appears or disappears

    @property
    def cost(self) -> tuple[float, float]:
        """Among strategies with equal values of this, the readers of the result decide."""
        return self.nbytes, self.shared_partial


class Chosen(NamedTuple):
    """The choice for one op."""

    call: OpCall
    values: list[Value]  # its inputs
    placed: Placed


Priced = tuple[Price, Placed]


class Walk:
    """The state of one walk: the values so far and the steps that made them.

    Args:
        axes: of the mesh.
        name: of the program, for errors.
        advice: the placements that a plan of all ops has for its ops.
    """

    def __init__(self, axes: MeshAxes, name: str, advice: Advice = NO_ADVICE) -> None:
        self.axes, self.name, self.advice = axes, name, advice
        self.steps: list[plan.Step] = []
        self.count = 0  # number of slots so far
        # a Value for each node; for an op with several results a list of them
        self.values: dict[Node, Any] = {}
        self.prices = Prices(axes, advice.early)
        self.ahead = Ahead(self.prices, self.values, name)
        # what was chosen for each op, and for the ops that one was written out as, that one
        self.chosen: dict[Node, Chosen] = {}
        self.within: dict[Node, Node] = {}
        # the placements of ops that were weighed, by `likeness`
        self.weighed_before: dict[tuple[Any, ...] | None, Placed] = {}
        # the placements of `out_placements`, by result; those of inputs and of constraints
        self.leaving: dict[Node, Marks] = {}
        self.given: set[Marks] = set()
        # the placements of the carries of loops, by shape
        self.carried: dict[tuple[int, ...], Marks] = {}
        # the terms of sums that are added in another order, and the sums left to later ones
        self.summed: dict[Node, list[Node]] = {}
        self.left: set[Node] = set()
        self.merged: set[Node] = set()  # gradients that are added first
        self.unaligned: dict[Node, Unaligned] = {}
        self.gradients: dict[Node, plan.Gradient] = {}
        # gradients that leave the program Partial
        self.unreduced: list[tuple[plan.Slot, Node]] = []
        # gradients that stay Partial until the end of their loop
        self.later: Collection[Node] = ()
        # the sorts that ranks may do on their own rows, and the ops on such rows
        self.sorts: dict[Graph, dict[Node, SortedRows]] = {}
        self.own_rows: dict[Node, OwnRows] = {}
        self.cotangents: dict[int, plan.Slot] = {}  # by number

    def fresh(self) -> Walk:
        """A walk over another graph of the same program."""
        inner = Walk(self.axes, self.name, self.advice)
        inner.carried = self.carried
        return inner

    @property
    def replicated(self) -> Marks:
        """The placement that is replicated on every axis."""
        return ("R",) * len(self.axes.sizes)

    # Inputs, nodes and results

    def enter(self, node: Node, marks: Marks, unreduced: str | None) -> plan.Slot:
        """Add an input. Returns its slot."""
        fake = node.meta["val"]
        slot = self.slot(fake, marks)
        self.note_given(fake.shape, marks)
        as_sum = self.rescaled(node, slot, means.as_sums(marks))
        self.values[node] = Value(
            fake,
            early=True,
            slots={as_sum.marks: (as_sum, None)},
            users=len(node.users),
            unreduced=unreduced,
        )
        return slot

    def note_given(self, shape: Sequence[int], marks: Marks) -> None:
        """Note placements that the user gave: results may have them, too."""
        if is_said(marks, shape, self.axes):
            self.given.add(marks)

    def leave(self, node: Node, marks: Marks | None, path: str, output: Node) -> plan.Slot:
        """The slot of a result, at the placements of `out_placements`."""
        value = self.values[node]
        wanted = marks or settled(value, self.axes, self.given)
        as_sums = means.as_sums(wanted)
        stays_partial = is_partial(as_sums)
        if stays_partial:
            value = self.unaligned[node].value if node in self.unaligned else value
            if not self.reaches(value, as_sums):
                if isinstance(marks, IfPartial):
                    return self.leave(node, None, path, output)
                raise refusals.cannot_stay_pending(self.name, path, node, wanted, self.axes)
        as_sum = self.redistribute(value, as_sums, output, implicit=False)
        slot = self.rescaled(output, as_sum, wanted)
        if stays_partial and (node in self.unaligned or value.unreduced):
            self.unreduced.append((slot, node))
        return slot

    def visit(self, node: Node) -> None:
        """Place the result of one node, by the handler of its kind."""
        if _reads_slots(node):
            self.make_inputs(node)
        kind: object = type(node.target) if isinstance(node.target, Loop) else node.target
        if node in self.own_rows:
            kind = OwnRows
        handler = HANDLERS.get(kind) or (PRIMS[kind].place if kind in PRIMS else Walk.apply)
        assert handler is not None, f"{node.target} cannot be placed"
        handler(self, node)

    def visit_in_place(self, node: Node, graph: Graph, result: Node) -> None:
        """Place the ops that stand for a node. The result of one of them is its result."""
        for inner in graph.nodes:
            self.within[inner] = self.within.get(node, node)
            if inner.op == "call_function":
                self.visit(inner)
        self.values[node] = self.values[result]
        self.values[node].users = len(node.users)

    # Slots and moves

    def slot(self, fake: torch.Tensor, marks: Marks) -> plan.Slot:
        """A new slot."""
        self.count += 1
        return plan.Slot(self.count, fake, marks)

    def rescaled(self, node: Node, slot: plan.Slot, marks: Marks) -> plan.Slot:
        """A slot with its means rescaled to sums, or the other way round. The slot itself if it
        has none.
        """
        if slot.marks == marks:
            return slot
        rescaled = self.slot(slot.value, marks)
        self.steps.append(plan.Rescale(node, slot, rescaled))
        return rescaled

    def redistribute(self, value: Value, marks: Marks, node: Node, *, implicit: bool) -> plan.Slot:
        """The value at a placement: an existing slot, or the cheapest moves from another slot.

        Args:
            value: the value to redistribute.
            marks: the target placements.
            node: on whose behalf.
            implicit: whether no placement of the user asks for it.

        Raises:
            PlacementError: this would reduce an unreduced gradient implicitly.
        """
        phase = node.meta.get("phase", "forward")
        self.view_slots(value, phase)
        for slot in value.readable(phase):
            if slot.marks == marks:
                return slot
        if value.fill is not None:
            return self.fill(value, marks)
        if value.recipe is not None:
            return self.make(value, marks)
        shared = self.gathered_view(value, marks, node, implicit=implicit)
        if shared is not None:
            return shared
        source, moves = self.cheapest(value, marks, phase)
        reduces = any(move.sends and move.collective.reduces for move in moves)
        if implicit and value.unreduced and reduces:
            raise refusals.not_reduced(self.name, value.unreduced, node, source.marks, self.axes)
        slot = self.slot(value.fake, marks)
        unasked = implicit and not value.asked
        self.steps.append(plan.Redistribute(node, source, slot, moves, unasked))
        again = any(is_made_again(move, value, node) for move in moves)
        only = phase if again else None
        value.slots[marks] = slot, only
        return slot

    def cheapest(
        self, value: Value, marks: Marks, phase: str
    ) -> tuple[plan.Slot, tuple[Move, ...]]:
        """The slot from which a placement is cheapest, and the moves from it."""
        least = INFINITE
        best = None
        for slot in value.readable(phase):
            found = self.route(value, slot, marks)
            if found is not None and (best is None or found[0] < least):
                least = found[0]
                best = (slot, found[1])
        assert best is not None, f"no moves to {marks}"
        return best

    def reaches(self, value: Value, marks: Marks) -> bool:
        """Whether a value can have a placement."""
        if value.fill is not None:
            return all(rules.fill_fits(value.fill[1], mark) for mark in marks)
        if value.recipe is not None:
            return all(map(is_numbered, marks))
        slots = value.readable("forward")
        return any(self.route(value, slot, marks) for slot in slots)

    def route(
        self, value: Value, slot: plan.Slot, marks: Marks
    ) -> tuple[float, tuple[Move, ...]] | None:
        """The cheapest moves from a slot to a placement, with their cost."""
        shape = tuple(value.fake.shape)
        itemsize = value.fake.element_size()
        return route(shape, itemsize, slot.marks, marks, self.axes)

    # Values that each rank makes for itself at any placement, where they are read: constants,
    # random numbers, expanded scalars, and what is computed element by element from them alone.
    # Only a rank's shard is made, and nothing is sent.

    def fill_of(self, node: Node) -> Any:
        """The value of a constant tensor, or of a view of one. None for any other op."""
        fake = node.meta.get("val")
        if not isinstance(fake, torch.Tensor):
            return None
        if rules.row_of(node.target).keeps_constants:
            source = self.values[args_of(node)[0]]
            return None if source.fill is None else source.fill[1]
        return rules.fill_value(node.target, node.args, fake.dtype)

    def constant(self, node: Node, value: Any) -> Value:
        """A constant tensor of one value."""
        is_like = node.target in rules.LIKE
        return Value(
            node.meta["val"],
            early=False,
            fill=(node, value),
            users=len(node.users),
            like=self.values.get(args_of(node)[0]) if is_like else None,
        )

    def fill(self, value: Value, marks: Marks) -> plan.Slot:
        """Make a constant at a placement."""
        assert value.fill is not None
        node, number = value.fill
        slot = self.slot(value.fake, marks)
        self.steps.append(plan.Fill(node, slot, number))
        value.slots[marks] = slot, None
        return slot

    def make(self, value: Value, marks: Marks) -> plan.Slot:
        """Run the op of a value at a placement."""
        assert value.recipe is not None
        node, values = value.recipe
        is_random = node.target is RANDOM_BITS
        ins = []
        for v in values:
            wanted = self.replicated if is_random or not v.fake.dim() else marks
            ins.append(self.redistribute(v, wanted, node, implicit=False))
        slot = self.slot(value.fake, marks)
        self.steps.append(plan.Apply(node, tuple(ins), (slot,)))
        value.slots[marks] = slot, None
        return slot

    def make_inputs(self, node: Node) -> None:
        """Make the inputs of a node that could be made at any placement, replicated."""
        for read in node.all_input_nodes:
            value = self.values[read]
            if isinstance(value, Value) and value.recipe and not value.slots:
                self.redistribute(value, self.replicated, node, implicit=False)

    # Views share the slots of the tensor that they view: what is gathered once is gathered for
    # all. A view has a slot for each slot of its source, and a gather of a view is one of its
    # source, which other views of it then read.

    def view_slots(self, value: Value, phase: str) -> None:
        """Add the slots of a view that follow from those of its source."""
        view = value.view
        if view is None:
            return
        self.view_slots(view.source, phase)
        for marks, (slot, only) in list(view.source.slots.items()):
            if only not in (None, phase):
                continue
            image = self.image(view, marks)
            if image is None or value.slots.get(image, (None, ""))[1] in (None, phase):
                continue
            out = self.slot(value.fake, image)
            self.steps.append(plan.Apply(view.node, (slot,), (out,)))
            value.slots[image] = out, only

    def gathered_view(
        self, value: Value, marks: Marks, node: Node, *, implicit: bool
    ) -> plan.Slot | None:
        """A view at a placement that replicates it on more axes, by its source at such a
        placement. None where that costs more, or does not exist.
        """
        view = value.view
        if view is None or not view.is_same_size:
            return None
        phase = node.meta.get("phase", "forward")
        for own in view.source.readable(phase):
            image = self.image(view, own.marks)
            if image is None:
                continue
            pairs = list(zip(own.marks, image, marks, strict=True))
            if any(seen != wanted != "R" for _, seen, wanted in pairs):
                continue
            # a gradient is reduced where it is ready
            if any(seen in PENDING and wanted == "R" for _, seen, wanted in pairs):
                continue
            before = tuple(mark if seen == wanted else wanted for mark, seen, wanted in pairs)
            if self.image(view, before) != marks:
                continue
            self.redistribute(view.source, before, node, implicit=implicit)
            self.view_slots(value, phase)
            return value.slots[marks][0]
        return None

    def image(self, view: View, marks: Marks) -> Marks | None:
        """The placements of a view, given those of its source. None where it has none."""
        if marks not in view.images:
            view.images[marks] = self.image_of(view, marks)
        return view.images[marks]

    def image_of(self, view: View, marks: Marks) -> Marks | None:
        """The placements of a view by its rule, one axis after the other."""
        call = view.call
        rows = answered(rules.find(call.target), call, self.name, view.node)
        placed = Placed([()], [()])
        for mark in marks:
            strategies = (x for row in rows for x in with_units(call, row, [{mark}]))
            same = [x for x in strategies if x[0] == (mark,)]
            fitting = self.fitting(call, same, placed)
            if not fitting:
                return None
            placed = fitting[0]
        return placed.outs[0] if placed.ins[0] == marks else None

    def rearrange(self, node: Node, call: OpCall, value: Value, result: Value) -> None:
        """Rearrange a parameter at each of its placements, so that it is gathered once. A view
        of another value has those of its source.
        """
        if not result.early:
            if rules.row_of(node.target).rearranges and not result.varies:
                result.view = View(node, call, value)
            return
        strategies = answered(rules.find(call.target), call, self.name, node)
        out_mark: dict[Mark, Mark] = {}
        for (mark,), (out,) in strategies:
            out_mark.setdefault(mark, out)
        for slot, only in list(value.slots.values()):
            if only not in (None, node.meta["phase"]):
                continue
            if any(mark not in out_mark for mark in slot.marks):
                continue
            out_marks = [out_mark[mark] for mark in slot.marks]
            marks = layout.canonical(call.outs[0].shape, out_marks, self.axes.sizes)
            if marks is not None and marks not in result.slots:
                out = self.slot(call.outs[0], marks)
                result.slots[marks] = out, only
                self.steps.append(plan.Apply(node, (slot,), (out,)))

    # Ops with a sharding rule

    def apply(self, node: Node, decided: Placed | None = None) -> None:
        """Place an op by the cheapest strategy of its sharding rule, unless it is decided."""
        if (value := self.fill_of(node)) is not None:
            self.values[node] = self.constant(node, value)
            return
        call, values = self.call(node)
        readable = [v.readable(node.meta["phase"]) for v in values]
        advised = node in self.advice.ops
        if not advised and is_cut(call, readable, self.axes.sizes):
            self.write_out(node, call, values)
            return
        if _is_made_anywhere(call, values):
            recipe = (node, tuple(values))
            users = len(node.users)
            self.values[node] = Value(node.meta["val"], early=False, recipe=recipe, users=users)
            return
        refusals.refuse_random(node, self.name, self.axes)
        placed = decided or self.choose(call, values, node)
        self.chosen[node] = Chosen(call, values, placed)
        self.take(node, call, values, placed)

    def call(self, node: Node) -> tuple[OpCall, list[Value]]:
        """An op's call in the form that its rule takes, and its input values."""
        values = [self.values[x] for x in arguments(node)]
        for value in values:
            self.view_slots(value, node.meta["phase"])
        ins = tuple(v.fake for v in values)
        outs = tensors(node.meta.get("val"))  # empty for an op that only checks
        return OpCall(node.target, node.args, dict(node.kwargs), ins, outs), values

    def write_out(self, node: Node, call: OpCall, values: list[Value]) -> None:
        """Place an op by its decomposition into smaller ones."""
        graph = written_out(call, node)
        holders = graph.find_nodes(op="placeholder")
        self.values.update(zip(holders, values, strict=True))
        (output,) = graph.find_nodes(op="output")
        self.visit_in_place(node, graph, output.args[0])

    def take(
        self,
        node: Node,
        call: OpCall,
        values: list[Value],
        placed: Placed,
        local: Local | None = None,
    ) -> None:
        """Place an op so; `local` is how a rank runs it, if that is not by its rule."""
        ins = tuple(
            self.redistribute(value, marks, node, implicit=node.target is not DEBUG)
            for value, marks in zip(values, placed.ins, strict=True)
        )
        outs = tuple(
            self.slot(fake, marks) for fake, marks in zip(call.outs, placed.outs, strict=True)
        )
        self.steps.append(plan.Apply(node, ins, outs, local))
        results = self.results(node, values, outs)
        if len(values) == len(results) == 1:
            self.rearrange(node, call, values[0], results[0])
        self.assign(node, results)

    def results(self, node: Node, values: list[Value], outs: Iterable[plan.Slot]) -> list[Value]:
        """The values of an op's results, each at one placement."""
        early = rules.row_of(node.target).rearranges and all(v.early for v in values)
        gradient = next((v.unreduced for v in values if v.unreduced), None)
        varies = frozenset().union(*(v.varies for v in values))
        equal = frozenset(
            axis for axis in varies if all(axis in v.equal or axis not in v.varies for v in values)
        )
        results = []
        for out in outs:
            users = ends.reducing(node, [out.marks], self.ahead.choices)
            result = at_one_placement(out, users, varies, equal)
            result.early = early
            result.unreduced = gradient if is_partial(out.marks) else None
            results.append(result)
        return results

    def assign(self, node: Node, results: list[Value]) -> None:
        """Record the values of an op's results, and for a tuple those of its tensors."""
        result = node.meta.get("val")
        if isinstance(result, torch.Tensor):
            self.values[node] = results[0]
        elif result is not None:
            feed = iter(results)
            self.values[node] = [
                next(feed) if isinstance(r, torch.Tensor) else None for r in result
            ]

    def choose(self, call: OpCall, values: list[Value], node: Node) -> Placed:
        """The advice for an op if its inputs can be placed so, else its cheapest strategies."""
        advised = self.advice.ops.get(node)
        if advised is not None and all(map(self.reaches, values, advised.ins)):
            return advised
        held = [v.held(node.meta["phase"]) for v in values]
        is_term = [self.stays_partial(node, axis) for axis in range(len(self.axes.sizes))]
        key = likeness(call, values, held, is_term)
        if key in self.weighed_before:
            ins, outs = self.weighed_before[key]
            return Placed([*ins], [*outs])
        times = self.ahead.times
        placed = self.weigh(call, values, node)
        if key is not None and self.ahead.times == times:
            self.weighed_before[key] = Placed([*placed.ins], [*placed.outs])
        return placed

    def weigh(
        self,
        call: OpCall,
        values: list[Value],
        node: Node,
        strategies: Sequence[Choice] | None = None,
        fixed: Mapping[int, Choice] = {},
    ) -> Placed:
        """For each axis, in mesh order, the strategy that moves the fewest bytes.

        Args:
            call: the op.
            values: its inputs.
            node: its node.
            strategies: some of those of its rule. By default all.
            fixed: the strategies of axes of which the op leaves no choice.
        """
        rule = rules.find(call.target)
        if strategies is None:
            strategies = answered(rule, call, self.name, node)
        held = [v.held(node.meta["phase"]) for v in values]
        varies = frozenset().union(*(v.varies for v in values))
        placed = Placed([()] * len(call.ins), [()] * len(call.outs))
        for axis, name in enumerate(self.axes.names):
            # values that vary between ranks are computed by each rank alone
            rows = [replicated(call)] if name in varies else strategies
            now = [{slot.marks[axis] for slot in slots} for slots in held]
            own = [x for row in rows for x in with_units(call, row, now)]
            if axis in fixed:
                own = [fixed[axis]]
            fitting = self.fitting(call, own, placed)
            if not fitting:
                problem = f"none of its strategies fits on axis {name}"
                raise failed(problem, rule, call, self.name, node)
            is_term = self.stays_partial(node, axis)
            priced = [(self.price(call, values, held, x, axis, is_term), x) for x in fitting]
            placed = self.best(node, priced, axis)
        return placed

    def fitting(self, call: OpCall, strategies: Iterable[Choice], placed: Placed) -> list[Placed]:
        """The placements of the axes so far with one more, for each strategy that fits."""
        longer = (fit(call, strategy, placed, self.axes.sizes) for strategy in strategies)
        return [x for x in longer if x is not None]

    def stays_partial(self, node: Node, axis: int) -> bool:
        """Whether somebody reads the terms of a result: the caller, or code of one rank."""
        wanted = self.leaving.get(node)
        if wanted is not None and wanted[axis] in REDUCTIONS:
            return True
        return any(user.target is OWN_TERM for user in node.users)

    def best(self, node: Node, priced: list[Priced], axis: int) -> Placed:
        """The cheapest of some strategies. Among equals, the one whose result is cheapest for
        its readers, then the first. A reduce-scatter, which costs a start more, is the equal
        of its all-reduce.
        """
        least, shared = min(price.cost for price, _ in priced)
        starts = (0.0, self.axes.cost(axis).start) if least else (0.0,)
        costs = [least + start for start in starts]
        equals = [
            (price, placed)
            for price, placed in priced
            if price.nbytes in costs and price.shared_partial == shared
        ]
        has_one_result = isinstance(node.meta.get("val"), torch.Tensor)
        if len(equals) == 1 or not has_one_result:
            return min(equals, key=lambda pair: pair[0])[1]

        def with_readers(pair: Priced) -> tuple[float, Price]:
            price, placed = pair
            return self.ahead.price(node, placed.outs[0], axis), price

        return min(equals, key=with_readers)[1]

    def price(
        self,
        call: OpCall,
        values: list[Value],
        held: list[Slots],
        placed: Placed,
        axis: int,
        is_term: bool,
    ) -> Price:
        """The sort key of a strategy on one axis: its cost, then how much it changes the
        sharding of the inputs.
        """
        # one loop, since this runs for every strategy of every op
        nbytes = 0.0
        passes_partial = False
        shared_partial = False
        was_sharded = False
        # one value as two arguments moves once
        counted: set[tuple[int, Mark]] = set()
        for value, slots, marks in zip(values, held, placed.ins, strict=True):
            wanted = marks[axis]
            if not was_sharded:
                was_sharded = any(slot.marks[axis] != "R" for slot in slots)
            if wanted in PENDING:
                passes_partial = True
                shared_partial = not is_term and (shared_partial or value.users > 1)
            if (id(value), wanted) not in counted:
                counted.add((id(value), wanted))
                price = self.prices.input(value, slots, wanted, axis)
                nbytes += price * self.prices.weight(value, slots, axis)
        resharded = sum((m[axis] == "R") == was_sharded for m in placed.outs)
        if not is_term and (passes_partial or nbytes > 0):
            for x, marks in zip(call.outs, placed.outs, strict=True):
                if marks[axis] in PENDING:
                    nbytes += self.prices.move(x, marks, "R", axis)
        return Price(nbytes, float(shared_partial), float(resharded))


Handler = Callable[[Walk, Node], None]
# Of nodes that are not placed by a sharding rule: by op, or by the type of a loop. The rows are
# in handlers.py, but for the prims of per-rank code, which ops/prims.py has.
HANDLERS: dict[object, Handler] = {}


def _reads_slots(node: Node) -> bool:
    """Whether a node must find its inputs made: a loop, or a prim."""
    is_op = isinstance(node.target, _compat.OpOverload)
    is_prim = is_op and _compat.namespace_of(node.target) == "shardfn"
    return not is_op or (is_prim and node.target not in READ_ANYWHERE)


def _is_made_anywhere(call: OpCall, values: list[Value]) -> bool:
    """Whether an op's result can be made at any placement, given its arguments."""
    if any(v.varies for v in values) or len(call.outs) != 1:
        return False
    if call.target is RANDOM_BITS:
        return len(values) == 1 and call.ins[0].dim() == 1 and _is_replicated(values[0])
    if call.target is EXPAND:
        value = values[0]
        return not value.fake.dim() and (value.fill is not None or _is_replicated(value))
    if not rules.is_pointwise(call.target) or not any(v.recipe for v in values):
        return False
    return all(_is_made_with(v, call.outs[0]) for v in values)


def _is_replicated(value: Value) -> bool:
    """Whether every rank has the global tensor anyway."""
    return any(all(m == "R" for m in marks) for marks in value.slots)


def _is_made_with(value: Value, result: torch.Tensor) -> bool:
    """Whether an argument can be made at whatever placement its result gets."""
    if not value.fake.dim():
        return value.is_unmade or _is_replicated(value)
    is_free = value.recipe is not None or value.fill is not None
    return is_free and value.fake.shape == result.shape
