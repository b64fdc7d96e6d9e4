"""Checks of the arguments of a call that Dynamo reads ours for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from ....errors import CaptureError
from ..reading import located


@located
def check(
    called: Any, ours: Callable[..., Any], args: Sequence[Any], kwargs: Any, own: Sequence[Any] = ()
) -> None:
    """Check that a call of torch's function fits it, and ours.

    Args:
        called: torch's function or method.
        ours: the function that Dynamo reads in its place.
        args: the arguments of torch's function.
        kwargs: its keyword arguments.
        own: the arguments of ours in place of the first of `args`, for a method.

    Raises:
        CaptureError: it does not fit.
    """
    signature = _signature(called)
    if signature is None:
        return
    problem = _problem(signature, args, kwargs)
    if problem is None:
        given = [*own, *args[1:]] if own else args
        problem = _problem(inspect.signature(ours), given, kwargs)
    if problem is None:
        return
    name = called.__qualname__
    raise CaptureError.of(
        name,
        problem,
        needed=f"{called.__name__}({_parameters(signature)})",
        fix=f"pass the arguments of {name} by these names",
    )


def _signature(called: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(called)
    except (TypeError, ValueError):
        return None  # of a function in C++


def _problem(signature: inspect.Signature, args: Sequence[Any], kwargs: Any) -> str | None:
    """Say in Python's words why arguments do not fit a function's signature."""
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    return None


def _parameters(signature: inspect.Signature) -> str:
    """List the parameters of a signature without their annotations."""
    plain = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in signature.parameters.values()
        if parameter.name != "self"
    ]
    text = str(inspect.Signature(plain))
    return text[1:-1]
