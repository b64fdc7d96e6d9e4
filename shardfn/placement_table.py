"""Trees of placements that print as a table, for parameters and for the arguments of a call."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import attrs
import torch

from . import _tree
from .byte_sizes import human_bytes
from .extensions import page_of
from .patterns import general
from .placement import blocks_of, is_spec, marks_of, row_of, spec_of, stages_in
from .types import Aval, MeshAxes, MeshPlacements, stage_of

HEADS = ("path", "tensors", "shape", "dtype", "placement")


@attrs.frozen
class Leaf:
    """One parameter. `names` has its path first, then the other names of a tied one."""

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    names: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        size = self.dtype.itemsize
        for n in self.shape:
            size *= n
        return size


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
        self.axes = axes
        self._notes = tuple(notes)

    def __or__(self, other: Any) -> Any:
        """These placements, and others in their place where there are some."""
        both = {**self, **other}
        return Placements(both, [*self._leaves.values()], self.axes, self._notes)

    @property
    def nbytes(self) -> int:
        """The bytes of the rank that holds most; of the global tensors where the mesh is not
        known.
        """
        return bytes_of_rank(self.rows)

    @property
    def rows(self) -> list[Row]:
        """The rows of the table."""
        return _rows(dict(self), self._leaves, self.axes)

    @property
    def total(self) -> str:
        """The last line of the table: the bytes of all tensors, on one device and on a rank."""
        return _total(self.rows, self._leaves, self.axes)

    def _repr_pretty_(self, printer: Any, is_cycle: bool) -> None:
        """What a notebook shows: the table."""
        printer.text(str(self))

    def _repr_html_(self) -> str | None:
        """Draw a picture in a notebook."""
        return page_of(self)

    def __str__(self) -> str:
        grid = [_heads(self.axes), *map(_cells, self.rows)]
        lines = [*_aligned(grid), self.total, *self._notes]
        return "\n".join(lines)


@attrs.frozen
class Row:
    """Tensors of one shape and placement whose paths differ in numbers only. Ranks of other stages
    hold none of them.
    """

    paths: tuple[str, ...]
    shape: str
    dtype: str
    placement: str
    nbytes: int
    stages: Mapping[str, int]  # by mesh axis, the coordinate that has them
    sizes: tuple[int, ...] | None  # the shape of each; None if it is not known
    spec: Any  # the placement of the first

    @property
    def path(self) -> str:
        first, *others = self.paths
        return general(first) if others else first


def _rows(tree: dict[str, Any], leaves: Mapping[str, Leaf], axes: MeshAxes | None) -> list[Row]:
    """The rows of a tree, those of equal layers as one."""
    groups = defaultdict[tuple[str, str, str, str], list[tuple[str, int]]](list)
    stages: dict[str, dict[str, int]] = {}
    firsts: dict[str, Any] = {}
    for path, spec in _tree.named_leaves(tree, is_spec):
        shape = dtype = ""
        size = 0
        if leaf := leaves.get(path):
            shape = "x".join(map(str, leaf.shape)) or "()"
            dtype = str(leaf.dtype).removeprefix("torch.")
            size = local_bytes(leaf, spec, axes)
        stages[repr(spec)] = {} if axes is None else _coordinates(spec, axes)
        firsts[path] = spec
        groups[general(path), shape, dtype, repr(spec)].append((path, size))
    rows = []
    for (_, shape, dtype, placement), same in groups.items():
        paths = tuple(path for path, _ in same)
        size = sum(size for _, size in same)
        leaf = leaves.get(paths[0])
        sizes = None if leaf is None else leaf.shape
        spec = firsts[paths[0]]
        rows.append(Row(paths, shape, dtype, placement, size, stages[placement], sizes, spec))
    return rows


def _coordinates(spec: Any, axes: MeshAxes) -> dict[str, int]:
    """The coordinate that each stage of a placement names, by mesh axis."""
    marks = ("R",) * len(axes.names) if spec is None else stages_in(spec, axes)
    rows = zip(axes.names, map(stage_of, marks), strict=True)
    return {name: stage.coordinate for name, stage in rows if stage is not None}


def bytes_of_rank(rows: Sequence[Row]) -> int:
    """The bytes of the rank that holds most of all rows."""
    names = sorted({name for row in rows for name in row.stages})
    columns = [{row.stages[name] for row in rows if name in row.stages} for name in names]
    ranks = (dict(zip(names, at, strict=True)) for at in itertools.product(*columns))
    return max(sum(row.nbytes for row in rows if row.stages.items() <= at.items()) for at in ranks)


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


def _largest(size: int, dim: int, marks: MeshPlacements, axes: MeshAxes) -> int:
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
    mine = human_bytes(bytes_of_rank(rows))
    most = "at most " if any(row.stages for row in rows) else ""
    return f"{count} tensors on {axes}: {every}, {most}{mine} a rank"


@attrs.frozen(eq=False)
class ArgumentPlacements:
    """The placements of the arguments of a call.

    Args:
        in_placements: a placement for each leaf of the arguments, for `shard`: a tuple, or a dict
            by name for a call with keywords.
        table: the same by path, which prints as a table.

    Example:
        >>> import torch, shardfn as sf
        >>> with sf.fake_world(4):
        ...     mesh = sf.make_mesh((4,), ("dp",))
        ...     double = sf.shard(lambda x: x * 2, mesh, sf.auto)
        ...     print(double.lower(torch.ones(8, 3)).placements)
        in_placements = (P('dp'),)
        path  tensors  shape  dtype    placement  bytes a rank
        x     1        8x3    float32  P('dp')    24 B
        1 tensors on (dp=4): 96 B, 24 B a rank
    """

    in_placements: tuple[Any, ...] | dict[str, Any]
    table: Placements

    def text(self) -> str:
        """The placements as Python. One stands for a subtree of equal ones."""
        if isinstance(self.in_placements, dict):
            rows = [f"{name!r}: {_text(part)}" for name, part in self.in_placements.items()]
            return f"{{{', '.join(rows)}}}"
        parts = [_text(part) for part in self.in_placements]
        comma = "," if len(parts) == 1 else ""
        return f"({', '.join(parts)}{comma})"

    def _repr_pretty_(self, printer: Any, is_cycle: bool) -> None:
        """What a notebook shows: the table."""
        printer.text(str(self))

    def _repr_html_(self) -> str | None:
        """Draw a picture in a notebook."""
        return page_of(self)

    def __str__(self) -> str:
        return f"in_placements = {self.text()}\n{self.table}"


class Placed(Protocol):
    """The arguments of a call: paths of all leaves, and of the tensors the numbers of their
    leaves, metadata and placements.
    """

    @property
    def paths(self) -> tuple[str, ...]: ...

    @property
    def treedef(self) -> Any: ...

    @property
    def tensors(self) -> tuple[int, ...]: ...

    @property
    def avals(self) -> tuple[Aval, ...]: ...

    @property
    def marks(self) -> tuple[MeshPlacements, ...]: ...

    @property
    def axes(self) -> MeshAxes: ...


def argument_placements(placed: Placed) -> ArgumentPlacements:
    """The placements of the arguments of a call."""
    specs: list[Any] = [None] * len(placed.paths)
    leaves = []
    flat = {}
    rows = zip(placed.tensors, placed.avals, placed.marks, strict=True)
    for i, aval, marks in rows:
        path = placed.paths[i]
        specs[i] = spec_of(marks, len(aval.shape), placed.axes)
        flat[path] = specs[i]
        leaves.append(Leaf(path, aval.shape, aval.dtype, (path,)))
    args, kwargs = _tree.unflatten(placed.treedef, specs)
    table = Placements(flat, leaves, placed.axes)
    if not kwargs:
        return ArgumentPlacements(tuple(args), table)
    return ArgumentPlacements({**_by_name(args, placed), **kwargs}, table)


def _by_name(args: Sequence[Any], placed: Placed) -> dict[str, Any]:
    """The placements of positional arguments by the names of their parameters; those of `*args`
    as a tuple. An argument without leaves needs none.
    """
    parts: dict[str, Any] = {}
    starred: dict[str, dict[int, Any]] = {}
    for path, way in zip(placed.paths, placed.treedef.accessors(), strict=True):
        is_keyword, argument = way.path[:2]
        if is_keyword:
            continue
        name, bracket, _ = path.removesuffix(way[2:].codify("")).partition("[")
        if bracket:
            starred.setdefault(name, {})[argument] = args[argument]
        else:
            parts[name] = args[argument]
    return parts | {name: tuple(rows.values()) for name, rows in starred.items()}


def _text(part: Any) -> str:
    """Placements as Python; equal ones of a subtree as one."""
    specs = [spec for _, spec in _tree.named_leaves(part, is_spec)]
    kinds = {*map(repr, specs)}
    if len(kinds) == 1 and not isinstance(part, torch.Tensor):
        return kinds.pop()
    if isinstance(part, dict):
        rows = [f"{key!r}: {_text(x)}" for key, x in part.items()]
        return f"{{{', '.join(rows)}}}"
    if type(part) in (tuple, list):
        inner = ", ".join(map(_text, part))
        if type(part) is list:
            return f"[{inner}]"
        return f"({inner}{',' * (len(part) == 1)})"
    return repr(part)
