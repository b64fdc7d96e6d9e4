"""`Prim`: the table of the prims of shard_map (per-rank code), one row for each prim, for all
stages.

A row is one function with `@prim`. A higher layer adds its own functions to the row (how a prim is
placed, how a rank computes it) with `implement`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ParamSpec

import attrs
import torch

from .. import _compat
from ..errors import CaptureError, problem
from .text_formats import parse_axes, parse_shards

Axes = frozenset[str]
P = ParamSpec("P")


@attrs.frozen(eq=False)
class Prim:
    """One row: a prim with its op, its derivatives and the functions of the later stages. Its
    constants are all arguments of the op but the tensor that comes first. The first of them may be
    an operand: a tensor without a derivative.

    A linear prim has a `transpose`, any other one `jvp` and `vjp`; without a tensor there is no
    derivative.

    Args:
        call: the function that per-rank code calls; Dynamo keeps its calls in the graph.
        definition: of the op that a Program holds, by torch's custom_op.
        axes: of its constants: the mesh axes that it works over.
        takes_varying: whether its tensor must vary over them.
        gives_varying: whether its result varies over them.
        transpose: of the cotangent and the constants: the cotangent of the tensor.
        jvp: of the tangent, the tensor, the result and the constants: the tangent of the result.
        vjp: of the cotangent, the tensor, the result and the constants: that of the tensor.
        batched: of its constants: those for a tensor with one more dim in front.
        batched_operand: of an operand without that dim: where a tensor has one more dim, in place
            of the front. An operand with one has it in front, and so has the tensor.
        communicates: whether ranks must call it together.
        public: what users call it, where that is not its name.
        check: refuses a call in Dynamo's graph (capture/shard_map/varying.py).
        place: chooses placements (partition/propagation/walk_shard_map.py).
        lower: how a rank computes it alone, where it may (partition/rules/shard_map.py).
    """

    call: Callable[..., torch.Tensor]
    definition: Any
    axes: Callable[..., Axes]
    takes_varying: bool
    gives_varying: bool
    transpose: Callable[..., torch.Tensor] | None = None
    jvp: Callable[..., torch.Tensor] | None = None
    vjp: Callable[..., torch.Tensor] | None = None
    batched: Callable[..., tuple[Any, ...]] = lambda *constants: constants
    batched_operand: Callable[[torch.Tensor], int] | None = None
    communicates: bool = True
    public: str = ""
    check: Callable[..., None] | None = None
    place: Callable[..., None] | None = None
    lower: Callable[..., list[torch.fx.Node]] | None = None

    @property
    def op(self) -> Any:
        """Return the op that a Program holds."""
        return _compat.overload_of(self.definition)

    def axes_of(self, node: torch.fx.Node) -> Axes:
        """Return the mesh axes that a call works over."""
        return self.axes(*constants_of(node))

    def varies(self, node: torch.fx.Node, before: Axes) -> Axes:
        """Return the axes over which the result of a call varies, if its tensor varies over
        `before`.
        """
        axes = self.axes_of(node)
        return before | axes if self.gives_varying else before - axes


PRIMS: dict[Any, Prim] = {}  # by op
CALLS: dict[Any, Prim] = {}  # by what per-rank code calls


def add_row(row: Prim) -> None:
    """Put a row into the table, in place of one of the same prim."""
    PRIMS[row.op] = CALLS[row.call] = row


def implement(call: Callable[..., torch.Tensor], **fields: Any) -> None:
    """Add the functions of a higher layer (check, place, lower, transpose) to a prim's row."""
    add_row(attrs.evolve(CALLS[call], **fields))


def constants_of(node: torch.fx.Node) -> tuple[Any, ...]:
    """Return the constants of a call of a prim, in Dynamo's graph or in a Program."""
    return tuple(x for x in node.args if not isinstance(x, torch.fx.Node))


def prim(
    *, name: str = "", **fields: Any
) -> Callable[[Callable[P, torch.Tensor]], Callable[P, torch.Tensor]]:
    """Define a prim from its fake kernel: register the op, wrap the call for per-rank code, and
    add the row.

    The op takes the positional parameters. Keyword-only ones are for capture, which finds them
    in Dynamo's graph.

    Args:
        name: of the op, where it is not that of the function.
        fields: the other fields of `Prim`.
    """

    def decorator(fake: Callable[P, torch.Tensor]) -> Callable[P, torch.Tensor]:
        definition = _custom_op(name or fake.__name__, fake)
        op = _compat.overload_of(definition)

        def per_rank_call(*args: P.args, **_: P.kwargs) -> torch.Tensor:
            return _run(op, *args)

        per_rank_call.__name__ = per_rank_call.__qualname__ = fake.__name__
        per_rank_call.__module__, per_rank_call.__doc__ = fake.__module__, fake.__doc__
        add_row(Prim(_compat.keep_in_graph(per_rank_call), definition, **fields))
        return per_rank_call

    return decorator


def _custom_op(name: str, fake: Callable[..., torch.Tensor]) -> Any:
    """Register the op of our namespace that runs only as a fake kernel."""
    signature = inspect.signature(fake)
    positional = [
        p for p in signature.parameters.values() if p.kind is not inspect.Parameter.KEYWORD_ONLY
    ]

    def body(*args: Any) -> torch.Tensor:
        if not _compat.is_capturing():
            return uncaptured()
        # torch asks for the value of a fake tensor that is a constant: a meta tensor says that
        # there is none
        return fake(args[0].to("meta"), *args[1:])

    body.__signature__ = signature.replace(parameters=positional)
    schema = torch.library.infer_schema(body, mutates_args=())
    definition = torch.library.custom_op(f"shardfn::{name}", body, mutates_args=(), schema=schema)
    definition.register_fake(fake)
    return definition


def uncaptured(*_: Any) -> torch.Tensor:
    """Refuse to run a prim outside a capture."""
    fix = (
        "use shardfn's transforms (sf.vmap, sf.grad, ...) around it, which capture the function "
        "first"
    )
    raise CaptureError(
        problem("shard_map", "shard_map is called inside a transform of torch.func", fix=fix),
        fix=fix,
    )


def _run(op: Any, *args: Any) -> torch.Tensor:
    """Call a prim so that it is right under every transform."""
    takes_tensor = isinstance(args[0], torch.Tensor)
    return _Applied.apply(args[0], op, *args[1:]) if takes_tensor else op(*args)


class _Applied(torch.autograd.Function):
    """A prim of a tensor as autograd.Function, with the derivatives and the batching of its row."""

    @staticmethod
    def forward(x: torch.Tensor, op: Any, *constants: Any) -> torch.Tensor:
        return op(x, *constants)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, op, *constants = inputs
        ctx.row, ctx.constants = PRIMS[op], constants
        operands = [c for c in constants if isinstance(c, torch.Tensor)]
        ctx.constants = constants[len(operands) :]
        saved = [*operands] if ctx.row.transpose else [*operands, x, output]
        if saved:
            ctx.save_for_backward(*saved)
            ctx.save_for_forward(*saved)

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> Any:
        row = ctx.row
        if row.transpose is None:
            result = row.vjp(cotangent, *ctx.saved_tensors, *ctx.constants)
            return result, None, *[None] * len(ctx.constants)
        constants = (*ctx.saved_tensors, *ctx.constants)
        return row.transpose(cotangent, *constants), None, *[None] * len(constants)

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *_: Any) -> Any:
        row = ctx.row
        if row.transpose is None:
            return row.jvp(tangent, *ctx.saved_tensors, *ctx.constants)
        return _Applied.apply(tangent, row.op, *ctx.saved_tensors, *ctx.constants)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: torch.Tensor, op: Any, *unbatched: Any) -> Any:
        row = PRIMS[op]
        if row.batched_operand is not None:
            return _with_operand(info.batch_size, in_dims, x, row, *unbatched)
        constants = row.batched(*unbatched)
        return _Applied.apply(x.movedim(in_dims[0], 0), op, *constants), 0


def _with_operand(
    size: int, in_dims: Any, x: torch.Tensor, row: Prim, operand: torch.Tensor, *constants: Any
) -> Any:
    """Apply a prim with an operand to batched tensors. Returns the result and its batched dim."""
    x_dim, _, operand_dim, *_ = in_dims
    assert row.batched_operand is not None
    if operand_dim is None:
        dim = row.batched_operand(operand)
        return _Applied.apply(x.movedim(x_dim, dim), row.op, operand, *constants), dim
    x = x.expand(size, *x.shape) if x_dim is None else x.movedim(x_dim, 0)
    return _Applied.apply(x, row.op, operand.movedim(operand_dim, 0), *constants), 0


def named_axes(text: str, *_: Any) -> Axes:
    """Return the axes of a prim whose first constant lists them."""
    return frozenset(parse_axes(text))


def one_axis(axis: str, *_: Any) -> Axes:
    """Return the axes of a prim whose first constant is one."""
    return frozenset((axis,))


def sharding_axes(text: str, *_: Any) -> Axes:
    """Return the axes that shard a dim, of a prim whose first constant is a text of shards."""
    return frozenset(name for name, _, dim in parse_shards(text) if dim is not None)
