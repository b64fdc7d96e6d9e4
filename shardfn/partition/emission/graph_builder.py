"""Builds one rank's graph, node by node, with a fake value for each node."""

from __future__ import annotations

from collections.abc import Sequence
from operator import getitem
from typing import Any

import attrs
import torch

from ... import _compat
from ...ops.elementwise import Elementwise
from ...types import MeshAxes, MeshPlacements
from .. import layout

aten = torch.ops.aten


@attrs.frozen(eq=False, repr=False)
class LocalShard:
    """One rank's shard of a global value: its node, global shape and placements."""

    node: torch.fx.Node
    shape: tuple[int, ...]  # global
    stride: tuple[int, ...]  # global
    placements: MeshPlacements
    local_shape: tuple[int, ...]

    def is_sharded(self, dim: int) -> bool:
        """Return whether some mesh axis shards this dim."""
        return any((layout.split(m) or (None,))[0] == dim for m in self.placements)


class Builder:
    """Builds the graph of all ranks with equal local sizes, with a fake value per node.

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
        self.first = 0  # the first rank that runs the step, which shows values
        self.offsets: dict[Any, torch.fx.Node] = {}
        self.inlined: dict[Any, dict[torch.fx.Node, torch.Tensor]] = {}
        with mode:
            self.coords = [
                self.placeholder(f"coord_{name}", torch.empty((), dtype=torch.int64, device=device))
                for name in axes.names
            ]

    def placeholder(self, name: str, value: torch.Tensor) -> torch.fx.Node:
        """Add an input to the graph."""
        node = self.graph.placeholder(name)
        node.meta["val"] = value
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
        """Add a call to the graph, and compute its fake value."""
        node = self.graph.call_function(target, args, kwargs)
        fake = torch.fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        node.meta.update(self.about)
        node.meta["val"] = _compat.result_of(self.mode, target, *fake)
        return node

    def inline(self, block: Elementwise, inputs: Sequence[torch.fx.Node]) -> list[torch.fx.Node]:
        """Add the ops of a block to the graph. Their fake values are computed once for all copies
        with inputs of the same layouts.
        """
        fakes = [node.meta["val"] for node in inputs]
        key = block, *((x.shape, x.stride(), x.device) for x in fakes)
        if key not in self.inlined:
            self.inlined[key] = block.values(self.mode, fakes)
        values = self.inlined[key]
        nodes: dict[torch.fx.Node, torch.fx.Node] = {}
        feed = iter(inputs)
        for node in block.graph.nodes:
            if node.op == "placeholder":
                nodes[node] = next(feed)
            elif node.op == "call_function":
                nodes[node] = self.graph.node_copy(node, nodes.__getitem__)
                nodes[node].meta = {**self.about, "val": values[node]}
        results: Any = block.graph.output_node().args[0]
        return [nodes[node] for node in results]

    def item(self, node: torch.fx.Node, i: int) -> torch.fx.Node:
        """Add the getitem of one of the values that a call returns."""
        item = self.graph.call_function(getitem, (node, i))
        item.meta.update(self.about, val=node.meta["val"][i])
        return item

    def local_shape(self, shape: Sequence[int], placements: MeshPlacements) -> tuple[int, ...]:
        """Return the shape of this rank's shard."""
        return layout.local_shape(shape, placements, self.axes.sizes, self.coordinates)

    def shard(
        self, node: torch.fx.Node, value: torch.Tensor, placements: MeshPlacements
    ) -> LocalShard:
        """Record a node as the shard of a global value."""
        shard = LocalShard(
            node,
            tuple(value.shape),
            tuple(value.stride()),
            placements,
            self.local_shape(value.shape, placements),
        )
        node.meta["type"] = (shard.shape, placements)
        return shard

    def offset(self, shard: LocalShard, dim: int) -> torch.fx.Node:
        """Emit the offset of this rank's shard in a global dim, computed from its coordinates."""
        size = shard.shape[dim]
        total = None
        for k, (placement, n) in enumerate(zip(shard.placements, self.axes.sizes, strict=True)):
            cut = layout.split(placement)
            if cut is None or cut[0] != dim:
                continue
            start = self.start(k, size, cut[1])
            total = start if total is None else self.call(aten.add.Tensor, total, start)
            assert layout.is_plain(placement), "a strided shard has no offset"
            size = layout.chunk(size, cut[1], n, self.coordinates[k])[1]
        assert total is not None
        return total

    def runs(self, shard: LocalShard, dim: int) -> list[torch.fx.Node]:
        """Emit the offsets of the runs of this rank's shard in a global dim: one, or the two of a
        zigzag.
        """
        turning = [k for k, m in enumerate(shard.placements) if layout.is_zigzag(m)]
        for axis in turning:
            if layout.shards(shard.placements[axis], dim):
                size = shard.shape[dim]
                first = self.start(axis, size // 2, 1)
                own = layout.chunk(size // 2, 1, self.axes.sizes[axis], 0)[1]
                return [first, self.call(aten.rsub.Scalar, first, size - own)]
        return [self.offset(shard, dim)]

    def start(self, axis: int, size: int, unit: int) -> torch.fx.Node:
        """Emit the start of this rank's chunk along one axis; an equal start is emitted once."""
        n = self.axes.sizes[axis]
        key = (axis, size, unit)
        if key not in self.offsets:
            start = self.call(aten.mul.Tensor, self.coords[axis], layout.full_chunk(size, unit, n))
            even = (size // unit) % n == 0
            self.offsets[key] = start if even else self.call(aten.clamp.default, start, None, size)
        return self.offsets[key]

    def contiguous(self, node: torch.fx.Node) -> torch.fx.Node:
        """Return the value in row-major memory, with a clone if needed."""
        if node.meta["val"].is_contiguous():
            return node
        return self.call(aten.clone.default, node, memory_format=torch.contiguous_format)

    def restride(
        self, node: torch.fx.Node, shape: Sequence[int], stride: Sequence[int]
    ) -> torch.fx.Node:
        """Give a local value the dim order in memory of the global one, since some kernels do
        not check strides.
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
