"""The plan of a partition: the steps of every rank, independent of local sizes."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from ..buckets import Wish
from ..types import Marks, MeshAxes
from .redistribute import Move


@attrs.frozen(eq=False)
class Slot:
    """One value at one placement."""

    number: int
    value: torch.Tensor  # fake, global
    marks: Marks


@attrs.frozen(eq=False)
class Redistribute:
    """Redistribute a slot to another placement."""

    source: Slot
    target: Slot
    moves: tuple[Move, ...]
    node: torch.fx.Node  # the global node on whose behalf
    implicit: bool

    @property
    def read(self) -> tuple[Slot, ...]:
        return (self.source,)

    @property
    def made(self) -> tuple[Slot, ...]:
        return (self.target,)


@attrs.frozen(eq=False)
class Apply:
    """Run a global node's op on local tensors."""

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
class Nested:
    """Run a loop or a branch, whose graphs have plans of their own."""

    node: torch.fx.Node
    ins: tuple[Slot, ...]
    outs: tuple[Slot, ...]
    plans: tuple[Plan, ...]

    @property
    def read(self) -> tuple[Slot, ...]:
        return self.ins

    @property
    def made(self) -> tuple[Slot, ...]:
        return self.outs


@attrs.frozen(eq=False)
class Fill:
    """Make a constant tensor's shard locally."""

    node: torch.fx.Node
    out: Slot
    value: Any

    @property
    def read(self) -> tuple[Slot, ...]:
        return ()

    @property
    def made(self) -> tuple[Slot, ...]:
        return (self.out,)


@attrs.frozen(eq=False)
class Relabel:
    """Reinterpret a local tensor: as a shard of a global tensor, as a varying value, or as a
    term of a Partial sum.
    """

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
class Rescale:
    """Convert a Partial mean to a Partial sum or back, by a multiplication on each rank."""

    node: torch.fx.Node
    source: Slot
    target: Slot

    @property
    def read(self) -> tuple[Slot, ...]:
        return (self.source,)

    @property
    def made(self) -> tuple[Slot, ...]:
        return (self.target,)


Step = Redistribute | Apply | Nested | Fill | Relabel | Rescale


@attrs.frozen(eq=False)
class Gradient:
    """A gradient that `bucketed_grad` redistributes to its parameter's placement."""

    node: torch.fx.Node  # the global node that redistributes it
    wish: Wish
    region: str  # the bucketed_grad call: equal for all its gradients
    like: Slot | None  # the parameter, if it is an input
    slot: Slot  # the result
    unused: bool  # whether the loss is independent of the parameter


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
    ] = ()  # outs that are unreduced gradients


def needed(planned: list[Step], outs: tuple[Slot, ...]) -> tuple[Step, ...]:
    """The steps that some result depends on, and those that only check. Equal on every rank, so
    that all drop the same collectives.
    """
    live, kept = {slot.number for slot in outs}, []
    for step in reversed(planned):
        if not step.made or any(slot.number in live for slot in step.made):
            kept.append(step)
            live.update(slot.number for slot in step.read)
    return tuple(reversed(kept))
