"""The price of a value at a placement on one mesh axis, in bytes that a rank sends."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from ...types import PARTIAL_KINDS, AxisPlacement, MeshAxes, MeshPlacements
from .. import plan, rules
from ..redistribute import axis_price, kind_of, local_bytes, price
from ..rule_api.strategy import OpCall
from .values import Value, can_be_drawn

INFINITE = float("inf")  # the price of an impossible placement


@attrs.frozen
class Prices:
    """Prices of redistributions on one mesh axis, for greedy propagation.

    Args:
        axes: of the mesh, with the costs of their links.
        early: the weight of a byte of an input, whose gather may start early.
    """

    axes: MeshAxes
    early: float

    def move(
        self, x: torch.Tensor, placements: MeshPlacements, wanted: AxisPlacement, axis: int
    ) -> float:
        """Price a tensor at a placement on one axis, from the placements that it has."""
        n = self.axes.sizes[axis]
        nbytes = local_bytes(nbytes_of(x), placements, self.axes.sizes[: len(placements)], axis)
        return axis_price(placements[axis], wanted, nbytes, n, x.shape, self.axes.cost(axis))

    def input(
        self, value: Value, slots: Sequence[plan.Slot], wanted: AxisPlacement, axis: int
    ) -> float:
        """Price one input of an op at a placement on one axis, from its cheapest slot."""
        if value.fill is not None:
            return 0.0 if rules.fill_fits(value.fill[1], wanted) else INFINITE
        if value.recipe is not None:
            return 0.0 if can_be_drawn(wanted) else INFINITE
        if any(slot.placements[axis] == wanted for slot in slots):
            return 0.0
        return min(self.move(value.fake, slot.placements, wanted, axis) for slot in slots)

    def reduced(
        self, x: torch.Tensor, placements: MeshPlacements, slots: Sequence[plan.Slot], axis: int
    ) -> float:
        """Price the reduction of a Partial gradient to the cheapest placement of its source."""
        n = self.axes.sizes[axis]
        nbytes = local_bytes(nbytes_of(x), placements, self.axes.sizes[: len(placements)], axis)
        targets = {slot.placements[axis] for slot in slots} or {"R"}
        kinds = {kind_of(placements[axis], wanted) for wanted in targets} - {None}
        prices = (price(kind, nbytes, n, self.axes.cost(axis)) for kind in kinds if kind)
        return min(prices, default=0.0)

    def inside(self, call: OpCall, ins: Sequence[MeshPlacements], axis: int) -> float:
        """Price what ranks send inside of an op by a strategy on one axis."""
        of_op = rules.row_of(call.target).sends
        if of_op is None:
            return 0.0
        nbytes, starts = of_op(call, ins, axis, self.axes.sizes)
        cost = self.axes.cost(axis)
        return nbytes * cost.byte + starts * cost.start

    def share_of_terms(
        self, x: torch.Tensor, terms: Sequence[tuple[Value, Sequence[plan.Slot]]], axis: int
    ) -> float:
        """Estimate the share of a Partial result that a rank will have, from how later axes shard
        the Partial inputs of its size. So a sum is not taken for larger than its terms.
        """
        sizes = self.axes.sizes[axis + 1 :]
        shares = [
            min(local_bytes(1.0, slot.placements[axis + 1 :], sizes, -1) for slot in slots)
            for value, slots in terms
            if slots and value.fake.numel() == x.numel()
        ]
        return max(shares, default=1.0)

    def weight(self, value: Value, slots: Sequence[plan.Slot], axis: int) -> float:
        """Return the weight of a byte of an input: parameters count less, since their gathers
        start early.
        """
        if not value.early or any(slot.placements[axis] in PARTIAL_KINDS for slot in slots):
            return 1.0
        return self.early


def nbytes_of(x: torch.Tensor) -> float:
    """Return the bytes of a global tensor."""
    return float(x.numel() * x.element_size())
