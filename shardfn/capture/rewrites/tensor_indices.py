"""Indexing by a number that is a tensor, such as the step of a loop, as gathers and scatters.

Dynamo reads this.
"""

from __future__ import annotations

from typing import Any

import torch

from ... import _compat
from ...errors import CaptureError
from ...ops.nodes import args_of
from .. import annotations as sources
from ..dynamo_nodes import graphs_of, root_of, written_by
from . import python_substitutes

Row = tuple[int, int | None, int]  # the dim, the size of a slice or None, its stride


def gathered(x: torch.Tensor, starts: Any, rows: tuple[Row, ...], key: Any) -> torch.Tensor:
    """`x[key]` where some indices are tensors, as gathers; Dynamo keeps this call. Dynamo keeps
    this call: the result is no view.
    """
    for start, (dim, count, stride) in zip(starts, rows, strict=True):
        x = x.index_select(dim, _index(start, x.shape[dim], count, stride))
    return x[key]


def placed(
    value: torch.Tensor, x: torch.Tensor, starts: Any, rows: tuple[Row, ...], key: Any
) -> torch.Tensor:
    """The value that is written to `x[key]`; Dynamo keeps this call, which says where it goes.
    Dynamo keeps this call, which says where.
    """
    return value.clone()


@_compat.read_by_dynamo
def put(x: torch.Tensor, starts: Any, rows: tuple[Row, ...], key: Any, value: Any) -> None:
    """`x[key] = value` where some indices are tensors, as gathers and scatters."""
    if isinstance(value, torch.Tensor):
        value = placed(value, x, starts, rows, key)
    parts = [x]
    indices = []
    for start, (dim, count, stride) in zip(starts, rows, strict=True):
        index = _index(start, x.shape[dim], count, stride)
        indices.append(index)
        parts.append(parts[-1].index_select(dim, index))
    parts[-1][key] = value
    for k in reversed(range(len(rows))):
        parts[k].index_copy_(rows[k][0], indices[k], parts[k + 1])


@_compat.read_by_dynamo
def _index(start: torch.Tensor, size: int, count: int | None, stride: int) -> torch.Tensor:
    """The positions that an index or a slice selects, as a tensor of one dim. A number may count
    from the end.
    """
    first = start.to(torch.int64)
    if count is None:
        first = torch.where(first < 0, first + size, first).reshape(1)
        return checked_index(first, (first >= 0) & (first < size))
    last = first + (count - 1) * stride
    positions = first + torch.arange(count, device=start.device) * stride
    return checked_index(positions, (first >= 0) & (last < size))


@_compat.read_by_dynamo
def checked_index(x: torch.Tensor, ok: torch.Tensor) -> torch.Tensor:
    """The indices, if a condition holds; otherwise the program raises an error when it runs. A
    shard would take it for an index of another one.
    """
    nothing = torch.zeros(1, dtype=torch.int64, device=x.device)
    return x + nothing.index_select(0, (~ok).to(torch.int64).reshape(1))


@_compat.read_by_dynamo
def narrow(input: torch.Tensor, dim: int, start: Any, length: int) -> torch.Tensor:
    """torch.narrow, by the method."""
    return input.narrow(dim, start, length)


@_compat.read_by_dynamo
def select(input: torch.Tensor, dim: int, index: Any) -> torch.Tensor:
    """torch.select, by the method."""
    return input.select(dim, index)


def install() -> None:
    """Have Dynamo keep these calls. Capture calls this before it traces."""
    for fn in (gathered, placed):
        _compat.keep_in_graph(fn)


def refuse_writes(python: torch.fx.GraphModule, name: str) -> None:
    """Refuse writes in place to what such an index has gathered. `x[t] += 1` puts it back.

    Raises:
        CaptureError: names the line.
    """
    nodes = [node for graph in graphs_of(python) for node in graph.nodes]
    if all(node.target is not gathered for node in nodes):
        return
    for node in nodes:
        roots = [root for x in written_by(node) if (root := root_of(x)).target is gathered]
        if roots and not _is_put_back(node, roots[0]):
            raise CaptureError.of(
                name,
                "the function writes in place to x[t], which is a copy if t is a tensor",
                fix="x[t] = value, x[t] += value",
                source=sources.user_line(node),
            )


def _is_put_back(node: torch.fx.Node, root: torch.fx.Node) -> bool:
    """Whether what a node has written goes back at once to where it was gathered from."""
    if node.next.target is not placed:
        return False
    value, *place = args_of(node.next)
    return root_of(value) is root and place == [*args_of(root)]


python_substitutes.TABLE.update({torch.narrow: narrow, torch.select: select})
FUNCTIONS = _compat.StepFunctions(gathered, put)
