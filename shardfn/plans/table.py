"""Placements: the tree of placements that prints as a table."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from .. import _tree
from ..byte_sizes import human_bytes
from ..placement import blocks_of, is_spec, marks_of, row_of
from ..types import Marks, MeshAxes
from .leaves import Leaf
from .patterns import general

HEADS = ("path", "tensors", "shape", "dtype", "placement")


@_tree.dict_node
class Placements(dict[str, Any]):
    """A dict of placements, in the form of the parameters, that prints as a table.

    Args:
        tree: placements, in the form of the parameters.
        leaves: the parameters, whose shapes the table shows.
        axes: of the mesh; None if it is not known, and the table shows global bytes.
        notes: lines under the table.

    Example:
        >>> from shardfn import P
        >>> Placements({"w": P("tp")}, ())["w"]
        P('tp')
    """

    def __init__(
        self,
        tree: Mapping[str, Any],
        leaves: Sequence[Leaf],
        axes: MeshAxes | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        super().__init__(tree)
        self._leaves = {leaf.path: leaf for leaf in leaves}
        self._axes = axes
        self._notes = tuple(notes)

    def __or__(self, other: Any) -> Any:
        """These placements, and others in their place where there are some."""
        both = {**self, **other}
        return Placements(both, [*self._leaves.values()], self._axes, self._notes)

    @property
    def nbytes(self) -> int:
        """The bytes of a rank; of the global tensors where the mesh is not known."""
        rows = _rows(dict(self), self._leaves, self._axes)
        return sum(row.nbytes for row in rows)

    def _repr_pretty_(self, printer: Any, is_cycle: bool) -> None:
        """What a notebook shows: the table."""
        printer.text(str(self))

    def __str__(self) -> str:
        rows = _rows(dict(self), self._leaves, self._axes)
        head = _heads(self._axes)
        grid = [head, *map(_cells, rows)]
        total = _total(rows, self._leaves, self._axes)
        lines = [*_aligned(grid), total, *self._notes]
        return "\n".join(lines)


@attrs.frozen
class Row:
    """Tensors of one shape and placement whose paths differ in numbers only."""

    paths: tuple[str, ...]
    shape: str
    dtype: str
    placement: str
    nbytes: int

    @property
    def path(self) -> str:
        first, *others = self.paths
        return general(first) if others else first


def _rows(tree: dict[str, Any], leaves: Mapping[str, Leaf], axes: MeshAxes | None) -> list[Row]:
    """The rows of a tree, those of equal layers as one."""
    groups = defaultdict[tuple[str, str, str, str], list[tuple[str, int]]](list)
    for path, spec in _tree.named_leaves(tree, is_spec):
        shape = dtype = ""
        size = 0
        if leaf := leaves.get(path):
            shape = "x".join(map(str, leaf.shape)) or "()"
            dtype = str(leaf.dtype).removeprefix("torch.")
            size = local_bytes(leaf, spec, axes)
        groups[general(path), shape, dtype, repr(spec)].append((path, size))
    rows = []
    for (_, shape, dtype, placement), same in groups.items():
        paths = tuple(path for path, _ in same)
        size = sum(size for _, size in same)
        rows.append(Row(paths, shape, dtype, placement, size))
    return rows


def local_bytes(leaf: Leaf, spec: Any, axes: MeshAxes | None) -> int:
    """The bytes of a parameter on the rank that holds most of it; of the global tensor where
    the mesh is not known.
    """
    sizes = list(leaf.shape)
    if spec is not None and axes is not None:
        marks = marks_of(spec, leaf.shape, axes)
        for dim in range(len(sizes)):
            sizes[dim] = _largest(sizes[dim], dim, marks, axes)
    return math.prod(sizes) * leaf.dtype.itemsize


def _largest(size: int, dim: int, marks: Marks, axes: MeshAxes) -> int:
    """The elements of a dim on the rank that holds most of them."""
    for part in row_of(dim, marks, axes):
        name, blocks = blocks_of(part)
        ranks = axes.sizes[axes.names.index(name)]
        size = blocks * -(-size // blocks // ranks)
    return size


def _heads(axes: MeshAxes | None) -> tuple[str, ...]:
    return (*HEADS, "bytes" if axes is None else "bytes a rank")


def _cells(row: Row) -> tuple[str, ...]:
    count = str(len(row.paths))
    size = human_bytes(row.nbytes)
    return row.path, count, row.shape, row.dtype, row.placement, size


def _aligned(grid: Sequence[tuple[str, ...]]) -> list[str]:
    """Lines with columns of one width."""
    widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in grid
    ]


def _total(rows: Sequence[Row], leaves: Mapping[str, Leaf], axes: MeshAxes | None) -> str:
    """The last line: bytes of all parameters, on one device and on a rank."""
    every = human_bytes(sum(leaf.nbytes for leaf in leaves.values()))
    count = sum(len(row.paths) for row in rows)
    if axes is None:
        return f"{count} tensors, {every}"
    mine = human_bytes(sum(row.nbytes for row in rows))
    return f"{count} tensors on {axes}: {every}, {mine} a rank"
