"""What a walk knows of one global value: its slots, and what it may be read as."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from ...types import PENDING, Marks, MeshAxes
from .. import layout, plan


@attrs.define(eq=False)
class Value:
    """A global value: its slots by placement, and in which phase each may be read."""

    fake: torch.Tensor
    early: bool  # an input, or only a rearrangement of inputs
    fill: tuple[torch.fx.Node, Any] | None = None
    slots: dict[Marks, tuple[plan.Slot, str | None]] = attrs.field(factory=dict)
    users: int = 1
    unreduced: str | None = (
        None  # the argument that is an unreduced gradient, if this is it or a linear function of it
    )
    like: Value | None = None  # of a constant: the value whose shape it takes
    varies: frozenset[str] = (
        frozenset()
    )  # the mesh axes over which it is each rank's own, in a shard_map
    equal: frozenset[str] = (
        frozenset()
    )  # those of them over which all ranks' happen to be equal
    asked: bool = False  # whether per-rank code asks for its Partial sum

    def readable(self, phase: str) -> list[plan.Slot]:
        return [slot for slot, only in self.slots.values() if only in (None, phase)]

    def held(self, phase: str) -> list[plan.Slot]:
        """The slots that a choice may look at: a constant that is made like a value belongs
        where that is.
        """
        if self.slots or self.like is None:
            return self.readable(phase)
        return [
            slot
            for slot in self.like.readable(phase)
            if not any(m in PENDING for m in slot.marks)
        ]


@attrs.frozen(eq=False)
class Unaligned:
    """A gradient before it is redistributed to the placement of its parameter."""

    value: Value
    like: torch.fx.Node  # the parameter
    wish: str


def is_partial(marks: Marks) -> bool:
    """Whether a reduction is Partial on some axis."""
    return any(m in PENDING for m in marks)


def settled(value: Value, axes: MeshAxes) -> Marks:
    """The placement of a value that nothing asks for: as it is, Partial reduced, in plain
    chunks.
    """
    if value.fill is not None and not value.slots:
        return ("R",) * len(axes.sizes)
    marks = next(iter(value.slots))
    plain = tuple(
        "R" if m in PENDING else layout.cut_of(m)[0] if isinstance(m, tuple) else m
        for m in marks
    )
    return layout.fitted(value.fake.shape, plain, axes.sizes)
