"""The records of a walk: one global value with its slots, the placements of an op, and advice."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import attrs
import torch

from ...capture import annotations as sources
from ...collectives import ALL_GATHER
from ...placement import in_some_order
from ...types import PARTIAL_KINDS, AxisPlacement, MeshAxes, MeshPlacements
from .. import layout, plan
from ..redistribute import Move
from ..rule_api.strategy import OpCall


class Placed(NamedTuple):
    """The placements of an op's inputs and results, on the axes decided so far."""

    ins: list[MeshPlacements]
    outs: list[MeshPlacements]


# A gather of an input can start early and overlap with compute. Other collectives cannot.
EARLY = 0.25


class Advice(NamedTuple):
    """The placements that the planner chose, which a second walk follows.

    Args:
        ops: of ops.
        carries: of the carries of loops, by shape.
        branches: of the results of conds, by their positions.
        early: the weight of a byte of an input, for ops without advice.
    """

    ops: Mapping[torch.fx.Node, Placed]
    carries: Mapping[tuple[int, ...], MeshPlacements]
    branches: Mapping[tuple[torch.fx.Node, int], MeshPlacements] = {}
    early: float = EARLY


NO_ADVICE = Advice({}, {})


@attrs.define(eq=False)
class Value:
    """A global value during the walk: its slots by placement, and the phase in which each may
    be read.
    """

    fake: torch.Tensor
    early: bool  # whether it is an input, or only a rearrangement of inputs
    fill: tuple[torch.fx.Node, Any] | None = None
    # how it is made where it is read, if that is at any placement: the op and its arguments
    recipe: tuple[torch.fx.Node, tuple[Value, ...]] | None = None
    slots: dict[MeshPlacements, tuple[plan.Slot, str | None]] = attrs.field(factory=dict)
    users: int = 1
    unreduced: str | None = None  # the unreduced gradient that this is, or is linear in
    like: Value | None = None  # for a constant: the value whose shape it takes
    varies: frozenset[str] = frozenset()  # the mesh axes over which it varies, in a shard_map
    equal: frozenset[str] = (
        frozenset()
    )  # those of them over which it is known to be equal on all ranks
    is_explicit: bool = False  # whether per-rank code needs its Partial sum
    view: View | None = None  # how it is a view of another value

    @property
    def is_unmade(self) -> bool:
        """Whether the value can be made at any placement, and has not been made yet."""
        return not self.slots and (self.fill is not None or self.recipe is not None)

    def readable(self, phase: str) -> list[plan.Slot]:
        """List the slots that a phase may read."""
        return [slot for slot, only in self.slots.values() if only in (None, phase)]

    def strategy_slots(self, phase: str) -> list[plan.Slot]:
        """List the slots that a strategy may read; a constant borrows those of the value whose
        shape it takes.
        """
        if self.slots or self.like is None:
            return self.readable(phase)
        return [
            slot
            for slot in self.like.readable(phase)
            if not any(m in PARTIAL_KINDS for m in slot.placements)
        ]


@attrs.define(eq=False)
class View:
    """How a value is a view of another value.

    Args:
        node: the op, of one tensor.
        call: its call.
        source: the value that it views.
        images: the placements of the view, by those of the source. None where it has none.
    """

    node: torch.fx.Node
    call: OpCall
    source: Value
    images: dict[MeshPlacements, MeshPlacements | None] = attrs.field(factory=dict)

    @property
    def is_same_size(self) -> bool:
        """Whether a gather of the source sends as many bytes as one of the view."""
        (x,), (out,) = self.call.ins, self.call.outs
        return x.dtype == out.dtype and x.numel() == out.numel()


def value_of_slot(
    slot: plan.Slot,
    users: int = 1,
    varies: frozenset[str] = frozenset(),
    equal: frozenset[str] = frozenset(),
) -> Value:
    """Make the value of an op's result, which has one slot."""
    slots: dict[MeshPlacements, tuple[plan.Slot, str | None]] = {slot.placements: (slot, None)}
    return Value(slot.value, early=False, slots=slots, users=users, varies=varies, equal=equal)


@attrs.frozen(eq=False)
class UnplacedGradient:
    """A gradient before it is redistributed to the placement of its parameter."""

    value: Value
    like: torch.fx.Node  # the parameter
    options: str


def is_repeated_in_backward(move: Move, value: Value, node: torch.fx.Node) -> bool:
    """Return whether forward and backward each make a move, so that its result is not saved:
    parameters, checkpointed calls.
    """
    if sources.is_checkpointed(node.meta.get("custom") or {}):
        return move.sends and move.collective.grows
    return value.early and move.kind == ALL_GATHER


def is_partial(placements: MeshPlacements) -> bool:
    """Return whether placements are Partial on some axis."""
    return any(m in PARTIAL_KINDS for m in placements)


def default_placements(
    value: Value, axes: MeshAxes, given: Collection[MeshPlacements] = ()
) -> MeshPlacements:
    """Return the default placements of a value: Partial reduced, in plain chunks."""
    if value.is_unmade:
        return ("R",) * len(axes.sizes)
    placements = next(iter(value.slots))
    reduced = tuple("R" if m in PARTIAL_KINDS else m for m in placements)
    if reduced in given:
        return reduced
    return in_plain_chunks(value.fake.shape, reduced, axes)


def in_plain_chunks(
    shape: Sequence[int], placements: Sequence[AxisPlacement], axes: MeshAxes
) -> MeshPlacements:
    """Simplify placements to plain chunks, unless a `P` can say them as they are."""
    given = layout.canonical(shape, placements, axes.sizes)
    is_given = given is not None and all(
        isinstance(m, str) or (layout.dim_and_unit(m)[1] == 1 and not any(layout.halo(m)))
        for m in given
    )
    if given is not None and is_given and in_some_order(given, shape, axes):
        return given
    plain = [m if isinstance(m, str) else layout.dim_and_unit(m)[0] for m in placements]
    return layout.fitted(shape, plain, axes.sizes)


def can_be_drawn(placement: AxisPlacement) -> bool:
    """Return whether a rank can draw its shard of random numbers at this placement: its elements
    are one run along each dim, or the two of a zigzag, without a halo.
    """
    is_shard = placement not in PARTIAL_KINDS and not any(layout.halo(placement))
    return is_shard and layout.blocks(placement) in (1, -2)
