"""The ops of per-rank code in a Program, each with the shape of its result."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import CaptureError
from .text_formats import parse_shards


def uncaptured(*_: Any) -> torch.Tensor:
    fix = "shardfn's transforms around it (vmap, grad, ...), which read the function first"
    raise CaptureError.of(
        "shard_map", "it is called inside a transform of torch.func itself", fix=fix
    )


def _sized(x: torch.Tensor, sizes: dict[int, int]) -> torch.Tensor:
    """An empty tensor like x with other sizes, in the same order of dims in memory."""
    shape = [sizes.get(d, n) for d, n in enumerate(x.shape)]
    stride, step = [1] * len(shape), 1
    for d in sorted(range(len(shape)), key=lambda d: (x.stride(d), -d)):
        stride[d] = step
        step *= max(shape[d], 1)
    return torch.empty_strided(shape, stride, dtype=x.dtype, device=x.device)


@torch.library.custom_op("shardfn::prim_to_local", mutates_args=())
def prim_to_local(x: torch.Tensor, cuts: str) -> torch.Tensor:
    """The rank's shard of x."""
    return uncaptured()


@torch.library.custom_op("shardfn::prim_from_local", mutates_args=())
def prim_from_local(x: torch.Tensor, cuts: str) -> torch.Tensor:
    """The global tensor of which x is the rank's shard."""
    return uncaptured()


@torch.library.custom_op("shardfn::vary", mutates_args=())
def prim_vary(x: torch.Tensor, axes: str) -> torch.Tensor:
    """An invariant value as a varying one."""
    return uncaptured()


@torch.library.custom_op("shardfn::psum", mutates_args=())
def prim_psum(x: torch.Tensor, axes: str, pending: bool) -> torch.Tensor:
    """The sum over the ranks of some axes; it may stay Partial."""
    return uncaptured()


@torch.library.custom_op("shardfn::extremum", mutates_args=())
def prim_extremum(x: torch.Tensor, axes: str, kind: str) -> torch.Tensor:
    """The max or min over the ranks of some axes."""
    return uncaptured()


@torch.library.custom_op("shardfn::all_gather", mutates_args=())
def prim_all_gather(x: torch.Tensor, axis: str, n: int, dim: int) -> torch.Tensor:
    """The values of all ranks, concatenated along a dim."""
    return uncaptured()


@torch.library.custom_op("shardfn::own_piece", mutates_args=())
def prim_own_piece(x: torch.Tensor, axis: str, n: int, dim: int) -> torch.Tensor:
    """The rank's chunk, along a dim, of an invariant value."""
    return uncaptured()


@torch.library.custom_op("shardfn::all_to_all", mutates_args=())
def prim_all_to_all(
    x: torch.Tensor, axis: str, n: int, split: int, concat: int
) -> torch.Tensor:
    """The rank's chunk along `split` of the values of all ranks, concatenated along `concat`."""
    return uncaptured()


@torch.library.custom_op("shardfn::ppermute", mutates_args=())
def prim_ppermute(x: torch.Tensor, axis: str, perm: str) -> torch.Tensor:
    """The value of the rank that sends to this one, or zeros if none does. `0>1,1>0`: 0 sends
    to 1, and 1 to 0.
    """
    return uncaptured()


@torch.library.custom_op("shardfn::axis_index", mutates_args=())
def prim_axis_index(axis: str, device: torch.device) -> torch.Tensor:
    """The rank's index on an axis."""
    return uncaptured()


def _local(x: torch.Tensor, text: str) -> torch.Tensor:
    sizes = dict(enumerate(x.shape))
    for _, n, dim in parse_shards(text):
        if dim is not None:
            sizes[dim] //= n
    return _sized(x, sizes)


def _whole(x: torch.Tensor, text: str) -> torch.Tensor:
    sizes = dict(enumerate(x.shape))
    for _, n, dim in parse_shards(text):
        if dim is not None:
            sizes[dim] *= n
    return _sized(x, sizes)


prim_to_local.register_fake(_local)
prim_from_local.register_fake(_whole)
prim_vary.register_fake(lambda x, axes: torch.empty_like(x))
prim_psum.register_fake(lambda x, axes, pending: torch.empty_like(x))
prim_extremum.register_fake(lambda x, axes, kind: torch.empty_like(x))
prim_all_gather.register_fake(
    lambda x, axis, n, dim: _sized(x, {dim: x.shape[dim] * n})
)
prim_own_piece.register_fake(
    lambda x, axis, n, dim: _sized(x, {dim: x.shape[dim] // n})
)
prim_all_to_all.register_fake(
    lambda x, axis, n, s, c: _sized(x, {s: x.shape[s] // n, c: x.shape[c] * n})
)
prim_ppermute.register_fake(lambda x, axis, perm: torch.empty_like(x))
prim_axis_index.register_fake(
    lambda axis, device: torch.empty((), dtype=torch.int64, device=device)
)
