"""Gives results memory of their own: copies an output that would share memory with an input or
another output.

Two outputs may be disjoint parts of one buffer, as the gradients of one bucket are.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import attrs
import torch

from .. import _compat
from ..capture.aten_views import memory_of, viewed

aten = torch.ops.aten
Reach = tuple[
    int, int
]  # the first element of a storage that a tensor uses, and the one after the last
EVERYTHING: Reach = (-1, 2**63)


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
    holders = graph.graph.find_nodes(op="placeholder")
    _own_what_as_strided_reads(graph.graph, holders)
    donated_memory = {holders[i] for i in donated}
    results = list(output.args[0])
    taken = _Taken(donated_memory)
    written = [node for node in results if _is_written(node)]
    for node in written:
        taken.ranges[memory_of(node)] = [EVERYTHING]
    for k, node in enumerate(results):
        if not isinstance(node, torch.fx.Node) or node in written:
            continue
        if not taken.take(node):
            results[k] = _copied(graph.graph, node, holders)
    output.args = (type(output.args[0])(results),)
    graph.recompile()
    return graph


def _own_what_as_strided_reads(graph: torch.fx.Graph, holders: Sequence[torch.fx.Node]) -> None:
    """Copy the input of an as_strided if a compiler has removed the op that made its memory."""
    for node in graph.find_nodes(op="call_function", target=aten.as_strided.default):
        viewed_node, *layout = node.args
        if viewed(viewed_node) is not None:
            node.args = (_copied(graph, viewed_node, holders), *layout)


@attrs.define(eq=False)
class _Taken:
    """The parts of memory that results occupy."""

    donated: Collection[torch.fx.Node]  # inputs in whose memory a result may lie
    ranges: dict[Any, list[Reach]] = attrs.field(factory=dict)  # by memory

    def take(self, node: torch.fx.Node) -> bool:
        """Claim the memory of a result. Returns False if it is taken."""
        memory = memory_of(node)
        start, end = reach = _reach(node.meta["val"])
        is_free = _is_made(memory) or memory in self.donated
        ranges = self.ranges.setdefault(memory, [] if is_free else [EVERYTHING])
        if any(low < end and start < high for low, high in ranges):
            return False
        ranges.append(reach)
        return True


def _is_written(node: Any) -> bool:
    """Whether an output is written into a donated input."""
    return isinstance(node, torch.fx.Node) and node.target is aten.copy_.default


def _is_made(origin: Any) -> bool:
    """Whether each run allocates the memory, so that it is neither an input's nor a constant's."""
    return isinstance(origin, tuple) or origin.op == "call_function"


def _reach(x: torch.Tensor) -> Reach:
    if any(map(_compat.is_symbol, (*x.shape, *x.stride(), x.storage_offset()))):
        return EVERYTHING  # a comparison would make a number of it
    if not x.numel():
        return (0, 0)
    first = int(x.storage_offset())
    return first, first + sum(
        (int(n) - 1) * int(s) for n, s in zip(x.shape, x.stride(), strict=True)
    ) + 1


def _copied(
    graph: torch.fx.Graph, node: torch.fx.Node, holders: Sequence[torch.fx.Node]
) -> torch.fx.Node:
    """A copy, made before anything is written into a donated input."""
    with graph.inserting_after(holders[-1] if node.op == "placeholder" else node):
        copy = graph.call_function(aten.clone.default, (node,))
    about = {key: x for key, x in node.meta.items() if key in ("source", "phase")}
    copy.meta.update(about, val=node.meta["val"].clone())  # of a fake tensor: in memory of its own
    return copy
