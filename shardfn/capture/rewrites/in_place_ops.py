"""In-place writes as ops without writes, where a look at the graph is enough: nothing reads the
memory by an older name afterwards.
"""

from __future__ import annotations

from typing import Any

import torch

from ... import _compat
from ..aten_views import memory_of, viewed

IN_PLACE = "_"  # what the name of such an op ends with


def without_writes(
    graph: torch.fx.GraphModule, writes: list[torch.fx.Node], table: dict[Any, Any]
) -> bool:
    """Replace each in-place op of a graph by the op that returns the new value.

    `x.add_(y)` becomes `x + y`, which the later nodes of the graph read already. Must be called
    under the fake mode of the trace.

    Args:
        graph: of ATen ops. It is changed only if all writes can be replaced.
        writes: its nodes that write in place.
        table: the ops that a capture decomposes.

    Returns:
        Whether all are replaced. If not, functionalization has to find the views that see them.
    """
    values = _Values(graph.graph)
    replacements = {}
    for node in writes:
        op = _without_write(node.target, table)
        if op is None or not values.is_last_name(node):
            return False
        value = _fake_result(node, op)
        if value is None:
            return False
        replacements[node] = op, value
    for node, (op, value) in replacements.items():
        _replace(node, op, value)
    graph.recompile()
    return True


def _replace(node: torch.fx.Node, op: Any, value: torch.Tensor) -> None:
    """Replace a node by a call of another op with this fake result."""
    with node.graph.inserting_before(node):
        fresh = node.graph.call_function(op, node.args, node.kwargs)
    fresh.meta = {**node.meta, "val": value, "original_aten": op}
    node.replace_all_uses_with(fresh)
    node.graph.erase_node(node)


class _Values:
    """The nodes that name each memory of a graph, in order."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        nodes = [n for n in graph.nodes if n.op != "output"]
        self.place = {n: i for i, n in enumerate(graph.nodes)}
        self.names: dict[Any, list[torch.fx.Node]] = {}
        for node in nodes:
            self.names.setdefault(memory_of(node), []).append(node)

    def is_last_name(self, write: torch.fx.Node) -> bool:
        """Whether what a node writes to is a tensor of its own, and nothing reads that memory
        after the write but through the write's result.
        """
        target = write.args[0]
        if not isinstance(target, torch.fx.Node) or target.op != "call_function":
            return False
        is_view = viewed(target) is not None and not _writes(target)
        here = self.place[write]
        older = (n for n in self.names[memory_of(write)] if self.place[n] < here)
        return not is_view and not any(map(self._is_read_after(here), older))

    def _is_read_after(self, here: int) -> Any:
        place = self.place
        return lambda node: any(place[user] > here for user in node.users)


def _writes(node: torch.fx.Node) -> bool:
    op = node.target
    return isinstance(op, _compat.OpOverload) and _compat.schema(op).is_mutable


def _without_write(op: Any, table: dict[Any, Any]) -> Any:
    """The op that returns what an in-place op writes. None if there is none, or a
    capture would decompose it."""
    _, _, name = _compat.schema(op).name.partition("::")
    packet = getattr(torch.ops.aten, name.removesuffix(IN_PLACE), None)
    if op.namespace != "aten" or not name.endswith(IN_PLACE) or packet is None:
        return None
    overloads = [getattr(packet, name) for name in packet.overloads()]
    functional = next((x for x in overloads if _argument_types(x) == _argument_types(op)), None)
    if functional is None or functional in table or _compat.schema(functional).is_mutable:
        return None
    return functional if "CompositeImplicitAutograd" not in _compat.kernels(functional) else None


def _argument_types(op: Any) -> list[tuple[str, str]]:
    """The names and types of an op's arguments."""
    return [(a.name, str(a.type)) for a in _compat.schema(op).arguments]


def _fake_result(node: torch.fx.Node, op: Any) -> torch.Tensor | None:
    """The fake result of an op for the arguments of a node. None if it is not like the node's."""
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    was = node.meta["val"]
    with torch.no_grad():
        value = op(*args, **kwargs)
    traits = [(x.shape, x.dtype, x.stride(), x.device) for x in (value, was)]
    return value if traits[0] == traits[1] else None
