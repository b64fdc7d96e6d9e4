"""The plan of a partition: what happens on every rank, before any local size is known."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch

from ..buckets import Wish
from ..ops import debug
from ..types import Marks, MeshAxes
from .redistribute import Move


@attrs.frozen(eq=False)
class Slot:
    """One value at one placement."""

    number: int
    value: torch.Tensor  # fake, global
    marks: Marks


@attrs.frozen(eq=False)
class _Change:
    """One slot made of another, of one global node or on its behalf."""

    node: torch.fx.Node
    source: Slot
    target: Slot

    @property
    def read(self) -> tuple[Slot, ...]:
        return (self.source,)

    @property
    def made(self) -> tuple[Slot, ...]:
        return (self.target,)


@attrs.frozen(eq=False)
class Redistribute(_Change):
    """Bring a slot to another placement."""

    moves: tuple[Move, ...]
    implicit: bool


@attrs.frozen(eq=False)
class Relabel(_Change):
    """Give a local tensor another meaning: a shard of a global tensor, a value of its own, or a
    term of a sum.
    """


@attrs.frozen(eq=False)
class Rescale(_Change):
    """Make a mean over ranks a sum, or a sum a mean: a multiplication on each rank."""


@attrs.frozen(eq=False)
class _Call:
    """A global node's op, with the slots that it takes and makes."""

    node: torch.fx.Node
    ins: tuple[Slot, ...]
    outs: tuple[Slot, ...]  # one for each tensor that the op returns

    @property
    def read(self) -> tuple[Slot, ...]:
        return self.ins

    @property
    def made(self) -> tuple[Slot, ...]:
        return self.outs


@attrs.frozen(eq=False)
class Apply(_Call):
    """Run a global node's op on local tensors."""

    # how a rank runs it, if that is not by the op's rule
    local: Callable[..., Any] | None = None


@attrs.frozen(eq=False)
class Nested(_Call):
    """Run a loop or a branch, whose graphs have plans of their own."""

    plans: tuple[Plan, ...]


@attrs.frozen(eq=False)
class Fill:
    """Make the shard of a constant tensor locally."""

    node: torch.fx.Node
    out: Slot
    value: Any

    @property
    def read(self) -> tuple[Slot, ...]:
        return ()

    @property
    def made(self) -> tuple[Slot, ...]:
        return (self.out,)


Step = Redistribute | Apply | Nested | Fill | Relabel | Rescale


@attrs.frozen(eq=False)
class Gradient:
    """A gradient that `bucketed_grad` brings to its parameter's placement."""

    node: torch.fx.Node  # the global node that does
    wish: Wish
    region: str  # the same for all gradients of one call
    like: Slot | None  # the parameter, where it is an input
    slot: Slot  # the result
    unused: bool  # whether the loss does not depend on the parameter


@attrs.frozen(eq=False)
class Plan:
    """Every step, in order, the same on all ranks."""

    axes: MeshAxes
    steps: tuple[Step, ...]
    ins: tuple[Slot, ...]
    outs: tuple[Slot, ...]
    gradients: tuple[Gradient, ...] = ()
    unreduced: tuple[
        tuple[Slot, torch.fx.Node], ...
    ] = ()  # outs that are gradients which somebody else is to reduce
    # of a function with its gradients: the cotangents of its results, by their number
    cotangents: tuple[tuple[int, Slot], ...] = ()
    # the placements that a plan of all ops has (propagation/values.py)
    advice: Any = attrs.field(default=None, repr=False)


def moves(chosen: Plan) -> Iterator[tuple[Redistribute, Move]]:
    """The moves of a plan, without those of its loops. Equal ones become one collective."""
    seen = set()
    for step in chosen.steps:
        if not isinstance(step, Redistribute):
            continue
        phase = step.node.meta.get("phase")
        for move in step.moves:
            key = (step.source.number, move.before, move.after, move.perm, phase)
            if key not in seen:
                seen.add(key)
                yield step, move


def on_one_rank(chosen: Plan) -> Iterator[str]:
    """The names of the nodes whose collectives are over axes of one rank, which send nothing."""
    sizes = chosen.axes.sizes
    for step, move in moves(chosen):
        if move.sends and sizes[move.axis] == 1:
            yield step.node.name
    for step in chosen.steps:
        plans = step.plans if isinstance(step, Nested) else ()
        for inner in plans:
            yield from on_one_rank(inner)


def shows(step: Step) -> bool:
    """Whether a step shows values, itself or in a loop."""
    return isinstance(step, (Apply, Nested)) and debug.has_effect(step.node)


def has_effect(step: Step) -> bool:
    """Whether a step checks or shows values, so that it runs though nothing reads its results."""
    return not step.made or shows(step)


def needed(planned: list[Step], outs: tuple[Slot, ...]) -> tuple[Step, ...]:
    """The steps that some result depends on, and those that only check; the same on every rank,
    so that all drop the same collectives.
    """
    live = {slot.number for slot in outs}
    kept = []
    for step in reversed(planned):
        if has_effect(step) or any(slot.number in live for slot in step.made):
            kept.append(step)
            live.update(slot.number for slot in step.read)
    return tuple(reversed(kept))
