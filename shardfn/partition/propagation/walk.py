"""Stage 2, first half: walk the Program once and choose a placement for every value.

Everything here is the same on all ranks: it looks at global shapes and at the mesh's sizes only.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import attrs
import torch

from ...buckets import Wish
from ...capture import annotations as sources
from ...errors import PlacementError, problem
from ...ops.loops import Loop
from ...types import PENDING, Mark, Marks, MeshAxes, Program
from .. import layout, plan, rules
from ..redistribute import local_bytes, mark_price, route
from ..rule_api.checked import answered, failed
from ..rule_api.strategy import Choice, OpCall, replicated
from . import means, refusals, walk_shard_map
from .constraints import aligned, constrained
from .decompose import is_cut, written_out
from .lookahead import Ahead
from .units import extended, in_units
from .values import Value
from .walk_loops import nest

# A gather of an input can start before anything is computed and hide behind it; other
# collectives stand in the way.
EARLY = 0.25
CONSTRAIN = "prim_redistribute"
ALIGN = "prim_align"
AFTER = "after"
KEPT_TWICE = (
    "gather",
    "all_to_all",
    "halo",
)  # moves whose result would be kept beside what it is made of
ADD = torch.ops.aten.add.Tensor


def propagate(
    program: Program,
    axes: MeshAxes,
    in_marks: Sequence[Marks],
    out_marks: Sequence[Marks | None],
    unreduced: Collection[int] = (),
) -> plan.Plan:
    """Choose placements for every value of a Program.

    Args:
        program: what to place.
        axes: names and sizes of the mesh.
        in_marks: the placement of each input.
        out_marks: the placement asked for each output, None where it may stay as it falls.
        unreduced: inputs that are gradients which nobody has reduced yet, by number: no op
            reduces them in passing.

    Returns:
        The plan.

    Raises:
        RuleError: an op that cannot be right on this mesh.
        PlacementError: an unreduced gradient that an op would have to reduce; a result that
            cannot stay unreduced.
    """
    return walked(Walk(axes, program.name), program, in_marks, out_marks, unreduced)


def walked(
    walk: Walk,
    program: Program,
    in_marks: Sequence[Marks],
    out_marks: Sequence[Marks | None],
    unreduced: Collection[int],
) -> plan.Plan:
    """The plan that a walk over a Program makes; arguments as those of `plan`."""
    graph = program.graph.graph
    holders = graph.find_nodes(op="placeholder")
    forgotten = [
        path if i in unreduced else None for i, path in enumerate(program.in_paths)
    ]
    ins = tuple(
        walk.enter(*entry)
        for entry in zip(holders, in_marks, forgotten, strict=True)
    )
    for node in graph.nodes:
        if node.op == "call_function":
            walk.visit(node)
    (output,) = graph.find_nodes(op="output")
    outs = tuple(
        walk.leave(*leaving, output)
        for leaving in zip(
            output.args[0], out_marks, program.out_paths, strict=True
        )
    )
    needed = plan.needed(walk.steps, outs)
    return plan.Plan(
        walk.axes,
        needed,
        ins,
        outs,
        tuple(walk.gradients.values()),
        tuple(walk.unreduced),
    )


@attrs.frozen(eq=False)
class _Unaligned:
    """A gradient before it is brought to the placement of its parameter."""

    value: Value
    like: torch.fx.Node  # the parameter
    wish: str


class Walk:
    """The state of one walk: the values so far and the steps that made them."""

    def __init__(self, axes: MeshAxes, name: str) -> None:
        self.axes, self.name = axes, name
        self.values: dict[torch.fx.Node, Any] = {}
        self.unaligned: dict[torch.fx.Node, _Unaligned] = {}
        self.gradients: dict[torch.fx.Node, plan.Gradient] = {}
        self.unreduced: list[
            tuple[plan.Slot, torch.fx.Node]
        ] = []  # gradients that leave before they are
        self.steps: list[plan.Step] = []
        self.later: Collection[
            torch.fx.Node
        ] = ()  # gradients that a loop leaves Partial
        self.count = 0
        self.ahead = Ahead(self)

    def slot(self, fake: torch.Tensor, marks: Marks) -> plan.Slot:
        self.count += 1
        return plan.Slot(self.count, fake, marks)

    def enter(
        self, node: torch.fx.Node, marks: Marks, unreduced: str | None
    ) -> plan.Slot:
        fake = node.meta["val"]
        slot = self.slot(fake, marks)
        held = means.rescaled(self, node, slot, means.as_sums(marks))
        self.values[node] = Value(
            fake,
            early=True,
            slots={held.marks: (held, None)},
            users=len(node.users),
            unreduced=unreduced,
        )
        return slot

    def leave(
        self,
        node: torch.fx.Node,
        marks: Marks | None,
        path: str,
        output: torch.fx.Node,
    ) -> plan.Slot:
        value = self.values[node]
        asked = marks or _settled(value, self.axes)
        marks = means.as_sums(asked)
        if _is_pending(marks):
            value = self.unaligned[node].value if node in self.unaligned else value
            if not self.reaches(value, marks):
                raise refusals.cannot_stay_pending(
                    self.name, path, node, asked, self.axes
                )
        slot = means.rescaled(
            self, output, self.bring(value, marks, output, implicit=False), asked
        )
        if _is_pending(marks) and (node in self.unaligned or value.unreduced):
            self.unreduced.append((slot, node))
        return slot

    def reaches(self, value: Value, marks: Marks) -> bool:
        if value.fill is not None:
            return all(rules.fill_fits(value.fill[1], m) for m in marks)
        shape, size = tuple(value.fake.shape), value.fake.element_size()
        return any(
            route(shape, size, s.marks, marks, self.axes)
            for s in value.readable("forward")
        )

    def visit(self, node: torch.fx.Node) -> None:
        op = getattr(node.target, "_opname", getattr(node.target, "__name__", ""))
        if isinstance(node.target, Loop):
            nest(self, node)
        elif op == "getitem":
            self.values[node] = self.values[node.args[0]][node.args[1]]
            self.values[node].users = len(node.users)
        elif op == CONSTRAIN:
            self.constrain(node)
        elif op == ALIGN:
            self.align(node)
        elif op == AFTER:
            self.after(node)
        elif (
            getattr(node.target, "namespace", "") == "shardfn"
            and op in walk_shard_map.PRIMS
        ):
            walk_shard_map.visit(self, node, op)
        elif (value := rules.fill_value(node.target, node.args)) is not None:
            like = (
                self.values.get(node.args[0]) if node.target in rules.LIKE else None
            )
            self.values[node] = Value(
                node.meta["val"],
                early=False,
                fill=(node, value),
                users=len(node.users),
                like=like,
            )
        elif not self.add_unreduced(node):
            self.apply(node)

    def fresh(self) -> Walk:
        """A walk over another graph of the same program."""
        return Walk(self.axes, self.name)

    def valued(self, slot: plan.Slot, varies: frozenset[str]) -> Value:
        """A new value, at one placement."""
        return Value(
            slot.value, early=False, slots={slot.marks: (slot, None)}, varies=varies
        )

    def constrain(self, node: torch.fx.Node) -> None:
        value = self.values[node.args[0]]
        current = _settled(value, self.axes)
        try:
            marks = constrained(node.args[1], self.axes, value.fake.shape, current)
        except ValueError as error:
            source, fix = (
                node.meta.get("source"),
                "P with axes of the mesh, one part for each dim",
            )
            text = problem("constrain", str(error), fix=fix, source=source)
            raise PlacementError(
                text, placements=node.args[1], source=source, fix=fix
            ) from None
        self.same(node, value, self.bring(value, marks, node, implicit=False))

    def align(self, node: torch.fx.Node) -> None:
        value = self.values[node.args[0]]
        first = next(iter(value.readable(node.meta["phase"])), None)
        if node in self.later and first is not None and _is_pending(first.marks):
            self.same(node, value, first)
            return
        self.settle(node, self.values[node.args[0]], node.args[1], node.args[2])

    def settle(
        self, node: torch.fx.Node, value: Value, like_node: torch.fx.Node, wish: str
    ) -> None:
        """Bring a gradient to the placement of its parameter."""
        like = self.values[like_node]
        wanted = next(iter(like.slots), None) or ("R",) * len(self.axes.sizes)
        marks = aligned(value.fake.shape, like.fake.shape, wanted, self.axes)
        self.unaligned[node] = _Unaligned(
            attrs.evolve(value, slots=dict(value.slots)), like_node, wish
        )
        slot = self.bring(value, marks, node, implicit=False)
        self.same(node, value, slot)
        if wish:
            parameter = like.slots[wanted][0] if wanted in like.slots else None
            unused = value.fill is not None and value.fill[1] == 0
            region = node.meta.get("custom", {}).get("gradients", "")
            self.gradients[node] = plan.Gradient(
                node, Wish.of(wish), region, parameter, slot, unused
            )

    def add_unreduced(self, node: torch.fx.Node) -> bool:
        """Add gradients of one parameter before they are reduced, where nothing else reads
        them; whether these are such.
        """
        parts = [self.unaligned.get(x) for x in node.all_input_nodes]
        if (
            node.target is not ADD
            or len(parts) != 2
            or node.kwargs
            or any(len(x.users) > 1 for x in node.all_input_nodes)
        ):
            return False
        if None in parts or parts[0].like is not parts[1].like:
            return False
        for x in node.all_input_nodes:
            self.values[x] = self.unaligned[x].value
            self.gradients.pop(x, None)
        self.apply(node)
        self.settle(node, self.values[node], parts[0].like, parts[0].wish)
        return True

    def same(self, node: torch.fx.Node, value: Value, slot: plan.Slot) -> None:
        """A prim's result is its argument, at one placement."""
        slots = {slot.marks: (slot, None)}
        self.values[node] = Value(
            value.fake,
            early=False,
            slots=slots,
            users=len(node.users),
            varies=value.varies,
        )

    def after(self, node: torch.fx.Node) -> None:
        """A value as it is, at every placement that it has, but not before another one is there."""
        value, token = (self.values[x] for x in node.args)
        there = next(iter(token.readable("backward")), None)
        if value.fill is not None or there is None:
            self.values[node] = value
            return
        slots: dict[Marks, tuple[plan.Slot, str | None]] = {}
        for slot, only in value.slots.values():
            if only in (None, "backward"):
                slots[slot.marks] = (self.slot(value.fake, slot.marks), only)
                self.steps.append(
                    plan.Apply(node, (slot, there), (slots[slot.marks][0],))
                )
        self.values[node] = attrs.evolve(value, slots=slots, users=len(node.users))

    def write_out(
        self, node: torch.fx.Node, call: OpCall, values: list[Value]
    ) -> None:
        """Place an op as the smaller ones that it is made of."""
        graph = written_out(call, node)
        self.values.update(
            zip(graph.find_nodes(op="placeholder"), values, strict=True)
        )
        for inner in graph.nodes:
            if inner.op == "call_function":
                self.visit(inner)
        (output,) = graph.find_nodes(op="output")
        self.values[node] = self.values[output.args[0]]
        self.values[node].users = len(node.users)

    def apply(self, node: torch.fx.Node) -> None:
        call, values = self.call(node)
        if is_cut(
            call, [v.readable(node.meta["phase"]) for v in values], self.axes.sizes
        ):
            self.write_out(node, call, values)
            return
        refusals.refuse_random(node, self.name, self.axes)
        in_marks, out_marks = self.choose(call, values, node)
        ins = tuple(
            self.bring(v, m, node, implicit=True)
            for v, m in zip(values, in_marks, strict=True)
        )
        early = node.target in rules.REARRANGES and all(v.early for v in values)
        outs = [
            self.slot(fake, marks)
            for fake, marks in zip(call.outs, out_marks, strict=True)
        ]
        self.steps.append(plan.Apply(node, ins, tuple(outs)))
        unreduced = next((v.unreduced for v in values if v.unreduced), None)
        users = len(node.users)
        varies = frozenset().union(*(v.varies for v in values))
        equal = frozenset(
            a
            for a in varies
            if all(a in v.equal or a not in v.varies for v in values)
        )
        kept = [unreduced if _is_pending(o.marks) else None for o in outs]
        slots = [{o.marks: (o, None)} for o in outs]
        made = [
            Value(o.value, early, None, s, users, k, None, varies, equal)
            for o, s, k in zip(outs, slots, kept, strict=True)
        ]
        if early and len(values) == len(outs) == 1:
            self.rearrange(node, call, values[0], made[0])
        result = node.meta.get("val")
        if isinstance(result, torch.Tensor):
            self.values[node] = made[0]
        elif result is not None:
            feed = iter(made)
            self.values[node] = [
                next(feed) if isinstance(r, torch.Tensor) else None for r in result
            ]

    def rearrange(
        self, node: torch.fx.Node, call: OpCall, value: Value, made: Value
    ) -> None:
        """Let a rearranged parameter be read off the parameter wherever that is, gathered or
        not, so that it is gathered once.
        """
        choices = answered(rules.find(call.target), call, self.name, node)
        for slot, only in list(value.slots.values()):
            found = [
                next((out for (mine,), (out,) in choices if mine == mark), None)
                for mark in slot.marks
            ]
            marks = (
                None
                if None in found
                else layout.canonical(call.outs[0].shape, found, self.axes.sizes)
            )
            if (
                only in (None, node.meta["phase"])
                and marks is not None
                and marks not in made.slots
            ):
                made.slots[marks] = (self.slot(call.outs[0], marks), only)
                self.steps.append(
                    plan.Apply(node, (slot,), (made.slots[marks][0],))
                )

    def call(self, node: torch.fx.Node) -> tuple[OpCall, list[Value]]:
        nodes: list[torch.fx.Node] = []
        torch.fx.node.map_arg((node.args, node.kwargs), nodes.append)
        values = [self.values[n] for n in nodes]
        result = node.meta.get("val")  # none for an op that only checks
        outs = (
            (result,)
            if isinstance(result, torch.Tensor)
            else tuple(r for r in result or () if isinstance(r, torch.Tensor))
        )
        return OpCall(
            node.target,
            node.args,
            dict(node.kwargs),
            tuple(v.fake for v in values),
            outs,
        ), values

    def choose(
        self, call: OpCall, values: list[Value], node: torch.fx.Node
    ) -> tuple[list[Marks], list[Marks]]:
        """Per axis, in mesh order, the choice that moves the fewest bytes."""
        choices = answered(rules.find(call.target), call, self.name, node)
        held = [v.held(node.meta["phase"]) for v in values]
        ins: list[Marks] = [()] * len(call.ins)
        outs: list[Marks] = [()] * len(call.outs)
        own = frozenset().union(*(v.varies for v in values))
        for axis, name in enumerate(self.axes.names):
            found: list[tuple[tuple[float, ...], Any]] = []
            for choice in choices if name not in own else [replicated(call)]:
                for concrete in in_units(choice, held, axis):
                    placed = self.fit(call, concrete, ins, outs)
                    if placed is not None:
                        found.append(
                            (self.price(call, values, held, placed, axis), placed)
                        )
            if not found:
                raise failed(
                    f"none of its choices fits on axis {self.axes.names[axis]}",
                    rules.find(call.target),
                    call,
                    self.name,
                    node,
                )
            ins, outs = self.best(node, found, axis)
        return ins, outs

    def best(
        self,
        node: torch.fx.Node,
        found: list[tuple[tuple[float, ...], Any]],
        axis: int,
    ) -> Any:
        """The cheapest of some priced choices; of equals the one whose result its readers want,
        then the first.
        """
        least = min(price[:2] for price, _ in found)
        equals = [(price, placed) for price, placed in found if price[:2] == least]
        if len(equals) > 1 and isinstance(node.meta.get("val"), torch.Tensor):
            equals = [
                ((self.ahead.price(node, placed[1][0], axis), *price), placed)
                for price, placed in equals
            ]
        return min(equals, key=lambda pair: pair[0])[1]

    def fit(
        self, call: OpCall, choice: Choice, ins: list[Marks], outs: list[Marks]
    ) -> tuple[list[Marks], list[Marks]] | None:
        """Extend the marks of the axes so far by one axis; None where a unit does not fit."""
        sizes = self.axes.sizes
        new_ins = [
            extended(x.shape, marks, m, sizes)
            for x, marks, m in zip(call.ins, ins, choice[0], strict=True)
        ]
        new_outs = [
            extended(x.shape, marks, m, sizes)
            for x, marks, m in zip(call.outs, outs, choice[1], strict=True)
        ]
        return None if None in new_ins or None in new_outs else (new_ins, new_outs)

    def price(
        self,
        call: OpCall,
        values: list[Value],
        held: list[list[plan.Slot]],
        placed: Any,
        axis: int,
    ) -> tuple[float, ...]:
        """What a choice costs on one axis; at equal cost, what keeps the most cut of what came
        in cut.
        """
        ins, outs = placed
        total, passes, busy, placed_already = 0.0, False, False, False
        brought = set()  # what two arguments share is brought once
        for value, slots, marks in zip(values, held, ins, strict=True):
            wanted = marks[axis]
            placed_already = placed_already or any(
                slot.marks[axis] != "R" for slot in slots
            )
            passes = passes or wanted in PENDING
            busy = busy or (wanted in PENDING and value.users > 1)
            if (id(value), wanted) not in brought:
                total += self.input_price(value, slots, wanted, axis) * self.weight(
                    value, slots, axis
                )
            brought.add((id(value), wanted))
        whole = sum(
            (m[axis] == "R") == placed_already for m in outs
        )  # nothing is cut that came in whole
        if passes or total > 0:
            total += sum(
                self.reduce_price(x, m, axis)
                for x, m in zip(call.outs, outs, strict=True)
                if m[axis] in PENDING
            )
        return total, float(busy), float(whole)

    def weight(self, value: Value, slots: list[plan.Slot], axis: int) -> float:
        """What a byte of a value counts."""
        return (
            EARLY
            if value.early
            and not any(slot.marks[axis] in PENDING for slot in slots)
            else 1.0
        )

    def input_price(
        self, value: Value, slots: list[plan.Slot], wanted: Mark, axis: int
    ) -> float:
        if value.fill is not None:
            return 0.0 if rules.fill_fits(value.fill[1], wanted) else float("inf")
        n = self.axes.sizes[axis]
        if n == 1:
            return (
                0.0
                if wanted not in PENDING
                or any(s.marks[axis] == wanted for s in slots)
                else float("inf")
            )
        nbytes = _nbytes(value.fake)
        shape, sizes, cost = value.fake.shape, self.axes.sizes, self.axes.cost(axis)
        return min(
            mark_price(
                s.marks[axis],
                wanted,
                local_bytes(nbytes, s.marks, sizes, axis),
                n,
                shape,
                cost,
            )
            for s in slots
        )

    def reduce_price(self, x: torch.Tensor, marks: Marks, axis: int) -> float:
        nbytes = local_bytes(_nbytes(x), marks, self.axes.sizes[: len(marks)], axis)
        return mark_price(
            marks[axis],
            "R",
            nbytes,
            self.axes.sizes[axis],
            x.shape,
            self.axes.cost(axis),
        )

    def bring(
        self, value: Value, marks: Marks, node: torch.fx.Node, *, implicit: bool
    ) -> plan.Slot:
        """The value at a placement: a slot that has it, or the cheapest moves from one that has
        another.
        """
        phase = node.meta.get("phase", "forward")
        slots = value.readable(phase)
        for slot in slots:
            if slot.marks == marks:
                return slot
        if value.fill is not None:
            slot = self.slot(value.fake, marks)
            self.steps.append(plan.Fill(value.fill[0], slot, value.fill[1]))
            value.slots[marks] = (slot, None)
            return slot
        found = [
            (
                route(
                    tuple(value.fake.shape),
                    value.fake.element_size(),
                    s.marks,
                    marks,
                    self.axes,
                ),
                s,
            )
            for s in slots
        ]
        (_, moves), source = min(
            ((r, s) for r, s in found if r is not None), key=lambda pair: pair[0][0]
        )
        if (
            implicit
            and value.unreduced
            and any(m.kind.startswith("reduce") for m in moves)
        ):
            raise refusals.not_reduced(
                self.name, value.unreduced, node, source.marks, self.axes
            )
        slot = self.slot(value.fake, marks)
        self.steps.append(
            plan.Redistribute(
                source, slot, moves, node, implicit and not value.asked
            )
        )
        again = (
            KEPT_TWICE
            if sources.is_checkpointed(node.meta.get("custom") or {})
            else ("gather",)
            if value.early
            else ()
        )
        # a parameter that was gathered for the forward is gathered again for the backward, not
        # kept in between; nor is
        # what a checkpointed call gathers
        value.slots[marks] = (
            slot,
            phase if any(m.kind in again for m in moves) else None,
        )
        return slot


def _settled(value: Value, axes: MeshAxes) -> Marks:
    """Where a value stays if nothing is asked: as it is, pending sums reduced, in plain chunks."""
    if value.fill is not None and not value.slots:
        return ("R",) * len(axes.sizes)
    marks = next(iter(value.slots))
    plain = tuple(
        "R" if m in PENDING else layout.split(m)[0] if isinstance(m, tuple) else m
        for m in marks
    )
    return layout.canonical(value.fake.shape, plain, axes.sizes)


def _is_pending(marks: Marks) -> bool:
    return any(m in PENDING for m in marks)


def _nbytes(x: torch.Tensor) -> float:
    return float(x.numel() * x.element_size())
