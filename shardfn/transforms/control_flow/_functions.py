"""autograd.Functions that communicate, or ask for the number of a rank: their forward and backward
are read, as the rule of a `custom_vjp` is.

Dynamo reads this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ... import _compat, _tree
from ...capture import trace
from ...capture.control_flow import bodies, endings
from ...capture.dtensors import table

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
def applied(
    key: int,
    name: str,
    methods: tuple[Callable[..., Any], ...],
    *args: Any,
) -> Any:
    """A call of a Function.

    Args:
        key: of the class.
        name: of the class, in errors.
        methods: its backward, its forward, and its setup_context if it has one.
        args: of the call.
    """
    if not trace.begin_rule(key):
        return _forward(methods, args, ())[0]
    xs = [x for x in args if isinstance(x, torch.Tensor)]
    needs = tuple([isinstance(x, torch.Tensor) and _is_float(x) for x in args])
    body = _forward_body(methods, args, needs)
    out, saved, moving, still, opaque = bodies.region(body, xs)
    if opaque:  # of a forward whose other values nobody reads
        copies = [x.clone() if isinstance(x, torch.Tensor) else x for x in args]
        context = _forward(methods, copies, needs)[1]
        still = {**still, **{k: getattr(context, k) for k in opaque}}
    results = _tree.tensors(out)
    residuals = _tree.tensors((saved, moving))

    def backward(*tensors: torch.Tensor) -> Any:
        given = iter(tensors)
        kept = _tree.with_tensors((saved, moving), [next(given) for _ in residuals])
        context = Context(kept[0], needs)
        for attribute, x in {**still, **kept[1]}.items():
            setattr(context, attribute, x)
        cotangents = [
            next(given) if isinstance(x, torch.Tensor) else None for x in _row(out)
        ]
        gradients = _row(methods[0](context, *cotangents))
        found = [g for g, x in zip(gradients, args, strict=False) if _counts(g, x)]
        left = iter(bodies.leave(found))
        pairs = [(g, x) for g, x in zip(gradients, args, strict=False)]
        return [
            next(left) if _counts(g, x) else None
            for g, x in pairs
            if isinstance(x, torch.Tensor)
        ]

    gradients = bodies.region(backward, [*residuals, *results])
    given = [g is not None for g in gradients]
    back = [g for g in gradients if g is not None]
    forward = [*results, *residuals]
    outs = endings.custom_vjp(name, results, forward, back, xs, given)
    trace.end_rule()
    return _tree.with_tensors(out, outs)


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
        every = {k: getattr(context, k) for k in context.own_names}
        moving = {k: x for k, x in every.items() if isinstance(x, MOVING)}
        others = {k: x for k, x in every.items() if not isinstance(x, MOVING)}
        still = {k: x for k, x in others.items() if isinstance(x, CONSTANTS)}
        opaque = [k for k in others if k not in still]
        kept = (context.saved_tensors, moving)
        results = _tree.tensors(out)
        left = bodies.leave([*results, *_tree.tensors(kept)])
        count = len(results)
        saved, moved = _tree.with_tensors(kept, left[count:])
        return _tree.with_tensors(out, left[:count]), saved, moved, still, opaque

    return forward


@_compat.read_by_dynamo
def _forward(
    methods: tuple[Callable[..., Any], ...], args: Sequence[Any], needs: Any
) -> Any:
    """(the result of the forward, its context)."""
    context = Context((), needs)
    if len(methods) == 2:
        out = methods[1](context, *args)
    else:
        out = methods[1](*args)
        methods[2](context, tuple(args), out)
    return _silenced(out, context.own_silent), context


@_compat.read_by_dynamo
def _silenced(out: Any, silent: list[Any]) -> Any:
    """The results, without a derivative of those that are marked so."""
    if not silent:
        return out
    rows = [x.detach() if any(x is y for y in silent) else x for x in _row(out)]
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


table.FUNCTIONS[torch.autograd.Function] = applied
