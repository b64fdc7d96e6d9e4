"""The order in which a process calls programs that communicate, in a form that two processes can
compare at any time.
"""

from __future__ import annotations

import itertools
import zlib
from collections import deque
from collections.abc import Mapping
from types import CodeType
from typing import Any, NamedTuple

import attrs

# keys of events that do not call a program: a comparison, an error, a checkpoint
COMPARING, RAISED, CHECKPOINT = 0, 1, 2
WHICH_RAISED = ", which raised "  # and the error
PROGRAMS = 3  # the key of the first program of a lane
SHOWN = 8  # calls that a process shows one by one


@attrs.define(eq=False)
class Lane:
    """The calls on one mesh, in order. All ranks of the mesh have the same."""

    name: str
    ranks: tuple[int, ...]
    count: int = 0  # of events that have begun
    digest: int = 0  # of all of them
    numbers: itertools.count[int] = attrs.Factory(lambda: itertools.count(PROGRAMS))
    gathers: itertools.count[int] = attrs.Factory(itertools.count)
    recent: deque[tuple[int, int, str]] = attrs.Factory(lambda: deque(maxlen=SHOWN))
    # for each power of two the last two positions that it divides, with their digests
    marks: dict[int, tuple[tuple[int, int], ...]] = attrs.field(factory=dict)

    def add(self, event: Event) -> None:
        """Count an event that begins."""
        self.count += 1
        key = event.key.to_bytes(4, "little")
        self.digest = zlib.crc32(key, self.digest)
        here = self.count, self.digest
        self.recent.append((*here, event.text))
        power = 1
        while self.count % power == 0:
            self.marks[power] = (*self.marks.get(power, ())[-1:], here)
            power *= 2

    def shown(self) -> dict[str, Any]:
        """The lane as JSON."""
        marks = {at: digest for pair in self.marks.values() for at, digest in pair}
        return {"count": self.count, "marks": sorted(marks.items()), "recent": list(self.recent)}


class Event(NamedTuple):
    """The begin of a call, or of a comparison between ranks."""

    lane: Lane
    key: int
    text: str  # the function and its signature
    # what the nodes of its program send, by name of the node
    sends: Mapping[str, str]
    code: CodeType | None = None  # of the function around the program


def first_difference(mine: Any, other: Any) -> tuple[int, str, str] | None:
    """The first call in which two processes are known to differ.

    Args:
        mine, other: what `Lane.shown` returns on each.

    Returns:
        Its number and the text of both. None if they agree as far as both have come.
    """
    own = {at: (digest, text) for at, digest, text in mine["recent"]}
    rows = [(at, digest, text) for at, digest, text in other["recent"] if at in own]
    for at, digest, text in sorted(rows):
        if own[at][0] != digest:
            return at, own[at][1], text
    digests = dict(map(tuple, mine["marks"]))
    for at, digest in sorted(map(tuple, other["marks"])):
        if digests.get(at, digest) != digest:
            return at, _around(mine, at), _around(other, at)
    return None


def _around(lane: Any, at: int) -> str:
    text = lane["recent"][-1][2] if lane["recent"] else "none"
    return f"one of the first {at} calls differs; the last call is {text}, call {lane['count']}"
