"""The check of the arguments of public functions against the table of accepted types."""

from __future__ import annotations

from typing import Any

from ..errors import ShardError, call_site
from .kinds import ARGUMENTS

SHOWN = 60  # characters of a value in an error


def accept(function: str, **given: Any) -> None:
    """Check that each argument of a function has a type and a value that its parameter accepts.

    Args:
        function: the name of the function, a key of the table `ARGUMENTS`.
        given: the arguments to check, by parameter name.

    Raises:
        ShardError: an argument has a wrong type or value. The message lists all wrong arguments.
    """
    kinds = ARGUMENTS[function]
    wrong = [name for name, x in given.items() if not kinds[name].test(x)]
    if not wrong:
        return
    rows = [
        f"{name} is {described(given[name])}, and must be {kinds[name].needed}" for name in wrong
    ]
    first = kinds[wrong[0]]
    where = f"{function}, {wrong[0]}"
    fix, needed = first.fix, first.needed
    raise ShardError.of(where, *rows, needed=needed, fix=fix, source=call_site(), arg_path=wrong[0])


def described(x: Any) -> str:
    """A value as short text, with its type."""
    text = " ".join(repr(x).split())
    text = text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."
    return f"{text}, a {type(x).__name__}"
