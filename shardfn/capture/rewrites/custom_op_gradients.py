"""Gradients of custom ops from `register_autograd`, in a form that torch.func accepts (torch
2.11 to 2.13).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ... import _compat
from ...errors import CaptureError
from .. import annotations as sources

REQUIRES_GRAD = lambda x: isinstance(x, torch.Tensor) and x.requires_grad
TORCHS = ("aten", "prim", "prims", "shardfn")  # and shardfn's


def has_derivative(op: Any) -> bool:
    """Whether an op is a custom op with a gradient that capture supports."""
    return any(
        _compat.overload_of(record) is op
        for record in _custom_ops()
        if _compat.backward_of(record) is not None
    )


def _custom_ops() -> list[Any]:
    """The user's custom ops, except ops on lists of tensors, which autograd.Function does not
    support.
    """
    made = _compat.custom_ops(of_torch=False)
    mine = [r for r in made if _compat.namespace_of(r) not in TORCHS]
    return [
        r
        for r in mine
        if not _compat.schema(_compat.overload_of(r)).is_mutable
        and "Tensor[]" not in str(_compat.schema(_compat.overload_of(r)))
    ]


def is_composite(op: Any) -> bool:
    """Whether an op is CompositeImplicit: autograd decomposes it."""
    return _compat.kernels(op) <= {
        "Autograd",
        "CompositeImplicitAutograd",
    } and "CompositeImplicitAutograd" in _compat.kernels(op)


def refuse_dropped(node: torch.fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a node whose op has no derivative where one is needed: torch would drop that term.

    Raises:
        CaptureError: names the op and the line.
    """
    given = *args, *kwargs.values()
    refuse_dropped_call(node.target, given, node.meta.get("stack_trace"))


def refuse_dropped_call(target: Any, args: tuple[Any, ...], stack: str | None) -> None:
    """Refuse a call of an op that has no derivative where one is needed."""
    op = getattr(target, "default", target)
    if not isinstance(op, _compat.OpOverload) or op.namespace in TORCHS:
        return
    kernels = _compat.kernels(op)
    source = sources.line_of(stack)
    if "CompositeImplicitAutograd" in kernels:
        return
    is_custom = "Autograd" not in kernels or any(
        _compat.overload_of(record) is op for record in _compat.custom_ops()
    )
    if is_custom and any(map(_compat.carries_tangent, args)):
        got = "the op has no forward-mode derivative, but the call needs one"
        fix = "use reverse mode: sf.vjp or sf.jacrev; or wrap the op in sf.custom_jvp"
        raise CaptureError.of(f"op {op}", got, fix=fix, source=source)
    if "Autograd" not in kernels and any(map(REQUIRES_GRAD, args)):
        fix = "define the op by torch.library.custom_op with register_autograd, or pass x.detach()"
        got = "the op has no derivative, but is differentiated"
        raise CaptureError.of(f"op {op}", got, fix=fix, source=source)


def custom_op_runner() -> Callable[..., Any] | None:
    """A function that runs op calls so that torch.func accepts custom ops, and their gradients.
    Their own kernel has no setup_context, so torch.func refuses it. None without such ops.
    """
    records: dict[Any, Any] = {}
    for record in _custom_ops():
        op = _compat.overload_of(record)
        records[op] = records[op.overloadpacket] = record

    def run(call: Callable[..., Any], op: Any, *args: Any, **kwargs: Any) -> Any:
        record = records.get(op)
        if record is None or not _compat.is_differentiating():
            return call(op, *args, **kwargs)
        args, kwargs = _positional(_compat.overload_of(record), args, kwargs)
        if _compat.backward_of(record) is None and not any(map(REQUIRES_GRAD, args)):
            return call(op, *args, **kwargs)
        return _autograd_function(record, len(args), kwargs).apply(*args)

    return run if records else None


def _positional(
    op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of an op with as many as possible by position: autograd follows no others."""
    declared = _compat.schema(op).arguments
    by_place = [a for a in declared[len(args) :] if not a.kwarg_only]
    while by_place and by_place[-1].name not in kwargs:
        by_place.pop()
    more = tuple(kwargs.get(a.name, a.default_value) for a in by_place)
    moved = {a.name for a in by_place}
    return args + more, {k: x for k, x in kwargs.items() if k not in moved}


def _autograd_function(record: Any, count: int, kwargs: dict[str, Any]) -> Any:
    """The autograd.Function of one call."""
    op = _compat.overload_of(record)
    setup = _compat.setup_context_of(record)
    derivative = _compat.backward_of(record)

    class Differentiable(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*xs: Any) -> Any:
            return op(*xs, **kwargs)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            left = _compat.schema(op).arguments[
                count:
            ]  # the dispatcher drops arguments that equal their defaults
            args = (*inputs, *(a.default_value for a in left if not a.kwarg_only))
            named = {a.name: kwargs.get(a.name, a.default_value) for a in left if a.kwarg_only}
            if setup is not None:
                setup(
                    ctx=ctx,
                    inputs=args,
                    output=output,
                    **({"keyword_only_inputs": named} if named else {}),
                )

        @staticmethod
        def backward(ctx: Any, *cotangents: Any) -> Any:
            if derivative is None:  # as of an op that is the gradient of another
                raise RuntimeError(_compat.NO_DERIVATIVE)
            found = derivative(ctx, *cotangents)
            return (found if isinstance(found, tuple) else (found,))[:count]

    return Differentiable
