"""The price of a value at a placement on one mesh axis, in bytes that a rank sends."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from ...types import PENDING, Mark, Marks, MeshAxes
from .. import plan, rules
from ..redistribute import local_bytes, mark_price
from .values import Value, is_numbered

INFINITE = float("inf")  # the price of an impossible placement


@attrs.frozen
class Prices:
    """The prices of moves.

    Args:
        axes: of the mesh, with the costs of their links.
        early: the weight of a byte of an input, whose gather may start early.
    """

    axes: MeshAxes
    early: float

    def move(self, x: torch.Tensor, marks: Marks, wanted: Mark, axis: int) -> float:
        """The price of a tensor at a placement on one axis, from placements that it has."""
        n = self.axes.sizes[axis]
        nbytes = local_bytes(nbytes_of(x), marks, self.axes.sizes[: len(marks)], axis)
        return mark_price(marks[axis], wanted, nbytes, n, x.shape, self.axes.cost(axis))

    def input(self, value: Value, slots: Sequence[plan.Slot], wanted: Mark, axis: int) -> float:
        """The price of one input at a placement on one axis."""
        if value.fill is not None:
            return 0.0 if rules.fill_fits(value.fill[1], wanted) else INFINITE
        if value.recipe is not None:
            return 0.0 if is_numbered(wanted) else INFINITE
        if any(slot.marks[axis] == wanted for slot in slots):
            return 0.0
        return min(self.move(value.fake, slot.marks, wanted, axis) for slot in slots)

    def weight(self, value: Value, slots: Sequence[plan.Slot], axis: int) -> float:
        """The weight of a byte of an input."""
        if not value.early or any(slot.marks[axis] in PENDING for slot in slots):
            return 1.0
        return self.early


def nbytes_of(x: torch.Tensor) -> float:
    """The bytes of a global tensor."""
    return float(x.numel() * x.element_size())
