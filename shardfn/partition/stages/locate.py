"""Which coordinate of a pipeline's axis runs each step of a plan.

A plan is made as if the axis had one rank. Here each step goes where the values are that it reads,
and a value that others read too is sent to them. A pipeline among the steps is taken apart into its
stages' actions.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Sequence
from typing import Any

import attrs
from torch.fx import Node

from ... import source_text
from ...capture.annotations import PIPELINE, is_of_pipeline
from ...collectives import ALL_REDUCE
from ...errors import PlacementError, ScheduleError
from ...ops.loops import Scan
from ...ops.nodes import args_of, origin_of, returned_by
from ...ops.placement import REDISTRIBUTE
from ...ops.text_formats import STAGE_AXIS, parse_record, parse_stages
from ...pipelines import Schedule
from ...pipelines.named import schedule_of
from ...types import AtStage, MeshAxes, MeshPlacements, Program, stage_of
from ..plan import FromStage, Nested, OnStage, Pipelined, Plan, Redistribute, Slot, Step
from ..redistribute import Move
from ..split_backward import is_free
from .actions import Actions, Parting, totals_of
from .body import Located, Locating


def stage_axis(
    program: Program, axes: MeshAxes, marks: Sequence[MeshPlacements | None]
) -> int | None:
    """The mesh axis on which values are on stages; None if there are no stages.

    Args:
        program: the Program, whose constraints may name stages.
        axes: of the mesh.
        marks: the placements of inputs and results.

    Raises:
        PlacementError: they name stages of two axes.
    """
    rows = [row for row in marks if row is not None]
    found = {k for row in rows for k, mark in enumerate(row) if stage_of(mark) is not None}
    constraints = program.graph.graph.find_nodes(op="call_function", target=REDISTRIBUTE)
    named = [name for node in constraints for name, _ in parse_stages(node.args[1])]
    found |= {axes.names.index(name) for name in named if name in axes.names}
    if STAGE_AXIS in named and axes.names and not found:
        if len(axes.names) > 1:
            got = (
                "the function constrains a value to an sf.Stage, but no parameter is on a stage, "
                "so the mesh axis of the stages is unknown"
            )
            fix = f"P({axes.names[-1]}=...), which names the axis"
            raise PlacementError.of(f"{program.name}, placements", got, fix=fix)
        found = {0}
    if len(found) > 1:
        names = " and ".join(repr(axes.names[k]) for k in sorted(found))
        got = f"values are on stages of {names}"
        raise PlacementError.of(f"{program.name}, placements", got, needed="stages of one axis")
    return found.pop() if found else None


def without_stages(marks: MeshPlacements) -> MeshPlacements:
    """Placements with replicated in place of stages."""
    return tuple("R" if stage_of(mark) else mark for mark in marks)


def located(
    plan: Plan,
    program: Program,
    axis: int,
    in_marks: Sequence[MeshPlacements],
    out_marks: Sequence[MeshPlacements | None],
) -> Plan:
    """Give each step of a plan its coordinate, and send values to where they are read.

    Args:
        plan: of the program, as if the axis had one rank.
        program: the Program.
        axis: of the stages.
        in_marks: the placements of the inputs.
        out_marks: those that results must have; None where propagation decides.

    Raises:
        PlacementError: a parameter on no stage, or on one before its readers.
        ScheduleError: a schedule that does not fit the stages.
    """
    return _Locate(plan, program, axis, in_marks).located(out_marks)


class _Locate:
    """The homes of the values of a plan, and its steps so far."""

    def __init__(
        self, plan: Plan, program: Program, axis: int, in_marks: Sequence[MeshPlacements]
    ) -> None:
        self.plan, self.program, self.axis = plan, program, axis
        self.size = plan.axes.sizes[axis]
        self.steps: list[Step] = []
        self.homes: dict[int, AtStage | None] = {}  # by slot; None: every coordinate has it
        # by slot: the arguments of a stage that it is made of, by their shapes
        self.kin: dict[int, frozenset[tuple[Any, AtStage]]] = {}
        self.homes.update((slot.number, None) for _, slot in plan.cotangents)
        self.kin.update((slot.number, frozenset()) for _, slot in plan.cotangents)
        self.everywhere: dict[int, Slot] = {}  # by slot: the slot that all coordinates have
        self.stay: set[int] = set()  # slots that are made of arguments on stages alone
        entering = [*plan.ins, *(slot for _, slot in plan.cotangents)]
        every = [*entering, *(slot for step in plan.steps for slot in step.made)]
        self.fresh = 1 + max((slot.number for slot in every), default=0)
        self.readers: dict[int, list[Step]] = collections.defaultdict(list)
        for step in plan.steps:
            for slot in step.read:
                self.readers[slot.number].append(step)
        self.makers = {slot.number: step for step in plan.steps for slot in step.made}
        self.likes = {g.slot.number: g.like for g in plan.gradients if g.like is not None}
        self.paths = dict(zip((s.number for s in plan.ins), program.in_paths, strict=False))
        for slot, marks in zip(plan.ins, in_marks, strict=True):
            home = stage_of(marks[axis])
            self.homes[slot.number] = home
            self.kin[slot.number] = _kin(slot, home)
            if home is not None:
                self.stay.add(slot.number)

    def located(self, out_marks: Sequence[MeshPlacements | None]) -> Plan:
        for step in self.plan.steps:
            if isinstance(step, Nested) and _is_pipeline(step):
                self.pipeline(step)
            else:
                self.steps.append(self.placed(step))
        returned = returned_by(self.program.graph.graph)
        outs = tuple(map(self.result, self.plan.outs, out_marks, map(_is_constrained, returned)))
        ins = tuple(self.marked(slot, self.homes[slot.number]) for slot in self.plan.ins)
        floating = [x for x in outs if x.value.is_floating_point() or x.value.is_complex()]
        cotangents = tuple(
            (k, self.cotangent(slot, stage_of(floating[k].placements[self.axis]), outs))
            for k, slot in self.plan.cotangents
        )
        return attrs.evolve(
            self.plan,
            steps=tuple(self.steps),
            ins=ins,
            outs=outs,
            cotangents=cotangents,
            stage_axis=self.axis,
        )

    def cotangent(self, slot: Slot, home: AtStage | None, outs: Sequence[Slot]) -> Slot:
        """The cotangent of a result, which is on the stage of that result: sent to all, where
        other stages read or return it.
        """
        if home is None:
            return slot
        readers = [x for x in self.steps if slot.number in {s.number for s in x.read}]
        marks = [stage_of(x.placements[self.axis]) for x in outs if x.number == slot.number]
        wanted = {x.coordinate for x in readers} | {at and at.coordinate for at in marks}
        own = self.marked(slot, home)
        if wanted <= {home.coordinate}:
            return own
        own = attrs.evolve(own, number=self.fresh)
        self.fresh += 1
        after, self.steps = self.steps, []
        self.homes[own.number] = home
        self.send(
            attrs.evolve(slot, number=own.number), slot, readers[0].node if readers else self.output
        )
        self.steps += after
        return own

    def marked(self, slot: Slot, home: AtStage | None) -> Slot:
        """A slot with its stage among its placements."""
        marks = list(slot.placements)
        if home is not None:
            marks[self.axis] = home.mark
        return attrs.evolve(slot, placements=tuple(marks))

    def constrained(self, step: OnStage) -> Step:
        """Place a value where a constraint says."""
        self.homes[step.target.number] = step.home
        kin = self.kin[step.source.number] | _kin(step.target, step.home)
        self.kin[step.target.number] = kin
        return self.reading(step, step.home.coordinate)

    def placed(self, step: Step) -> Step:
        """Place one step where it reads arguments, else where most of what it reads is; on all
        coordinates, where these have shards of what it reads or makes, or what a view is of.
        """
        if isinstance(step, OnStage):
            return self.constrained(step)
        is_view = bool(step.read) and is_free(step)
        is_view = is_view and all(slot.number in self.everywhere for slot in step.read)
        if is_view or _is_sharded_over(self.axis, step):
            self.homes.update((slot.number, None) for slot in step.made)
            self.kin.update((slot.number, frozenset()) for slot in step.made)
            return self.reading(step, None)
        numbers = {slot.number for slot in step.read}
        weight: dict[AtStage, float] = collections.defaultdict(float)
        for slot in step.read:
            home = self.homes[slot.number]
            if home is not None and slot.number in (numbers & self.stay or numbers):
                is_sent = slot.number in self.everywhere
                nbytes = slot.value.numel() * slot.value.element_size()
                weight[home] += 0 if is_sent else nbytes
        sign = -1 if step.node.meta.get("phase") == "backward" else 1
        home = max(
            weight, key=lambda x: (weight[x], sign * x.chunk, sign * x.coordinate), default=None
        )
        if numbers and numbers <= self.stay:
            self.stay.update(slot.number for slot in step.made)
        for slot in step.made:  # a gradient is made where its parameter lives
            like = self.likes.get(slot.number)
            home = home if like is None else self.homes[like.number] or home
        coordinate = None if home is None else home.coordinate
        kin = frozenset().union(*(self.kin[slot.number] for slot in step.read))
        for slot in step.made:
            self.homes[slot.number] = home
            like = self.likes.get(slot.number)
            own = frozenset() if like is None else _kin(like, self.homes[like.number])
            self.kin[slot.number] = kin | own
        return self.reading(step, coordinate)

    def reading(self, step: Step, coordinate: int | None) -> Step:
        """A step of one coordinate, which reads values of others after they are sent."""
        instead = {}
        for slot in step.read:
            home = self.homes[slot.number]
            if home is not None and home.coordinate != coordinate:
                instead[slot.number] = self.sent(slot, step)
        if instead:
            new = tuple(instead.get(slot.number, slot) for slot in step.read)
            step = attrs.evolve(
                step, **({"ins": new} if hasattr(step, "ins") else {"source": new[0]})
            )
        return attrs.evolve(step, coordinate=coordinate)

    def sent(self, slot: Slot, reader: Step | None) -> Slot:
        """The slot of a value of one coordinate that all coordinates have: a sum over the axis, to
        which the others add zeros.
        """
        if slot.number in self.everywhere:
            return self.everywhere[slot.number]
        whole = attrs.evolve(slot, number=self.fresh)
        self.fresh += 1
        self.send(slot, whole, reader.node if reader is not None else self.output)
        self.everywhere[slot.number] = whole
        return whole

    def send(self, slot: Slot, whole: Slot, node: Node) -> None:
        """Make a slot that all coordinates have of that of one coordinate."""
        home = self.homes[slot.number]
        assert home is not None, f"{slot} is everywhere"
        before = list(slot.placements)
        before[self.axis] = "sum"
        term = attrs.evolve(slot, number=self.fresh, placements=tuple(before))
        self.fresh += 1
        self.steps.append(FromStage(node, slot, term, home=home.coordinate))
        move = Move(ALL_REDUCE, self.axis, term.placements, whole.placements)
        self.steps.append(Redistribute(node, term, whole, (move,), implicit=False))
        self.homes[term.number] = self.homes[whole.number] = None

    @property
    def axis_name(self) -> str:
        return self.plan.axes.names[self.axis]

    @property
    def output(self) -> Any:
        (output,) = self.program.graph.graph.find_nodes(op="output")
        return output

    def result(self, slot: Slot, wanted: MeshPlacements | None, is_constrained: bool) -> Slot:
        """A result on the stage that it must be on, or on that of the argument that it is made of;
        else all coordinates have it.
        """
        home = self.homes[slot.number]
        if wanted is not None:
            target = stage_of(wanted[self.axis])
        elif slot.number in self.likes:
            target = self.homes[self.likes[slot.number].number]
        elif is_constrained or slot.placements[self.axis] != "R":
            target = None
        else:
            own = {at for shape, at in self.kin.get(slot.number, ()) if shape == slot.value.shape}
            target = home if home in own else own.pop() if len(own) == 1 else None
        is_there = home is None or (target is not None and home.coordinate == target.coordinate)
        return self.marked(slot if is_there else self.sent(slot, None), target)

    # Pipelines

    def pipeline(self, step: Nested) -> None:
        """Take a pipeline apart into the actions of its stages."""
        scan = step.node.target
        assert isinstance(scan, Scan), f"{step.node} must be a scan over microbatches"
        axis_name, text = parse_record(step.node.meta["custom"][PIPELINE])
        name = f"{self.program.name}, pipelined_grad"
        if axis_name != self.axis_name:
            got = f"axis is {axis_name!r}, but parameters are on stages of {self.axis_name!r}"
            raise PlacementError.of(f"{name}, axis", got, needed="the mesh axis of the stages")
        consts, end = scan.consts, scan.consts + scan.carries
        homes = [self.homes[slot.number] for slot in step.ins]
        self.refuse_sharded(name, step)
        self.refuse_unplaced(name)
        schedule = schedule_of(
            text, self.size, scan.length, 1 + max((h.chunk for h in homes[:consts] if h), default=0)
        )
        self.refuse_other(name, schedule, scan)
        numbers = [None if h is None else _stage_number(name, schedule, h) for h in homes[:consts]]
        (plan,) = step.plans
        paths = [self.path(slot) for slot in step.ins[:consts]]
        sums = range(consts, end)
        owners = [self.owner(slot) for slot in step.outs[: scan.carries]]
        owned = [None if at is None else _stage_number(name, schedule, at) for at in owners]
        number_of = functools.partial(_stage_number, name, schedule)
        body = Locating(
            plan, name, schedule.stages, numbers, paths, sums, owned, number_of
        ).located()
        kinds = ("F", "B", "W") if schedule.parts else ("F", "BW")
        stacked = [(slot, _stage_of_result(body, slot)) for slot in plan.outs[scan.carries :]]
        parts = Parting(body, kinds, consts, scan.carries).actions(stacked)
        totals = [*totals_of(body, owned)]
        counts = consts, scan.carries
        actions = Actions(name, self.axis, paths, schedule, body, parts, totals, stacked, *counts)
        ins = [
            slot if i < consts or homes[i] is None else self.sent(slot, step)
            for i, slot in enumerate(step.ins)
        ]
        self.steps.append(
            Pipelined(step.node, tuple(ins), step.outs, actions.plans, actions=actions)
        )
        coordinates = [actions.home_of_total(j) for j in range(scan.carries)]
        coordinates += [actions.home_of_stacked(k) for k in range(len(stacked))]
        for slot, coordinate in zip(step.outs, coordinates, strict=True):
            self.homes[slot.number] = AtStage(coordinate)
            self.kin[slot.number] = frozenset()

    def owner(self, slot: Slot) -> AtStage | None:
        """The stage of the parameter whose gradient is made of a sum; None if it is not found."""
        number: int | None = slot.number
        while number is not None:
            if number in self.likes:
                return self.homes.get(self.likes[number].number)
            made = [s.number for step in self.readers[number] for s in step.made]
            number = made[0] if len(made) == 1 else None
        return None

    def path(self, slot: Slot) -> str:
        """The path of the argument that a value is, or that it alone is made of."""
        number: int | None = slot.number
        while number is not None and number not in self.paths:
            read = self.makers[number].read if number in self.makers else ()
            number = read[0].number if len(read) == 1 else None
        return f"a value of {tuple(slot.value.shape)}" if number is None else self.paths[number]

    def refuse_sharded(self, name: str, step: Nested) -> None:
        """Refuse values of a microbatch that are sharded over the axis of the stages, of which
        each runs in its own time.

        Raises:
            PlacementError: names the arguments, or the lines.
        """
        sharded = [slot for slot in step.ins if slot.placements[self.axis] != "R"]
        wrong = [f"{self.path(slot)} is sharded over {self.axis_name!r}" for slot in sharded]
        if not wrong:
            (plan,) = step.plans
            steps = [x for x in plan.steps if _is_sharded_over(self.axis, x)]
            lines = dict.fromkeys(
                source_text.located(**origin_of(x.node)) or x.node.name for x in steps
            )
            wrong = [f"a value is sharded over {self.axis_name!r}, at {line}" for line in lines]
        if wrong:
            fix = f"shard over other axes, since {self.axis_name!r} is the axis of the stages"
            raise PlacementError.of(f"{name}, placements", *wrong, fix=fix)

    def refuse_unplaced(self, name: str) -> None:
        """Refuse parameters that are on no stage.

        Raises:
            PlacementError: names them.
        """
        wrong = [
            f"{self.path(like)} is on no stage"
            for like in self.likes.values()
            if self.homes.get(like.number) is None
        ]
        if wrong:
            fix = f"P(..., {self.axis_name}=0), or sf.strategy('pipeline', params, mesh)"
            raise PlacementError.of(
                f"{name}, stages", *wrong, needed="a stage for each parameter", fix=fix
            )

    def refuse_other(self, name: str, schedule: Schedule, scan: Scan) -> None:
        """Refuse a schedule of other coordinates or microbatches, or one that is not right.

        Raises:
            ScheduleError: says what differs.
        """
        wrong = []
        if schedule.coordinates != self.size:
            wrong.append(
                f"the schedule is for {schedule.coordinates} pipeline ranks, but the axis has "
                f"{self.size} ranks"
            )
        if schedule.microbatches != scan.length:
            wrong.append(
                f"the schedule has {schedule.microbatches} microbatches, but the call has "
                f"{scan.length}"
            )
        if wrong:
            raise ScheduleError.of(f"{name}, schedule {schedule.name!r}", *wrong)
        schedule.check(schedule.stages)


def _kin(slot: Slot, home: AtStage | None) -> frozenset[tuple[Any, AtStage]]:
    return frozenset() if home is None else frozenset([(slot.value.shape, home)])


def _is_constrained(node: Node) -> bool:
    """Whether a value is placed by a constraint that names no stage."""
    return node.target is REDISTRIBUTE and not parse_stages(args_of(node)[1])


def _is_sharded_over(axis: int, step: Step) -> bool:
    """Whether a step reads or makes shards over an axis, itself or in a loop."""
    if any(slot.placements[axis] != "R" for slot in (*step.read, *step.made)):
        return True
    plans = step.plans if isinstance(step, Nested) else ()
    return any(_is_sharded_over(axis, inner) for plan in plans for inner in plan.steps)


def _is_pipeline(step: Nested) -> bool:
    """Whether a step runs by a schedule. A pipeline whose sums are saved after each microbatch, as
    a derivative of it does, has the order of a loop.
    """
    if not is_of_pipeline(step.node):
        return False
    (plan,) = step.plans
    scan: Any = step.node.target
    ins = {slot.number for slot in plan.ins}
    return not any(slot.number in ins for slot in plan.outs[scan.carries :])


def _stage_number(name: str, schedule: Schedule, at: AtStage) -> int:
    """The number of a stage in a schedule.

    Raises:
        ScheduleError: the coordinate has fewer stages.
    """
    own = [s for s in range(schedule.stages) if schedule.home(s) == at.coordinate]
    if at.chunk < len(own):
        return own[at.chunk]
    raise ScheduleError.of(
        f"{name}, schedule {schedule.name!r}",
        f"the schedule has {len(own)} stages on pipeline rank {at.coordinate}, but a parameter is "
        f"on stage {at.chunk} of this rank",
        fix='schedule="interleaved", which accepts any number of stages per pipeline rank',
    )


def _stage_of_result(body: Located, slot: Slot) -> int:
    origin = body.origins[slot.number]
    return body.last if origin.stage is None else origin.stage
