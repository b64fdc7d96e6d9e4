"""Runs of graphs as trees: unrolled to events, counted, summed."""

from __future__ import annotations

import pytest

from shardfn.inspect.timeline.events import Event, GraphRun, InnerRuns


def event(name: str, track: str, start: float, seconds: float) -> Event:
    return Event(name, track, start, seconds, None, None)


BODY = GraphRun(
    3.0,
    (
        event("mm", "compute", 0.0, 1.0),
        event("all_reduce", "axis dp", 1.0, 2.0),
        event("all_reduce", "exposed", 1.0, 2.0),
    ),
)
OUTER = GraphRun(
    11.0,
    (event("add", "compute", 0.0, 1.0), event("mul", "compute", 10.0, 1.0)),
    (InnerRuns("scan", 1.0, BODY, 2), InnerRuns("scan", 7.0, BODY, 1, "F of stage 0")),
)


def test_loops_unroll_to_the_events_of_their_turns() -> None:
    events = OUTER.unrolled(1)
    assert len(events) == OUTER.size(1) == 2 + 3 * 3
    starts = [x.start for x in events if x.name == "mm"]
    assert starts == [1.0, 4.0, 7.0]
    assert [x.action for x in events if x.name == "mm"] == [None, None, "F of stage 0"]
    assert [x.start for x in events] == sorted(x.start for x in events)


def test_a_body_that_is_not_unrolled_is_one_event_a_track() -> None:
    events = OUTER.unrolled(0)
    assert len(events) == OUTER.size(0) == 2 + 2 * 3
    first = [x for x in events if x.repeats == 2]
    assert [(x.name, x.track, x.start, x.seconds) for x in first] == [
        ("scan", "compute", 1.0, 2.0),
        ("scan", "axis dp", 1.0, 4.0),
        ("scan", "exposed", 3.0, 4.0),
    ]
    assert {x.name for x in events if x.action} == {"F of stage 0"}


@pytest.mark.parametrize("depth", [0, 1])
def test_tracks_take_as_long_however_deep_loops_unroll(depth: int) -> None:
    for track, seconds in OUTER.busy.items():
        events = OUTER.unrolled(depth)
        assert sum(x.seconds for x in events if x.track == track) == pytest.approx(seconds)
    assert OUTER.communication == 6.0


def test_runs_are_counted_through_loops() -> None:
    outermost = GraphRun(22.0, (), (InnerRuns("scan", 0.0, OUTER, 2),))
    assert outermost.counts() == {outermost: 1, OUTER: 2, BODY: 6}
    assert outermost.depth == 2


def test_loops_unroll_as_deep_as_few_enough_events_allow() -> None:
    assert [OUTER.depth_within(most) for most in (11, 10, 1)] == [1, 0, 0]
