"""The global values of a simulated run, put together from the local tensors of its ranks.

A value of the program may have several local forms, one for each placement at which the plan holds
it. The first is what its op returned. The last that is not Partial is what later ops mostly read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from ...mesh import all_coordinates
from ...ops import shard_map
from ...ops.loops import Loop
from ...ops.nodes import returned_by
from ...ops.prims import CALLS, PRIMS
from ...partition import layout
from ...partition import plan as steps
from ...runtime.compiled import Compiled, inputs_of_ranks
from ...runtime.layouts import cut, join
from ...runtime.simulator import simulate
from ...types import REDUCTIONS, MeshAxes, MeshPlacements, Program
from .rounding import Terms, exceeding

FROM_LOCAL = CALLS[shard_map.from_local].op


@attrs.frozen(eq=False)
class GlobalValue:
    """A value of a program at one placement, put together.

    Args:
        slot: its slot in the plan.
        value: the global tensor.
        magnitude: of a Partial value, the sum of the magnitudes of its terms; else None.
        unequal: the ranks whose replica differs from that of the first rank by more than rounding.
    """

    slot: steps.Slot
    value: torch.Tensor
    magnitude: torch.Tensor | None
    unequal: tuple[int, ...]

    @property
    def terms(self) -> Terms:
        """What the sum of its terms rounds by."""
        return Terms(self.magnitude, 1)


@attrs.frozen(eq=False)
class Redistributed:
    """A redistribution of a value whose result is another value.

    Args:
        node: of the program, whose value it is.
        step: of the plan.
        before: the value before it.
        after: the value after it.
        wrong: the elements that differ, as a mask.
    """

    node: torch.fx.Node
    step: Any
    before: GlobalValue
    after: GlobalValue
    wrong: torch.Tensor


@attrs.frozen(eq=False)
class Values:
    """The values of one run of a program.

    Args:
        program: the global program.
        axes: of the mesh; without names for one device.
        first: of each value, what its op returned.
        read: of each value, what later ops read.
        locals: the local tensors of the values that belong to one rank, inside of a shard_map.
        redistributed: the redistributions that changed a value, in order.
    """

    program: Program
    axes: MeshAxes
    first: dict[torch.fx.Node, GlobalValue]
    read: dict[torch.fx.Node, torch.Tensor]
    locals: dict[torch.fx.Node, list[torch.Tensor]]
    redistributed: list[Redistributed]

    def ranks_of(self, wrong: torch.Tensor, marks: MeshPlacements) -> tuple[int, ...]:
        """List the ranks that hold elements of a mask, by number in the mesh."""
        if any(m in REDUCTIONS for m in marks):
            marks = tuple("R" if m in REDUCTIONS else m for m in marks)
        rows = enumerate(all_coordinates(self.axes))
        return tuple(
            r
            for r, c in rows
            if layout.is_here(marks, c) and bool(cut(wrong, marks, self.axes, c).any())
        )


def values_of(compiled: Compiled, leaves: list[Any]) -> Values:
    """Run a compiled program for all ranks, op by op, and put each of its values together.

    Args:
        compiled: the program of a simulated world, or of one device.
        leaves: of its arguments.
    """
    program, plan, axes = compiled.captured.program, compiled.partition, compiled.placed.axes
    everyone = all_coordinates(axes) if axes.names else [()]
    programs = [compiled.programs[c] for c in everyone]
    inputs = inputs_of_ranks(compiled)(leaves)
    gathering = _Gathering(program, plan, axes, [p.graph for p in programs])
    results = simulate(programs, inputs, everyone, gathering.note)
    gathering.note_results(results)
    return gathering.values()


class _Gathering:
    """Collects the local tensors of all ranks, and puts a value together once all have come."""

    def __init__(
        self, program: Program, plan: steps.Plan, axes: MeshAxes, graphs: Sequence[torch.fx.Graph]
    ) -> None:
        self.program, self.plan, self.axes = program, plan, axes
        self.forms = Forms(axes)
        self.tops = {id(graph) for graph in graphs}
        self.node_of = node_of_slots(program, plan)
        self.slots, self.steps = slots_and_steps(plan)
        self.own = of_one_rank(program.graph.graph)
        self.expected: dict[int, set[int]] = {}
        for rank, graph in enumerate(graphs):
            for node in graph.nodes:
                for number in node.meta.get("slots", ()):
                    self.expected.setdefault(number, set()).add(rank)
        self.waiting: dict[int, dict[int, torch.Tensor]] = {}
        self.known: dict[int, GlobalValue] = {}  # by slot
        self.locals: dict[torch.fx.Node, list[torch.Tensor]] = {}

    def note(self, rank: int, node: torch.fx.Node, x: Any) -> None:
        """Take one rank's result of a node."""
        numbers = node.meta.get("slots", ())
        if not numbers or id(node.graph) not in self.tops or not isinstance(x, torch.Tensor):
            return
        for number in numbers:
            if number not in self.node_of or number not in self.slots:
                continue
            rows = self.waiting.setdefault(number, {})
            rows[rank] = x
            if len(rows) == len(self.expected[number]):
                self._put_together(number, self.waiting.pop(number))

    def _put_together(self, number: int, rows: dict[int, torch.Tensor]) -> None:
        node, slot = self.node_of[number], self.slots[number]
        if node in self.own:
            if len(rows) == len(self.forms.everyone):
                self.locals[node] = [rows[r] for r in sorted(rows)]
            return
        value = self.forms.global_value(slot, rows, self._claimed(number, slot.placements))
        if value is not None:
            self.known[number] = value

    def note_results(self, results: Sequence[Sequence[torch.Tensor]]) -> None:
        """Take the results of all ranks, of which an op that is run in parts says nothing."""
        columns = zip(*results, strict=True)
        nodes = returned_by(self.program.graph.graph)
        seen = {self.node_of[number] for number in self.known}
        for slot, node, column in zip(self.plan.outs, nodes, columns, strict=True):
            if node in seen or node in self.own:
                continue
            replicated = tuple(m == "R" for m in slot.placements)
            value = self.forms.global_value(slot, dict(enumerate(column)), replicated)
            if value is not None:
                self.known[slot.number], self.node_of[slot.number] = value, node

    def _claimed(self, number: int, marks: MeshPlacements) -> tuple[bool, ...]:
        """For each axis, whether the plan says that a step makes equal replicas over it, of values
        that have none.
        """
        step = self.steps.get(number)
        reads = step.read if step is not None else ()
        return tuple(
            m == "R" and (step is None or any(x.placements[k] != "R" for x in reads))
            for k, m in enumerate(marks)
        )

    def values(self) -> Values:
        """The values, once the run has ended."""
        first: dict[torch.fx.Node, GlobalValue] = {}
        read: dict[torch.fx.Node, torch.Tensor] = {}
        wrong = []
        for number in sorted(self.known):
            value, node = self.known[number], self.node_of[number]
            if node not in first:
                first[node], read[node] = value, value.value
                continue
            changed = self._changed(number, node, value)
            if changed is not None:
                wrong.append(changed)
            if value.magnitude is None:
                read[node] = value.value
        return Values(self.program, self.axes, first, read, self.locals, wrong)

    def _changed(self, number: int, node: torch.fx.Node, value: GlobalValue) -> Any:
        """Compare a slot with the one that it was redistributed from."""
        step = self.steps.get(number)
        if not isinstance(step, steps.Redistribute) or step.source.number not in self.known:
            return None
        before = self.known[step.source.number]
        if before.value.shape != value.value.shape or before.value.dtype != value.value.dtype:
            return None
        terms = attrs.evolve(before.terms, count=max(self.axes.sizes, default=1))
        mask = exceeding(before.value, value.value, terms=terms)
        if mask is None and not value.unequal:
            return None
        if mask is None:
            mask = torch.zeros(value.value.shape, dtype=torch.bool)
        return Redistributed(node, step, before, value, mask)


@attrs.frozen(eq=False)
class _Form:
    """How the local tensors of one shape and placements lie on the ranks.

    Args:
        here: the ranks that have one.
        shapes: of their local tensors.
        is_partial: whether they are terms.
        is_sharded: whether they are shards.
    """

    here: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    is_partial: bool
    is_sharded: bool


class Forms:
    """Puts global values together on one mesh."""

    def __init__(self, axes: MeshAxes) -> None:
        self.axes = axes
        self.everyone = all_coordinates(axes) if axes.names else [()]
        self.forms: dict[Any, _Form | None] = {}
        self.firsts: dict[tuple[bool, ...], list[int]] = {}

    def form(self, shape: tuple[int, ...], marks: MeshPlacements) -> _Form | None:
        """How a value lies on the ranks; None for one with halos."""
        key = shape, marks
        if key not in self.forms:
            self.forms[key] = self._form(shape, marks)
        return self.forms[key]

    def _form(self, shape: tuple[int, ...], marks: MeshPlacements) -> _Form | None:
        if any(any(layout.halo(m)) for m in marks):
            return None
        here = [r for r, c in enumerate(self.everyone) if layout.is_here(marks, c)]
        sizes = self.axes.sizes
        return _Form(
            tuple(here),
            tuple(layout.local_shape(shape, marks, sizes, self.everyone[r]) for r in here),
            any(m in REDUCTIONS for m in marks),
            any(layout.split(m) is not None for m in marks),
        )

    def first_replicas(self, axes: tuple[bool, ...]) -> list[int]:
        """For each rank the first one that has the same replica, where all ranks of some axes have
        the same.
        """
        if axes not in self.firsts:
            at = {c: r for r, c in enumerate(self.everyone)}
            self.firsts[axes] = [
                at[tuple(0 if same else k for same, k in zip(axes, c, strict=True))]
                for c in self.everyone
            ]
        return self.firsts[axes]

    def global_value(
        self, slot: steps.Slot, rows: dict[int, torch.Tensor], claimed: tuple[bool, ...]
    ) -> GlobalValue | None:
        """Put a value together from the local tensors of ranks; None if one is missing, or has
        another shape than its placements give.

        Args:
            slot: of the plan.
            rows: the local tensors by rank.
            claimed: the axes over which replicas are compared.
        """
        shape, marks, axes = tuple(slot.value.shape), slot.placements, self.axes
        form = self.form(shape, marks)
        if form is None or any(r not in rows for r in form.here):
            return None
        if any(rows[r].shape != size for r, size in zip(form.here, form.shapes, strict=True)):
            return None
        unequal = []
        if any(claimed):
            firsts = self.first_replicas(claimed)
            unequal = [r for r in form.here if _is_other(rows[firsts[r]], rows[r])]
        x = rows[form.here[0]]
        if not form.is_partial and not form.is_sharded:
            return GlobalValue(slot, x, None, tuple(unequal))
        shards = [rows.get(r, x) for r in range(len(self.everyone))]
        if not form.is_partial:
            return GlobalValue(slot, join(shards, shape, marks, axes), None, tuple(unequal))
        wide = shards if x.dtype.itemsize > 2 else [_widened(shard) for shard in shards]
        value = join(wide, shape, marks, axes).to(x.dtype)
        magnitude = None
        if value.is_floating_point() or value.is_complex():
            magnitude = join([shard.abs() for shard in wide], shape, marks, axes)
        return GlobalValue(slot, value, magnitude, tuple(unequal))


def _is_other(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two replicas differ by more than rounding."""
    return x is not y and not torch.equal(x, y) and exceeding(x, y) is not None


def _widened(x: torch.Tensor) -> torch.Tensor:
    """Return floating values of two bytes in float32, in which sums of their terms hardly round."""
    return x.float() if x.is_floating_point() else x


def node_of_slots(program: Program, plan: steps.Plan) -> dict[int, torch.fx.Node]:
    """Map the slots of a plan to the nodes of its program whose value they are.

    A slot has the fake value of its node. Where an op was written out as others, its readers say
    which slot is its value. Nodes that were copied have one fake value: there the steps that make
    or read a slot say whose it is.
    """
    graph = program.graph.graph
    nodes = set(graph.nodes)
    of_fake: dict[int, list[torch.fx.Node]] = {}
    for node in graph.nodes:
        if isinstance(node.meta.get("val"), torch.Tensor):
            of_fake.setdefault(id(node.meta["val"]), []).append(node)
    slots, _ = slots_and_steps(plan)
    of_slot: dict[int, torch.fx.Node] = {}

    def link(slot: steps.Slot, node: Any) -> None:
        value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
        if not isinstance(value, torch.Tensor) or value.shape != slot.value.shape:
            return
        if node in of_fake.setdefault(id(slot.value), [node]):
            of_slot.setdefault(slot.number, node)

    for slot, node in zip(plan.ins, graph.find_nodes(op="placeholder"), strict=True):
        link(slot, node)
    for step in plan.steps:
        node: Any = getattr(step, "node", None)
        if isinstance(step, steps.Pipelined) or node not in nodes:
            continue
        for slot in step.made:
            if node in of_fake.get(id(slot.value), ()):
                of_slot.setdefault(slot.number, node)
        if isinstance(step, (steps.Apply, steps.Nested)):
            _link_call(step, link)
    for slot, node in zip(plan.outs, returned_by(graph), strict=True):
        link(slot, node)
    changes = [step for step in plan.steps if hasattr(step, "source")]
    for step in changes:
        _pass_on(step.source, step.made, of_slot)
    for step in reversed(changes):
        for slot in step.made:
            _pass_on(slot, (step.source,), of_slot)
    unfinished = _unfinished(plan, nodes)
    found = {}
    for n, slot in slots.items():
        candidates = of_fake.get(id(slot.value), [])
        only = candidates[0] if len(candidates) == 1 else None
        node = of_slot.get(n, only)
        if node is not None and n not in unfinished:
            found[n] = node
    return found


def _link_call(step: Any, link: Callable[[steps.Slot, Any], None]) -> None:
    """Link the slots that an op reads and makes to its arguments and results."""
    arguments = _tensor_arguments(step.node)
    if len(arguments) == len(step.ins):
        for slot, node in zip(step.ins, arguments, strict=True):
            link(slot, node)
    results = {u.args[1]: u for u in step.node.users if len(u.args) == 2}
    if isinstance(step.node.target, Loop) or len(step.outs) > 1:
        values = step.node.meta["val"]
        places = [i for i, x in enumerate(values) if isinstance(x, torch.Tensor)]
        for i, slot in zip(places, step.outs, strict=False):
            link(slot, results.get(i))


def _pass_on(
    slot: steps.Slot, others: Sequence[steps.Slot], of_slot: dict[int, torch.fx.Node]
) -> None:
    """Link other placements of a slot's value to its node."""
    if slot.number not in of_slot:
        return
    for other in others:
        if other.value is slot.value:
            of_slot.setdefault(other.number, of_slot[slot.number])


def _unfinished(plan: steps.Plan, nodes: set[torch.fx.Node]) -> set[int]:
    """Collect the slots of the parts of an op that have its fake value, but for the last part, as
    of a sum whose terms are added one by one.
    """
    last: dict[int, int] = {}
    parts = []
    for step in plan.steps:
        if isinstance(step, steps.Apply) and step.node not in nodes:
            for slot in step.outs:
                parts.append(slot)
                last[id(slot.value)] = slot.number
    unfinished = {slot.number for slot in parts if last[id(slot.value)] != slot.number}
    for step in plan.steps:
        source = getattr(step, "source", None)
        if isinstance(source, steps.Slot) and source.number in unfinished:
            unfinished.update(slot.number for slot in step.made)
    return unfinished


def _tensor_arguments(node: torch.fx.Node) -> list[torch.fx.Node]:
    """List the nodes among the arguments of a node, in order, each as often as it is read."""
    nodes: list[torch.fx.Node] = []

    def take(x: torch.fx.Node) -> torch.fx.Node:
        nodes.append(x)
        return x

    torch.fx.node.map_arg((node.args, node.kwargs), take)
    return nodes


def slots_and_steps(plan: steps.Plan) -> tuple[dict[int, steps.Slot], dict[int, Any]]:
    """Collect the slots of a plan by number, and the step that makes each."""
    slots = {slot.number: slot for slot in plan.ins}
    making: dict[int, Any] = {}
    for step in plan.steps:
        for slot in step.made:
            slots[slot.number] = slot
            making.setdefault(slot.number, step)
    return slots, making


def of_one_rank(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """Collect the nodes inside of shard_maps, whose values belong to one rank."""
    own: set[torch.fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function" or node.target is FROM_LOCAL:
            continue
        if node.target in PRIMS or any(x in own for x in node.all_input_nodes):
            own.add(node)
    return own
