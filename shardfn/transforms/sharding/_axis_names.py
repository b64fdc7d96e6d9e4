"""The axis names of a collective: each stands for a mesh axis or for the mapped dim of a vmap.

Dynamo reads this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ... import _tree
from ...capture.shard_map import axis_names
from ...ops import shard_map
from ...ops.text_formats import print_axes

AxisName = str | tuple[str, ...]
Names = Sequence[tuple[str, int, int]]  # (name, size, level), the outermost first


def mapped(names: Names) -> list[tuple[str, int, int]]:
    """The names that a vmap binds."""
    return [b for b in names if b[2] != axis_names.MESH]


def mesh_axes(names: Names) -> str:
    """The names of mesh axes, as the prims write them."""
    return print_axes([b[0] for b in names if b[2] == axis_names.MESH])


def count(names: Names) -> int:
    """The product of the sizes of all axes."""
    n = 1
    for b in names:
        n *= b[1]
    return n


def leafwise(fn: Callable[[Any], Any], tree: Any) -> Any:
    """Apply a function of one tensor or number to every leaf of a tree."""
    return _tree.refill((tree,), iter([fn(x) for x in _tree.quick_leaves((tree,))]))[0]


def tensor(x: Any) -> torch.Tensor:
    """A number as a tensor."""
    return x if isinstance(x, torch.Tensor) else torch.tensor(x)


def stacked(x: torch.Tensor, names: Names) -> torch.Tensor:
    """(...) -> (n, ...): the values of all ranks or samples, stacked."""
    shape = x.shape
    for name, n, level in reversed(names):
        x = (
            shard_map.all_gather(x.unsqueeze(0), name, n, 0)
            if level == axis_names.MESH
            else shard_map.mapped_gather(x, n, level)
        )
    return x.reshape(count(names), *shape)


def chosen(x: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    """One slice along a dim, the dim kept."""
    return x.index_select(dim, index.reshape(1))


def linear_index(names: Names) -> torch.Tensor:
    """The index of this rank or sample over all names, of which the first counts slowest."""
    found = index(*names[0])
    for name, n, level in names[1:]:
        found = found * n + index(name, n, level)
    return found


def index(name: str, n: int, level: int) -> torch.Tensor:
    """The index of this rank or sample on one axis."""
    device = axis_names.device()
    return (
        shard_map.axis_index(name, torch.device(device))
        if level == axis_names.MESH
        else shard_map.mapped_index(n, level, device)
    )
