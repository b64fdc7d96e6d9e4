"""Views by strides in a graph of a file stay inside the memory of their tensor: compiled code does
not check that.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ...capture.checkpoint.recompute import owner_of

aten = torch.ops.aten
BY_STRIDES = {
    aten.as_strided.default,
    aten.as_strided_copy.default,
    aten.as_strided_scatter.default,
}


def check_reach(node: torch.fx.Node) -> None:
    """Check a node of a graph with fake values.

    Raises:
        ValueError: it reads elements outside of its tensor.
    """
    if node.target not in BY_STRIDES:
        return
    said = _arguments(node)
    base = said["self"]
    shape, stride = said["size"], said["stride"]
    offset = said.get("storage_offset")
    if offset is None:
        offset = base.meta["val"].storage_offset()
    if math.prod(shape) == 0:
        return
    last = offset + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    owner = owner_of(base).meta["val"]
    room = owner.untyped_storage().nbytes() // base.meta["val"].itemsize
    if min(offset, *stride, 0) < 0 or last >= room:
        raise ValueError(f"{node}: elements outside of its tensor")


def _arguments(node: torch.fx.Node) -> dict[str, Any]:
    """The arguments of a node, by name."""
    op: Any = node.target
    names = [x.name for x in op._schema.arguments]
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
