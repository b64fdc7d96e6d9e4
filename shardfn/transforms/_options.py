"""Checks of what is passed to a transform beside its function; Dynamo runs them as they are, so
that errors come out as they are.
"""

from __future__ import annotations

from typing import Any

from .. import _compat
from ..errors import ShardError, TreeError, problem


@_compat.constant_in_graph
def check_flag(where: str, option: str, x: Any) -> None:
    """Check that an option is True or False.

    Raises:
        ShardError: something else.
    """
    if not isinstance(x, bool):
        fix = f"{option}=True or {option}=False"
        raise ShardError(
            problem(
                f"{where}, {option}", f"{option} is {x!r}", needed="a bool", fix=fix
            ),
            fix=fix,
        )


@_compat.read_by_dynamo
def check_function(verb: str, fn: Any, more: str = "") -> None:
    """Check that what is transformed can be called; `more` is what the transform takes beside
    it, for the error.

    Raises:
        TreeError: it cannot.
    """
    if not callable(fn):
        refuse_function(verb, type(fn).__name__, more)


@_compat.constant_in_graph
def refuse_function(verb: str, kind: str, more: str) -> None:
    """Say that something is no function.

    Raises:
        TreeError: always.
    """
    fix = f"{verb}(fn{more})"
    raise TreeError(
        problem(verb, f"a {kind}", needed="a function", fix=fix), fix=fix
    )
