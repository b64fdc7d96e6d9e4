"""DTensors on a submesh such as `mesh["tp"]`, as arguments and results of per-rank code: the local
tensor enters per-rank code, and becomes a DTensor on the axes of the submesh alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ... import _compat
from ...capture.dtensors import placement_checks, replaced_calls
from ...capture.dtensors.dtensor_values import placement_of
from ...ops import placement
from ...ops import shard_map as prims
from ...ops.text_formats import parse_part, parse_placed, print_part, print_shards
from ...partition.layout import dense_strides
from ...simulated import dtensors, of_one_part, own_of_part
from .._paired import numbers
from ._dtensor_methods import joined, to_local


def own_of(name: str, path: str, x: DTensor) -> torch.Tensor:
    """Return the local tensor of an argument that is a DTensor on a submesh.

    Raises:
        PlacementError: the shards have different sizes.
    """
    placement_checks.refuse_uneven_part(f"{name}, argument {path}", path, x)
    return own_of_part(x)


@_compat.constant_in_graph
def rows_of_part(text: str, axes: Any) -> Any:
    """Parse the text of an argument DTensor into (axis, size, placement) rows if it is on a
    submesh; return () if it is on all axes of the mesh.
    """
    sizes = dict(axes)
    rows = tuple((name, sizes[name], said) for name, said in parse_placed(text))
    is_on_part_alone = len(rows) < len(sizes)
    return rows if is_on_part_alone else ()


@_compat.read_by_dynamo
def entering(x: torch.Tensor, rows: Any, axes: Any) -> torch.Tensor:
    """Make a DTensor on a submesh of the local tensor of an argument."""
    shards = print_shards([(name, n, 0) for name, n in axes])
    x = placement.forbid_writes(prims.to_local(x, shards).squeeze(0), placement.PART)
    local = tuple([int(n) for n in x.shape])
    made = placement_checks.check_shape(placement.PART, rows, local, None)
    return joined(x, rows, made)


@_compat.read_by_dynamo
def closed_over(x: torch.Tensor, text: str) -> torch.Tensor:
    """Make a DTensor on a submesh of the local tensor of a DTensor that the function
    closes over.
    """
    axes = placement_checks.mesh_axes_here()
    return entering(x, rows_of_part(text, axes), axes)


@_compat.read_by_dynamo
def said(x: torch.Tensor) -> str:
    """Print the placements and shape of a result DTensor on a submesh; "" for any other DTensor."""
    part = x._part  # type: ignore[attr-defined]  # of capture/dtensors/table.py
    return print_part(part, numbers(x)) if part else ""


@_compat.read_by_dynamo
def leaving(x: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a result DTensor on a submesh; other DTensors as they are."""
    part = x._part  # type: ignore[attr-defined]
    return to_local(x, part) if part else x


def of_part(x: torch.Tensor, text: str, mesh: Any) -> DTensor:
    """Build the user's result, a DTensor on a submesh, from its local tensor and printed
    placements.

    Raises:
        PlacementError: in a simulated world, if the submeshes hold different values.
    """
    placed, shape = parse_part(text)
    rows = parse_placed(placed)
    part = mesh[tuple(name for name, _ in rows)]
    order = sorted(range(len(shape)), key=lambda dim: -x.stride(dim))
    strides = dense_strides(shape, order)
    placements = tuple(placement_of(said) for _, said in rows)
    spec = _compat.dtensor_spec(part, placements, shape, strides, x.dtype)
    local = of_one_part(x, part)
    (made,) = dtensors([local], [spec])
    return made


replaced_calls.CLOSED_OVER[replaced_calls.PART] = closed_over
