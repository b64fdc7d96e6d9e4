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
    """Select the axis names that an enclosing vmap binds."""
    return [b for b in names if b[2] != axis_names.MESH]


def mesh_axes(names: Names) -> str:
    """Select the names of mesh axes, printed as the prims take them."""
    return print_axes([b[0] for b in names if b[2] == axis_names.MESH])


def count(names: Names) -> int:
    """Return the number of ranks or samples over all named axes together."""
    n = 1
    for b in names:
        n *= b[1]
    return n


def leafwise(fn: Callable[[Any], Any], tree: Any) -> Any:
    """Map a function of a tensor or number over a tree. None stays None."""
    leaves = [None if x is None else fn(x) for x in _tree.quick_leaves((tree,))]
    return _tree.refill((tree,), iter(leaves))[0]


def tensor(x: Any) -> torch.Tensor:
    """Turn a Python number into a tensor; leave a tensor as it is."""
    return x if isinstance(x, torch.Tensor) else torch.tensor(x)


def stacked(x: torch.Tensor, names: Names) -> torch.Tensor:
    """Stack the values of all ranks or samples along a new first dim: (...) -> (n, ...)."""
    shape = x.shape
    for name, n, level in reversed(names):
        x = (
            shard_map.all_gather(x.unsqueeze(0), name, n, 0)
            if level == axis_names.MESH
            else shard_map.mapped_gather(x, n, level)
        )
    return x.reshape(count(names), *shape)


def chosen(x: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    """Select one index of a dim, keeping the dim with size 1."""
    return x.index_select(dim, index.reshape(1))


def linear_index(names: Names) -> torch.Tensor:
    """Return this rank's or sample's linear index over several axes, in row-major order."""
    found = index(*names[0])
    for name, n, level in names[1:]:
        found = found * n + index(name, n, level)
    return found


def index(name: str, n: int, level: int) -> torch.Tensor:
    """Return this rank's or sample's index along one axis, as a tensor."""
    device = axis_names.device()
    return (
        shard_map.axis_index(name, torch.device(device))
        if level == axis_names.MESH
        else shard_map.mapped_index(n, level, device)
    )
