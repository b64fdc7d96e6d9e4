"""The timeline of a schedule: when actions start and end, given costs of stages and messages."""

from __future__ import annotations

import itertools

import pytest

import shardfn as sf
from shardfn.pipelines import timeline

ROWS = [[("F", 0, 0), ("BW", 0, 0)], [("F", 1, 0), ("BW", 1, 0)]]


def test_an_action_starts_when_its_coordinate_is_free_and_its_message_is_there() -> None:
    schedule = sf.Schedule("one", ROWS)
    costs = {("F", 0): 2.0, ("BW", 0): 3.0, ("F", 1): 5.0, ("B", 1): 7.0, ("W", 1): 11.0}
    first, second = timeline(schedule, costs, delay=0.5)
    assert second == [(2.5, 7.5), (7.5, 25.5)]  # F and BW of stage 1
    assert first == [(0.0, 2.0), (26.0, 29.0)]


def test_a_result_of_the_same_coordinate_takes_no_message() -> None:
    schedule = sf.schedules.zbv(1, 2)
    costs = {(kind, s): 1.0 for kind in "FBW" for s in range(2)}
    assert timeline(schedule, costs, delay=9.0) == timeline(schedule, costs)


@pytest.mark.parametrize("name", sf.schedules.__all__)
def test_check_prices_what_the_timeline_shows(name: str) -> None:
    schedule = getattr(sf.schedules, name)(3, 5)
    costs = {(kind, s): float("FBW".index(kind) + 1) for kind in "FBW" for s in range(6)}
    spans = timeline(schedule, costs)
    price = schedule.check(costs={"F": 1, "B": 2, "W": 3})
    assert price.time == max(end for row in spans for _, end in row)
    assert price.busy == tuple(sum(end - start for start, end in row) for row in spans)
    for row in spans:
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(row))


def test_an_action_that_waits_forever_is_named() -> None:
    schedule = sf.Schedule("backward first", [ROWS[0][::-1], ROWS[1]])
    with pytest.raises(
        sf.ScheduleError, match="^timeline: coordinate 0 waits forever before BW0.0"
    ):
        timeline(schedule, {("F", 0): 1.0})
