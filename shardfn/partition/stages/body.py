"""The stage of each step of a pipeline's body: one microbatch's value and gradients.

A forward step runs where its latest input is. A step of the backward runs at the earliest stage
that has what it reads: what it saved in the forward, or what is further up the pipeline. A gradient
is added up where it is made. What depends on no parameter, or on parameters alone, runs wherever
it is read.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Sequence

import attrs
import torch

from ...errors import PlacementError
from ...ops.messages import Ref
from ...ops.nodes import origin_of
from ...source_text import located
from ...types import AtStage
from ..plan import Apply, OnStage, Plan, Slot, Step, has_effect
from ..split_backward import is_free

ADD = torch.ops.aten.add.Tensor
FORWARD, BACKWARD, WEIGHTS = "F", "B", "W"


@attrs.frozen
class Origin:
    """What a value of the body is made of.

    Args:
        stage: where it is made; None for a value that each stage makes for itself.
        parameters: those that it is made of, where that is all that it is made of.
        has_rows: whether it is made of the microbatch.
    """

    stage: int | None = None
    parameters: frozenset[int] = frozenset()
    has_rows: bool = False

    @property
    def is_placed(self) -> bool:
        """Whether one stage makes it."""
        return self.stage is not None


@attrs.frozen(eq=False)
class Term:
    """A value that is added to a sum over microbatches."""

    total: int  # the number of the sum
    value: Slot
    stage: int


@attrs.frozen(eq=False)
class Located:
    """A body whose steps have stages.

    Args:
        plan: of the body.
        stages: how many there are.
        homes: of each input that is the same for every microbatch: its stage, or None.
        origins: of each value, by the number of its slot.
        stage_of: of each step that one stage runs.
        kind_of: of each such step: F, B or W.
        terms: of all sums.
        made_by: the step that makes each value.
    """

    plan: Plan
    stages: int
    homes: Sequence[int | None]
    origins: dict[int, Origin]
    stage_of: dict[Step, int]
    kind_of: dict[Step, str]
    terms: list[Term]
    made_by: dict[int, Step]
    adder: dict[int, Apply]  # of each sum, the step that adds its last term

    def name_of(self, slot: Slot, stage: int) -> Ref:
        """What a value is called in actions: values that each stage makes for itself are told
        apart.
        """
        is_placed = self.made_by.get(slot.number) in self.stage_of
        return ("value", slot.number if is_placed else (slot.number, stage))

    @property
    def last(self) -> int:
        """The last stage, which computes what no stage has to."""
        return self.stages - 1


@attrs.define(eq=False)
class Locating:
    """A body whose steps are being placed.

    Args:
        plan: of the body.
        name: of the function, for errors.
        stages: how many there are.
        homes: of each constant input, its stage, or None.
        paths: of each constant input.
        sums: the numbers of the inputs that are sums.
        owners: for each sum, the stage of the parameter whose gradient it is, or None.
        number_of: the number of a stage that a constraint names.
    """

    plan: Plan
    name: str
    stages: int
    homes: Sequence[int | None]
    paths: Sequence[str]
    sums: range
    owners: Sequence[int | None]
    number_of: Callable[[AtStage], int]
    origins: dict[int, Origin] = attrs.field(factory=dict)
    stage_of: dict[Step, int] = attrs.field(factory=dict)
    kind_of: dict[Step, str] = attrs.field(factory=dict)
    # the stages that have a value, or a parameter, without another message
    has: dict[int, set[int]] = attrs.field(factory=lambda: collections.defaultdict(set))
    has_parameter: dict[int, set[int]] = attrs.field(factory=lambda: collections.defaultdict(set))
    backward: set[Step] = attrs.field(factory=set)
    adds: set[Apply] = attrs.field(factory=set)  # steps that add terms to sums
    adder: dict[int, Apply] = attrs.field(factory=dict)
    made_by: dict[int, Step] = attrs.field(factory=dict)
    # by value: the steps of the backward that read it
    readers: dict[int, list[Step]] = attrs.field(factory=lambda: collections.defaultdict(list))
    fitting_of: dict[Step, set[int]] = attrs.field(factory=dict)
    ahead: set[int] = attrs.field(factory=set)  # values that B reads
    # by value: the stages of the parameters whose gradients it is a term of
    owner_of: dict[int, set[int]] = attrs.field(factory=lambda: collections.defaultdict(set))

    def located(self) -> Located:
        """Place every step."""
        self.made_by = {slot.number: step for step in self.plan.steps for slot in step.made}
        terms = list(self.found_terms())
        for total, slot in terms:
            owner = self.owners[total]
            if owner is not None:
                self.owner_of[slot.number].add(owner)
        self.enter()
        for step in self.plan.steps:
            self.visit(step)
        self.refuse_unread()
        self.place_backward()
        self.part_backward()
        placed = [
            Term(total, slot, self.last if (at := self.origins[slot.number].stage) is None else at)
            for total, slot in terms
        ]
        return Located(
            self.plan,
            self.stages,
            self.homes,
            self.origins,
            self.stage_of,
            self.kind_of,
            placed,
            self.made_by,
            self.adder,
        )

    @property
    def last(self) -> int:
        return self.stages - 1

    def enter(self) -> None:
        """Say what the inputs are made of."""
        for i, slot in enumerate(self.plan.ins):
            home = self.homes[i] if i < len(self.homes) else None
            parameters = frozenset() if home is None else frozenset([i])
            self.origins[slot.number] = Origin(None, parameters, i >= self.sums.stop)
            if home is not None:
                self.has_parameter[i].add(home)

    def found_terms(self) -> Iterator[tuple[int, Slot]]:
        """Find the terms of each sum: what is added to it, and not read otherwise."""
        readers = collections.Counter(s.number for step in self.plan.steps for s in step.read)
        readers.update(slot.number for slot in self.plan.outs)
        for k, i in enumerate(self.sums):
            carry = self.plan.ins[i]
            found = [*self.summands(self.plan.outs[k], carry, readers)]
            assert carry in found, f"{self.name}: sum {k} is more than a sum"
            self.adder.update((k, step) for step in self.adds if carry in step.ins)
            yield from ((k, slot) for slot in found if slot is not carry)

    def summands(self, slot: Slot, carry: Slot, readers: dict[int, int]) -> Iterator[Slot]:
        """Take a sum apart, as far as all its parts are placed alike."""
        step = self.made_by.get(slot.number)
        if not isinstance(step, Apply) or not _is_plain_sum(step, slot) or readers[slot.number] > 1:
            yield slot
            return
        self.adds.add(step)
        for x in step.ins:
            yield from self.summands(x, carry, readers)

    # Forward

    def visit(self, step: Step) -> None:
        """Say what the results of a step are made of, and the stage of a forward step."""
        if step in self.adds:
            return
        ins = [self.origins[slot.number] for slot in step.read]
        parameters = frozenset[int]().union(*(x.parameters for x in ins))
        has_rows = any(x.has_rows for x in ins)
        is_placed = any(x.is_placed for x in ins) or (parameters and has_rows)
        is_placed = is_placed or isinstance(step, OnStage) or has_effect(step)
        if not is_placed:
            made = Origin(None, parameters, has_rows)
        else:
            is_late = any(self.made_by.get(s.number) in self.backward for s in step.read)
            is_noted = step.node.meta.get("phase") == "backward"
            if is_late or (is_noted and not is_free(step)):
                self.backward.add(step)
            if is_free(step) and len(step.read) == 1:
                self.has[step.made[0].number] = self.has[step.read[0].number]
            latest = [x.stage for x in ins if x.stage is not None]
            latest += [self.home(i) for i in parameters]
            stage = max(latest, default=0)
            if step not in self.backward:
                stage = self.constrained(step, stage)
                self.kind_of[step] = FORWARD
                self.note_reads(step, stage)
            made = Origin(stage)
            self.stage_of[step] = stage
        for slot in step.made:
            self.origins[slot.number] = made
            if made.stage is not None and step not in self.backward:
                self.has[slot.number].add(made.stage)

    def constrained(self, step: Step, stage: int) -> int:
        """The stage of a forward step: that of a constraint, which may be a later one.

        Raises:
            PlacementError: it is an earlier one.
        """
        wanted = self.number_of(step.home) if isinstance(step, OnStage) else stage
        if wanted < stage:
            got = f"a value of stage {stage} would have to be sent back to stage {wanted}"
            raise PlacementError.of(f"{self.name}, constrain", got, **origin_of(step.node))
        return wanted

    def home(self, parameter: int) -> int:
        """Return the stage of a parameter."""
        stage = self.homes[parameter]
        assert stage is not None, f"{self.paths[parameter]} is on no stage"
        return stage

    def note_reads(self, step: Step, stage: int) -> None:
        """Note that a stage has what a step reads."""
        for slot in step.read:
            origin = self.origins[slot.number]
            if origin.is_placed:
                self.has[slot.number].add(stage)
            for i in origin.parameters:
                self.has_parameter[i].add(stage)

    def refuse_unread(self) -> None:
        """Refuse stages in the wrong order: those whose parameters only later stages read, since
        what they meet is there. A stage that runs something sends such a parameter.

        Raises:
            PlacementError: names the parameters and the lines that read them.
        """
        readers: dict[int, list[Step]] = collections.defaultdict(list)
        busy: set[int] = set()  # stages that run something of the forward
        for step, kind in self.kind_of.items():
            if kind == FORWARD:
                busy.add(self.stage_of[step])
                for slot in step.read:
                    for i in self.origins[slot.number].parameters:
                        readers[i].append(step)
        wrong = []
        for i, steps in sorted(readers.items()):
            home = self.home(i)
            earliest = min(steps, key=self.stage_of.__getitem__)
            stage = self.stage_of[earliest]
            if stage > home and home not in busy and not isinstance(earliest, OnStage):
                line = located(**origin_of(earliest.node)) or earliest.node.name
                wrong.append(
                    f"{self.paths[i]} is on stage {home}, but is first read on stage {stage}, "
                    f"at {line}, with {self.met(earliest, stage)}: stage {home} computes "
                    "nothing"
                )
        if wrong:
            fix = (
                "place each parameter on the stage that reads it first: stages follow the "
                "order in which the function reads its parameters"
            )
            raise PlacementError.of(f"{self.name}, stages", *wrong, fix=fix)

    def met(self, step: Step, stage: int) -> str:
        """What holds a step on its stage: parameters, or values that are made there."""
        origins = [self.origins[slot.number] for slot in step.read]
        found = sorted({i for x in origins for i in x.parameters if self.home(i) == stage})
        names = " and ".join(self.paths[i] for i in found) or "a value"
        return f"{names} of that stage"

    # Backward

    def place_backward(self) -> None:
        """Choose the stage of each step of the backward: cotangents only move down."""
        lowest = self.lower_bounds()
        for step in self.plan.steps:
            if step not in self.backward:
                continue
            ins = [(slot, self.origins[slot.number]) for slot in step.read]
            cotangents = [slot for slot, _ in ins if self.made_by.get(slot.number) in self.backward]
            upper = min(
                (self.stage_now(slot) for slot in cotangents),
                default=max(lowest[step], self.latest(step)),
            )
            lower = min(lowest[step], upper)
            stages = range(lower, upper + 1)
            stage = self.number_of(step.home) if isinstance(step, OnStage) else -1
            if stage not in stages:
                stage = self.cheapest(step, cotangents, stages)
            self.stage_of[step] = stage
            for slot in step.made:
                self.origins[slot.number] = Origin(stage)
                self.has[slot.number].add(stage)

    def stage_now(self, slot: Slot) -> int:
        """Return the stage of a value that one stage makes."""
        stage = self.origins[slot.number].stage
        assert stage is not None, f"value {slot.number} is on no stage"
        return stage

    def lower_bounds(self) -> dict[Step, int]:
        """The earliest stage of each step of the backward: that of what it saved, and of what
        reads its results.
        """
        bounds: dict[Step, int] = {}
        needed: dict[int, int] = {}  # by slot: the latest of its readers' bounds
        for step in reversed(self.plan.steps):
            if step not in self.backward:
                continue
            after = max((needed.get(slot.number, 0) for slot in step.made), default=0)
            bounds[step] = max(after, self.saved(step))
            for slot in step.read:
                needed[slot.number] = max(needed.get(slot.number, 0), bounds[step])
                self.readers[slot.number].append(step)
        return bounds

    def saved(self, step: Step) -> int:
        """The latest stage that makes one of the forward values that a step reads."""
        return max(
            (
                self.stage_now(slot)
                for slot in step.read
                if self.origins[slot.number].is_placed
                and self.made_by.get(slot.number) not in self.backward
            ),
            default=0,
        )

    def latest(self, step: Step) -> int:
        """The latest stage of what a step reads."""
        parameters = [i for slot in step.read for i in self.origins[slot.number].parameters]
        return max([self.saved(step), *map(self.home, parameters)])

    def cheapest(self, step: Step, cotangents: list[Slot], stages: range) -> int:
        """The stage at which a step of the backward sends least: the earliest among equals, among
        those that have what it saved and the parameters that it reads.
        """
        fitting = [s for s in stages if s in self.fitting(step)] or [*stages]

        def sent(stage: int) -> float:
            moved = [x for x in cotangents if stage not in self.has[x.number]]
            for slot in step.made:
                readers = (self.fitting(x) for x in self.readers[slot.number])
                moved += [slot] * any(stage not in fitting for fitting in readers)
            return sum(x.value.numel() * x.value.element_size() for x in moved)

        return min(fitting, key=lambda stage: (sent(stage), stage))

    def fitting(self, step: Step) -> set[int]:
        """The stages that have the forward values and the parameters that a step of the backward
        reads; all of them if it reads none, or if no stage has all. A gradient is made where its
        parameter lives, if that stage is among them.
        """
        if step not in self.fitting_of:
            found = set(range(self.stages))
            for slot in step.read:
                origin = self.origins[slot.number]
                if self.made_by.get(slot.number) not in self.backward and origin.is_placed:
                    found &= self.has[slot.number]
                for i in origin.parameters:
                    found &= self.has_parameter[i]
            found = found or set(range(self.stages))
            self.fitting_of[step] = found & self.owners_fed(step) or found
        return self.fitting_of[step]

    def owners_fed(self, step: Step) -> set[int]:
        """The stage of the parameter whose gradient a product makes; empty if it makes another
        value.
        """
        if len(step.read) < 2:
            return set()
        fed: set[int] = set()
        queue = list(step.made)
        while queue:
            slot = queue.pop()
            fed |= self.owner_of[slot.number]
            for reader in self.readers[slot.number]:
                if len(reader.read) > 1:
                    return set()
                queue += reader.made
        return fed if len(fed) == 1 else set()

    def part_backward(self) -> None:
        """Part the backward: B is what earlier stages wait for, and W is the rest."""
        waiting: dict[int, int] = {}  # by slot: the latest stage that waits for it
        for step in reversed(self.plan.steps):
            if step not in self.backward:
                continue
            stage = self.stage_of[step]
            is_waited_for = any(waiting.get(slot.number, stage) < stage for slot in step.made)
            is_waited_for |= any(slot.number in self.ahead for slot in step.made)
            self.kind_of[step] = BACKWARD if is_waited_for else WEIGHTS
            for slot in step.read:
                waiting[slot.number] = min(waiting.get(slot.number, stage), stage)
                if is_waited_for:
                    self.ahead.add(slot.number)


def _is_plain_sum(step: Apply, result: Slot) -> bool:
    """Whether a step adds two values that are placed and shaped as their sum."""
    form = lambda x: (x.placements, x.value.shape, x.value.dtype)
    is_add = step.node.target is ADD and not step.node.kwargs and len(step.ins) == 2
    return is_add and all(form(x) == form(result) for x in step.ins)
