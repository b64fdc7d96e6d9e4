"""Prims of per-rank code without communication."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...ops import shard_map
from ...ops.prims import implement
from ...ops.text_formats import parse_axes
from ..emission.builder import Builder, Piece

aten = torch.ops.aten


def _axis_index(
    b: Builder, args: Sequence[Any], kwargs: dict[str, Any], mine: list[Piece]
) -> list[torch.fx.Node]:
    return [b.call(aten.clone.default, b.coords[b.axes.names.index(args[0])])]


def _equal_sum(
    b: Builder, args: Sequence[Any], kwargs: dict[str, Any], mine: list[Piece]
) -> list[torch.fx.Node]:
    """The sum of equal terms over ranks."""
    sizes = dict(zip(b.axes.names, b.axes.sizes, strict=True))
    x = args[0]
    n = 1
    for name in parse_axes(args[1]):
        n *= sizes[name]
    return [b.call(aten.mul.Tensor, x, n)]


def _equal_extremum(
    b: Builder, args: Sequence[Any], kwargs: dict[str, Any], mine: list[Piece]
) -> list[torch.fx.Node]:
    return [args[0]]


implement(shard_map.axis_index, lower=_axis_index)
implement(shard_map.psum, lower=_equal_sum)
implement(shard_map.extremum, lower=_equal_extremum)
