"""The prims of per-rank code: into a shard_map and out of it, and the collectives inside, right
under every transform.

A value inside is the same on all ranks of an axis (invariant) or each rank's own (varying);
`varying.py` finds out which. All of these but `extremum` are linear, so each has a transpose in
the table below, and none of them is its own guess: what a rank uses of an invariant value
passes `vary`, whose transpose is the sum; the transpose of a sum sends nothing.
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
    """The same cuts of a value with one more dim in front."""
    return print_shards(
        [
            (name, n, None if dim is None else dim + 1)
            for name, n, dim in parse_shards(text)
        ]
    )


@attrs.frozen
class Linear:
    """A linear prim of one tensor and some constants.

    `transpose` takes the cotangent and the constants; `deeper` gives the constants for a value
    with one more dim in front.
    """

    op: Callable[..., torch.Tensor]
    transpose: Callable[..., torch.Tensor]
    deeper: Callable[..., tuple[Any, ...]]


def _back(perm: str) -> str:
    """The way back."""
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
    """Its derivative goes to the ranks that hold the extremum, in equal shares, as torch.amax
    does it.
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
    """What all samples of one vmap have, stacked in front; `index`, which only that vmap maps,
    says which one.
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
        if index_dim is None:  # another vmap than the one that the name is bound to
            return _MappedGather.apply(x.movedim(x_dim, 0), index), 1
        every = (
            x.expand(info.batch_size, *x.shape)
            if x_dim is None
            else x.movedim(x_dim, 0)
        )
        return every.clone(), None  # it may be written to, and x is not meant then


def run(name: str, x: torch.Tensor, *constants: Any) -> torch.Tensor:
    """A linear prim by name."""
    return _Linear.apply(x, name, *constants)


def to_local(x: torch.Tensor, cuts: str) -> torch.Tensor:
    """A rank's own piece."""
    return run("to_local", x, cuts)


def from_local(x: torch.Tensor, cuts: str, where: str) -> torch.Tensor:
    """The whole of rank's own pieces; `where` names the result in errors."""
    return run("from_local", x, cuts)


def vary(x: torch.Tensor, axes: str) -> torch.Tensor:
    """What all ranks have, as each rank's own."""
    return run("vary", x, axes)


def psum(x: torch.Tensor, axes: str, pending: bool) -> torch.Tensor:
    """The sum over ranks."""
    return run("psum", x, axes, pending)


def extremum(x: torch.Tensor, axes: str, kind: str) -> torch.Tensor:
    """The max or min over ranks."""
    return _Extremum.apply(x, axes, kind)


def all_gather(x: torch.Tensor, axis: str, n: int, dim: int) -> torch.Tensor:
    """What all ranks have, along a dim."""
    return run("all_gather", x, axis, n, dim)


def own_piece(x: torch.Tensor, axis: str, n: int, dim: int) -> torch.Tensor:
    """A rank's own piece of what all have."""
    return run("own_piece", x, axis, n, dim)


def all_to_all(
    x: torch.Tensor, axis: str, n: int, split: int, concat: int
) -> torch.Tensor:
    """Pieces along one dim exchanged for pieces along another."""
    return run("all_to_all", x, axis, n, split, concat)


def ppermute(x: torch.Tensor, axis: str, perm: str) -> torch.Tensor:
    """What another rank has."""
    return run("ppermute", x, axis, perm)


def axis_index(axis: str, device: str) -> torch.Tensor:
    """A rank's number."""
    return prim_axis_index(axis, torch.device(device))


def mapped_index(n: int, level: int, device: str) -> torch.Tensor:
    """A sample's number in the vmap at a level."""
    return _compat.mapped_index(n, level, device)


def mapped_gather(x: torch.Tensor, n: int, level: int) -> torch.Tensor:
    """What all samples of the vmap at a level have, stacked in front."""
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
    """Have Dynamo leave the prims whole; capture calls this before it traces."""
    for prim in (*PRIMS, mapped_index, mapped_gather):
        _compat.keep_in_graph(prim)
