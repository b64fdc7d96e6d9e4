"""What the names of axes stand for in a collective: ranks of a mesh, or samples of a vmap."""

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
    """Those that vmap maps."""
    return [b for b in names if b[2] != axis_names.MESH]


def mesh_axes(names: Names) -> str:
    """Those that are mesh axes, as the prims write them."""
    return print_axes([b[0] for b in names if b[2] == axis_names.MESH])


def count(names: Names) -> int:
    """How many ranks or samples there are on all of them."""
    n = 1
    for b in names:
        n *= b[1]
    return n


def leafwise(fn: Callable[[Any], Any], tree: Any) -> Any:
    """A function of one tensor or number on every leaf of a tree."""
    return _tree.refill(
        (tree,), iter([fn(x) for x in _tree.quick_leaves((tree,))])
    )[0]


def tensor(x: Any) -> torch.Tensor:
    """A number as a tensor."""
    return x if isinstance(x, torch.Tensor) else torch.tensor(x)


def stacked(x: torch.Tensor, names: Names) -> torch.Tensor:
    """(...) -> (n, ...): what all have."""
    shape = x.shape
    for name, n, level in reversed(names):
        x = (
            shard_map.all_gather(x.unsqueeze(0), name, n, 0)
            if level == axis_names.MESH
            else shard_map.mapped_gather(x, n, level)
        )
    return x.reshape(count(names), *shape)


def chosen(x: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    """One row along a dim, the dim kept."""
    return x.index_select(dim, index.reshape(1))


def linear_index(names: Names) -> torch.Tensor:
    """This rank's or sample's number, the first name counting slowest."""
    found = index(*names[0])
    for name, n, level in names[1:]:
        found = found * n + index(name, n, level)
    return found


def index(name: str, n: int, level: int) -> torch.Tensor:
    """This rank's or sample's number on one axis."""
    device = axis_names.device()
    return (
        shard_map.axis_index(name, torch.device(device))
        if level == axis_names.MESH
        else shard_map.mapped_index(n, level, device)
    )
