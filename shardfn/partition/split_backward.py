"""Two plans of one: the forward, and the backward that reads its residuals."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import attrs

from ..capture import annotations as sources
from ..capture.checkpoint.recompute import is_view
from ..types import AtStage
from .plan import Apply, Fill, OnStage, Plan, Relabel, Slot, Step, has_effect

INPUT = "input"
RESULT = "result"
SAVED = "saved"


@attrs.frozen(eq=False)
class SplitPlan:
    """A plan of a function with its gradients, split into a forward and a backward plan.

    Args:
        forward: returns the results, and then the values that it saves.
        backward: takes the residuals, and then the cotangents; returns the gradients.
        residuals: where each residual comes from: an input of the forward, a result, or a saved
            value, with its number among those.
        cotangents: the numbers of the cotangents.
    """

    forward: Plan
    backward: Plan
    residuals: tuple[tuple[str, int], ...]
    cotangents: tuple[int, ...]


def split_backward(plan: Plan, results: int, drawn: Collection[int] = ()) -> SplitPlan:
    """Split a plan into forward and backward; what the backward reads is a residual.

    The backward has the steps that capture has annotated as backward, and those that depend on
    a cotangent. It repeats constants and views. Everything else that it reads is a residual.

    Args:
        plan: of a function that returns its results, and then gradients.
        results: how many results it has.
        drawn: the inputs that differ from call to call, such as the state of random calls,
            which are saved as computed values are.
    """
    returned = plan.outs[:results]
    gradients = plan.outs[results:]
    flow = _Flow(plan)
    late, read = flow.backward(gradients, returned)
    places = _numbered(RESULT, returned) | _numbered(INPUT, plan.ins)
    for i in drawn:
        del places[plan.ins[i].number]
    known = {slot.number: slot for slot in (*returned, *plan.ins)}  # with their stages
    residuals = [known.get(slot.number) or flow.on_its_stage(slot, late) for slot in read]
    saved = tuple(x for x in residuals if x.number not in places)
    places |= _numbered(SAVED, saved)
    outs = (*returned, *saved)
    checks = [step for step in plan.steps if has_effect(step) and step not in late]
    checked = [slot for step in checks for slot in step.read]
    early = flow.later_dims((*outs, *checked)) | {*checks}
    numbers, cotangents = tuple(zip(*plan.cotangents, strict=True)) or ((), ())
    forward = attrs.evolve(plan, steps=_some(plan, early), outs=outs, cotangents=())
    backward = attrs.evolve(
        plan,
        steps=_some(plan, late),
        ins=(*residuals, *cotangents),
        outs=gradients,
        unreduced=(),
        cotangents=(),
    )
    origins = tuple(places[x.number] for x in residuals)
    return SplitPlan(forward, backward, origins, numbers)


def _numbered(kind: str, slots: Iterable[Slot]) -> dict[int, tuple[str, int]]:
    """Map the numbers of slots to (kind, index)."""
    return {slot.number: (kind, index) for index, slot in enumerate(slots)}


def _some(plan: Plan, steps: Collection[Step]) -> tuple[Step, ...]:
    """Keep some steps of a plan, in its order."""
    return tuple(step for step in plan.steps if step in steps)


class _Flow:
    """Which step makes each slot of a plan, and which steps belong to the backward."""

    def __init__(self, plan: Plan) -> None:
        self.axis = plan.stage_axis
        self.made: dict[int, Step] = {}  # by slot
        self.given = {slot.number for _, slot in plan.cotangents}
        self.late: set[Step] = set()
        later = set(self.given)
        for step in plan.steps:
            made = {slot.number for slot in step.made}
            read = {slot.number for slot in step.read}
            self.made.update(dict.fromkeys(made, step))
            if _is_noted(step) or read & later:
                self.late.add(step)
                later |= made

    def later_dims(self, slots: Iterable[Slot]) -> set[Step]:
        """Collect the steps that some slots depend on."""
        steps: set[Step] = set()
        queue = list(slots)
        while queue:
            step = self.made.get(queue.pop().number)
            if step is not None and step not in steps:
                steps.add(step)
                queue += step.read
        return steps

    def on_its_stage(self, slot: Slot, steps: Iterable[Step]) -> Slot:
        """A slot with its stage among its placements, if one stage makes it, or alone reads it in
        the backward.
        """
        if self.axis is None:
            return slot
        places = {self.made[slot.number].coordinate}
        if places == {None}:
            places = {x.coordinate for x in steps if slot.number in {s.number for s in x.read}}
        (coordinate, *others) = places
        if coordinate is None or others:
            return slot
        marks = list(slot.placements)
        marks[self.axis] = AtStage(coordinate).mark
        return attrs.evolve(slot, placements=tuple(marks))

    def backward(
        self, gradients: Iterable[Slot], returned: Collection[Slot]
    ) -> tuple[set[Step], list[Slot]]:
        """Return the steps of the backward, and the residuals that it reads."""
        early = self.later_dims(returned)
        results = {slot.number for slot in returned}
        steps: set[Step] = {s for s in self.late if has_effect(s)}
        read: dict[int, Slot] = {}
        queue = [*gradients, *(x for step in steps for x in step.read)]
        while queue:
            slot = queue.pop()
            step = self.made.get(slot.number)
            if step in steps or slot.number in self.given:
                continue
            if step is None or slot.number in results:
                read[slot.number] = slot
                continue
            is_own = step in self.late and step not in early
            if is_own or is_free(step):
                steps.add(step)
                queue += step.read
            else:
                read[slot.number] = slot
        return steps, [read[number] for number in sorted(read)]


def _is_noted(step: Step) -> bool:
    """Return whether capture marked a step as backward."""
    noted = step.node.meta.get("custom") or {}
    return sources.OUTERMOST in noted


def is_free(step: Step) -> bool:
    """Return whether the backward may repeat a step instead of saving its result."""
    if isinstance(step, Apply):
        return not step.ins or is_view(step.node)
    return isinstance(step, (Fill, Relabel)) and not isinstance(step, OnStage)
