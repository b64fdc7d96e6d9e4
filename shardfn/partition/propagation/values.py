"""The records of a walk: one global value with its slots, the placements of an op, and advice."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import attrs
import torch

from ...capture import annotations as sources
from ...collectives import ALL_GATHER
from ...placement import in_some_order
from ...types import PENDING, Mark, Marks, MeshAxes
from .. import layout, plan
from ..redistribute import Move
from ..rule_api.strategy import OpCall


class Placed(NamedTuple):
    """The placements of an op's inputs and outputs, on the mesh axes decided so far."""

    ins: list[Marks]
    outs: list[Marks]


# A gather of an input can start early and overlap with compute. Other collectives cannot.
EARLY = 0.25


class Advice(NamedTuple):
    """The placements that a plan of all ops has.

    Args:
        ops: of ops.
        carries: of the carries of loops, by shape.
        branches: of the results of conds, by their positions.
        early: the weight of a byte of an input, for ops without advice.
    """

    ops: Mapping[torch.fx.Node, Placed]
    carries: Mapping[tuple[int, ...], Marks]
    branches: Mapping[tuple[torch.fx.Node, int], Marks] = {}
    early: float = EARLY


NO_ADVICE = Advice({}, {})


@attrs.define(eq=False)
class Value:
    """A global value: its slots by placement, and in which phase each may be read."""

    fake: torch.Tensor
    early: bool  # whether it is an input, or only a rearrangement of inputs
    fill: tuple[torch.fx.Node, Any] | None = None
    # how it is made where it is read, if that is at any placement: the op and its arguments
    recipe: tuple[torch.fx.Node, tuple[Value, ...]] | None = None
    slots: dict[Marks, tuple[plan.Slot, str | None]] = attrs.field(factory=dict)
    users: int = 1
    unreduced: str | None = None  # the unreduced gradient that this is, or is linear in
    like: Value | None = None  # for a constant: the value whose shape it takes
    varies: frozenset[str] = frozenset()  # the mesh axes over which it varies, in a shard_map
    equal: frozenset[str] = (
        frozenset()
    )  # those of them over which it is known to be equal on all ranks
    asked: bool = False  # whether per-rank code needs its Partial sum
    view: View | None = None  # how it is a view of another value

    @property
    def is_unmade(self) -> bool:
        """Whether it can be made at any placement, and has not been made yet."""
        return not self.slots and (self.fill is not None or self.recipe is not None)

    def readable(self, phase: str) -> list[plan.Slot]:
        return [slot for slot, only in self.slots.values() if only in (None, phase)]

    def held(self, phase: str) -> list[plan.Slot]:
        """The slots that a strategy may read. A constant made like another value has the slots
        of that value.
        """
        if self.slots or self.like is None:
            return self.readable(phase)
        return [
            slot for slot in self.like.readable(phase) if not any(m in PENDING for m in slot.marks)
        ]


@attrs.define(eq=False)
class View:
    """How a value is a view of another one.

    Args:
        node: the op, of one tensor.
        call: its call.
        source: the value that it views.
        images: the placements of the view, by those of the source. None where it has none.
    """

    node: torch.fx.Node
    call: OpCall
    source: Value
    images: dict[Marks, Marks | None] = attrs.field(factory=dict)

    @property
    def is_same_size(self) -> bool:
        """Whether a gather of the source sends as many bytes as one of the view."""
        (x,), (out,) = self.call.ins, self.call.outs
        return x.dtype == out.dtype and x.numel() == out.numel()


def at_one_placement(
    slot: plan.Slot,
    users: int = 1,
    varies: frozenset[str] = frozenset(),
    equal: frozenset[str] = frozenset(),
) -> Value:
    """A value that an op has made, at one placement."""
    slots: dict[Marks, tuple[plan.Slot, str | None]] = {slot.marks: (slot, None)}
    return Value(slot.value, early=False, slots=slots, users=users, varies=varies, equal=equal)


@attrs.frozen(eq=False)
class Unaligned:
    """A gradient before it is redistributed to the placement of its parameter."""

    value: Value
    like: torch.fx.Node  # the parameter
    wish: str


def is_made_again(move: Move, value: Value, node: torch.fx.Node) -> bool:
    """Whether a move is made once in the forward and the backward perform, so that its result
    is not saved: those of a parameter, and those in a checkpointed call.
    """
    if sources.is_checkpointed(node.meta.get("custom") or {}):
        return move.sends and move.collective.grows
    return value.early and move.kind == ALL_GATHER


def is_partial(marks: Marks) -> bool:
    """Whether the placements are Partial on some axis."""
    return any(m in PENDING for m in marks)


def settled(value: Value, axes: MeshAxes, given: Collection[Marks] = ()) -> Marks:
    """The default placements of a value: its own, with Partial reduced and in plain chunks, or in
    blocks as some given placement.
    """
    if value.is_unmade:
        return ("R",) * len(axes.sizes)
    marks = next(iter(value.slots))
    reduced = tuple("R" if m in PENDING else m for m in marks)
    if reduced in given:
        return reduced
    return in_plain_chunks(value.fake.shape, reduced, axes)


def in_plain_chunks(shape: Sequence[int], marks: Sequence[Mark], axes: MeshAxes) -> Marks:
    """The placements in plain chunks: as they are if a P says so, else in mesh order."""
    given = layout.canonical(shape, marks, axes.sizes)
    is_given = given is not None and all(
        isinstance(m, str) or (layout.cut_of(m)[1] == 1 and not any(layout.halo(m))) for m in given
    )
    if given is not None and is_given and in_some_order(given, shape, axes):
        return given
    plain = [m if isinstance(m, str) else layout.cut_of(m)[0] for m in marks]
    return layout.fitted(shape, plain, axes.sizes)


def is_numbered(mark: Mark) -> bool:
    """Whether a rank can make its part of random numbers: the elements of one range."""
    return mark not in PENDING and layout.is_plain(mark)
