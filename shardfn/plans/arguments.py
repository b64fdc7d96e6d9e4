"""The placements of the arguments of a call: text for `in_placements`, and a table."""

from __future__ import annotations

from typing import Any, Protocol

import attrs
import torch

from .. import _tree
from ..placement import is_spec, spec_of
from ..types import Aval, Marks, MeshAxes
from .leaves import Leaf
from .table import Placements


@attrs.frozen(eq=False)
class ArgumentPlacements:
    """The placements of the arguments of a call.

    Args:
        in_placements: a placement for each leaf of the positional arguments, for `shard`.
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

    in_placements: tuple[Any, ...]
    table: Placements

    def text(self) -> str:
        """The placements as Python. One stands for a subtree of equal ones."""
        parts = [_text(part) for part in self.in_placements]
        comma = "," if len(parts) == 1 else ""
        return f"({', '.join(parts)}{comma})"

    def _repr_pretty_(self, printer: Any, is_cycle: bool) -> None:
        """What a notebook shows: the table."""
        printer.text(str(self))

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
    def marks(self) -> tuple[Marks, ...]: ...

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
    args, _ = _tree.unflatten(placed.treedef, specs)
    table = Placements(flat, leaves, placed.axes)
    return ArgumentPlacements(tuple(args), table)


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
