"""Local tensors: sharding an argument, unsharding a result, and the DTensor spec of a result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ... import _compat
from ...mesh import all_coordinates
from ...partition import layout
from ...partition.rules.dtypes import COMPUTED, INTEGERS
from ...partition.strided import elements, strided_dims
from ...placement import torch_placements
from ...simulated import SimulatedTensor
from ...types import MEAN, Marks, MeshAxes
from .placed import Placed


def reader(is_dtensor: bool, marks: Marks, placed: Placed) -> Callable[[Any], Any]:
    """A reader of an argument's local tensor: that of this rank, or in a simulated world a list
    of all ranks'.
    """
    simulated = placed.is_simulated
    if is_dtensor:
        return _all_shards(len(all_coordinates(placed.axes))) if simulated else local_of
    if simulated:
        everyone = all_coordinates(placed.axes)
        if all(m == "R" for m in marks):
            return lambda x: [x] * len(everyone)
        return lambda x: [cut(x, marks, placed.axes, c) for c in everyone]
    if all(m == "R" for m in marks):
        return itself
    coordinate = placed.coordinate
    return lambda x: cut(x, marks, placed.axes, coordinate)


def local_of(x: Any) -> torch.Tensor:
    """The local tensor of a DTensor."""
    return _compat.local_tensor(x)


def itself(x: torch.Tensor) -> torch.Tensor:
    """A tensor that is its own local tensor."""
    return x


def _all_shards(n: int) -> Callable[[Any], list[torch.Tensor]]:
    def read(x: Any) -> list[torch.Tensor]:
        local = _compat.local_tensor(x)
        return local.shards if isinstance(local, SimulatedTensor) else [local] * n

    return read


def cut(x: torch.Tensor, marks: Marks, axes: MeshAxes, coordinate: Sequence[int]) -> torch.Tensor:
    """One rank's shard of a global tensor, in new memory, with the order of dims in memory of
    the global tensor.
    """
    out = whole = carried(x)
    strided = strided_dims(marks)
    for dim in strided:
        size = x.shape[dim]
        mine = elements(size, dim, marks, axes.sizes, coordinate)
        out = out.index_select(dim, mine.to(x.device))
    for mark, n, c in zip(marks, axes.sizes, coordinate, strict=True):
        found = layout.split(mark)
        if found and n > 1 and found[0] not in strided:
            start, size = layout.chunk(out.shape[found[0]], found[1], n, c)
            out = out.narrow(found[0], start, size)
    if out is whole:
        return x
    order = layout.stride_order(x.shape, x.stride())
    fresh = torch.empty_strided(
        out.shape, layout.dense_strides(out.shape, order), dtype=out.dtype, device=x.device
    )
    return fresh.copy_(out).view(x.dtype)


def carried(x: torch.Tensor) -> torch.Tensor:
    """A tensor in a dtype that has all kernels that move elements: integers for what torch only
    stores.
    """
    return x if x.dtype in COMPUTED else x.view(INTEGERS[x.itemsize])


def join(
    shards: Sequence[torch.Tensor], shape: Sequence[int], marks: Marks, axes: MeshAxes
) -> torch.Tensor:
    """The global tensor from the local tensors of all ranks."""
    values = dict(zip(all_coordinates(axes), map(carried, shards), strict=True))
    dtype = shards[0].dtype
    for k in reversed(range(len(marks))):
        groups: dict[tuple[int, ...], list[torch.Tensor]] = {}
        for c, value in sorted(values.items()):
            groups.setdefault(c[:k], []).append(value)
        values = {c: _joined(group, marks[k]) for c, group in groups.items()}
    (whole,) = values.values()
    for dim in strided_dims(marks):
        order = _stored(shape[dim], dim, marks, axes).argsort()
        whole = whole.index_select(dim, order.to(whole.device))
    return whole if whole.dtype == dtype else whole.view(dtype)


def _stored(size: int, dim: int, marks: Marks, axes: MeshAxes) -> torch.Tensor:
    """The numbers of the elements of a dim in the order of the ranks that hold them."""
    shards = [layout.split(m) is not None and layout.cut_of(m)[0] == dim for m in marks]
    held = [
        elements(size, dim, marks, axes.sizes, c)
        for c in all_coordinates(axes)
        if all(is_shard or not k for k, is_shard in zip(c, shards, strict=True))
    ]
    return torch.cat(held)


def _joined(group: list[torch.Tensor], mark: Any) -> torch.Tensor:
    found = layout.split(mark)
    if found:
        return torch.cat(group, found[0])
    if mark == "R":
        return group[0]
    reduce = {"sum": torch.sum, MEAN: torch.mean, "max": torch.amax, "min": torch.amin}[mark]
    return reduce(torch.stack(group), 0).to(group[0].dtype)  # torch sums integers in 64 bits


def spec_of(mesh: Any, marks: Marks, value: torch.Tensor) -> Any:
    """The DTensor spec of a result."""
    stride = value.stride()
    if not layout.is_dense(value.shape, stride):
        stride = layout.dense_strides(value.shape, range(value.dim()))
    return _compat.dtensor_spec(mesh, torch_placements(marks), value.shape, stride, value.dtype)
