"""The extension points of the core, through which optional packages add features to a run.

The core imports no optional package. The core asks `extensions.py` for the service of an extension
point, and works without the service if no package provides it. `public/` names the package for each
extension point, and the first request imports the package.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar

DIGESTS = "SHARDFN_DIGESTS"  # the folder for the digests of values
DEFAULT_WAIT = 600.0  # seconds for which processes wait for each other to start
# torch's variables, by which the launcher of a job gives a process its place
LAUNCHER = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
Lane = tuple[str, Sequence[int]]  # the ranks of a mesh, and a name for the order of their calls
Run = Callable[[list[Any]], list[Any]]


class Program(NamedTuple):
    """A compiled program that communicates, as the core describes it to the watchdog of a job."""

    name: str  # of the function, which errors name
    lane: Lane
    text: str  # the function and its signature
    sends: Mapping[str, str]  # what the nodes send or wait for, by name of the node


class Job(NamedTuple):
    """What a room does for the processes of a job. Without it torch.distributed does it: ranks wait
    for each other as long as torch lets them, and nobody says which of them is lost.
    """

    # (backend, seconds or None for torch's timeout): initialise the process group of the job
    join: Callable[[str, float | None], None]
    # (world, seconds): watch its ranks from now on; a wait ends after so many seconds
    watch: Callable[[Any, float], None]
    # a context in which process groups connect
    connecting: Callable[[], AbstractContextManager[None]]
    # (world, function, text, lane or None for all ranks): the texts of these ranks, in order
    texts: Callable[[Any, str, str, Lane | None], list[str]]
    # (world, program, run): `run`, which tells the others when it begins, ends and fails
    watched: Callable[[Any, Program, Run], Run]
    # (world, function): raise the error of the job, if there is one
    raise_lost: Callable[[Any, str], None]


class Eager(NamedTuple):
    """What a room does with DTensors of a fake world outside of functions. Without it such DTensors
    are arguments and results, which `sf.full` reads.
    """

    # (whether values are simulated): a context around a fake world
    world: Callable[[bool], AbstractContextManager[None]]
    # (op, arguments, keyword arguments): a collective of torch.distributed on local tensors
    collective: Callable[[Any, Any, Any], Any]
    # (op, arguments, keyword arguments): an op on simulated DTensors
    op: Callable[[Any, Any, Any], Any]
    # (name, tensor, arguments, keyword arguments): a method of a simulated DTensor
    method: Callable[[str, Any, Any, Any], Any]


class Digests(NamedTuple):
    """What a room does with the values of a run where SHARDFN_DIGESTS names a folder for their
    digests. Without it a run writes none.
    """

    # (lowered, run): `run`, op by op, which writes the digest of each value of this rank
    runner: Callable[[Any, Run], Run]
    # (compiled): a function that makes, for each call, what watches the nodes of all ranks
    watch: Callable[[Any], Callable[[], Any]]


class Pictures(NamedTuple):
    """What a room draws. Without it a notebook shows the text of values."""

    # (value, path=): its picture, as a Figure of matplotlib and a file
    draw: Callable[..., Any]
    # (value): HTML for a notebook; None for a value that it cannot draw here
    page: Callable[[Any], str | None]


class Reports(NamedTuple):
    """The page that a room writes of a lowered program. Without it there is none."""

    # (lowered, path=, hardware=): the report, written to a file
    report: Callable[..., Any]


T = TypeVar("T")
_rooms: dict[type[Any], Callable[[], Any]] = {}  # how to load the service of a point
_services: dict[type[Any], Any] = {}  # that have been loaded


def serve(point: type[T], load: Callable[[], T | None]) -> None:
    """Say how to load the service of a point. `load` is called when the core first asks for it, and
    returns None if its room is not there.
    """
    _rooms[point] = load


def service(point: type[T]) -> T | None:
    """The service of a point; None if no room serves it."""
    if point not in _services:
        load = _rooms.get(point)
        _services[point] = None if load is None else load()
    return _services[point]


def digests() -> Digests | None:
    """The service that writes digests; None where nobody asks for them.

    Raises:
        ImportError: this package lacks its room.
    """
    if not os.environ.get(DIGESTS):
        return None
    found = service(Digests)
    if found is None:
        raise absent(DIGESTS, "proof")
    return found


def page_of(x: Any) -> str | None:
    """The HTML that a notebook shows of a value; None for its text."""
    found = service(Pictures)
    return None if found is None else found.page(x)


def absent(where: str, room: str) -> ImportError:
    """The error for something that only a room can do, where this package lacks it."""
    return ImportError(f"{where} needs shardfn.{room}, which this installation does not include")
