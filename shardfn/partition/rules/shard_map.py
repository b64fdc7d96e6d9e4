"""Prims of per-rank code without communication."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...ops import shard_map
from ...ops.prims import implement
from ...ops.text_formats import parse_axes
from ..emission.graph_builder import Builder, LocalShard

aten = torch.ops.aten


def _axis_index(
    b: Builder, args: Sequence[Any], kwargs: dict[str, Any], mine: list[LocalShard]
) -> list[torch.fx.Node]:
    """Emit this rank's index along an axis."""
    return [b.call(aten.clone.default, b.coords[b.axes.names.index(args[0])])]


def _equal_sum(
    b: Builder, args: Sequence[Any], kwargs: dict[str, Any], mine: list[LocalShard]
) -> list[torch.fx.Node]:
    """Emit the sum of equal terms over ranks: a multiplication."""
    sizes = dict(zip(b.axes.names, b.axes.sizes, strict=True))
    x = args[0]
    n = 1
    for name in parse_axes(args[1]):
        n *= sizes[name]
    return [b.call(aten.mul.Tensor, x, n)]


def _equal_extremum(
    b: Builder, args: Sequence[Any], kwargs: dict[str, Any], mine: list[LocalShard]
) -> list[torch.fx.Node]:
    """Emit the maximum of equal values over ranks: the value itself."""
    return [args[0]]


implement(shard_map.axis_index, lower=_axis_index)
implement(shard_map.psum, lower=_equal_sum)
implement(shard_map.extremum, lower=_equal_extremum)
