"""Prims: identity ops that carry placements through Dynamo and every transform.

Each is a custom op, so that it appears in the graph, inside an autograd.Function with rules for
backward, jvp and vmap.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import _compat
from .text_formats import parse_placed, print_spec


@torch.library.custom_op("shardfn::prim_redistribute", mutates_args=())
def prim_redistribute(x: torch.Tensor, placements: str) -> torch.Tensor:
    """Redistribute x to `placements`, which has one entry for each tensor dim. `*` leaves a dim
    as it is.
    """
    return x.clone()


@torch.library.custom_op("shardfn::prim_align", mutates_args=())
def prim_align(x: torch.Tensor, like: torch.Tensor, wish: str) -> torch.Tensor:
    """Redistribute x to the placements of `like`. `wish` has the bucketing options of the
    reduction (`buckets.BucketOptions`), or is empty.
    """
    return x.clone()


prim_redistribute.register_fake(lambda x, placements: torch.empty_like(x))
prim_align.register_fake(lambda x, like, wish: torch.empty_like(x))


@torch.library.custom_op("shardfn::prim_name", mutates_args=())
def prim_name(x: torch.Tensor, name: str) -> torch.Tensor:
    """Name x for the policies of checkpointed calls. Removed before the Program is complete."""
    return x.clone()


prim_name.register_fake(lambda x, name: torch.empty_like(x))


@torch.library.custom_op("shardfn::prim_cotangent", mutates_args=())
def prim_cotangent(x: torch.Tensor, number: int) -> torch.Tensor:
    """The cotangent of result x, which a call of the backward is given. `number` counts them."""
    return x.clone()


prim_cotangent.register_fake(lambda x, number: torch.empty_like(x))
NAME = torch.ops.shardfn.prim_name.default
OF_TERMS = "casts terms"  # an annotation: a Partial value stays Partial through the cast
ALIGN = torch.ops.shardfn.prim_align.default
COTANGENT = torch.ops.shardfn.prim_cotangent.default
REDISTRIBUTE = torch.ops.shardfn.prim_redistribute.default

_own = torch.library.Library("shardfn", "FRAGMENT")
_own.define("after(Tensor(a) x, Tensor token) -> Tensor(a)")
_own.impl("after", lambda x, token: torch.ops.aten.alias.default(x), "CompositeExplicitAutograd")
AFTER = torch.ops.shardfn.after.default  # x, but not before the token is available


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor, placements: str) -> torch.Tensor:
        return prim_redistribute(x, placements)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.placements = inputs[1]

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> Any:
        return _Redistribute.apply(cotangent, ctx.placements), None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, _: Any) -> Any:
        return _Redistribute.apply(tangent, ctx.placements)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: torch.Tensor, placements: str) -> Any:
        return _Redistribute.apply(x.movedim(in_dims[0], 0), "*;" + placements), 0


class _Moved(torch.autograd.Function):
    """A DTensor that is redistributed: its gradient goes back to the placements before, or stays
    where it is if those are not known (None).
    """

    @staticmethod
    def forward(x: torch.Tensor, after: str, before: str | None) -> torch.Tensor:
        return prim_redistribute(x, after)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.after, ctx.before = inputs

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> Any:
        if ctx.before is not None:
            cotangent = _Redistribute.apply(cotangent, ctx.before)
        return cotangent, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, _: Any, __: Any) -> Any:
        return _Moved.apply(tangent, ctx.after, ctx.before)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: torch.Tensor, after: str, before: str | None) -> Any:
        before = None if before is None else "*;" + before
        return _Moved.apply(x.movedim(in_dims[0], 0), "*;" + after, before), 0


class _Retyped(torch.autograd.Function):
    """A DTensor that is cast and redistributed. Its gradient is cast to `backward_dtype`, goes
    back to the placements before, and is cast to the dtype before.
    """

    @staticmethod
    def forward(
        x: torch.Tensor,
        after: str | None,
        before: str | None,
        forward_dtype: torch.dtype,
        backward_dtype: torch.dtype,
    ) -> torch.Tensor:
        y = _cast_terms(x, forward_dtype)
        return y.clone() if after is None else prim_redistribute(y, after)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, *ctx.options = inputs
        ctx.dtype = x.dtype

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> Any:
        _, before, _, backward_dtype = ctx.options
        g = _cast_terms(cotangent, backward_dtype)
        if before is not None:
            g = _Redistribute.apply(g, before)
        return g.to(ctx.dtype), None, None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *_: Any) -> Any:
        return _Retyped.apply(tangent, *ctx.options)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: torch.Tensor, *options: Any) -> Any:
        *specs, forward_dtype, backward_dtype = options
        batched = [None if spec is None else "*;" + spec for spec in specs]
        x = x.movedim(in_dims[0], 0)
        return _Retyped.apply(x, *batched, forward_dtype, backward_dtype), 0


def _cast_terms(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor in the dtype in which it is redistributed. The terms of a Partial one are cast,
    and reduced in this dtype.
    """
    with torch.fx.traceback.annotate({OF_TERMS: True}):
        return x.to(dtype)


class _Scaled(torch.autograd.Function):
    """The identity, whose cotangent is multiplied by a number."""

    @staticmethod
    def forward(x: torch.Tensor, factor: float) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.factor = inputs

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> Any:
        return cotangent * ctx.factor, None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, _: Any) -> Any:
        return tangent.view_as(tangent)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: torch.Tensor, factor: float) -> Any:
        return _Scaled.apply(x, factor), in_dims[0]


class _Align(torch.autograd.Function):
    """Derivatives of a gradient take its placements. Only the gradient itself is sent in a
    bucket.
    """

    @staticmethod
    def forward(x: torch.Tensor, like: torch.Tensor, wish: str) -> torch.Tensor:
        return prim_align(x, like, wish)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[1])
        ctx.save_for_forward(inputs[1])

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> Any:
        return _Align.apply(cotangent, ctx.saved_tensors[0], ""), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, _: Any, __: Any) -> Any:
        return _Align.apply(tangent, ctx.saved_tensors[0], "")

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: torch.Tensor, like: torch.Tensor, wish: str) -> Any:
        x_dim, like_dim, _ = in_dims
        like = like.unsqueeze(0) if like_dim is None else like.movedim(like_dim, 0)
        if x_dim is None:
            return _Align.apply(x, like[0], wish), None
        return _Align.apply(x.movedim(x_dim, 0), like, wish), 0


class _Name(torch.autograd.Function):
    """Tangents and cotangents have no name."""

    @staticmethod
    def forward(x: torch.Tensor, name: str) -> torch.Tensor:
        return prim_name(x, name)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> Any:
        return cotangent, None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, _: Any) -> Any:
        return tangent.view_as(tangent)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: torch.Tensor, name: str) -> Any:
        return _Name.apply(x, name), in_dims[0]


def named(x: torch.Tensor, name: str) -> torch.Tensor:
    """`prim_name`, for use under any transform."""
    return _Name.apply(x, name)


def redistribute(x: torch.Tensor, placements: str) -> torch.Tensor:
    """`prim_redistribute`, for use under any transform."""
    return _Redistribute.apply(x, placements)


def align(
    xs: list[torch.Tensor], likes: list[torch.Tensor], wishes: list[str]
) -> list[torch.Tensor]:
    """`prim_align` for several tensors, for use under any transform. Dynamo traces all of them
    as one call.
    """
    return [_Align.apply(x, like, wish) for x, like, wish in zip(xs, likes, wishes, strict=True)]


def placed(x: torch.Tensor, text: str) -> torch.Tensor:
    """A global tensor that is a DTensor, with its placements. A Partial one is not redistributed,
    so that propagation reduces it where it is cheapest.
    """
    spec = _spec(text, x.dim())
    return x if spec is None else redistribute(x, spec)


def moved(
    x: torch.Tensor,
    text: str,
    before: str,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """A DTensor with other placements than before, each as text. It is redistributed in the first
    dtype, and its gradient in the second: by default in its own.
    """
    spec = _spec(text, x.dim())
    own = _spec(before, x.dim())
    dtypes = forward_dtype or x.dtype, backward_dtype or x.dtype
    if dtypes != (x.dtype, x.dtype):
        return _Retyped.apply(x, spec, own, *dtypes)
    return x if spec is None else _Moved.apply(x, spec, own)


PLACED = (placed, moved)  # the calls in Dynamo's graph that make DTensors, and say how they lie


def _spec(text: str, ndim: int) -> str | None:
    """The placements of a DTensor as a spec. None if it is Partial, or torch decides."""
    rows = parse_placed(text)
    if any(said[0] in "P?" for _, said in rows):
        return None
    axes = [[axis for axis, said in rows if said == f"S{dim}"] for dim in range(ndim)]
    return print_spec(axes)


def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    """A tensor whose gradient is multiplied by a number."""
    return _Scaled.apply(x, factor)


def returned(x: torch.Tensor) -> torch.Tensor:
    """A DTensor that is a result of the code of one rank."""
    return x


def unmarked(x: torch.Tensor) -> torch.Tensor:
    """A global tensor that is not taken for a DTensor from here on."""
    return x


# kinds of values, of `shared`
ARGUMENT = "an argument"
PART = "a DTensor on a part of the mesh"
HELD = "a tensor that the function closes over"
GATHERED = "a gathered parameter"


def shared(x: torch.Tensor, what: str, equal: str = "", unsaid: str = "") -> torch.Tensor:
    """The tensor, whose memory is an argument's or that of a DTensor, as `what` says. Capture
    refuses to write to it.

    Args:
        x: the tensor.
        what: one of the kinds above, or words for an error.
        equal: the axes over which the code says that all ranks have the same gradient of it.
        unsaid: those over which it says neither this nor that ranks have terms of it.
    """
    return x


def cotangent(x: torch.Tensor, number: int) -> torch.Tensor:
    """`prim_cotangent`, outside of all transforms."""
    return prim_cotangent(x, number)


def primal(x: torch.Tensor) -> torch.Tensor:
    """A tensor that a function closes over, about to be differentiated."""
    return x


def install() -> None:
    """Have Dynamo keep the prims as graph nodes. Capture calls this before it traces."""
    _compat.keep_in_graph(cotangent)
    _compat.keep_in_graph(primal)
    _compat.keep_in_graph(redistribute)
    _compat.keep_in_graph(align)
    _compat.keep_in_graph(named)
    _compat.keep_in_graph(placed)
    _compat.keep_in_graph(moved)
    _compat.keep_in_graph(shared)
    _compat.keep_in_graph(unmarked)
    _compat.keep_in_graph(returned)
    _compat.keep_in_graph(scaled)
