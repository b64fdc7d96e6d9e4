"""autograd.Functions that communicate, or ask for the number of a rank: their forward and backward
are read, as the rule of a `custom_vjp` is.

Dynamo reads this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ... import _compat, _tree
from ...capture import aten_trace
from ...capture.control_flow import bodies, control_flow_ops
from ...capture.dtensors import replaced_calls
from ...errors import CaptureError

MOVING = (torch.Tensor, list, tuple, dict)  # attributes of these classes may be tensors
CONSTANTS = (bool, int, float, str, type(None), torch.dtype)  # which a body can return


class Context:
    """The context that a forward and a backward take. It notes the names that they set."""

    @_compat.read_by_dynamo
    def __init__(self, saved: Any, needs: tuple[bool, ...]) -> None:
        object.__setattr__(self, "own_names", [])
        object.__setattr__(self, "own_silent", [])
        object.__setattr__(self, "saved_tensors", saved)
        object.__setattr__(self, "needs_input_grad", needs)

    @_compat.read_by_dynamo
    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        self.own_names.append(name)

    @_compat.read_by_dynamo
    def save_for_backward(self, *tensors: Any) -> None:
        """Save tensors for the backward."""
        object.__setattr__(self, "saved_tensors", tensors)

    @_compat.read_by_dynamo
    def save_for_forward(self, *tensors: Any) -> None:
        """Save tensors for a jvp, which is not read."""

    @_compat.read_by_dynamo
    def mark_non_differentiable(self, *tensors: Any) -> None:
        """Note results without a derivative."""
        self.own_silent.extend(tensors)

    @_compat.read_by_dynamo
    def mark_dirty(self, *tensors: Any) -> None:
        """Note arguments that the forward writes to. They are its own copies."""

    @_compat.read_by_dynamo
    def set_materialize_grads(self, value: bool) -> None:
        """Say whether a missing cotangent is zero. It always is."""


@_compat.read_by_dynamo
def applied(key: int, name: str, methods: tuple[Callable[..., Any], ...], *args: Any) -> Any:
    """A call of a Function.

    Args:
        key: of the class.
        name: of the class, in errors.
        methods: its backward, its forward, and its setup_context if it has one.
        args: of the call.
    """
    if not aten_trace.begin_rule(key):
        return _forward(methods, args, (False,) * len(args))[0]
    xs = [x for x in args if isinstance(x, torch.Tensor)]
    needs = tuple([isinstance(x, torch.Tensor) and _is_float(x) for x in args])
    out, saved, still = _forward_read(methods, args, needs, xs)
    results = _tree.tensors(out)
    residuals = _tree.tensors(saved)
    body = _backward_body(name, methods, args, needs, (out, saved, still))
    gradients = bodies.run_body(body, [*residuals, *results])
    given = [g is not None for g in gradients]
    back = [g for g in gradients if g is not None]
    forward = [*results, *residuals]
    outs = control_flow_ops.custom_vjp(name, results, forward, back, xs, given)
    aten_trace.end_rule()
    return _tree.with_tensors(out, outs)


@_compat.read_by_dynamo
def _forward_read(
    methods: tuple[Callable[..., Any], ...], args: Sequence[Any], needs: Any, xs: list[torch.Tensor]
) -> Any:
    """(the result, what is saved in tensors, the other attributes) of the forward as a body."""
    body = _forward_body(methods, args, needs)
    out, saved, moving, still, opaque = bodies.run_body(body, xs)
    if opaque:  # of a forward whose other values are not read
        copies = [x.clone() if isinstance(x, torch.Tensor) else x for x in args]
        context = _forward(methods, copies, needs)[1]
        still = {**still, **{k: getattr(context, k) for k in opaque}}
    return out, (saved, moving), still


@_compat.read_by_dynamo
def _backward_body(
    name: str, methods: tuple[Callable[..., Any], ...], args: Sequence[Any], needs: Any, read: Any
) -> Callable[..., Any]:
    """The backward of the saved tensors and the cotangents: for each tensor among the arguments
    its gradient, or None.
    """
    out, saved, still = read

    def backward(*tensors: torch.Tensor) -> Any:
        feed = iter(tensors)
        residuals = [next(feed) for _ in _tree.tensors(saved)]
        kept, moving = _tree.with_tensors(saved, residuals)
        context = Context(kept, needs)
        for attribute, x in {**still, **moving}.items():
            setattr(context, attribute, x)
        cotangents = []
        for x in _row(out):
            is_tensor = isinstance(x, torch.Tensor)
            cotangents.append(next(feed) if is_tensor else None)
        gradients = _row(methods[0](context, *cotangents))
        check_count(name, len(gradients), len(args))
        pairs = list(zip(gradients, args, strict=False))
        found = [g for g, x in pairs if _counts(g, x)]
        left = iter(bodies.mark_results(found))
        every = []
        for g, x in pairs:
            if isinstance(x, torch.Tensor):
                every.append(next(left) if _counts(g, x) else None)
        return every

    return backward


@_compat.read_by_dynamo
def _forward_body(
    methods: tuple[Callable[..., Any], ...], args: Sequence[Any], needs: Any
) -> Callable[..., Any]:
    """The forward of tensors: its results, the tensors that it saves, those among the attributes
    of the context, the other attributes, and the names of those that cannot be results.
    """

    def forward(*tensors: torch.Tensor) -> Any:
        feed = iter(tensors)
        given = [next(feed) if isinstance(x, torch.Tensor) else x for x in args]
        out, context = _forward(methods, given, needs)
        moving: dict[str, Any] = {}
        still: dict[str, Any] = {}
        opaque: list[str] = []
        for attribute in dict.fromkeys(context.own_names):
            x = getattr(context, attribute)
            if isinstance(x, MOVING):
                moving[attribute] = x
            elif isinstance(x, CONSTANTS):
                still[attribute] = x
            else:
                opaque.append(attribute)
        kept = (context.saved_tensors, moving)
        results = _tree.tensors(out)
        left = bodies.mark_results([*results, *_tree.tensors(kept)])
        count = len(results)
        saved, moved = _tree.with_tensors(kept, left[count:])
        return _tree.with_tensors(out, left[:count]), saved, moved, still, opaque

    return forward


@_compat.read_by_dynamo
def _forward(methods: tuple[Callable[..., Any], ...], args: Sequence[Any], needs: Any) -> Any:
    """(the result of the forward, its context)."""
    context = Context((), needs)
    if len(methods) == 2:
        out = methods[1](context, *args)
    else:
        out = methods[1](*args)
        methods[2](context, tuple(args), out)
    return _silenced(out, context.own_silent), context


@_compat.constant_in_graph
def check_count(name: str, count: int, wanted: int) -> None:
    """Check that a backward gives a gradient or None for each argument.

    Raises:
        CaptureError: it gives fewer.
    """
    if count < wanted:
        raise CaptureError.of(
            f"autograd.Function {name}",
            f"the backward returns {count} gradients for {wanted} arguments",
            fix="return a gradient or None for each argument of the forward",
        )


@_compat.read_by_dynamo
def _silenced(out: Any, silent: list[Any]) -> Any:
    """The results, without a derivative of those that are marked so."""
    if not silent:
        return out
    rows = []
    for x in _row(out):
        is_silent = any(x is y for y in silent)
        rows.append(x.detach() if is_silent else x)
    return tuple(rows) if isinstance(out, tuple) else rows[0]


@_compat.read_by_dynamo
def _row(x: Any) -> tuple[Any, ...]:
    return x if isinstance(x, tuple) else (x,)


@_compat.read_by_dynamo
def _counts(g: Any, x: Any) -> bool:
    """Whether a backward gives a gradient of an argument."""
    is_tensor = isinstance(x, torch.Tensor) and isinstance(g, torch.Tensor)
    return is_tensor and _is_float(x)


@_compat.read_by_dynamo
def _is_float(x: torch.Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


replaced_calls.FUNCTIONS[torch.autograd.Function] = applied
