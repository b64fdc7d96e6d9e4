"""The number of a rank, used as a Python number: what errors add for code that asked for one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ... import _compat
from ...errors import ShardError
from ...tracebacks import has_our_note
from ..shard_map.axis_names import Scope, current_scope
from . import data_dependent

SHARED = "the number of a rank is a tensor inside the function, since ranks share one program"
PART = (
    "for this rank's part of x use distribute_tensor(x, mesh, [Shard(0)]).to_local(), or "
    "x.index_select(0, rank * n + torch.arange(n))"
)
ONE_OF = (
    "torch.stack(values).index_select(0, rank.reshape(1)), which selects one of several "
    "values by rank"
)
BRANCH = (
    "the function branches or slices by the number of a rank",
    f"torch.where(rank == 0, a, b) in place of a branch; {PART}; in shard_map "
    "sf.axis_index(axis_name) is the rank",
)
NUMBER = (
    "the function uses the number of a rank as a Python number: an index, a size or a count",
    f"{PART}; {ONE_OF}; in shard_map sf.axis_index(axis_name) is the rank",
)
KEY = ("the function uses the number of a rank as a key of a dict", ONE_OF)
OF_RANKS = {  # the problem of a value -> of the number of a rank, with the suggestion
    data_dependent.BRANCH[0]: BRANCH,
    data_dependent.NUMBER[0]: NUMBER,
    data_dependent.KEY[0]: KEY,
}


@_compat.constant_in_graph
def note_call(what: str, axis_name: str | tuple[str, ...] = ()) -> None:
    """Record that a call has given the number of a rank, as a tensor.

    Args:
        what: the call.
        axis_name: where it may be the number of a sample, of a vmap: the axis, or axes.
    """
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    here = current_scope()
    if all(name in here.manual for name in names):
        here.rank_calls.append(what)


@contextlib.contextmanager
def noting_rank_calls(scope: Scope) -> Iterator[None]:
    """A context that adds to an error of torch the calls that gave the number of a rank."""
    try:
        yield
    except ShardError:
        raise
    except Exception as error:
        if scope.rank_calls and not has_our_note(error):
            calls = ", ".join(dict.fromkeys(scope.rank_calls))
            error.add_note(f"{SHARED}; calls that return the number of a rank: {calls}")
        raise


def may_be_rank_number(text: str) -> bool:
    """Whether the value that an error of torch is about may be the number of a rank."""
    origin = text.partition("computed as follows:")[2].partition("Hint:")[0]
    return "axis_index(" in origin if origin else "/control_flow/" not in text


def notes_of_error(error: BaseException) -> list[str]:
    """The note of an error, if it has one."""
    notes = getattr(error, "__notes__", ())
    return [note for note in notes if SHARED in note]
