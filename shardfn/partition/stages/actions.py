"""The actions of a pipeline's stages as plans, and what each coordinate does in which order: its
schedule, with messages added.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import attrs
import torch

from ...ops.messages import Message, Receive, Ref, Send
from ...ops.nodes import origin_of
from ...ops.pipeline import Add, Free, Instruction, Pipeline, Run, Zero
from ...pipelines import Schedule
from ...source_text import NOWHERE
from ...types import Aval
from .. import layout
from ..emission.graph_builder import Builder
from ..plan import Apply, Plan, Slot, Step
from ..split_backward import is_free
from .body import Located


@attrs.frozen(eq=False)
class Action:
    """What one action of a stage computes.

    Args:
        stage: its stage.
        kinds: F, B, W, or B and W together.
        plan: its steps.
        reads: what its inputs are.
        makes: what its results are: slots of the body, or sums.
    """

    stage: int
    kinds: str
    plan: Plan
    reads: tuple[Ref, ...]
    makes: tuple[Ref, ...]


@attrs.frozen(eq=False)
class Own:
    """The part of one coordinate: the numbers of its plans, inputs and results."""

    plans: tuple[int, ...]
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    pipeline: Pipeline


@attrs.frozen(eq=False)
class Actions:
    """All actions of a pipeline, and the schedule that orders them.

    Args:
        name: of the function.
        axis: the mesh axis of the stages.
        paths: of the inputs that are the same for every microbatch.
        schedule: the order.
        body: the body, located.
        actions: by stage and kinds.
        totals: for each sum, its home, and the other stages that have terms of it.
        stacked: for each result of a microbatch, its slot and its stage.
        consts: how many inputs are the same for every microbatch.
        carries: how many are sums.
    """

    name: str
    axis: int
    paths: Sequence[str]
    schedule: Schedule
    body: Located
    actions: dict[tuple[int, str], Action]
    totals: list[tuple[int, list[int]]]
    stacked: list[tuple[Slot, int]]
    consts: int
    carries: int

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans of all actions, in the order of their stages."""
        return tuple(x.plan for x in self.ordered)

    @property
    def ordered(self) -> list[Action]:
        """All actions, in the order of their stages."""
        return [self.actions[key] for key in sorted(self.actions, key=_in_order)]

    def home_of_total(self, k: int) -> int:
        """Return the coordinate that has a sum in the end."""
        return self.schedule.home(self.totals[k][0])

    def home_of_stacked(self, k: int) -> int:
        """Return the coordinate that has a result of each microbatch."""
        return self.schedule.home(self.stacked[k][1])

    def of(self, b: Builder) -> Own:
        """The part of the coordinate of a rank, with messages of its local shapes."""
        coordinate = b.coordinates[self.axis]
        order = _Order(self, b)
        rows = order.instructions()
        return order.own(coordinate, rows[coordinate])


class _Order:
    """The instructions of all coordinates of a pipeline, for ranks with equal local shapes."""

    def __init__(self, actions: Actions, b: Builder) -> None:
        self.a, self.b = actions, b
        self.schedule = actions.schedule
        self.axis = b.axes.names[actions.axis]
        self.group = b.group_names[actions.axis]
        self.rows: list[list[Instruction]] = [[] for _ in range(self.schedule.coordinates)]
        self.count = 0  # of messages
        self.there: set[tuple[Ref, int]] = set()  # values and coordinates that have them
        # messages that are sent, and not received yet, by value and target
        self.arriving: dict[tuple[Ref, int], Receive] = {}
        self.wanted: dict[Ref, list[int]] = collections.defaultdict(list)  # the stages that read
        for action in actions.ordered:
            for ref in action.reads:
                self.wanted[ref].append(action.stage)

    def instructions(self) -> list[list[Instruction]]:
        """Walk the schedule, all coordinates in turn, each as far as its inputs are sent."""
        self.send_parameters()
        at = [0] * len(self.rows)
        while any(at[c] < len(row) for c, row in enumerate(self.schedule.table)):
            before = list(at)
            for c, row in enumerate(self.schedule.table):
                while at[c] < len(row) and self.run(c, row[at[c]]):
                    at[c] += 1
            assert at != before, f"{self.schedule} waits for itself"
        self.add_totals()
        return [_with_frees(row, self.results(c)) for c, row in enumerate(self.rows)]

    def send_parameters(self) -> None:
        """Send each parameter that other coordinates read, once."""
        for i, home in enumerate(self.a.body.homes):
            if home is None:
                continue
            source = self.schedule.home(home)
            targets = {self.schedule.home(s) for s in self.wanted["in", i]} - {source}
            for target in sorted(targets):
                self.message(("in", i), self.a.body.plan.ins[i], source, target)

    def run(self, coordinate: int, scheduled: Any) -> bool:
        """Add one action, if what it reads is sent."""
        kind, stage, k = scheduled
        action = self.a.actions.get((stage, kind))
        if action is None:
            return True
        reads = tuple(_at(ref, k) for ref in action.reads)
        missing = [
            ref
            for ref, at in zip(action.reads, reads, strict=True)
            if ref[0] == "value" and (at, coordinate) not in self.there
        ]
        if missing:
            return False
        makes = tuple(_at(ref, k) for ref in action.makes)
        number = self.numbers(coordinate).index((stage, kind))
        for at in reads:
            self.receive(at, coordinate)
        run = Run(number, kind, stage, k, reads, makes)
        self.rows[coordinate].append(run)
        for ref, at in zip(action.makes, makes, strict=True):
            if ref[0] != "value":
                continue
            self.there.add((at, coordinate))
            targets = {self.schedule.home(s) for s in self.wanted[ref]} - {coordinate}
            for target in sorted(targets):
                slot = self.slot_of(action, ref)
                self.message(at, slot, coordinate, target, str(run))
                self.there.add((at, target))
        return True

    def slot_of(self, action: Action, ref: Ref) -> Slot:
        return action.plan.outs[action.makes.index(ref)]

    def receive(self, value: Ref, coordinate: int) -> None:
        """Receive a value just before it is read for the first time."""
        arriving = self.arriving.pop((value, coordinate), None)
        if arriving is not None:
            self.rows[coordinate].append(arriving)

    def message(
        self, value: Ref, slot: Slot, source: int, target: int, action: str | None = None
    ) -> None:
        """Send a value where it is made; `receive` puts the other end of it."""
        number, self.count = self.count, self.count + 1
        step = self.a.body.made_by.get(slot.number)
        about = f"%{step.node.name}" if step is not None else self.about_input(slot)
        origin = origin_of(step.node) if step is not None else NOWHERE
        line, module = origin["source"], origin["module"]
        aval = self.aval(slot)
        message = Message(source, target, number, value, aval, about, line, action, module)
        self.rows[source].append(Send(message, self.axis, self.group))
        self.arriving[value, target] = Receive(message, self.axis, self.group)

    def aval(self, slot: Slot) -> Aval:
        """The local tensor of a value: dense, with its dims in the order of the global one."""
        x = slot.value
        shape = self.b.local_shape(x.shape, slot.placements)
        stride = layout.dense_strides(shape, layout.stride_order(x.shape, x.stride()))
        return Aval(tuple(shape), tuple(stride), x.dtype, str(x.device))

    def about_input(self, slot: Slot) -> str:
        """What an input is called in messages: a parameter by its path, or a sum of gradients."""
        i = self.a.body.plan.ins.index(slot)
        return self.a.paths[i] if i < self.a.consts else "a sum of gradients"

    def add_totals(self) -> None:
        """Send the sums of other stages home, and add them there."""
        for j, (home, others) in enumerate(self.a.totals):
            target = self.schedule.home(home)
            total = ("sum", j)
            for source in sorted({self.schedule.home(s) for s in others} - {target}):
                slot = self.a.body.plan.ins[self.a.consts + j]
                self.message(total, slot, source, target)
                arriving = self.arriving.pop((total, target))
                term = ("term", j, source)
                message = attrs.evolve(arriving.message, value=term)
                self.rows[target].append(attrs.evolve(arriving, message=message))
                self.rows[target].append(Add(total, term))

    def results(self, coordinate: int) -> list[Ref]:
        """The values that a coordinate returns."""
        a = self.a
        found: list[Ref] = [
            ("sum", j) for j in range(a.carries) if a.home_of_total(j) == coordinate
        ]
        return found + [
            self.stack(slot, stage)
            for k, (slot, stage) in enumerate(a.stacked)
            if a.home_of_stacked(k) == coordinate
        ]

    def stack(self, slot: Slot, stage: int) -> Ref:
        """A result of each microbatch: the microbatches themselves are stacked already."""
        body = self.a.body
        rows = body.plan.ins[self.a.consts + self.a.carries :]
        if slot in rows:
            return ("in", body.plan.ins.index(slot))
        return ("stack", body.name_of(slot, stage)[1])

    def numbers(self, coordinate: int) -> list[tuple[int, str]]:
        """The actions of a coordinate."""
        keys = sorted(self.a.actions, key=_in_order)
        return [key for key in keys if self.schedule.home(key[0]) == coordinate]

    def zeros(self, refs: Iterable[Ref]) -> Iterator[Zero]:
        """Begin the sums of a coordinate."""
        for ref in dict.fromkeys(ref for ref in refs if ref[0] == "sum"):
            yield Zero(ref, self.aval(self.a.body.plan.ins[self.a.consts + ref[1]]))

    def own(self, coordinate: int, row: Sequence[Instruction]) -> Own:
        """The part of a coordinate, whose inputs are those that it reads."""
        a = self.a
        keys = sorted(a.actions, key=_in_order)
        mine = self.numbers(coordinate)
        results = self.results(coordinate)
        received = {x.message.value for x in row if isinstance(x, Receive)}
        refs = [ref for x in row for ref in _read(x)] + [
            ref for ref in results if ref[0] != "stack"
        ]
        used = dict.fromkeys(_input(ref) for ref in refs if ref not in received)
        ins = sorted(i for i in used if i is not None)
        row = [*self.zeros(refs), *row]
        place = {i: n for n, i in enumerate(ins)}
        renamed = _Renaming(place, received)
        outs = [j for j in range(a.carries) if a.home_of_total(j) == coordinate]
        outs += [a.carries + k for k in range(len(a.stacked)) if a.home_of_stacked(k) == coordinate]
        pipeline = Pipeline(
            (),
            0,
            length=self.schedule.microbatches,
            instructions=tuple(map(renamed.instruction, row)),
            results=tuple(map(renamed.ref, results)),
        )
        plans = tuple(keys.index(key) for key in mine)
        return Own(plans, tuple(ins), tuple(outs), pipeline)


def _in_order(key: tuple[int, str]) -> tuple[int, int]:
    """The place of an action among all: by stage, the forward first."""
    stage, kinds = key
    return stage, "FBW".index(kinds[0])


def _at(ref: Ref, k: int) -> Ref:
    """A value of an action, for one microbatch."""
    return (*ref, k) if ref[0] in ("row", "value") else ref


def _read(x: Instruction) -> Iterable[Ref]:
    """The values that an instruction reads."""
    if isinstance(x, Run):
        return x.reads
    if isinstance(x, Send):
        return (x.message.value,)
    return (x.total, x.term) if isinstance(x, Add) else ()


def _input(ref: Ref) -> int | None:
    """The number of the input that a value is, if it is one."""
    return ref[1] if ref[0] in ("in", "row") else None


@attrs.frozen(eq=False)
class _Renaming:
    """Values with the numbers that the inputs of one coordinate have."""

    place: dict[int, int]
    received: set[Ref]

    def ref(self, ref: Ref) -> Ref:
        kind, *numbers = ref
        if ref in self.received and kind == "in":
            return ("got", *numbers)
        if kind not in ("in", "row"):
            return ref
        return (kind, self.place[ref[1]], *numbers[1:])

    def instruction(self, x: Instruction) -> Instruction:
        if isinstance(x, Run):
            reads, makes = map(self.ref, x.reads), map(self.ref, x.makes)
            return attrs.evolve(x, reads=tuple(reads), makes=tuple(makes))
        if isinstance(x, (Send, Receive)):
            value = self.ref(x.message.value)
            return attrs.evolve(x, message=attrs.evolve(x.message, value=value))
        return x


def _with_frees(row: list[Instruction], results: list[Ref]) -> list[Instruction]:
    """The instructions of a coordinate, with each value forgotten after its last reader."""
    stays = {ref[1] for ref in results if ref[0] == "stack"}
    last: dict[Ref, int] = {}
    for i, x in enumerate(row):
        refs = [*_read(x)]
        if isinstance(x, Run):
            refs += x.makes
        if isinstance(x, Receive):
            refs.append(x.message.value)
        last.update(dict.fromkeys((r for r in refs if r[0] in ("value", "term")), i))
    dead = collections.defaultdict(list)
    for ref, i in last.items():
        if ref[0] != "value" or ref[1] not in stays:
            dead[i].append(ref)
    out: list[Instruction] = []
    for i, x in enumerate(row):
        out.append(x)
        if i in dead:
            out.append(Free(tuple(dead[i])))
    return out


class Parting:
    """Takes the steps of a located body apart into the plans of actions."""

    def __init__(self, body: Located, kinds: Sequence[str], consts: int, carries: int) -> None:
        self.body, self.kinds = body, kinds
        self.consts, self.carries = consts, carries
        self.inputs = {slot.number: i for i, slot in enumerate(body.plan.ins)}
        self.fresh = max([0, *self.inputs, *body.made_by]) + 1

    def actions(self, results: Iterable[tuple[Slot, int]]) -> dict[tuple[int, str], Action]:
        """The actions of all stages.

        Args:
            results: the values that leave, with the stage that has each.
        """
        keys = [(s, kinds) for s in range(self.body.stages) for kinds in self.kinds]
        wanted = list(results)
        parts: dict[tuple[int, str], dict[Step, None]] = {}
        made: dict[tuple[int, int], str] = {}  # by slot and stage: the kinds of the action
        for stage, kinds in keys:
            steps = [
                step
                for step in self.body.plan.steps
                if self.body.stage_of.get(step) == stage and self.body.kind_of[step] in kinds
            ]
            roots = [s for step in steps for s in step.read]
            roots += [t.value for t in self.terms(stage, kinds)]
            if kinds == self.kinds[0]:
                roots += [slot for slot, at in wanted if at == stage]
            parts[stage, kinds] = self.with_copies(stage, steps, roots, made)
            for step in parts[stage, kinds]:
                for slot in step.made:
                    made.setdefault((slot.number, stage), kinds)
        read = self.reads(parts, wanted)
        found = {key: self.action(key, steps, read) for key, steps in parts.items()}
        return {key: x for key, x in found.items() if x.makes or x.plan.steps}

    def terms(self, stage: int, kinds: str) -> list[Any]:
        """The terms of sums that an action adds: those that it makes."""
        return [
            t for t in self.body.terms if t.stage == stage and self.kind_of_slot(t.value) in kinds
        ]

    def kind_of_slot(self, slot: Slot) -> str:
        step = self.body.made_by.get(slot.number)
        kind = self.body.kind_of.get(step) if step is not None else None
        return kind or self.kinds[0][0]

    def with_copies(
        self, stage: int, steps: list[Step], roots: list[Slot], made: dict[tuple[int, int], str]
    ) -> dict[Step, None]:
        """The steps of an action, with those that any stage runs for itself, and with views of
        values of other actions, in the order of the body.
        """
        taken = dict.fromkeys(steps)
        queue = list(roots)
        while queue:
            slot = queue.pop()
            step = self.body.made_by.get(slot.number)
            if step is None or step in taken:
                continue
            is_everywhere = step not in self.body.stage_of
            is_made = (slot.number, stage) in made and self.body.origins[slot.number].has_rows
            if is_free(step) or (is_everywhere and not is_made):
                taken[step] = None
                queue += step.read
        return dict.fromkeys(step for step in self.body.plan.steps if step in taken)

    def reads(
        self, parts: dict[tuple[int, str], dict[Step, None]], results: list[tuple[Slot, int]]
    ) -> set[Ref]:
        """The values that an action does not make, and reads; and those that leave."""
        name_of = self.body.name_of
        found = {name_of(slot, stage) for slot, stage in results}
        for key, steps in parts.items():
            own = {slot.number for step in steps for slot in step.made}
            needs = [s for step in steps for s in step.read]
            needs += [t.value for t in self.terms(*key)]
            found |= {name_of(slot, key[0]) for slot in needs if slot.number not in own}
        return found

    def action(self, key: tuple[int, str], steps: dict[Step, None], read: set[Ref]) -> Action:
        """Make the plan of one action."""
        stage, kinds = key
        own = {slot.number for step in steps for slot in step.made}
        terms = self.terms(stage, kinds)
        needs = [s for step in steps for s in step.read] + [t.value for t in terms]
        ins = {s.number: s for s in needs if s.number not in own}
        outs = [s for step in steps for s in step.made if self.is_sent(s, step, read, stage)]
        adding, sums_in, sums_out = self.added(terms)
        plan = Plan(
            self.body.plan.axes,
            (*steps, *adding),
            (*ins.values(), *sums_in.values()),
            (*outs, *sums_out.values()),
        )
        reads = [self.ref(slot, stage) for slot in ins.values()] + [("sum", j) for j in sums_in]
        makes = [self.body.name_of(s, stage) for s in outs] + [("sum", j) for j in sums_out]
        return Action(stage, kinds, plan, tuple(reads), tuple(makes))

    def is_sent(self, slot: Slot, step: Step, read: set[Ref], stage: int) -> bool:
        """Whether other actions read a value that an action makes, from there."""
        at = self.body.stage_of.get(step)
        return self.body.name_of(slot, stage) in read and (at is None or at == stage)

    def added(self, terms: list[Any]) -> tuple[list[Step], dict[int, Slot], dict[int, Slot]]:
        """The steps that add an action's terms to sums, and the sums before and after them."""
        steps: list[Step] = []
        before: dict[int, Slot] = {}
        after: dict[int, Slot] = {}
        for term in terms:
            j = term.total
            carry = self.body.plan.ins[self.consts + j]
            if j not in before:
                before[j] = after[j] = carry
            add = _in_place(self.body.adder[j])
            total = attrs.evolve(carry, number=self.fresh)
            self.fresh += 1
            steps.append(attrs.evolve(add, ins=(after[j], term.value), outs=(total,)))
            after[j] = total
        return steps, before, after

    def ref(self, slot: Slot, stage: int) -> Ref:
        """What a slot is for an action that reads it."""
        i = self.inputs.get(slot.number)
        if i is None:
            return self.body.name_of(slot, stage)
        return ("row", i) if i >= self.consts + self.carries else ("in", i)


def _in_place(add: Apply) -> Apply:
    """A step that adds a term to a sum, in a form that no compiler joins with the product that
    makes the term: it would copy the sum twice.
    """
    graph = torch.fx.Graph()
    inputs = graph.placeholder("total"), graph.placeholder("term")
    node = graph.call_function(torch.ops.prims.add.default, inputs)
    node.meta = dict(add.node.meta)
    return attrs.evolve(add, node=node)


def totals_of(body: Located, owners: Sequence[int | None]) -> Iterator[tuple[int, list[int]]]:
    """For each sum, the stage that has it in the end, and the other stages that have terms.

    Args:
        body: the body, located.
        owners: for each sum, the stage of the parameter whose gradient it is, or None.
    """
    for j, owner in enumerate(owners):
        stages = {t.stage for t in body.terms if t.total == j}
        home = min(stages, default=body.last) if owner is None else owner
        yield home, sorted(stages - {home})
