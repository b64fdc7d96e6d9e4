"""Builds one rank's graph, node by node, with a fake value for each node."""

from __future__ import annotations

from collections.abc import Sequence
from operator import getitem
from typing import Any

import attrs
import torch

from ... import _compat
from ...types import Marks, MeshAxes
from .. import layout

aten = torch.ops.aten


@attrs.frozen(eq=False, repr=False)
class Piece:
    """A rank's shard of a global value: its node, and its placements."""

    node: torch.fx.Node
    shape: tuple[int, ...]  # global
    stride: tuple[int, ...]  # global
    marks: Marks
    local_shape: tuple[int, ...]

    def cuts(self, dim: int) -> bool:
        """Whether some axis shards this dim."""
        return any((layout.split(m) or (None,))[0] == dim for m in self.marks)


class Builder:
    """Builds a graph for all ranks with the same local sizes.

    Args:
        axes: the mesh.
        coordinates: those of one rank. Only sizes depend on them: offsets are computed in the
            graph.
        mode: the fake tensor mode of the values.
        device: of the coordinates.
        group_names: the process group name of each axis.
    """

    def __init__(
        self,
        axes: MeshAxes,
        coordinates: Sequence[int],
        mode: _compat.FakeTensorMode,
        device: str,
        group_names: tuple[str, ...],
    ) -> None:
        self.axes, self.coordinates, self.mode = axes, tuple(coordinates), mode
        self.group_names = group_names
        self.graph = torch.fx.Graph()
        self.about: dict[str, Any] = {}
        self.offsets: dict[Any, torch.fx.Node] = {}
        with mode:
            self.coords = [
                self.placeholder(f"coord_{name}", torch.empty((), dtype=torch.int64, device=device))
                for name in axes.names
            ]

    def placeholder(self, name: str, value: torch.Tensor) -> torch.fx.Node:
        """An input of the graph."""
        node = self.graph.placeholder(name)
        node.meta["val"] = value
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
        """Add a call, and compute its fake value."""
        node = self.graph.call_function(target, args, kwargs)
        fake = torch.fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        node.meta.update(self.about)
        node.meta["val"] = target(*fake[0], **fake[1])
        return node

    def item(self, node: torch.fx.Node, i: int) -> torch.fx.Node:
        """One of the values that a call returns."""
        item = self.graph.call_function(getitem, (node, i))
        item.meta.update(self.about, val=node.meta["val"][i])
        return item

    def local_shape(self, shape: Sequence[int], marks: Marks) -> tuple[int, ...]:
        """The shape of these ranks' shard."""
        return layout.local_shape(shape, marks, self.axes.sizes, self.coordinates)

    def piece(self, node: torch.fx.Node, value: torch.Tensor, marks: Marks) -> Piece:
        """A node as a shard of a global value."""
        piece = Piece(
            node,
            tuple(value.shape),
            tuple(value.stride()),
            marks,
            self.local_shape(value.shape, marks),
        )
        node.meta["type"] = (piece.shape, marks)
        return piece

    def offset(self, piece: Piece, dim: int) -> torch.fx.Node:
        """The offset of the shard in the global dim, computed from the rank's coordinates by
        the same code on every rank.
        """
        size = piece.shape[dim]
        total = None
        for k, (mark, n) in enumerate(zip(piece.marks, self.axes.sizes, strict=True)):
            cut = layout.split(mark)
            if cut is None or cut[0] != dim:
                continue
            start = self.start(k, size, cut[1])
            total = start if total is None else self.call(aten.add.Tensor, total, start)
            assert layout.is_plain(mark), "a strided shard has no offset"
            size = layout.chunk(size, cut[1], n, self.coordinates[k])[1]
        assert total is not None
        return total

    def start(self, axis: int, size: int, unit: int) -> torch.fx.Node:
        """The offset of this rank's chunk of a dim of that size."""
        n = self.axes.sizes[axis]
        key = (axis, size, unit)
        if key not in self.offsets:
            start = self.call(aten.mul.Tensor, self.coords[axis], layout.full_chunk(size, unit, n))
            even = (size // unit) % n == 0
            self.offsets[key] = start if even else self.call(aten.clamp.default, start, None, size)
        return self.offsets[key]

    def contiguous(self, node: torch.fx.Node) -> torch.fx.Node:
        """The value in row-major memory."""
        if node.meta["val"].is_contiguous():
            return node
        return self.call(aten.clone.default, node, memory_format=torch.contiguous_format)

    def restride(
        self, node: torch.fx.Node, shape: Sequence[int], stride: Sequence[int]
    ) -> torch.fx.Node:
        """The value with the dim order in memory of the global value, since some kernels do not
        check strides.
        """
        order = layout.stride_order(shape, stride)
        value = node.meta["val"]
        if value.stride() == layout.dense_strides(value.shape, order) or (
            layout.is_dense(value.shape, value.stride())
            and (layout.stride_order(value.shape, value.stride()) == order)
        ):
            return node
        if order == tuple(range(len(order))):
            return self.contiguous(node)
        back = [order.index(d) for d in range(len(order))]
        return self.call(
            aten.permute.default,
            self.contiguous(self.call(aten.permute.default, node, list(order))),
            back,
        )
