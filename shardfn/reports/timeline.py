"""The timeline of a step on each rank, reduced to few enough events to draw."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from ..inspect.step_time import OpTime, RankTimeline, StepTime
from ..inspect.timeline.events import Event
from .strings import Strings

MOST_EVENTS = 12_000  # of all ranks that are drawn
MOST_LANES = 16  # ranks, one of each coordinate of a pipeline
MOST_ROWS = 100  # of the table of ops
NANO = 1e9


@attrs.frozen
class Drawn:
    """An event of the picture: one of the step, or several short ones that follow each other.

    Args:
        event: the first of them.
        end: of the last of them, in seconds from the start of the step.
        count: how many they are.
    """

    event: Event
    end: float
    count: int = 1


def timeline_rows(times: Sequence[StepTime], strings: Strings) -> dict[str, Any]:
    """Return the events of a step for each coordinate of a pipeline, or for one rank.

    Args:
        times: of the programs of a step, which run one after the other.
        strings: of the page.
    """
    lanes = times[0].ranks
    shown = lanes[:MOST_LANES]
    most = MOST_EVENTS // (len(shown) * len(times))
    total = sum(time.total for time in times)
    tracks: dict[str, int] = {}
    rows = []
    events = 0
    for k, lane in enumerate(shown):
        drawn = []
        offset = 0.0
        for time in times:
            every = _unrolled(time.ranks[k], most)
            events += len(every)
            drawn += [_row(x, offset, tracks, strings) for x in _fewer(every, total, most)]
            offset += time.total
        rows.append({"title": lane.title, "ranks": len(lane.ranks), "events": drawn})
    return {
        "total": round(total * NANO),
        "tracks": [*tracks],
        "lanes": rows,
        "left_out_lanes": len(lanes) - len(shown),
        "coordinate": times[0].coordinate,
        "events": events,
        "ops": _ops([op for time in times for op in time.ops], strings),
    }


def _unrolled(lane: RankTimeline, most: int) -> tuple[Event, ...]:
    """List the events of a rank, with loops unrolled as deep as they can be drawn."""
    return lane.run.unrolled(lane.run.depth_within(most))


def _fewer(events: Sequence[Event], total: float, most: int) -> list[Drawn]:
    """Join short events that follow each other on a track, if there are too many to draw."""
    by_track = collections.defaultdict[str, list[Event]](list)
    for event in events:
        by_track[event.track].append(event)
    # joined events fill at least half of so many seconds each, on every track
    least = 0.0 if len(events) <= most else 2 * total * len(by_track) / most
    return [x for same in by_track.values() for x in _joined(same, least)]


def _joined(events: Sequence[Event], least: float) -> Iterator[Drawn]:
    """Yield the events of a track, each that takes less than so many seconds joined to those after
    it.
    """
    first, end, count = events[0], events[0].end, 1
    for event in events[1:]:
        if event.end - first.start <= least:
            end, count = event.end, count + 1
            continue
        yield Drawn(first, end, count)
        first, end, count = event, event.end, 1
    yield Drawn(first, end, count)


def _row(x: Drawn, offset: float, tracks: dict[str, int], strings: Strings) -> list[Any]:
    """Return track, start, length, name, line, module, action, bytes, bucket, repeats and count of
    an event; times in nanoseconds. Zeros at the end are left out.
    """
    event = x.event
    row = [
        tracks.setdefault(event.track, len(tracks)),
        round((offset + event.start) * NANO),
        round((x.end - event.start) * NANO),
        strings.number(event.name),
        strings.number(event.source),
        strings.number(event.module),
        strings.number(event.action),
        event.nbytes,
        0 if event.bucket is None else event.bucket + 1,
        event.repeats - 1,
        x.count - 1,
    ]
    while row[-1] == 0:
        row.pop()
    return row


def _ops(ops: Sequence[OpTime], strings: Strings) -> list[dict[str, Any]]:
    """Return the rows of the ops that take longest."""
    longest = sorted(ops, key=lambda op: -op.seconds)[:MOST_ROWS]
    return [
        {
            "name": strings.number(op.name),
            "axis": strings.number(op.axis),
            "count": op.count,
            "seconds": op.seconds,
            "source": strings.number(op.source),
            "module": strings.number(op.module),
        }
        for op in longest
    ]
