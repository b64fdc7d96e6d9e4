"""Run a program of torch.distributed as n ranks in this process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from .. import _compat
from ..errors import DivergenceError, problem
from . import process_state
from .exchange import Exchange
from .process_state import ProcessState
from .store import SharedStore
from .turns import Ended, Turns

MATCH = "the same collectives in the same order on every rank of a group, so that every wait ends"


class Ranks:
    """The ranks of a run.

    Args:
        n: the number of ranks.
        turns: of their threads.
        exchange: their collectives.
    """

    def __init__(self, n: int, turns: Turns, exchange: Exchange) -> None:
        self.n, self.turns, self.exchange = n, turns, exchange
        self.groups: dict[str, tuple[str, tuple[int, ...]]] = {}  # by name: description, ranks

    def rank(self) -> int:
        """Return the rank of the calling thread."""
        rank = self.turns.rank()
        assert rank is not None
        return rank


def run_ranks(
    each: Callable[[Ranks], Any],
    n: int,
    *,
    name: str,
    generators: Mapping[str, Any] | None = None,
    is_started: bool = True,
    state: Callable[..., ProcessState] = ProcessState,
    is_over: Callable[[], bool] = bool,
) -> list[Any]:
    """Run a function on n ranks, which take turns. torch.distributed is theirs meanwhile.

    Args:
        each: the function of a rank. It may ask torch.distributed for its rank.
        n: the number of ranks.
        name: of the program, for errors.
        generators: the states of random generators at the start of each rank; those of now.
        is_started: whether each rank begins with its default process group.
        state: makes the state of a process.
        is_over: whether ranks that wait for others end, without an error.

    Returns:
        The result of each rank.

    Raises:
        DivergenceError: ranks deadlock, or call different collectives.
        Exception: that of the first rank that fails, with a note of the rank.
    """
    starts = dict(generators or process_state.generators())
    states = [state(environment_of(rank, n), starts) for rank in range(n)]

    def stuck(waits: dict[int, str]) -> BaseException:
        if is_over():
            return Ended()
        ended = sorted(set(range(n)) - set(waits))
        lines = [f"  rank {rank} {text}" for rank, text in waits.items()]
        lines += [f"  rank {rank} has ended" for rank in ended]
        return DivergenceError(problem(name, "all ranks wait for each other", *lines, needed=MATCH))

    turns = Turns(n, stuck, lambda r: states[r].enter(), lambda r: states[r].leave())
    ranks = Ranks(n, turns, Exchange(turns, name))

    def begin(rank: int) -> Any:
        with torch.autograd.set_multithreading_enabled(False):
            if is_started:
                _compat.start_world()
            return each(ranks)

    with _installed(ranks):
        results = turns.run(begin)
    errors = {r: error for r, error in turns.failed.items() if not isinstance(error, Ended)}
    if errors:
        raise _first_error(errors, n)
    return results


def environment_of(rank: int, n: int) -> dict[str, str]:
    """Return the variables that torchrun sets for a rank of one machine."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(n),
        "LOCAL_WORLD_SIZE": str(n),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(n),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "0",
        "TORCHELASTIC_RUN_ID": "none",
    }


@contextlib.contextmanager
def _installed(ranks: Ranks) -> Iterator[None]:
    """Make process groups those of the ranks."""
    store = SharedStore(ranks.turns)

    def new_group(name: str, rank: int, n: int, members: Sequence[int], about: str) -> Any:
        ranks.groups[name] = about, tuple(members or range(n))
        return _compat.RankGroup(name, rank, n, ranks.exchange.post)

    _compat.groups_are_of_threads(True)
    try:
        with _compat.rank_groups(new_group, store, lambda: (ranks.rank(), ranks.n)):
            yield
    finally:
        _compat.groups_are_of_threads(False)


def _first_error(failed: Mapping[int, BaseException], n: int) -> BaseException:
    """Return the error of the first rank, with a note of all that failed."""
    ranks: Sequence[int] = sorted(failed)
    error = failed[ranks[0]]
    if not isinstance(error, DivergenceError):
        others = f", and so did {len(ranks) - 1} others" if len(ranks) > 1 else ""
        error.add_note(f"raised on simulated rank {ranks[0]} of {n}{others}")
    return error
