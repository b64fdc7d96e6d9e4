"""Checks of a transform's options. Dynamo runs them on constants, so errors reach the user
unchanged.
"""

from __future__ import annotations

from typing import Any

from .. import _compat
from ..errors import ShardError, TreeError


@_compat.constant_in_graph
def check_flag(where: str, option: str, x: Any) -> None:
    """Check that an option is True or False.

    Raises:
        ShardError: something else.
    """
    if not isinstance(x, bool):
        fix = f"{option}=True or {option}=False"
        raise ShardError.of(f"{where}, {option}", f"{option} is {x!r}", needed="a bool", fix=fix)


@_compat.read_by_dynamo
def check_function(verb: str, fn: Any, more: str = "") -> None:
    """Check that the function of a transform is callable. `more` names the transform's other
    arguments in the error.

    Raises:
        TreeError: it is not.
    """
    if not callable(fn):
        refuse_function(verb, type(fn).__name__, more)


@_compat.constant_in_graph
def refuse_function(verb: str, kind: str, more: str) -> None:
    """Raise the error for a value that is not a function.

    Raises:
        TreeError: always.
    """
    fix = f"{verb}(fn{more})"
    raise TreeError.of(verb, f"a {kind}", needed="a function", fix=fix)
