"""The service of a job for the core: its processes join it, exchange texts, and run programs that
communicate while a watchdog looks on.
"""

from __future__ import annotations

import traceback
from typing import Any

from ..extensions import Job, Lane, Program, Run
from ..ops.pipeline import doing
from .beside import connections_noted, watch_of
from .calls import Event
from .rendezvous import join
from .watch import Watch


def _watch(world: Any, seconds: float) -> None:
    watch_of(world).timeout = seconds


def _texts(world: Any, where: str, text: str, lane: Lane | None) -> list[str]:
    watch = watch_of(world)
    return watch.gathered(where, text, None if lane is None else watch.lane(*lane))


def watched(world: Any, program: Program, run: Run) -> Run:
    """A program that says when it begins and ends, and when it fails.

    Args:
        world: the world of its ranks.
        program: what it is.
        run: the program.
    """
    watch = watch_of(world)
    lane = watch.lane(*program.lane)

    def run_and_tell(inputs: list[Any]) -> list[Any]:
        if watch.raised is not None:
            watch.caught_up(program.name)
        watch.enter(event)
        try:
            out = run(inputs)
        except Exception as error:
            _explain(watch, event, program.name, error)
            raise
        watch.enter(None)
        return out

    code = run_and_tell.__code__
    event = Event(lane, next(lane.numbers), program.text, program.sends, code)
    return run_and_tell


def _explain(watch: Watch, event: Event, name: str, error: Exception) -> None:
    """Raise the reason why a program fails, if it is another rank, with the action of a pipeline
    that this one is in. Else tell the others that it has failed here.
    """
    action = doing(frame for frame, _ in traceback.walk_tb(error.__traceback__))
    at = "" if action is None else f", {action}"
    reason = watch.why(f"{name}{at}", error)
    if reason is not None:
        raise reason from error
    watch.has_raised(event.lane, f"{event.text}{at}", error)


def _raise_lost(world: Any, where: str) -> None:
    watch = watch_of(world)
    if watch.verdict is not None:
        raise watch.error(where)


SERVICE = Job(join, _watch, connections_noted, _texts, watched, _raise_lost)
