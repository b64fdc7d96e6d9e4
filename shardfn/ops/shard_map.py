"""The prims of per-rank code: into a shard_map and out of it, and the collectives inside, right
under every transform.

A value inside is the same on all ranks of an axis (invariant) or each rank's own (varying);
`varying.py` finds out which. All of these but `extremum` are linear, so each has a transpose in
the table below, and none of them is its own guess: what a rank uses of an invariant value
passes `vary`, whose transpose is the sum; the transpose of a sum sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from .. import _compat
from ..errors import CaptureError, problem

Cut = tuple[str, int, int | None]  # mesh axis, its size, the dim that it cuts


def parsed(text: str) -> list[Cut]:
    """`dp:2=0,tp:4=` as [("dp", 2, 0), ("tp", 4, None)]."""
    rows = [
        entry.replace(":", "=").split("=") for entry in text.split(",") if entry
    ]
    return [(name, int(n), int(dim) if dim else None) for name, n, dim in rows]


def written(cuts: Sequence[Cut]) -> str:
    """The text of what `parsed` returns."""
    return ",".join(
        f"{name}:{n}={'' if dim is None else dim}" for name, n, dim in cuts
    )


def _deeper(text: str) -> str:
    """The same cuts of a value with one more dim in front."""
    return written(
        [
            (name, n, None if dim is None else dim + 1)
            for name, n, dim in parsed(text)
        ]
    )


def _uncaptured(*_: Any) -> torch.Tensor:
    fix = "shardfn's transforms around it (vmap, grad, ...), which read the function first"
    raise CaptureError(
        problem(
            "shard_map",
            "it is called inside a transform of torch.func itself",
            fix=fix,
        ),
        fix=fix,
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
    """A rank's own piece of x."""
    return _uncaptured()


@torch.library.custom_op("shardfn::prim_from_local", mutates_args=())
def prim_from_local(x: torch.Tensor, cuts: str) -> torch.Tensor:
    """The whole of which x is a rank's own piece."""
    return _uncaptured()


@torch.library.custom_op("shardfn::vary", mutates_args=())
def prim_vary(x: torch.Tensor, axes: str) -> torch.Tensor:
    """What all ranks have, as each rank's own."""
    return _uncaptured()


@torch.library.custom_op("shardfn::psum", mutates_args=())
def prim_psum(x: torch.Tensor, axes: str, pending: bool) -> torch.Tensor:
    """The sum over the ranks of some axes; it may stay pending."""
    return _uncaptured()


@torch.library.custom_op("shardfn::extremum", mutates_args=())
def prim_extremum(x: torch.Tensor, axes: str, kind: str) -> torch.Tensor:
    """The max or min over the ranks of some axes."""
    return _uncaptured()


@torch.library.custom_op("shardfn::all_gather", mutates_args=())
def prim_all_gather(x: torch.Tensor, axis: str, n: int, dim: int) -> torch.Tensor:
    """What all ranks have, one after the other along a dim."""
    return _uncaptured()


@torch.library.custom_op("shardfn::own_piece", mutates_args=())
def prim_own_piece(x: torch.Tensor, axis: str, n: int, dim: int) -> torch.Tensor:
    """A rank's own piece along a dim of what all ranks have."""
    return _uncaptured()


@torch.library.custom_op("shardfn::all_to_all", mutates_args=())
def prim_all_to_all(
    x: torch.Tensor, axis: str, n: int, split: int, concat: int
) -> torch.Tensor:
    """Each rank's piece along `split` of what all ranks have, one after the other along
    `concat`.
    """
    return _uncaptured()


@torch.library.custom_op("shardfn::ppermute", mutates_args=())
def prim_ppermute(x: torch.Tensor, axis: str, perm: str) -> torch.Tensor:
    """What the rank has that sends to this one; zeros where none does. `0>1,1>0`: 0 sends to 1,
    and 1 to 0.
    """
    return _uncaptured()


@torch.library.custom_op("shardfn::axis_index", mutates_args=())
def prim_axis_index(axis: str, device: torch.device) -> torch.Tensor:
    """A rank's number on an axis."""
    return _uncaptured()


def _local(x: torch.Tensor, text: str) -> torch.Tensor:
    sizes = dict(enumerate(x.shape))
    for _, n, dim in parsed(text):
        if dim is not None:
            sizes[dim] //= n
    return _sized(x, sizes)


def _whole(x: torch.Tensor, text: str) -> torch.Tensor:
    sizes = dict(enumerate(x.shape))
    for _, n, dim in parsed(text):
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
    return ",".join(
        ">".join(reversed(pair.split(">"))) for pair in perm.split(",") if pair
    )


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
        return _uncaptured()

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
