"""The placement prims: identity ops that carry placements through Dynamo and every transform.

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
    """Redistribute x to `placements`, which has one entry for each tensor dim; `*` leaves a dim as
    it is. The op in the graph.
    """
    return x.clone()


@torch.library.custom_op("shardfn::prim_align", mutates_args=())
def prim_align(x: torch.Tensor, like: torch.Tensor, wish: str) -> torch.Tensor:
    """Redistribute a gradient x to the placements of `like`. `wish` has the bucketing options of
    the reduction (`buckets.BucketOptions`), or is empty. The op in the graph.
    """
    return x.clone()


prim_redistribute.register_fake(lambda x, placements: torch.empty_like(x))
prim_align.register_fake(lambda x, like, wish: torch.empty_like(x))


@torch.library.custom_op("shardfn::prim_name", mutates_args=())
def prim_name(x: torch.Tensor, name: str) -> torch.Tensor:
    """Name x for the policies of checkpointed calls. Capture removes the op before the Program is
    complete.
    """
    return x.clone()


prim_name.register_fake(lambda x, name: torch.empty_like(x))


@torch.library.custom_op("shardfn::prim_cotangent", mutates_args=())
def prim_cotangent(x: torch.Tensor, number: int) -> torch.Tensor:
    """Mark x as the cotangent of result `number`, an input of the backward call."""
    return x.clone()


prim_cotangent.register_fake(lambda x, number: torch.empty_like(x))
NAME = torch.ops.shardfn.prim_name.default
KEEPS_PARTIAL = "casts terms"  # an annotation: a Partial value stays Partial through the cast
ALIGN = torch.ops.shardfn.prim_align.default
COTANGENT = torch.ops.shardfn.prim_cotangent.default
REDISTRIBUTE = torch.ops.shardfn.prim_redistribute.default

_library = torch.library.Library("shardfn", "FRAGMENT")
_library.define("after(Tensor(a) x, Tensor token) -> Tensor(a)")
_library.impl(
    "after", lambda x, token: torch.ops.aten.alias.default(x), "CompositeExplicitAutograd"
)
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


class _RedistributeDTensor(torch.autograd.Function):
    """The redistribution of a DTensor. Its gradient goes back to the placements before, or stays
    as it is if those are unknown (None).
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
        return _RedistributeDTensor.apply(tangent, ctx.after, ctx.before)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: torch.Tensor, after: str, before: str | None) -> Any:
        before = None if before is None else "*;" + before
        return _RedistributeDTensor.apply(x.movedim(in_dims[0], 0), "*;" + after, before), 0


class _CastAndRedistribute(torch.autograd.Function):
    """The cast and redistribution of a DTensor. Its gradient is cast to `backward_dtype`,
    redistributed to the placements before, and cast to the dtype before.
    """

    @staticmethod
    def forward(
        x: torch.Tensor,
        after: str | None,
        before: str | None,
        forward_dtype: torch.dtype,
        backward_dtype: torch.dtype,
    ) -> torch.Tensor:
        y = _cast_keeping_partial(x, forward_dtype)
        return y.clone() if after is None else prim_redistribute(y, after)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, *ctx.options = inputs
        ctx.dtype = x.dtype

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> Any:
        _, before, _, backward_dtype = ctx.options
        g = _cast_keeping_partial(cotangent, backward_dtype)
        if before is not None:
            g = _Redistribute.apply(g, before)
        return g.to(ctx.dtype), None, None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *_: Any) -> Any:
        return _CastAndRedistribute.apply(tangent, *ctx.options)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: torch.Tensor, *options: Any) -> Any:
        *specs, forward_dtype, backward_dtype = options
        batched = [None if spec is None else "*;" + spec for spec in specs]
        x = x.movedim(in_dims[0], 0)
        return _CastAndRedistribute.apply(x, *batched, forward_dtype, backward_dtype), 0


def _cast_keeping_partial(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast a tensor before it is redistributed. A Partial one stays Partial: its terms are cast,
    and reduced in the new dtype.
    """
    with torch.fx.traceback.annotate({KEEPS_PARTIAL: True}):
        return x.to(dtype)


class _ScaleGradient(torch.autograd.Function):
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
        return _ScaleGradient.apply(x, factor), in_dims[0]


class _Align(torch.autograd.Function):
    """`prim_align` with its derivatives, which take the same placements. Only the gradient itself
    is sent in a bucket.
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
    """`prim_name` with its derivatives: tangents and cotangents have no name."""

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


def name_value(x: torch.Tensor, name: str) -> torch.Tensor:
    """Name a value for checkpoint policies; valid under any transform."""
    return _Name.apply(x, name)


def redistribute(x: torch.Tensor, placements: str) -> torch.Tensor:
    """Redistribute a global tensor to a spec; valid under any transform."""
    return _Redistribute.apply(x, placements)


def align(
    xs: list[torch.Tensor], likes: list[torch.Tensor], wishes: list[str]
) -> list[torch.Tensor]:
    """Redistribute gradients to the placements of their parameters; valid under any transform.
    Dynamo traces all of them as one call.
    """
    return [_Align.apply(x, like, wish) for x, like, wish in zip(xs, likes, wishes, strict=True)]


def placed(x: torch.Tensor, text: str) -> torch.Tensor:
    """Place a global tensor as a DTensor's text says. A Partial one is not redistributed, so that
    propagation reduces it where it is cheapest.
    """
    spec = _spec_text(text, x.dim())
    return x if spec is None else redistribute(x, spec)


def moved(
    x: torch.Tensor,
    text: str,
    before: str,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Redistribute a DTensor from `before` to `text`, in the first dtype; its gradient goes back
    in the second.
    """
    spec = _spec_text(text, x.dim())
    previous = _spec_text(before, x.dim())
    dtypes = forward_dtype or x.dtype, backward_dtype or x.dtype
    if dtypes != (x.dtype, x.dtype):
        return _CastAndRedistribute.apply(x, spec, previous, *dtypes)
    return x if spec is None else _RedistributeDTensor.apply(x, spec, previous)


PLACING_CALLS = (placed, moved)  # the calls in Dynamo's graph that make DTensors


def _spec_text(text: str, ndim: int) -> str | None:
    """Convert the text of DTensor placements to the text of a spec; None if it is Partial, or
    torch decides.
    """
    rows = parse_placed(text)
    if any(placement[0] in "P?" for _, placement in rows):
        return None
    axes = [[axis for axis, placement in rows if placement == f"S{dim}"] for dim in range(ndim)]
    return print_spec(axes)


def scale_gradient(x: torch.Tensor, factor: float) -> torch.Tensor:
    """Return a tensor whose gradient is multiplied by a number."""
    return _ScaleGradient.apply(x, factor)


def per_rank_result(x: torch.Tensor) -> torch.Tensor:
    """Mark a DTensor as a result of per-rank code."""
    return x


def forget_dtensor(x: torch.Tensor) -> torch.Tensor:
    """Mark a global tensor that is no DTensor from here on."""
    return x


# kinds of values, of `shared`
ARGUMENT = "an argument"
PART = "a DTensor on a submesh"
CLOSED_OVER = "a closed-over tensor"
GATHERED = "a gathered parameter"


def forbid_writes(x: torch.Tensor, kind: str, equal: str = "", undecided: str = "") -> torch.Tensor:
    """Mark a tensor whose memory is an argument's or a DTensor's: capture refuses to write to it.

    Args:
        x: the tensor.
        what: one of the kinds above, or words for an error.
        equal: the axes over which the code says that all ranks have the same gradient of it.
        undecided: those over which it says neither this nor that ranks have terms of it.
    """
    return x


def cotangent(x: torch.Tensor, number: int) -> torch.Tensor:
    """Mark a cotangent (`prim_cotangent`), outside of all transforms."""
    return prim_cotangent(x, number)


def closed_over_primal(x: torch.Tensor) -> torch.Tensor:
    """Mark a tensor that the function closes over and differentiates."""
    return x


def install() -> None:
    """Make Dynamo keep the prims as graph nodes. Capture calls this before it traces."""
    _compat.keep_in_graph(cotangent)
    _compat.keep_in_graph(closed_over_primal)
    _compat.keep_in_graph(redistribute)
    _compat.keep_in_graph(align)
    _compat.keep_in_graph(name_value)
    _compat.keep_in_graph(placed)
    _compat.keep_in_graph(moved)
    _compat.keep_in_graph(forbid_writes)
    _compat.keep_in_graph(forget_dtensor)
    _compat.keep_in_graph(per_rank_result)
    _compat.keep_in_graph(scale_gradient)
