"""Why a process waits: what it concludes from what all processes of the job tell each other."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs

from ..errors import DivergenceError, RankLostError, ShardError
from .calls import WHICH_RAISED, first_difference
from .presence import state_of

WAITING, PATIENT, DECIDED = "waiting", "patient", "decided"
WORLD = "world"  # the lane of comparisons
NONE = {"count": 0}
QUIET = 4.0  # beats after which a process counts as unheard
LOST, DIFFERENT = "lost", "different"
AGAIN = "read the first error of rank {}; torchrun --max-restarts=3 restarts a failed job"
ALIKE = "make the same calls in the same order on every rank"
EVERYWHERE = "raise the error on every rank or on none: an error on one rank ends the job"
LATE = "set make_mesh(..., timeout=) above the longest time between two calls of the slowest rank"


@attrs.frozen
class Heard:
    """The last status of a process.

    Args:
        rank: of it.
        status: what it has published last.
        age: seconds since then, as this process has heard it.
        beats: the seconds between two heartbeats.
    """

    rank: int
    status: Mapping[str, Any]
    age: float
    beats: float = 1.0


@attrs.frozen
class Verdict:
    """The reason why the job cannot go on, the same on all ranks."""

    kind: str
    rank: int  # the rank that is lost, or that differs
    lines: tuple[str, ...]
    fix: str
    host: str = ""
    heard: float | None = None  # seconds ago
    doing: str = ""

    def text(self) -> str:
        """The verdict as JSON."""
        return json.dumps(attrs.asdict(self))

    @classmethod
    def of(cls, text: str) -> Verdict:
        """The verdict that `text` has written."""
        fields = json.loads(text)
        return cls(**{**fields, "lines": tuple(fields["lines"])})

    def error(self, where: str, source: str | None) -> ShardError:
        """The error to raise.

        Args:
            where: the function that was called.
            source: the user's line.
        """
        if self.kind == DIFFERENT:
            return DivergenceError.of(where, *self.lines, fix=self.fix, source=source)
        return RankLostError.of(
            where,
            *self.lines,
            fix=self.fix,
            source=source,
            rank=self.rank,
            host=self.host,
            heard=self.heard,
            doing=self.doing,
        )


def judged(mine: Heard, others: list[Heard], *, patience: str) -> Verdict | None:
    """Why this process waits.

    Args:
        mine: this process.
        others: the processes that it has heard.
        patience: WAITING as long as it waits: a verdict only if no patience could help. PATIENT
            after the wait has failed. DECIDED if nothing more is to come: always a verdict.
    """
    rules = RULES[patience]
    later = lambda x: not _behind(mine, x, mine.status["now"])
    for rule in rules:
        for other in sorted(others, key=later):
            verdict = rule(mine, other)
            if verdict is not None:
                return verdict
    return None


def _left(mine: Heard, other: Heard) -> Verdict | None:
    left = other.status["left"]
    if not left or not left["error"] or left["follows"]:
        return None
    return _lost(other, f"it left after {left['error']}")


def _ended(mine: Heard, other: Heard) -> Verdict | None:
    if other.status["left"] or state_of(other.status["place"]) != "ended":
        return None
    return _lost(other, "its process ended without a reported error")


def _stopped(mine: Heard, other: Heard) -> Verdict | None:
    if state_of(other.status["place"]) != "stopped":
        return None
    return _lost(other, "its process is suspended by SIGSTOP or a debugger")


def _unheard(mine: Heard, other: Heard) -> Verdict | None:
    is_quiet = other.age > QUIET * other.beats and not other.status["left"]
    return _lost(other, "it is not heard") if is_quiet else None


def _differs(mine: Heard, other: Heard) -> Verdict | None:
    """Two ranks have begun other calls."""
    for name, lane in _common(mine, other):
        difference = first_difference(lane, other.status["lanes"][name])
        if difference is not None:
            at, own, theirs = difference
            lines = (f"rank {mine.rank}: {own}", f"rank {other.rank}: {theirs}")
            head = f"ranks are in different calls, from call {at} on"
            fix = EVERYWHERE if WHICH_RAISED in own + theirs else ALIKE
            return Verdict(DIFFERENT, other.rank, (head, *lines), fix)
    return None


def _common(mine: Heard, other: Heard) -> Iterator[tuple[str, Any]]:
    for name, lane in mine.status["lanes"].items():
        if name in other.status["lanes"]:
            yield name, lane


def _crossed(mine: Heard, other: Heard) -> Verdict | None:
    """Two ranks are in calls of which each was begun by one of them only."""
    own, theirs = mine.status["now"], other.status["now"]
    if not (own and theirs and own["long"] and theirs["long"]):
        return None
    if _behind(mine, other, own) and _behind(other, mine, theirs):
        return _in_other_calls(mine, other)
    return None


def _behind(mine: Heard, other: Heard, now: Any) -> bool:
    """Whether another rank of this one's call has not begun it."""
    if not now or other.rank not in now["ranks"]:
        return False
    lane = other.status["lanes"].get(now["lane"], NONE)
    return lane["count"] < now["call"]


def _raised(mine: Heard, other: Heard) -> Verdict | None:
    """A rank has raised in the call in which this one waits for it, and has gone on."""
    now = mine.status["now"]
    if not now or not now["long"] or not now["sends"] or other.rank not in now["ranks"]:
        return None
    lane = other.status["lanes"].get(now["lane"], NONE)
    for at, _, text in lane.get("recent", ()):
        if at == now["call"] + 1 and WHICH_RAISED in text:
            lines = f"rank {mine.rank}: {doing(mine.status)}", f"rank {other.rank}: {text}"
            head = f"ranks are in different calls, from call {at} on"
            return Verdict(DIFFERENT, other.rank, (head, *lines), EVERYWHERE)
    return None


def _finished(mine: Heard, other: Heard) -> Verdict | None:
    """A rank has ended in peace before the call that this one is in."""
    left, now = other.status["left"], mine.status["now"]
    if not left or left["follows"] or not _behind(mine, other, now):
        return None
    return _in_other_calls(mine, other)


def _elsewhere(mine: Heard, other: Heard) -> Verdict | None:
    now = mine.status["now"]
    busy = other.status["stage"] and not other.status["now"]
    if busy or not _behind(mine, other, now):
        return None
    return _in_other_calls(mine, other)


def _late(mine: Heard, other: Heard) -> Verdict | None:
    """A rank is there, and has not answered within the timeout."""
    verdict = _lost(other, "the rank did not answer within the timeout")
    return attrs.evolve(verdict, fix=LATE)


def _parted(mine: Heard, other: Heard) -> Verdict | None:
    """This rank has ended in peace, and another has called more, or has ended after fewer."""
    left, others = mine.status["left"], other.status["left"]
    if not left or left["error"] or (others and others["error"]):
        return None
    for name, lane in _common(mine, other):
        more = other.status["lanes"][name]["count"] - lane["count"]
        if more > 0 or (more < 0 and others):
            return _in_other_calls(mine, other)
    return None


def _in_other_calls(mine: Heard, other: Heard) -> Verdict:
    lines = (
        "ranks are in different calls",
        f"rank {mine.rank}: {doing(mine.status)}",
        f"rank {other.rank}: {doing(other.status)}",
    )
    return Verdict(DIFFERENT, other.rank, lines, ALIKE)


def _lost(other: Heard, reason: str) -> Verdict:
    place, does = other.status["place"], doing(other.status)
    return Verdict(
        LOST,
        other.rank,
        (
            f"rank {other.rank} is lost: {reason}",
            f"host {place['host']}, process {place['process']}, last sign of life "
            f"{other.age:.1f} s ago",
            f"it was {does}",
        ),
        AGAIN.format(other.rank),
        place["host"],
        round(other.age, 1),
        does,
    )


def doing(status: Mapping[str, Any]) -> str:
    """The activity of a process, as text."""
    now, stage, line = status["now"], status["stage"], status["line"]
    at = f", at {line}" if line else ""
    if now:
        sends = f": {now['sends']}" if now["sends"] else ""
        return f"in call {now['call']}, {now['text']}{sends}{at}"
    counts = [x["count"] for name, x in status["lanes"].items() if name != WORLD]
    before = f"after {sum(counts)} calls"
    if status["left"]:
        return f"at its end, {before}"
    return f"in {stage}{at}, {before}" if stage else f"in no call, {before}"


Rule = Callable[[Heard, Heard], Verdict | None]
AT_ONCE: tuple[Rule, ...] = (_left, _ended, _differs, _raised, _crossed, _finished, _parted)
AFTER_AN_ERROR: tuple[Rule, ...] = (*AT_ONCE, _stopped)
AT_LAST: tuple[Rule, ...] = (*AFTER_AN_ERROR, _unheard, _elsewhere, _late)
RULES = {WAITING: AT_ONCE, PATIENT: AFTER_AN_ERROR, DECIDED: AT_LAST}


def unheard_of(rank: int) -> Verdict:
    """The verdict on a rank that has published nothing."""
    lines = (f"rank {rank} is lost: it has given no sign of life",)
    return Verdict(LOST, rank, lines, AGAIN.format(rank))


def unserved(server: Heard, where: str) -> Verdict:
    """The verdict where the store is gone, and with it whoever served it."""
    return _lost(server, f"{where} no longer answers, and this rank served it")
