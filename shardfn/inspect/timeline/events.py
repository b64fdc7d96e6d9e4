"""`Event`: what a rank does from one time to another; `GraphRun`: the events of one run of a graph,
with those of its loops kept once however often they repeat.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterator, Mapping
from types import MappingProxyType

import attrs

COMPUTE = "compute"  # the track of ops
EXPOSED = "exposed"  # of waits for collectives
BUBBLE = "bubble"  # of waits for other coordinates of a pipeline
MOST_EVENTS = 50_000  # of one rank, with all loops unrolled


def axis_track(axis: str) -> str:
    """Return the track of the collectives over a mesh axis."""
    return f"axis {axis}"


@attrs.frozen
class Event:
    """One interval in the timeline of a rank.

    Args:
        name: the name of the op, or the kind of collective.
        track: one of "compute", "axis dp" for collectives over dp, "exposed" while the rank waits
            for a collective, and "bubble" while the rank waits for other stages. The events of a
            track never overlap. The events of "compute", "exposed" and "bubble" together fill the
            step.
        start: seconds from the start of the step.
        seconds: the duration of the event.
        source: the user's source line.
        module: the path of the submodule that runs the source line.
        axis: the mesh axis of a collective.
        nbytes: the bytes of a collective.
        bucket: the number of the bucket that a collective carries.
        action: the pipeline action of the event, such as "F of stage 0, microbatch 3".
        repeats: the number of consecutive runs that the event stands for. An event with more than 1
            run covers all work of a track in the runs of a loop body.
        read: the time at which the rank that waits for the collective or message goes on.
        target: for a message, the rank of the pipeline axis that receives the message.
    """

    name: str
    track: str
    start: float
    seconds: float
    source: str | None
    module: str | None
    axis: str | None = None
    nbytes: int = 0
    bucket: int | None = None
    action: str | None = None
    repeats: int = 1
    read: float | None = None
    target: int | None = None

    @property
    def end(self) -> float:
        """Return the time at which the event ends."""
        return self.start + self.seconds

    def later(self, seconds: float, action: str | None) -> Event:
        """Return a copy of the event at a later time, as part of an action."""
        return Event(
            self.name,
            self.track,
            self.start + seconds,
            self.seconds,
            self.source,
            self.module,
            self.axis,
            self.nbytes,
            self.bucket,
            self.action or action,
            self.repeats,
            None if self.read is None else self.read + seconds,
            self.target,
        )


@attrs.frozen
class InnerRuns:
    """Runs of a loop's body, one after the other.

    Args:
        name: of the loop.
        start: seconds from the start of the run of the outer graph.
        run: one of them.
        count: how many.
        action: of a pipeline.
        source: the user's line.
        module: the path of the submodule of that line.
    """

    name: str
    start: float
    run: GraphRun
    count: int = 1
    action: str | None = None
    source: str | None = None
    module: str | None = None


@attrs.frozen(eq=False)
class GraphRun:
    """One run of a graph on one rank.

    Args:
        seconds: how long it takes.
        events: of its own ops and collectives. Times count from its start.
        inner: the runs of its loops' bodies.
        starts: when each of its own ops starts, by the name of its node.
    """

    seconds: float
    events: tuple[Event, ...]
    inner: tuple[InnerRuns, ...] = ()
    starts: Mapping[str, float] = attrs.field(default=MappingProxyType({}), repr=False)

    @functools.cached_property
    def busy(self) -> dict[str, float]:
        """The seconds of each track."""
        seconds: dict[str, float] = collections.defaultdict(float)
        for event in self.events:
            seconds[event.track] += event.seconds
        for body in self.inner:
            for track, inside in body.run.busy.items():
                seconds[track] += body.count * inside
        return dict(seconds)

    @property
    def communication(self) -> float:
        """Return the seconds of all collectives and messages."""
        mine = (COMPUTE, EXPOSED, BUBBLE)
        return sum(seconds for track, seconds in self.busy.items() if track not in mine)

    def counts(self) -> dict[GraphRun, int]:
        """Return how often each run of a graph happens in this one, itself included."""
        counts: dict[GraphRun, int] = collections.defaultdict(int)

        def count(run: GraphRun, times: int) -> None:
            counts[run] += times
            bodies: dict[GraphRun, int] = collections.defaultdict(int)
            for body in run.inner:
                bodies[body.run] += body.count
            for inside, repeats in bodies.items():
                count(inside, times * repeats)

        count(self, 1)
        return dict(counts)

    @property
    def depth(self) -> int:
        """Return how deep loops are nested."""
        return max((1 + body.run.depth for body in self.inner), default=0)

    def size(self, depth: int) -> int:
        """Return how many events it has with loops unrolled to a depth."""
        bodies = sum(
            body.count * body.run.size(depth - 1) if depth else len(body.run.busy)
            for body in self.inner
        )
        return len(self.events) + bodies

    def depth_within(self, most: int) -> int:
        """Return the depth to which loops unroll into at most so many events, as far as any do."""
        depths = range(self.depth, 0, -1)
        return next((depth for depth in depths if self.size(depth) <= most), 0)

    def unrolled(self, depth: int) -> tuple[Event, ...]:
        """List the events in order of their start, with loops unrolled to a depth. A deeper body
        is one event a track.
        """
        events = self._unrolled(depth, 0.0, None)
        return tuple(sorted(events, key=lambda event: event.start))

    def _unrolled(self, depth: int, start: float, action: str | None) -> Iterator[Event]:
        for event in self.events:
            yield event.later(start, action)
        for body in self.inner:
            action_of_body = body.action or action
            if depth == 0:
                yield from _outline(body, start + body.start, action_of_body)
                continue
            for i in range(body.count):
                at = start + body.start + i * body.run.seconds
                yield from body.run._unrolled(depth - 1, at, action_of_body)


def _outline(body: InnerRuns, start: float, action: str | None) -> Iterator[Event]:
    """Yield one event for each track of a loop's body. What computes stands before what waits."""
    now = start
    for track in sorted(body.run.busy, key=_in_order):
        seconds = body.count * body.run.busy[track]
        is_rank = track in (COMPUTE, EXPOSED, BUBBLE)
        axis = None if is_rank else track.removeprefix("axis ")
        yield Event(
            body.action or body.name,
            track,
            now if is_rank else start,
            seconds,
            body.source,
            body.module,
            axis,
            action=action,
            repeats=body.count,
        )
        now += seconds if is_rank else 0.0


def _in_order(track: str) -> int:
    """Return the place of a track among those of one rank."""
    order = (COMPUTE, EXPOSED, BUBBLE)
    return order.index(track) if track in order else len(order)
