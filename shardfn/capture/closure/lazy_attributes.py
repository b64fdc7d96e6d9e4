"""Functions that store constants in attributes of objects, as a lazy default does."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ... import _compat

Reading = TypeVar("Reading")


def read_with_lazy_attributes(read: Callable[[_compat.Memo], Reading]) -> Reading:
    """Read a function, and store the constants that it would store in attributes of objects. One
    that stores constants only, and none when it is read again, has stored them afterwards.

    Raises:
        Exception: of the reading. Nothing is stored then.
    """
    memo = _compat.Memo()
    try:
        return read(memo)
    except Exception as error:
        if not memo.write(error):
            error.places = memo.places
            raise
    try:
        return read(_compat.Memo())
    except BaseException:
        memo.undo()
        raise
