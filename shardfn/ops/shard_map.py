"""The prims of per-rank code, for use under any transform: entering and leaving a shard_map,
and the collectives inside.

A value inside is invariant over an axis (equal on all its ranks) or varying. `varying.py`
infers which. All of these ops except `extremum` are linear, and the table below has an explicit
transpose for each. Local use of an invariant value goes through `vary` (JAX's `pvary`), whose
transpose is `psum`. The transpose of `psum` sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch

from .. import _compat
from .shard_map_ops import (
    prim_all_gather,
    prim_all_to_all,
    prim_axis_index,
    prim_extremum,
    prim_from_local,
    prim_own_piece,
    prim_ppermute,
    prim_psum,
    prim_to_local,
    prim_vary,
    uncaptured,
)
from .text_formats import parse_pairs, parse_shards, print_pairs, print_shards


def _deeper(text: str) -> str:
    """The same shards of a value with one more leading dim."""
    return print_shards(
        [
            (name, n, None if dim is None else dim + 1)
            for name, n, dim in parse_shards(text)
        ]
    )


@attrs.frozen
class Linear:
    """A linear prim of one tensor and some constants.

    `transpose` takes the cotangent and the constants. `deeper` returns the constants for a
    value with one more leading dim.
    """

    op: Callable[..., torch.Tensor]
    transpose: Callable[..., torch.Tensor]
    deeper: Callable[..., tuple[Any, ...]]


def _back(perm: str) -> str:
    """The transpose of a linear prim."""
    return print_pairs([(b, a) for a, b in parse_pairs(perm)])


TABLE: dict[str, Linear] = {
    "to_local": Linear(
        prim_to_local,
        lambda x, text: run("from_local", x, text),
        lambda text: (_deeper(text),),
    ),
    "from_local": Linear(
        prim_from_local,
        lambda x, text: run("to_local", x, text),
        lambda text: (_deeper(text),),
    ),
    "vary": Linear(
        prim_vary, lambda x, axes: run("psum", x, axes, True), lambda axes: (axes,)
    ),
    "psum": Linear(
        prim_psum,
        lambda x, axes, _: run("vary", x, axes),
        lambda axes, pending: (axes, pending),
    ),
    "all_gather": Linear(
        prim_all_gather,
        lambda x, axis, n, dim: run("own_piece", x, axis, n, dim),
        lambda axis, n, dim: (axis, n, dim + 1),
    ),
    "own_piece": Linear(
        prim_own_piece,
        lambda x, axis, n, dim: run("all_gather", x, axis, n, dim),
        lambda axis, n, dim: (axis, n, dim + 1),
    ),
    "all_to_all": Linear(
        prim_all_to_all,
        lambda x, axis, n, s, c: run("all_to_all", x, axis, n, c, s),
        lambda axis, n, s, c: (axis, n, s + 1, c + 1),
    ),
    "ppermute": Linear(
        prim_ppermute,
        lambda x, axis, perm: run("ppermute", x, axis, _back(perm)),
        lambda axis, perm: (axis, perm),
    ),
}


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor, name: str, *constants: Any) -> torch.Tensor:
        return TABLE[name].op(x, *constants)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.call = inputs[1:]

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> Any:
        name, *constants = ctx.call
        return (
            TABLE[name].transpose(cotangent, *constants),
            None,
            *[None] * len(constants),
        )

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *_: Any) -> Any:
        return _Linear.apply(tangent, *ctx.call)

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, x: torch.Tensor, name: str, *constants: Any
    ) -> Any:
        return _Linear.apply(
            x.movedim(in_dims[0], 0), name, *TABLE[name].deeper(*constants)
        ), 0


class _Extremum(torch.autograd.Function):
    """Max or min over ranks. Its derivative is split equally among the ranks that hold the
    extremum, as in torch.amax.
    """

    @staticmethod
    def forward(x: torch.Tensor, axes: str, kind: str) -> torch.Tensor:
        return prim_extremum(x, axes, kind)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.axes = inputs[1]
        ctx.save_for_backward(inputs[0], output)
        ctx.save_for_forward(inputs[0], output)

    @staticmethod
    def shares(ctx: Any) -> torch.Tensor:
        x, extremum = ctx.saved_tensors
        holds = (x == vary(extremum, ctx.axes)).to(x.dtype)
        return holds / vary(psum(holds, ctx.axes, False), ctx.axes)

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> Any:
        return vary(cotangent, ctx.axes) * _Extremum.shares(ctx), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *_: Any) -> Any:
        return psum(tangent * _Extremum.shares(ctx), ctx.axes, False)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: torch.Tensor, axes: str, kind: str) -> Any:
        return _Extremum.apply(x.movedim(in_dims[0], 0), axes, kind), 0


class _MappedGather(torch.autograd.Function):
    """The values of all samples of one vmap, stacked along a new first dim. `index`, which only
    that vmap maps, is the index of the sample.
    """

    @staticmethod
    def forward(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return uncaptured()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[1])
        ctx.save_for_forward(inputs[1])

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> Any:
        (index,) = ctx.saved_tensors
        return _MappedGather.apply(cotangent, index).sum(0).index_select(
            0, index.reshape(1)
        ).squeeze(0), None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, _: Any) -> Any:
        return _MappedGather.apply(tangent, ctx.saved_tensors[0])

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: torch.Tensor, index: torch.Tensor) -> Any:
        x_dim, index_dim = in_dims
        if index_dim is None:  # a different vmap than the one that binds the name
            return _MappedGather.apply(x.movedim(x_dim, 0), index), 1
        every = (
            x.expand(info.batch_size, *x.shape)
            if x_dim is None
            else x.movedim(x_dim, 0)
        )
        return every.clone(), None  # a copy, since it may be written to in place


def run(name: str, x: torch.Tensor, *constants: Any) -> torch.Tensor:
    """A linear prim by name."""
    return _Linear.apply(x, name, *constants)


def to_local(x: torch.Tensor, cuts: str) -> torch.Tensor:
    """The rank's shard."""
    return run("to_local", x, cuts)


def from_local(x: torch.Tensor, cuts: str, where: str) -> torch.Tensor:
    """The global tensor from shards. `where` names the result in errors."""
    return run("from_local", x, cuts)


def vary(x: torch.Tensor, axes: str) -> torch.Tensor:
    """An invariant value as a varying one."""
    return run("vary", x, axes)


def psum(x: torch.Tensor, axes: str, pending: bool) -> torch.Tensor:
    """The sum over ranks."""
    return run("psum", x, axes, pending)


def extremum(x: torch.Tensor, axes: str, kind: str) -> torch.Tensor:
    """The max or min over ranks."""
    return _Extremum.apply(x, axes, kind)


def all_gather(x: torch.Tensor, axis: str, n: int, dim: int) -> torch.Tensor:
    """The values of all ranks, concatenated along a dim."""
    return run("all_gather", x, axis, n, dim)


def own_piece(x: torch.Tensor, axis: str, n: int, dim: int) -> torch.Tensor:
    """The rank's chunk of an invariant value."""
    return run("own_piece", x, axis, n, dim)


def all_to_all(
    x: torch.Tensor, axis: str, n: int, split: int, concat: int
) -> torch.Tensor:
    """Exchange shards along one dim for shards along another."""
    return run("all_to_all", x, axis, n, split, concat)


def ppermute(x: torch.Tensor, axis: str, perm: str) -> torch.Tensor:
    """The value of another rank."""
    return run("ppermute", x, axis, perm)


def axis_index(axis: str, device: str) -> torch.Tensor:
    """The rank's index."""
    return prim_axis_index(axis, torch.device(device))


def mapped_index(n: int, level: int, device: str) -> torch.Tensor:
    """The sample's index in the vmap at a level."""
    return _compat.mapped_index(n, level, device)


def mapped_gather(x: torch.Tensor, n: int, level: int) -> torch.Tensor:
    """The values of all samples of the vmap at a level, stacked along a new first dim."""
    return _MappedGather.apply(x, _compat.mapped_index(n, level, str(x.device)))


PRIMS = (
    to_local,
    from_local,
    vary,
    psum,
    extremum,
    all_gather,
    own_piece,
    all_to_all,
    ppermute,
    axis_index,
)


def install() -> None:
    """Have Dynamo keep the prims as graph nodes. Capture calls this before it traces."""
    for prim in (*PRIMS, mapped_index, mapped_gather):
        _compat.keep_in_graph(prim)
