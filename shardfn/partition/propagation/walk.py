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
from ...ops.elementwise import Elementwise
from ...ops.loops import Loop
from ...ops.nodes import args_of
from ...ops.placement import REDISTRIBUTE
from ...ops.prims import CALLS, PRIMS
from ...ops.random_bits import RANDOM_BITS
from ...placement import is_expressible
from ...types import PARTIAL_KINDS, REDUCTIONS, AxisPlacement, IfPartial, MeshAxes, MeshPlacements
from .. import layout, plan, rules
from ..redistribute import Move, route
from ..rule_api.check_strategies import failed, strategies_of
from ..rule_api.strategy import Choice, OpCall, arguments, replicated, tensors
from . import refusals
from .asked_ways import asked_rows, is_asked, refuse_together
from .decompose_softmax import decomposed, works_along_sharded_dim
from .lookahead import Ahead
from .partial import partial_means, shared_partials
from .redistribution_prices import INFINITE, Prices
from .strategy_cache_key import strategy_cache_key
from .strategy_units import fit, with_units
from .values import (
    NO_ADVICE,
    Advice,
    Placed,
    UnplacedGradient,
    Value,
    View,
    can_be_drawn,
    default_placements,
    is_partial,
    is_repeated_in_backward,
    value_of_slot,
)

EXPAND = torch.ops.aten.expand.default
OWN_TERM = CALLS[shard_map.own_term].op
READ_ANYWHERE = {RANDOM_BITS, REDISTRIBUTE}  # prims that read a value at any placement

Local = Callable[..., Any]  # how a rank runs an op (emission/emit_steps.py)
Slots = list[plan.Slot]


def op_name(node: Node) -> str:
    """Return the name of a node's op, without its overload."""
    return getattr(node.target, "_opname", getattr(node.target, "__name__", ""))


class Price(NamedTuple):
    """The sort key of a strategy on one mesh axis: bytes first."""

    nbytes: float  # bytes moved, each weighted by how much of it is exposed
    shared_partial: float  # 1 where a Partial stays unreduced that other ops read too
    resharded: float  # outputs whose sharding appears or disappears

    @property
    def cost(self) -> tuple[float, float]:
        """The part of the key that decides; among equals, the readers of the result do."""
        return self.nbytes, self.shared_partial


class Chosen(NamedTuple):
    """The strategy chosen for one op."""

    call: OpCall
    values: list[Value]  # its inputs
    placed: Placed


Priced = tuple[Price, Placed]


class Walk:
    """One walk over a program, which places every value and collects the plan's steps.

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
        # the placements of ops that were weighed, by strategy_cache_key
        self.weighed_before: dict[tuple[Any, ...] | None, Placed] = {}
        # the placements of `out_placements`, by result; those of inputs and of constraints
        self.leaving: dict[Node, MeshPlacements] = {}
        self.user_placements: set[MeshPlacements] = set()
        # the placements of the carries of loops, by shape
        self.carried: dict[tuple[int, ...], MeshPlacements] = {}
        # how scans inside of loops were placed, by what decides that
        self.placed_scans: dict[tuple[Any, ...], Any] = {}
        # the terms of sums that are added in another order, and the sums left to later ones
        self.summed: dict[Node, list[Node]] = {}
        self.left: set[Node] = set()
        self.merged: set[Node] = set()  # gradients that are added first
        self.unplaced: dict[Node, UnplacedGradient] = {}
        self.gradients: dict[Node, plan.Gradient] = {}
        # gradients that leave the program Partial
        self.unreduced: list[tuple[plan.Slot, Node]] = []
        # gradients that stay Partial until the end of their loop
        self.later: Collection[Node] = ()
        # the sorts that ranks may run on their own rows, and nodes that the table does not place
        self.local_sorts: dict[Graph, dict[Node, Handler]] = {}
        self.overrides: dict[Node, Handler] = {}
        self.cotangents: dict[int, plan.Slot] = {}  # by number
        self.paths: dict[Node, str] = {}  # of the arguments

    def fresh(self) -> Walk:
        """Make a walk over another graph of the same program."""
        inner = Walk(self.axes, self.name, self.advice)
        inner.carried = self.carried
        inner.placed_scans = self.placed_scans
        inner.weighed_before = self.weighed_before
        return inner

    @property
    def replicated(self) -> MeshPlacements:
        """The placements that replicate a value on every axis."""
        return ("R",) * len(self.axes.sizes)

    # Inputs, nodes and results

    def enter(self, node: Node, placements: MeshPlacements, unreduced: str | None) -> plan.Slot:
        """Add an input of the program. Returns its slot."""
        fake = node.meta["val"]
        slot = self.slot(fake, placements)
        self.note_user_placements(fake.shape, placements)
        as_sum = self.rescaled(node, slot, partial_means.as_sums(placements))
        self.values[node] = Value(
            fake,
            early=True,
            slots={as_sum.placements: (as_sum, None)},
            users=len(node.users),
            unreduced=unreduced,
        )
        return slot

    def note_user_placements(self, shape: Sequence[int], placements: MeshPlacements) -> None:
        """Remember placements that the user wrote, since results may keep them."""
        if is_expressible(placements, shape, self.axes):
            self.user_placements.add(placements)

    def leave(
        self, node: Node, placements: MeshPlacements | None, path: str, output: Node
    ) -> plan.Slot:
        """Redistribute a result to its placements in `out_placements`. Returns its slot."""
        value = self.values[node]
        wanted = placements or default_placements(value, self.axes, self.user_placements)
        as_sums = partial_means.as_sums(wanted)
        stays_partial = is_partial(as_sums)
        if stays_partial:
            value = self.unplaced[node].value if node in self.unplaced else value
            if not self.reaches(value, as_sums):
                if isinstance(placements, IfPartial):
                    return self.leave(node, None, path, output)
                raise refusals.cannot_stay_partial(self.name, path, node, wanted, self.axes)
        as_sum = self.redistribute(value, as_sums, output, implicit=False)
        slot = self.rescaled(output, as_sum, wanted)
        if stays_partial and (node in self.unplaced or value.unreduced):
            self.unreduced.append((slot, node))
        return slot

    def visit(self, node: Node) -> None:
        """Place one node, by the handler of its kind or by its sharding rule."""
        if _reads_slots(node):
            self.make_inputs(node)
        kind: object = type(node.target) if isinstance(node.target, Loop) else node.target
        handler = self.overrides.get(node) or HANDLERS.get(kind)
        handler = handler or (PRIMS[kind].place if kind in PRIMS else Walk.apply)
        assert handler is not None, f"{node.target} cannot be placed"
        handler(self, node)

    def visit_in_place(self, node: Node, graph: Graph, result: Node) -> None:
        """Place the ops that replace a node; the result of one of them is its result."""
        for inner in graph.nodes:
            self.within[inner] = self.within.get(node, node)
            if inner.op == "call_function":
                self.visit(inner)
        self.values[node] = self.values[result]
        self.values[node].users = len(node.users)

    # Slots and moves

    def slot(self, fake: torch.Tensor, placements: MeshPlacements) -> plan.Slot:
        """Make a new slot."""
        self.count += 1
        return plan.Slot(self.count, fake, placements)

    def rescaled(self, node: Node, slot: plan.Slot, placements: MeshPlacements) -> plan.Slot:
        """Turn Partial means of a slot into sums, or back. Returns the slot itself if it has
        none.
        """
        if slot.placements == placements:
            return slot
        rescaled = self.slot(slot.value, placements)
        self.steps.append(plan.Rescale(node, slot, rescaled))
        return rescaled

    def redistribute(
        self, value: Value, placements: MeshPlacements, node: Node, *, implicit: bool
    ) -> plan.Slot:
        """Return a slot of a value at some placements: one that exists, or the cheapest moves
        from another.

        Args:
            value: the value to redistribute.
            placements: the target placements.
            node: on whose behalf.
            implicit: whether no placement of the user asks for it.

        Raises:
            PlacementError: this would reduce an unreduced gradient implicitly.
        """
        phase = node.meta.get("phase", "forward")
        self.view_slots(value, phase)
        for slot in value.readable(phase):
            if slot.placements == placements:
                return slot
        if value.fill is not None:
            return self.fill(value, placements)
        if value.recipe is not None:
            return self.make(value, placements)
        shared = self.gathered_view(value, placements, node, implicit=implicit)
        if shared is not None:
            return shared
        source, moves = self.cheapest(value, placements, phase)
        reduces = any(move.sends and move.collective.reduces for move in moves)
        if implicit and value.unreduced and reduces:
            raise refusals.not_reduced(
                self.name, value.unreduced, node, source.placements, self.axes
            )
        slot = self.slot(value.fake, placements)
        moved = [move.axis for move in moves if move.sends]
        is_implicit = implicit and not value.is_explicit and not is_asked(self.axes, node, moved)
        self.steps.append(plan.Redistribute(node, source, slot, moves, is_implicit))
        again = any(is_repeated_in_backward(move, value, node) for move in moves)
        only = phase if again else None
        value.slots[placements] = slot, only
        return slot

    def cheapest(
        self, value: Value, placements: MeshPlacements, phase: str
    ) -> tuple[plan.Slot, tuple[Move, ...]]:
        """Return the slot from which placements are cheapest to reach, and the moves."""
        least = INFINITE
        best = None
        for slot in value.readable(phase):
            found = self.route(value, slot, placements)
            if found is not None and (best is None or found[0] < least):
                least = found[0]
                best = (slot, found[1])
        assert best is not None, f"no moves to {placements}"
        return best

    def reaches(self, value: Value, placements: MeshPlacements) -> bool:
        """Return whether a value can have some placements."""
        if value.fill is not None:
            return all(rules.fill_fits(value.fill[1], placement) for placement in placements)
        if value.recipe is not None:
            return all(map(can_be_drawn, placements))
        slots = value.readable("forward")
        return any(self.route(value, slot, placements) for slot in slots)

    def route(
        self, value: Value, slot: plan.Slot, placements: MeshPlacements
    ) -> tuple[float, tuple[Move, ...]] | None:
        """Return the price and the moves from a slot to some placements."""
        shape = tuple(value.fake.shape)
        itemsize = value.fake.element_size()
        return route(shape, itemsize, slot.placements, placements, self.axes)

    # Values that each rank makes for itself at any placement, where they are read: constants,
    # random numbers, expanded scalars, and what is computed element by element from them alone.
    # Only a rank's shard is made, and nothing is sent.

    def fill_of(self, node: Node) -> Any:
        """Return the number that a node fills a tensor with; None for other ops."""
        fake = node.meta.get("val")
        if not isinstance(fake, torch.Tensor):
            return None
        place = rules.row_of(node.target).constant_of
        if place is not None:
            source = self.values[args_of(node)[place]]
            if source.fill is None or source.fake.dtype != fake.dtype:
                return None
            return source.fill[1]
        return rules.fill_value(node.target, node.args, fake.dtype)

    def constant(self, node: Node, value: Any) -> Value:
        """Make the value of a constant tensor, which each reader makes at its own placement."""
        is_like = node.target in rules.LIKE
        return Value(
            node.meta["val"],
            early=False,
            fill=(node, value),
            users=len(node.users),
            like=self.values.get(args_of(node)[0]) if is_like else None,
        )

    def fill(self, value: Value, placements: MeshPlacements) -> plan.Slot:
        """Make a constant at some placements."""
        assert value.fill is not None
        node, number = value.fill
        slot = self.slot(value.fake, placements)
        self.steps.append(plan.Fill(node, slot, number))
        value.slots[placements] = slot, None
        return slot

    def make(self, value: Value, placements: MeshPlacements) -> plan.Slot:
        """Run the op of a value that can be made anywhere at some placements."""
        assert value.recipe is not None
        node, values = value.recipe
        is_random = node.target is RANDOM_BITS
        ins = []
        for v in values:
            wanted = self.replicated if is_random or not v.fake.dim() else placements
            ins.append(self.redistribute(v, wanted, node, implicit=False))
        slot = self.slot(value.fake, placements)
        self.steps.append(plan.Apply(node, tuple(ins), (slot,)))
        value.slots[placements] = slot, None
        return slot

    def make_inputs(self, node: Node) -> None:
        """Make the unmade inputs of a node, replicated."""
        for read in node.all_input_nodes:
            value = self.values[read]
            if isinstance(value, Value) and value.recipe and not value.slots:
                self.redistribute(value, self.replicated, node, implicit=False)

    # Views share the slots of the tensor that they view: what is gathered once is gathered for
    # all. A view has a slot for each slot of its source, and a gather of a view is one of its
    # source, which other views of it then read.

    def view_slots(self, value: Value, phase: str) -> None:
        """Add a slot to a view for each slot of its source."""
        view = value.view
        if view is None:
            return
        self.view_slots(view.source, phase)
        for placements, (slot, only) in list(view.source.slots.items()):
            if only not in (None, phase):
                continue
            image = self.image(view, placements)
            if image is None or value.slots.get(image, (None, ""))[1] in (None, phase):
                continue
            out = self.slot(value.fake, image)
            self.steps.append(plan.Apply(view.node, (slot,), (out,)))
            value.slots[image] = out, only

    def gathered_view(
        self, value: Value, placements: MeshPlacements, node: Node, *, implicit: bool
    ) -> plan.Slot | None:
        """Gather a view by gathering its source, which other views share; None where that is
        not possible.
        """
        view = value.view
        if view is None or not view.is_same_size:
            return None
        phase = node.meta.get("phase", "forward")
        for own in view.source.readable(phase):
            image = self.image(view, own.placements)
            if image is None:
                continue
            pairs = list(zip(own.placements, image, placements, strict=True))
            if any(seen != wanted != "R" for _, seen, wanted in pairs):
                continue
            # a gradient is reduced where it is ready
            if any(seen in PARTIAL_KINDS and wanted == "R" for _, seen, wanted in pairs):
                continue
            before = tuple(
                placement if seen == wanted else wanted for placement, seen, wanted in pairs
            )
            if self.image(view, before) != placements:
                continue
            self.redistribute(view.source, before, node, implicit=implicit)
            self.view_slots(value, phase)
            return value.slots[placements][0]
        return None

    def image(self, view: View, placements: MeshPlacements) -> MeshPlacements | None:
        """Return the placements of a view, given those of its source, from a cache."""
        if placements not in view.images:
            view.images[placements] = self.image_of(view, placements)
        return view.images[placements]

    def image_of(self, view: View, placements: MeshPlacements) -> MeshPlacements | None:
        """Derive the placements of a view from those of its source by its rule; None if it has
        none.
        """
        call = view.call
        rows = strategies_of(rules.find(call.target), call, self.name, view.node)
        placed = Placed([()], [()])
        for placement in placements:
            strategies = (x for row in rows for x in with_units(call, row, [{placement}]))
            same = [x for x in strategies if x[0] == (placement,)]
            fitting = self.fitting(call, same, placed)
            if not fitting:
                return None
            placed = fitting[0]
        return placed.outs[0] if placed.ins[0] == placements else None

    def rearrange(self, node: Node, call: OpCall, value: Value, result: Value) -> None:
        """Rearrange a parameter at each of its placements, so that it is gathered once for all
        readers.
        """
        if not result.early:
            if rules.row_of(node.target).rearranges and not result.varies:
                result.view = View(node, call, value)
            return
        strategies = strategies_of(rules.find(call.target), call, self.name, node)
        out_placement: dict[AxisPlacement, AxisPlacement] = {}
        for (placement,), (out,) in strategies:
            out_placement.setdefault(placement, out)
        for slot, only in list(value.slots.values()):
            if only not in (None, node.meta["phase"]):
                continue
            if any(placement not in out_placement for placement in slot.placements):
                continue
            out_placements = [out_placement[placement] for placement in slot.placements]
            placements = layout.canonical(call.outs[0].shape, out_placements, self.axes.sizes)
            if placements is not None and placements not in result.slots:
                out = self.slot(call.outs[0], placements)
                result.slots[placements] = out, only
                self.steps.append(plan.Apply(node, (slot,), (out,)))

    # Ops with a sharding rule

    def apply(self, node: Node, decided: Placed | None = None) -> None:
        """Place an op by the cheapest strategy of its sharding rule."""
        if (value := self.fill_of(node)) is not None:
            self.values[node] = self.constant(node, value)
            return
        call, values = self.call(node)
        readable = [v.readable(node.meta["phase"]) for v in values]
        advised_carry = node in self.advice.ops
        if not advised_carry and works_along_sharded_dim(call, readable, self.axes.sizes):
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
        """Return an op's call in the form that its rule takes, and the values of its inputs."""
        values = [self.values[x] for x in arguments(node)]
        for value in values:
            self.view_slots(value, node.meta["phase"])
        ins = tuple(v.fake for v in values)
        outs = tensors(node.meta.get("val"))  # empty for an op that only checks
        return OpCall(node.target, node.args, dict(node.kwargs), ins, outs), values

    def write_out(self, node: Node, call: OpCall, values: list[Value]) -> None:
        """Place an op by placing its decomposition."""
        graph = decomposed(call, node)
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
        """Add the steps of an op with chosen placements: redistribute its inputs, run it."""
        ins = tuple(
            self.redistribute(value, placements, node, implicit=node.target is not DEBUG)
            for value, placements in zip(values, placed.ins, strict=True)
        )
        outs = tuple(
            self.slot(fake, placements)
            for fake, placements in zip(call.outs, placed.outs, strict=True)
        )
        step = plan.Apply(node, ins, outs, local)
        self.steps += rules.steps_of(step, self.axes, self.slot)
        results = self.results(node, values, outs)
        if len(values) == len(results) == 1:
            self.rearrange(node, call, values[0], results[0])
        self.assign(node, results)

    def results(self, node: Node, values: list[Value], outs: Iterable[plan.Slot]) -> list[Value]:
        """Make the values of an op's results."""
        early = rules.row_of(node.target).rearranges and all(v.early for v in values)
        gradient = next((v.unreduced for v in values if v.unreduced), None)
        varies = frozenset().union(*(v.varies for v in values))
        equal = frozenset(
            axis for axis in varies if all(axis in v.equal or axis not in v.varies for v in values)
        )
        results = []
        for out in outs:
            users = shared_partials.counted_readers(node, [out.placements], self.ahead.choices)
            result = value_of_slot(out, users, varies, equal)
            result.early = early
            result.unreduced = gradient if is_partial(out.placements) else None
            results.append(result)
        return results

    def assign(self, node: Node, results: list[Value]) -> None:
        """Record the values of an op's results under its node."""
        result = node.meta.get("val")
        if isinstance(result, torch.Tensor):
            self.values[node] = results[0]
        elif result is not None:
            feed = iter(results)
            self.values[node] = [
                next(feed) if isinstance(r, torch.Tensor) else None for r in result
            ]

    def choose(self, call: OpCall, values: list[Value], node: Node) -> Placed:
        """Choose the placements of an op: the planner's, those of an equal op, or the cheapest."""
        advised_carry = self.advice.ops.get(node)
        if advised_carry is not None and all(map(self.reaches, values, advised_carry.ins)):
            return advised_carry
        if not self.axes.names and rules.of_user(call.target) is None:
            return Placed([()] * len(call.ins), [()] * len(call.outs))
        slots_of_inputs = [v.strategy_slots(node.meta["phase"]) for v in values]
        is_term = [self.stays_partial(node, axis) for axis in range(len(self.axes.sizes))]
        key = strategy_cache_key(call, values, slots_of_inputs, is_term)
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
        """Choose the cheapest strategy of an op on each axis, in mesh order.

        Args:
            call: the op.
            values: its inputs.
            node: its node.
            strategies: some of those of its rule. By default all.
            fixed: the strategies of axes of which the op leaves no choice.
        """
        rule = rules.find(call.target)
        if strategies is None:
            strategies = strategies_of(rule, call, self.name, node)
        slots_of_inputs = [v.strategy_slots(node.meta["phase"]) for v in values]
        varies = frozenset().union(*(v.varies for v in values))
        placed = Placed([()] * len(call.ins), [()] * len(call.outs))
        for axis, name in enumerate(self.axes.names):
            # values that vary between ranks are computed by each rank alone
            is_closed = name in varies or name in self.axes.closed
            rows = [replicated(call)] if is_closed else strategies
            if self.axes.options and not is_closed:
                rows = asked_rows(call, rows, self.axes, axis, self.name, node)
            now = [{slot.placements[axis] for slot in slots} for slots in slots_of_inputs]
            own = [x for row in rows for x in with_units(call, row, now)]
            if axis in fixed:
                own = [fixed[axis]]
            fitting = self.fitting(call, own, placed)
            if not fitting:
                refuse_together(call, self.axes, axis, self.name, node)
                problem = f"none of the op's sharding strategies fits on axis {name}"
                raise failed(problem, rule, call, self.name, node)
            is_term = self.stays_partial(node, axis)
            priced = [
                (self.price(call, values, slots_of_inputs, x, axis, is_term), x) for x in fitting
            ]
            placed = self.best(node, priced, axis)
        return placed

    def fitting(self, call: OpCall, strategies: Iterable[Choice], placed: Placed) -> list[Placed]:
        """Extend an op's placements by each strategy that fits on the next axis."""
        longer = (fit(call, strategy, placed, self.axes.sizes) for strategy in strategies)
        return [x for x in longer if x is not None]

    def stays_partial(self, node: Node, axis: int) -> bool:
        """Return whether the caller or per-rank code reads the Partial terms of a result."""
        wanted = self.leaving.get(node)
        if wanted is not None and wanted[axis] in REDUCTIONS:
            return True
        return any(user.target is OWN_TERM for user in node.users)

    def best(self, node: Node, priced: list[Priced], axis: int) -> Placed:
        """Choose the cheapest of some priced strategies; ties go to the one that is cheapest
        for the readers.
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
        slots_of_inputs: list[Slots],
        placed: Placed,
        axis: int,
        is_term: bool,
    ) -> Price:
        """Price a strategy on one axis: bytes moved, then how it changes the sharding of the
        inputs.
        """
        # one loop, since this runs for every strategy of every op
        nbytes = self.prices.inside(call, placed.ins, axis)
        passes_partial = False
        shared_partial = False
        was_sharded = False
        # one value as two arguments moves once
        counted: set[tuple[int, AxisPlacement]] = set()
        terms: list[tuple[Value, Slots]] = []
        for value, slots, placements in zip(values, slots_of_inputs, placed.ins, strict=True):
            wanted = placements[axis]
            if not was_sharded:
                was_sharded = any(slot.placements[axis] != "R" for slot in slots)
            if wanted in PARTIAL_KINDS:
                passes_partial = True
                terms.append((value, slots))
                shared_partial = not is_term and (shared_partial or value.users > 1)
            if (id(value), wanted) not in counted:
                counted.add((id(value), wanted))
                price = self.prices.input(value, slots, wanted, axis)
                nbytes += price * self.prices.weight(value, slots, axis)
        resharded = sum((m[axis] == "R") == was_sharded for m in placed.outs)
        if not is_term and (passes_partial or nbytes > 0):
            gradients_of = rules.row_of(call.target).gradients_of
            sources = gradients_of(call) if gradients_of else [None] * len(call.outs)
            for x, placements, k in zip(call.outs, placed.outs, sources, strict=True):
                if placements[axis] in PARTIAL_KINDS:
                    later = self.prices.share_of_terms(x, terms, axis)
                    price = self.prices.move(x, placements, "R", axis)
                    if k is not None:
                        price = self.prices.reduced(x, placements, slots_of_inputs[k], axis)
                    nbytes += price * later
        return Price(nbytes, float(shared_partial), float(resharded))


Handler = Callable[[Walk, Node], None]
# Of nodes that are not placed by a sharding rule: by op, or by the type of a loop. The rows are
# in handlers.py, but for the prims of per-rank code, which ops/prims.py has.
HANDLERS: dict[object, Handler] = {}


def _reads_slots(node: Node) -> bool:
    """Return whether a node needs its inputs made: a loop, or a prim."""
    is_op = isinstance(node.target, _compat.OpOverload)
    is_prim = is_op and _compat.namespace_of(node.target) == "shardfn"
    is_called = not is_op and not isinstance(node.target, Elementwise)
    return is_called or (is_prim and node.target not in READ_ANYWHERE)


def _is_made_anywhere(call: OpCall, values: list[Value]) -> bool:
    """Return whether each reader can make an op's result at its own placement: random numbers,
    expanded scalars.
    """
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
    """Return whether every rank has the global tensor."""
    return any(all(m == "R" for m in placements) for placements in value.slots)


def _is_made_with(value: Value, result: torch.Tensor) -> bool:
    """Return whether an argument can be made at any placement of its op's result."""
    if not value.fake.dim():
        return value.is_unmade or _is_replicated(value)
    is_free = value.recipe is not None or value.fill is not None
    return is_free and value.fake.shape == result.shape
