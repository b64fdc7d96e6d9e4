"""The number of a rank, used as a Python number: what errors add for code that asked for one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ... import _compat
from ...errors import ShardError
from ..shard_map.axis_names import Scope, current_scope

SHARED = "a tensor here, since ranks share one program"


@_compat.constant_in_graph
def note_call(what: str, axis_name: str | tuple[str, ...] = ()) -> None:
    """Note that a call has given the number of a rank, as a tensor.

    Args:
        what: the call.
        axis_name: where it may be the number of a sample, of a vmap: the axis, or axes.
    """
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    here = current_scope()
    if all(name in here.manual for name in names):
        here.rank_calls.append(what)


@contextlib.contextmanager
def noted(scope: Scope) -> Iterator[None]:
    """A context that adds to an error of torch the calls that gave the number of a rank."""
    try:
        yield
    except ShardError:
        raise
    except Exception as error:
        if scope.rank_calls:
            calls = ", ".join(dict.fromkeys(scope.rank_calls))
            error.add_note(f"the number of a rank is {SHARED}: {calls}")
        raise


def of(error: BaseException) -> list[str]:
    """The note of an error, if it has one."""
    notes = getattr(error, "__notes__", ())
    return [note for note in notes if SHARED in note]
