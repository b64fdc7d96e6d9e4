"""The bags of a rank's indices: which bag each belongs to, and how long bags are."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from ....ops.nodes import args_of
from ...emission.builder import Builder, Piece
from ...rule_api.strategy import named

aten = torch.ops.aten
SUM, MEAN, MAX = range(3)


@attrs.frozen
class Options:
    """The numbers of a call.

    Args:
        mode: 0 for sums, 1 for means, 2 for maxima.
        padding: the index that adds nothing; negative for none.
        long: the number of indices in each bag, where the program says that all have as many.
        open_end: whether the last bag goes to the end of the indices.
    """

    mode: int
    padding: int
    long: int | None
    open_end: bool


def options_of(target: Any, args: Any, kwargs: Any) -> Options:
    """The numbers of a call with nodes for tensors."""
    values = named(target, args, kwargs)
    return Options(
        mode=values["mode"],
        padding=values["padding_idx"],
        long=_long(values),
        open_end=not values.get("include_last_offset", False),
    )


def _long(values: dict[str, Any]) -> int | None:
    """The step of the offsets, where they count from 0 to the number of indices."""
    offsets: torch.fx.Node = values["offsets"]
    is_counted = offsets.target is aten.arange.start_step
    if values.get("include_last_offset", False) or not is_counted:
        return None
    n = values["indices"].meta["val"].numel()
    first, last, step, *_ = args_of(offsets)
    is_even = n > 0 and step > 0 and n % step == 0
    return step if is_even and (first, last) == (0, n) else None


@attrs.frozen
class Bags:
    """The bags of a rank: its shard of equally long ones, or all of them, to which it adds its
    indices.

    Args:
        b: the builder.
        indices: the rank's.
        offsets: where bags begin, in the global indices.
        o: the numbers of the call.
    """

    b: Builder
    indices: Piece
    offsets: Piece
    o: Options

    @property
    def count(self) -> int:
        """The number of the rank's indices."""
        return self.indices.local_shape[0]

    def numbers(self, n: int) -> Any:
        """The numbers from 0 to n."""
        device = self.indices.node.meta["val"].device
        return self.b.call(aten.arange.default, n, device=device)

    def even(self, n: int) -> Any:
        """The bag of each of n indices, where all are equally long."""
        numbers = self.numbers(n)
        return self.b.call(aten.div.Tensor_mode, numbers, self.o.long, rounding_mode="floor")

    def whole(self) -> Any:
        """The bag of each of the global indices."""
        n = self.indices.shape[0]
        if self.o.long:
            return self.even(n)
        numbers = self.numbers(n)
        return self.bags_at(numbers)

    def bags_at(self, places: Any) -> Any:
        """The bags at some places in the global indices."""
        after = self.b.call(aten.searchsorted.Tensor, self.offsets.node, places, right=True)
        return self.b.call(aten.sub.Tensor, after, 1)

    @property
    def are_parts(self) -> bool:
        """Whether the rank has some of the indices of bags of any length."""
        return not self.o.long and self.indices.cuts(0)

    def own(self) -> Any:
        """The global number of the bag of each of the rank's indices."""
        if not self.indices.cuts(0):
            return self.whole()
        start = self.b.offset(self.indices, 0)
        if self.are_parts:
            numbers = self.numbers(self.count)
            places = self.b.call(aten.add.Tensor, numbers, start)
            return self.bags_at(places)
        first = self.b.call(aten.div.Tensor_mode, start, self.o.long, rounding_mode="floor")
        numbers = self.even(self.count)
        return self.b.call(aten.add.Tensor, numbers, first)

    def local(self) -> Any:
        """The number of the bag of each index among the rank's bags."""
        if self.o.long:
            return self.even(self.count)
        return self.own()

    def read(self) -> Any:
        """A mask of the indices that are not padding; None if all are read."""
        if self.o.padding < 0:
            return None
        return self.b.call(aten.ne.Scalar, self.indices.node, self.o.padding)

    def lengths(self, bags: int) -> Any:
        """The number of indices in each of the rank's bags, without padding."""
        if self.are_parts:
            return self.steps()
        read = self.read()
        if read is None:
            read = self.b.call(aten.ones_like.default, self.indices.node)
        read = self.b.call(aten._to_copy.default, read, dtype=torch.int64)
        return self.added(bags, read)

    def steps(self) -> Any:
        """The lengths of bags by their offsets."""
        end = self.b.call(aten.new_full.default, self.offsets.node, [1], self.indices.shape[0])
        starts = self.offsets.node
        after = self.b.call(aten.slice.Tensor, starts, 0, 1)
        ends = self.b.call(aten.cat.default, [after, end])
        return self.b.call(aten.sub.Tensor, ends, starts)

    def added(self, bags: int, values: Any) -> Any:
        """Values of indices, added in bags."""
        like = values.meta["val"]
        zeros = self.b.call(
            aten.zeros.default, [bags, *like.shape[1:]], dtype=like.dtype, device=like.device
        )
        return self.b.call(aten.index_add.default, zeros, 0, self.local(), values)


def bags_of(b: Builder, values: dict[str, Any], indices: Piece, offsets: Piece) -> Bags:
    """The bags of a rank's indices."""
    is_open = not values.get("include_last_offset", False)
    long = None
    if offsets.cuts(0):
        long = indices.shape[0] // offsets.shape[0]
    padding = values["padding_idx"]
    o = Options(values["mode"], padding, long, is_open)
    return Bags(b, indices, offsets, o)
