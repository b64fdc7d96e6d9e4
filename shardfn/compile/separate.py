"""`separate`: copies each output of a graph that would share memory with an input or another
output.

Two outputs may be disjoint slices of one buffer, as the gradients of one bucket are.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import attrs
import torch

from .. import _compat
from ..capture.aten_views import memory_of, viewed

aten = torch.ops.aten
Extent = tuple[
    int, int
]  # the first element of a storage that a tensor uses, and the one after the last
WHOLE_STORAGE: Extent = (-1, 2**63)


def separate(graph: torch.fx.GraphModule, donated: Sequence[int] = ()) -> torch.fx.GraphModule:
    """Copy each output that shares memory with an input, a constant or an earlier output. The
    copies are part of the graph.

    Also copies the input of an as_strided if a compiler has removed the op that made its
    memory.

    Args:
        graph: a graph of functional ops, changed in place.
        donated: the donated placeholders. One output may lie in the memory of each.

    Returns:
        The graph.
    """
    (output,) = graph.graph.find_nodes(op="output")
    placeholders = graph.graph.find_nodes(op="placeholder")
    _copy_inputs_of_as_strided(graph.graph, placeholders)
    donated_memory = {placeholders[i] for i in donated}
    results = list(output.args[0])
    occupied = _OccupiedMemory(donated_memory)
    written = [node for node in results if _is_written(node)]
    for node in written:
        occupied.ranges[memory_of(node)] = [WHOLE_STORAGE]
    for k, node in enumerate(results):
        if not isinstance(node, torch.fx.Node) or node in written:
            continue
        if not occupied.claim(node):
            results[k] = _insert_copy(graph.graph, node, placeholders)
    output.args = (type(output.args[0])(results),)
    graph.recompile()
    return graph


def _copy_inputs_of_as_strided(
    graph: torch.fx.Graph, placeholders: Sequence[torch.fx.Node]
) -> None:
    """Copy the input of an as_strided if a compiler has removed the op that made its memory."""
    for node in graph.find_nodes(op="call_function", target=aten.as_strided.default):
        viewed_node, *layout = node.args
        if viewed(viewed_node) is not None:
            node.args = (_insert_copy(graph, viewed_node, placeholders), *layout)


@attrs.define(eq=False)
class _OccupiedMemory:
    """The extents of memory that results occupy."""

    donated: Collection[torch.fx.Node]  # inputs in whose memory a result may lie
    ranges: dict[Any, list[Extent]] = attrs.field(factory=dict)  # by memory

    def claim(self, node: torch.fx.Node) -> bool:
        """Claim the memory of a result; return False if it is occupied."""
        memory = memory_of(node)
        start, end = extent = _extent(node.meta["val"])
        is_free = _is_allocated_by_run(memory) or memory in self.donated
        ranges = self.ranges.setdefault(memory, [] if is_free else [WHOLE_STORAGE])
        if any(low < end and start < high for low, high in ranges):
            return False
        ranges.append(extent)
        return True


def _is_written(node: Any) -> bool:
    """Return whether an output is written into a donated input."""
    return isinstance(node, torch.fx.Node) and node.target is aten.copy_.default


def _is_allocated_by_run(origin: Any) -> bool:
    """Return whether each run allocates the memory, so that it is neither an input's nor a
    constant's.
    """
    return isinstance(origin, tuple) or origin.op == "call_function"


def _extent(x: torch.Tensor) -> Extent:
    """Return the first element of a storage that a tensor uses, and the one after the last."""
    if any(map(_compat.is_symbol, (*x.shape, *x.stride(), x.storage_offset()))):
        return WHOLE_STORAGE  # a comparison would make a number of it
    if not x.numel():
        return (0, 0)
    first = int(x.storage_offset())
    return first, first + sum(
        (int(n) - 1) * int(s) for n, s in zip(x.shape, x.stride(), strict=True)
    ) + 1


def _insert_copy(
    graph: torch.fx.Graph, node: torch.fx.Node, placeholders: Sequence[torch.fx.Node]
) -> torch.fx.Node:
    """Insert a copy of a node, before anything is written into a donated input."""
    with graph.inserting_after(placeholders[-1] if node.op == "placeholder" else node):
        copy = graph.call_function(aten.clone.default, (node,))
    annotations = {key: x for key, x in node.meta.items() if key in ("source", "module", "phase")}
    # the clone of a fake tensor has memory of its own
    copy.meta.update(annotations, val=node.meta["val"].clone())
    return copy
