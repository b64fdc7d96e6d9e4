"""One walk over a Program: the placements of its values, and the steps that make them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch

from ...ops.debug import DEBUG
from ...ops.loops import Loop
from ...ops.nodes import args_of
from ...ops.prims import PRIMS
from ...placement import is_said
from ...types import IfPartial, Marks, MeshAxes
from .. import layout, plan, rules
from ..rule_api.checked import answered
from ..rule_api.strategy import OpCall
from . import made_anywhere, refusals, residuals, views, walk_shard_map
from .choose import Chooser, Chosen
from .constraints import ALIGN, add_unaligned, align, constrain
from .decompose import is_cut, written_out
from .loops.walk_loops import nest
from .partial import ends, gradient_casts, means, sums
from .sorted_rows import place as sorted_rows
from .values import NO_ADVICE, Advice, Placed, Unaligned, Value, is_made_again, is_partial, settled

CONSTRAIN = "prim_redistribute"
AFTER = "after"
COTANGENT = "prim_cotangent"


def op_name(node: torch.fx.Node) -> str:
    """The name of a node's op, without its overload."""
    return getattr(node.target, "_opname", getattr(node.target, "__name__", ""))


class Walk(Chooser):
    """The state of one walk: the values so far and the steps that made them."""

    def __init__(self, axes: MeshAxes, name: str, advice: Advice = NO_ADVICE) -> None:
        super().__init__(axes, name, advice)
        # the placements of inputs and of constraints
        self.given: set[Marks] = set()
        # the placements of the carries of loops, by shape
        self.carried: dict[tuple[int, ...], Marks] = {}
        # what was chosen for each op, and for the ops that one was written out as, that one
        self.chosen: dict[torch.fx.Node, Chosen] = {}
        self.within: dict[torch.fx.Node, torch.fx.Node] = {}
        # the terms of sums that are added in another order, and the sums left to later ones
        self.summed: dict[torch.fx.Node, list[torch.fx.Node]] = {}
        self.left: set[torch.fx.Node] = set()
        self.merged: set[torch.fx.Node] = set()  # gradients that are added first
        self.unaligned: dict[torch.fx.Node, Unaligned] = {}
        self.gradients: dict[torch.fx.Node, plan.Gradient] = {}
        # gradients that leave the program Partial
        self.unreduced: list[tuple[plan.Slot, torch.fx.Node]] = []
        # gradients that stay Partial until the end of their loop
        self.later: Collection[torch.fx.Node] = ()
        self.steps: list[plan.Step] = []
        # the sorts that ranks may do on their own rows, and the ops on such rows
        self.sorts: dict[torch.fx.Graph, Any] = {}
        self.own_rows: dict[torch.fx.Node, sorted_rows.OwnRows] = {}
        self.count = 0  # number of slots so far
        self.cotangents: dict[int, plan.Slot] = {}  # by number

    def slot(self, fake: torch.Tensor, marks: Marks) -> plan.Slot:
        self.count += 1
        return plan.Slot(self.count, fake, marks)

    def enter(self, node: torch.fx.Node, marks: Marks, unreduced: str | None) -> plan.Slot:
        """Add an input. Returns its slot."""
        fake = node.meta["val"]
        slot = self.slot(fake, marks)
        self.note_given(fake.shape, marks)
        as_sum = means.rescaled(self, node, slot, means.as_sums(marks))
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

    def leave(
        self, node: torch.fx.Node, marks: Marks | None, path: str, output: torch.fx.Node
    ) -> plan.Slot:
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
        slot = means.rescaled(self, output, as_sum, wanted)
        if stays_partial and (node in self.unaligned or value.unreduced):
            self.unreduced.append((slot, node))
        return slot

    def visit(self, node: torch.fx.Node) -> None:
        """Place the result of one node."""
        op = op_name(node)
        sorted_rows.begin(self, node)
        if made_anywhere.reads_slots(node):
            made_anywhere.make_inputs(self, node)
        if isinstance(node.target, Loop):
            nest(self, node)
        elif op == "getitem":
            source, number = args_of(node)
            self.values[node] = x = self.values[source][number]
            x.users = ends.reducing(node, x.slots, self.ahead.choices)
        elif node in self.own_rows:
            sorted_rows.place(self, node)
        elif op == CONSTRAIN:
            constrain(self, node)
        elif op == ALIGN:
            align(self, node)
        elif op == AFTER:
            residuals.after(self, node)
        elif op == COTANGENT:
            residuals.cotangent(self, node)
        elif node.target in PRIMS:
            walk_shard_map.visit(self, node)
        elif (value := self.fill_of(node)) is not None:
            self.values[node] = self.constant(node, value)
        elif not (add_unaligned(self, node) or sums.add_later(self, node)):
            self.apply(node)

    def fill_of(self, node: torch.fx.Node) -> Any:
        """The value of a constant tensor, or of a view of one. None for any other op."""
        fake = node.meta.get("val")
        if not isinstance(fake, torch.Tensor):
            return None
        if node.target in rules.VIEWS:
            source = self.values[args_of(node)[0]]
            return None if source.fill is None else source.fill[1]
        return rules.fill_value(node.target, node.args, fake.dtype)

    def constant(self, node: torch.fx.Node, value: Any) -> Value:
        """A constant tensor of one value: each rank makes its shard locally, at any placement."""
        is_like = node.target in rules.LIKE
        return Value(
            node.meta["val"],
            early=False,
            fill=(node, value),
            users=len(node.users),
            like=self.values.get(args_of(node)[0]) if is_like else None,
        )

    def fresh(self) -> Walk:
        """A walk over another graph of the same program."""
        inner = Walk(self.axes, self.name, self.advice)
        inner.carried = self.carried
        return inner

    def valued(self, slot: plan.Slot, varies: frozenset[str]) -> Value:
        """A new value, at one placement."""
        return Value(slot.value, early=False, slots={slot.marks: (slot, None)}, varies=varies)

    def place_as(self, node: torch.fx.Node, value: Value, slot: plan.Slot) -> None:
        """Make a prim's result its argument, at one placement."""
        self.values[node] = Value(
            value.fake,
            early=False,
            slots={slot.marks: (slot, None)},
            users=len(node.users),
            varies=value.varies,
        )

    def write_out(self, node: torch.fx.Node, call: OpCall, values: list[Value]) -> None:
        """Place an op by its decomposition into smaller ones."""
        graph = written_out(call, node)
        holders = graph.find_nodes(op="placeholder")
        self.values.update(zip(holders, values, strict=True))
        self.visit_in_place(node, graph)
        (output,) = graph.find_nodes(op="output")
        self.values[node] = self.values[output.args[0]]
        self.values[node].users = len(node.users)

    def visit_in_place(self, node: torch.fx.Node, graph: torch.fx.Graph) -> None:
        """Place the ops that stand for a node."""
        for inner in graph.nodes:
            self.within[inner] = self.within.get(node, node)
            if inner.op == "call_function":
                self.visit(inner)

    def apply(self, node: torch.fx.Node) -> None:
        """Place an op by the cheapest strategy of its sharding rule."""
        call, values = self.call(node)
        readable = [v.readable(node.meta["phase"]) for v in values]
        advised = node in self.advice.ops
        if not advised and is_cut(call, readable, self.axes.sizes):
            self.write_out(node, call, values)
            return
        if made_anywhere.is_made_anywhere(call, values):
            self.values[node] = made_anywhere.unmade(node, values)
            return
        refusals.refuse_random(node, self.name, self.axes)
        placed = self.choose(call, values, node)
        self.chosen[node] = Chosen(call, values, placed)
        self.take(node, call, values, placed)

    def take(
        self,
        node: torch.fx.Node,
        call: OpCall,
        values: list[Value],
        placed: Placed,
        local: Callable[..., Any] | None = None,
    ) -> None:
        """Place an op so; `local` is how a rank runs it, if that is not by its rule."""
        in_marks, out_marks = placed
        ins = tuple(
            self.redistribute(value, marks, node, implicit=node.target is not DEBUG)
            for value, marks in zip(values, in_marks, strict=True)
        )
        outs = tuple(
            self.slot(fake, marks) for fake, marks in zip(call.outs, out_marks, strict=True)
        )
        self.steps.append(plan.Apply(node, ins, outs, local))
        results = self.results(node, values, outs)
        if len(values) == len(results) == 1:
            self.rearrange(node, call, values[0], results[0])
        self.assign(node, results)

    def choose(self, call: OpCall, values: list[Value], node: torch.fx.Node) -> Placed:
        """A cast that makes a gradient is placed like the parameter; else the cheapest."""
        cast = gradient_casts.placed(self, node, call, values)
        return cast or super().choose(call, values, node)

    def call(self, node: torch.fx.Node) -> tuple[OpCall, list[Value]]:
        """An op's call in the form that its rule takes, and its input values."""
        nodes: list[torch.fx.Node] = []
        torch.fx.node.map_arg((node.args, node.kwargs), nodes.append)
        values = [self.values[n] for n in nodes]
        for value in values:
            views.follow(self, value, node.meta["phase"])
        result = node.meta.get("val")  # empty for an op that only checks
        results = (result,) if isinstance(result, torch.Tensor) else result or ()
        call = OpCall(
            target=node.target,
            args=node.args,
            kwargs=dict(node.kwargs),
            ins=tuple(v.fake for v in values),
            outs=tuple(r for r in results if isinstance(r, torch.Tensor)),
        )
        return call, values

    def results(
        self, node: torch.fx.Node, values: list[Value], outs: Iterable[plan.Slot]
    ) -> list[Value]:
        """The values of an op's results, each at one placement."""
        early = node.target in rules.REARRANGES and all(v.early for v in values)
        gradient = next((v.unreduced for v in values if v.unreduced), None)
        varies = frozenset().union(*(v.varies for v in values))
        equal = frozenset(
            axis for axis in varies if all(axis in v.equal or axis not in v.varies for v in values)
        )
        return [
            Value(
                out.value,
                early=early,
                slots={out.marks: (out, None)},
                users=ends.reducing(node, [out.marks], self.ahead.choices),
                unreduced=gradient if is_partial(out.marks) else None,
                varies=varies,
                equal=equal,
            )
            for out in outs
        ]

    def assign(self, node: torch.fx.Node, results: list[Value]) -> None:
        """Record the values of an op's results, and for a tuple those of its tensors."""
        result = node.meta.get("val")
        if isinstance(result, torch.Tensor):
            self.values[node] = results[0]
        elif result is not None:
            feed = iter(results)
            self.values[node] = [
                next(feed) if isinstance(r, torch.Tensor) else None for r in result
            ]

    def rearrange(self, node: torch.fx.Node, call: OpCall, value: Value, result: Value) -> None:
        """Rearrange a parameter at each of its placements, so that it is gathered once. A view
        of another value has those of its source.
        """
        if not result.early:
            views.note(node, call, value, result)
            return
        strategies = answered(rules.find(call.target), call, self.name, node)
        out_mark = {}
        for (mark,), (out,) in strategies:
            out_mark.setdefault(mark, out)
        for slot, only in list(value.slots.values()):
            if only not in (None, node.meta["phase"]):
                continue
            if any(mark not in out_mark for mark in slot.marks):
                continue
            out_marks = [out_mark[mark] for mark in slot.marks]
            shape = call.outs[0].shape
            marks = layout.canonical(shape, out_marks, self.axes.sizes)
            if marks is not None and marks not in result.slots:
                out = self.slot(call.outs[0], marks)
                result.slots[marks] = out, only
                self.steps.append(plan.Apply(node, (slot,), (out,)))

    def redistribute(
        self, value: Value, marks: Marks, node: torch.fx.Node, *, implicit: bool
    ) -> plan.Slot:
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
        views.follow(self, value, phase)
        for slot in value.readable(phase):
            if slot.marks == marks:
                return slot
        if value.fill is not None:
            return self.fill(value, marks)
        if value.recipe is not None:
            return made_anywhere.make(self, value, marks)
        shared = views.gathered(self, value, marks, node, implicit=implicit)
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

    def fill(self, value: Value, marks: Marks) -> plan.Slot:
        """Make a constant at a placement."""
        assert value.fill is not None
        node, number = value.fill
        slot = self.slot(value.fake, marks)
        self.steps.append(plan.Fill(node, slot, number))
        value.slots[marks] = slot, None
        return slot
