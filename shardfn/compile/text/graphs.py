"""`text_of` and `graph_of`: graphs as JSON and back, one row for each node with its op, its
arguments and its fake value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch

from ... import _compat
from ...ops.loops import Branch, Loop, Scan, While
from ...ops.pipeline import Pipeline
from ...types import Collective, MeshPlacements
from . import pipelines
from .ops import name_of, op_of
from .values import Unwritable, index, record_text, tensor_of, tensor_text, value_of, value_text

LOOPS: dict[str, type[Loop]] = {
    "Scan": Scan,
    "While": While,
    "Branch": Branch,
    "Pipeline": Pipeline,
}
ANNOTATION_KEYS = ("source", "module", "phase")  # metadata that printed programs read


def text_of(graph: torch.fx.Graph, *, notes: bool = False) -> list[Any]:
    """Write a graph as JSON: equal for graphs that compute the same in the same order.

    Args:
        graph: functional ATen and our ops, the inputs as placeholders.
        notes: whether to write down also what only people and checks read: the lines of the
            user, the collectives.

    Raises:
        Unwritable: it calls an op that a file may not call, or holds another object.
    """
    numbers: dict[torch.fx.Node, int] = {}
    rows: list[Any] = []
    for node in graph.nodes:
        rows.append(_row(node, numbers, notes))
        numbers[node] = len(numbers)
    return rows


def _row(node: torch.fx.Node, numbers: dict[torch.fx.Node, int], notes: bool) -> dict[str, Any]:
    """Write one node."""
    if node.op == "placeholder":
        return {"in": tensor_text(node.meta["val"]), **(_type_text(node) if notes else {})}
    args = [value_text(x, numbers.__getitem__) for x in node.args]
    if node.op == "output":
        return {"out": args[0]}
    row: dict[str, Any] = {**_target_text(node, notes), "args": args}
    if node.kwargs:
        kwargs = node.kwargs.items()
        row["kwargs"] = {k: value_text(x, numbers.__getitem__) for k, x in kwargs}
    row["val"] = _value_text(node.meta.get("val"))
    if notes:
        row |= _annotations(node)
    return row


def _target_text(node: torch.fx.Node, notes: bool) -> dict[str, Any]:
    """Write the op of a node, or the loop that it runs."""
    target: Any = node.target
    if isinstance(target, Loop):
        return loop_text(target, notes=notes)
    name = name_of(target)
    if node.op != "call_function" or name is None:
        raise Unwritable(f"the op {target}")
    return {"op": name}


def loop_text(loop: Any, *, notes: bool = False) -> dict[str, Any]:
    """Write a loop with its graphs as JSON.

    Raises:
        Unwritable: one of them has none.
    """
    inner = [text_of(graph, notes=notes) for graph in loop.graphs]
    fields = pipelines.fields_text(loop) if isinstance(loop, Pipeline) else _fields_text(loop)
    return {"loop": type(loop).__name__, "fields": fields, "graphs": inner}


def _fields_text(loop: Any) -> dict[str, Any]:
    """Write the fields of a loop, without its graphs."""
    fields = attrs.asdict(loop, recurse=False)
    del fields["graphs"]
    return {name: _json_field(x) for name, x in fields.items()}


def _json_field(x: Any) -> Any:
    """Convert a field of a loop (a number, a flag, or a tuple of numbers) to JSON."""
    return list(x) if isinstance(x, tuple) else x


def _value_text(value: Any) -> Any:
    """Write the fake value of a node: the metadata of a tensor, or of each tensor of several."""
    if isinstance(value, torch.Tensor):
        return tensor_text(value)
    if isinstance(value, (tuple, list)):
        return {"row": [_value_text(x) for x in value]}
    return None


def _annotations(node: torch.fx.Node) -> dict[str, Any]:
    """Write the metadata that only people and checks read: name, source line, type, collective."""
    values = {key: node.meta[key] for key in ANNOTATION_KEYS if node.meta.get(key) is not None}
    notes: dict[str, Any] = {"name": node.name}
    if values:
        notes["notes"] = record_text(values)
    notes |= _type_text(node)
    record = node.meta.get("collective")
    if record is not None:
        notes["collective"] = record_text(attrs.asdict(record))
    return notes


def _type_text(node: torch.fx.Node) -> dict[str, Any]:
    """Write the global shape and the placements of a node that has some."""
    if "type" not in node.meta:
        return {}
    shape, placements = node.meta["type"]
    return {"type": [list(shape), [_json_field(placement) for placement in placements]]}


def graph_of(rows: Any) -> torch.fx.Graph:
    """Build the graph of a JSON text, with fake values.

    Raises:
        ValueError, TypeError, KeyError, RuntimeError: no graph has that text.
        Unwritable: it calls an op that a file may not call.
    """
    with _compat.fake_mode():
        return _parse_graph(rows)


def _parse_graph(rows: Any) -> torch.fx.Graph:
    """Build a graph from its rows, inside a fake mode."""
    graph = torch.fx.Graph()
    nodes: list[torch.fx.Node] = []
    for row in rows:
        nodes.append(_parse_node(graph, row, nodes))
    if not nodes or nodes[-1].op != "output":
        raise ValueError("a graph without results")
    return graph


def _parse_node(
    graph: torch.fx.Graph, row: dict[str, Any], nodes: Sequence[torch.fx.Node]
) -> torch.fx.Node:
    """Append the node of one row to a graph."""
    if "in" in row:
        placeholder = graph.placeholder(f"in_{len(nodes)}")
        placeholder.meta["val"] = tensor_of(row["in"])
        placeholder.meta |= _type_of(row)
        return placeholder
    if "out" in row:
        return graph.output(value_of(row["out"], nodes))
    args = tuple(value_of(x, nodes) for x in row["args"])
    kwargs = {str(k): value_of(x, nodes) for k, x in row.get("kwargs", {}).items()}
    node = graph.call_function(_parse_target(row), args, kwargs)
    node.meta["val"] = _value_of(row["val"])
    node.meta.update({k: row["notes"][k] for k in ANNOTATION_KEYS if k in row.get("notes", {})})
    node.meta |= _type_of(row)
    if "collective" in row:
        node.meta["collective"] = Collective(**row["collective"])
    return node


def _type_of(row: dict[str, Any]) -> dict[str, Any]:
    """Read the global shape and the placements of a row that has some, as metadata."""
    if "type" not in row:
        return {}
    shape, placements = row["type"]
    return {"type": (tuple(shape), placements_of(placements))}


def placements_of(rows: Any) -> MeshPlacements:
    """Convert placements from JSON, where a tuple is a list."""
    return tuple(tuple(x) if isinstance(x, list) else x for x in rows)


def _parse_target(row: dict[str, Any]) -> Any:
    """Return the op or the loop of a row."""
    if "loop" in row:
        kind, fields = LOOPS[row["loop"]], row["fields"]
        is_pipeline = kind is Pipeline
        fields = (
            pipelines.fields_of(fields)
            if is_pipeline
            else {k: _parse_field(x) for k, x in fields.items()}
        )
        graphs = tuple(_parse_graph(rows) for rows in row["graphs"])
        return kind(graphs=graphs, **fields)
    op = op_of(row["op"])
    if op is None:
        raise Unwritable(f"the op {row['op']}")
    return op


def _parse_field(x: Any) -> Any:
    """Check a field of a loop, and convert lists to tuples."""
    if isinstance(x, list):
        return tuple(index(n, 2**31) for n in x)
    if x is None or type(x) is bool:
        return x
    return index(x, 2**63)


def _value_of(text: Any) -> Any:
    """Build the fake value of a node from its metadata."""
    if isinstance(text, dict):
        return tuple(_value_of(x) for x in text["row"])
    return None if text is None else tensor_of(text)
